"""Process groups for saves beside training, where cloudckpt has none of its own for them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from cloudckpt._group import exists

_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_groups.clear)


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
    default = dist.group.WORLD
    assert default is not None  # noqa: S101  # it is initialised
    source = process_group if process_group is not None else default
    for known, group in list(_groups.items()):
        if not (exists(known) and exists(group)):
            del _groups[known]
    if source in _groups:
        return _groups[source]
    _groups[source] = dist.new_group(
        dist.get_process_group_ranks(source), backend="gloo", use_local_synchronization=source is not default
    )
    return _groups[source]
