"""Find the manifest on the coordinator, for all ranks."""

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
class ManifestLookup:
    """The result of looking for a manifest at `uri`: a manifest, or else `error`."""

    uri: str
    document: bytes | None = None
    """The manifest, encoded for the broadcast to other ranks."""
    error: Exception | None = None
    """Why there is no manifest: none is committed, or the look for it failed."""
    is_torchs: bool = False
    """No manifest is committed, but a checkpoint of torch's own writer is there."""
    is_of_ranks: bool = False
    """No manifest is committed, but ranks saved on their own there."""


def find_manifest(
    uri: str, store: Callable[[], Store], retrier: Retrier, *, is_broadcast: bool
) -> tuple[ManifestLookup, Manifest | None]:
    """Look for the manifest. Raises nothing, as other ranks may wait for the answer: an error is part of that.

    Only after the store has said twice that no manifest is committed, it looks for torch's checkpoint or those of
    ranks that saved on their own. With `is_broadcast` the result holds the document.
    """
    try:
        try:
            manifest = resolve(store(), retrier).manifest
        except CheckpointNotFoundError as error:
            is_torchs = holds_torch_checkpoint(store(), retrier)
            is_of_ranks = not is_torchs and holds_rank_checkpoints(store(), retrier)
            return ManifestLookup(uri=uri, error=error, is_torchs=is_torchs, is_of_ranks=is_of_ranks), None
        return ManifestLookup(uri=uri, document=encode(manifest) if is_broadcast else None), manifest
    except Exception as error:  # noqa: BLE001  # each rank raises it
        return ManifestLookup(uri=uri, error=portable(error)), None


def broadcast_lookup(group: MetGroup, lookup: ManifestLookup | None) -> ManifestLookup:
    """Broadcast what rank 0 found to all ranks; the others pass None. All ranks call it.

    Raises `RankLostError` in bounded time if a rank does not.
    """
    box: list[ManifestLookup | None] = [lookup]
    dist.broadcast_object_list(box, group=group, group_src=0)
    assert box[0] is not None  # noqa: S101  # rank 0 passed it
    return box[0]
