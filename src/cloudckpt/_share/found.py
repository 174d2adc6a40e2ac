"""The manifest, found by the coordinator for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from cloudckpt._group import MetGroup
from cloudckpt.errors import CloudckptError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the coordinator found at `uri`; with neither a document nor an error, each rank looks for itself."""

    uri: str
    document: bytes | None = None
    error: CloudckptError | None = None


def handed_on(group: MetGroup, found: Found | None) -> Found:
    """What rank 0 found, on every rank; the others pass None. All of them have to come.

    Raises `RankLostError` where one does not, in bounded time.
    """
    box: list[Found | None] = [found]
    dist.broadcast_object_list(box, group=group, group_src=0)
    assert box[0] is not None  # noqa: S101  # rank 0 passed it
    return box[0]
