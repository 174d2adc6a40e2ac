"""The manifest, found by the coordinator for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from cloudckpt._commit.resolve import holds_rank_checkpoints, holds_torch_checkpoint, resolve
from cloudckpt._manifest.codec import encode
from cloudckpt._manifest.model import Manifest
from cloudckpt._ranks.met_group import MetGroup
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import CheckpointNotFoundError, portable
from cloudckpt.stores.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lies at `uri`, as one rank has found for all: a manifest, or else `error`."""

    uri: str
    document: bytes | None = None
    """The manifest, encoded for the way to other ranks."""
    error: Exception | None = None
    """Why there is no manifest: none is committed, or what went wrong in the look."""
    is_torchs: bool = False
    """None is committed, but a checkpoint of torch's own writer lies there."""
    is_of_ranks: bool = False
    """None is committed, but ranks saved on their own there."""


def find_at(
    uri: str, store: Callable[[], Store], retrier: Retrier, *, is_handed_on: bool
) -> tuple[Found, Manifest | None]:
    """Look what lies there. It raises nothing: other ranks may wait for the answer, for which a document is made.

    Anything but torch's checkpoint or the ranks' own is looked for only after the store has said twice that no manifest
    is committed. Whatever goes wrong in a look is the error that all ranks raise.
    """
    try:
        try:
            manifest = resolve(store(), retrier).manifest
        except CheckpointNotFoundError as error:
            is_torchs = any(retrier.call(lambda: holds_torch_checkpoint(store())) for _ in range(2))
            is_of_ranks = not is_torchs and holds_rank_checkpoints(store(), retrier, is_confirmed=True)
            return Found(uri=uri, error=error, is_torchs=is_torchs, is_of_ranks=is_of_ranks), None
        return Found(uri=uri, document=encode(manifest) if is_handed_on else None), manifest
    except Exception as error:  # noqa: BLE001  # each rank raises it
        return Found(uri=uri, error=portable(error)), None


def handed_on(group: MetGroup, found: Found | None) -> Found:
    """What rank 0 found, on every rank; the others pass None. All of them have to come.

    Raises `RankLostError` where one does not, in bounded time.
    """
    box: list[Found | None] = [found]
    dist.broadcast_object_list(box, group=group, group_src=0)
    assert box[0] is not None  # noqa: S101  # rank 0 passed it
    return box[0]
