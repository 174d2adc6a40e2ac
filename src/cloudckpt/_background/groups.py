"""Process groups for saves beside training, where cloudckpt has none of its own for them."""

from __future__ import annotations

import datetime as dt

import torch
import torch.distributed as dist

from cloudckpt._forks import in_child, never_free
from cloudckpt._ranks.group import check_is_rank, exists


class Twins:
    """gloo groups for one purpose, each of the ranks of another group, made once and used again."""

    def __init__(self) -> None:
        self._groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        in_child(self._forget)

    def _forget(self) -> None:
        """In a child, which is none of its parent's ranks."""
        never_free(self._groups)
        self._groups = {}

    def of(self, source: dist.ProcessGroup, *, timeout_s: float | None = None) -> dist.ProcessGroup:
        """That of the ranks of `source`. Collective on the first call; then its collectives take up to `timeout_s`."""
        check_is_rank(uri="")
        for known, group in list(self._groups.items()):
            if not (exists(known) and exists(group)):
                del self._groups[known]
        if source not in self._groups:
            self._groups[source] = dist.new_group(
                dist.get_process_group_ranks(source),
                backend="gloo",
                timeout=None if timeout_s is None else dt.timedelta(seconds=timeout_s),
                use_local_synchronization=source is not dist.group.WORLD,
            )
        return self._groups[source]


_TWINS = Twins()


def require_cpu_backend(process_group: dist.ProcessGroup | None) -> None:
    """Raise ``AssertionError``, as torch itself does, where the group has none."""
    if not dist.is_available() or not dist.is_initialized():
        return
    source = process_group if process_group is not None else dist.group.WORLD
    if source is not None and torch.device("cpu") not in source._device_types:  # noqa: SLF001  # as torch itself asks
        raise AssertionError(
            "A CPU backend must be enabled for async save; try initializing process group with 'cpu:gloo,cuda:nccl'"
        )


def background_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A gloo group of the same ranks, made once and used again. Collective on its first call."""
    if not dist.is_available() or not dist.is_initialized():
        return process_group
    source = process_group if process_group is not None else dist.group.WORLD
    assert source is not None  # noqa: S101  # it is initialised
    return _TWINS.of(source)
