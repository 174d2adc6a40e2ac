"""The manifest, found by the coordinator for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from cloudckpt._commit.resolve import resolve
from cloudckpt._manifest.codec import encode
from cloudckpt._manifest.model import Manifest
from cloudckpt._ranks.met_group import MetGroup
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import CheckpointNotFoundError, CloudckptError
from cloudckpt.stores.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the coordinator found at `uri`; with neither a document nor an error, each rank looks for itself."""

    uri: str
    document: bytes | None = None
    error: CloudckptError | None = None


def found_at(uri: str, store: Callable[[], Store], retrier: Retrier) -> tuple[Found, Manifest | None]:
    """What lies there, for `handed_on`. It raises nothing: the others are waiting."""
    try:
        manifest = resolve(store(), retrier).manifest
        return Found(uri=uri, document=encode(manifest)), manifest
    except CheckpointNotFoundError:
        return Found(uri=uri), None  # it may be one of torch's, or one that each rank saved for itself
    except CloudckptError as error:
        return Found(uri=uri, error=error), None
    except Exception:  # noqa: BLE001  # it comes again where torch reports it
        return Found(uri=uri), None


def handed_on(group: MetGroup, found: Found | None) -> Found:
    """What rank 0 found, on every rank; the others pass None. All of them have to come.

    Raises `RankLostError` where one does not, in bounded time.
    """
    box: list[Found | None] = [found]
    dist.broadcast_object_list(box, group=group, group_src=0)
    assert box[0] is not None  # noqa: S101  # rank 0 passed it
    return box[0]
