"""Finding the manifest that counts: the one with the highest number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cloudckpt._manifest.codec import decode
from cloudckpt._manifest.model import Manifest
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import CheckpointChangedError, CheckpointNotFoundError, ObjectNotFoundError
from cloudckpt.stores.base import Store

MANIFEST_PREFIX = "manifest"
TORCH_METADATA_KEY = ".metadata"
MAX_MANIFEST_BYTES = 2**31
_MANIFEST = re.compile(r"manifest(?:\.([1-9][0-9]{0,17}))?\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A manifest that counts, and its number: 0 for the first save, n for the n-th overwrite."""

    number: int
    manifest: Manifest


def manifest_key(number: int) -> str:
    """The key of the commit of the `number`-th overwrite; 0 is the first save."""
    return f"manifest.{number}.json" if number else "manifest.json"


def manifest_number(key: str) -> int | None:
    """The reverse of `manifest_key`; None for a key that is no manifest's."""
    match = _MANIFEST.fullmatch(key)
    return int(match.group(1) or 0) if match else None


def manifest_numbers(store: Store) -> list[int]:
    """The numbers of all manifests there are, lowest first."""
    numbers = (manifest_number(info.key) for info in store.list(MANIFEST_PREFIX))
    return sorted(number for number in numbers if number is not None)


def resolve(store: Store, retrier: Retrier) -> Resolved:
    """The manifest that counts.

    Raises `CheckpointNotFoundError` where there is none, and what `decode` raises. A manifest that vanishes between
    being listed and being read has been superseded or removed, so the listing is made once more.
    """
    for _ in range(2):
        numbers = retrier.call(lambda: manifest_numbers(store))
        if not numbers:
            raise _not_found(store, retrier)
        manifest = read_manifest(store, numbers[-1], retrier)
        if manifest is not None:
            return Resolved(number=numbers[-1], manifest=manifest)
    raise CheckpointChangedError(
        f"{store.uri} is being overwritten again and again: its manifest vanished twice while it was read. Load again",
        uri=store.uri,
    )


def read_manifest(store: Store, number: int, retrier: Retrier) -> Manifest | None:
    """The manifest with that number, or None where there is none (any more). Raises what `decode` raises."""
    key = manifest_key(number)
    try:
        document = retrier.call(lambda: store.read(key, max_bytes=MAX_MANIFEST_BYTES))
    except ObjectNotFoundError:
        return None
    return decode(document, uri=store.url(key))


def holds_torch_checkpoint(store: Store) -> bool:
    """Whether a ``.metadata`` of torch's own writers lies there."""
    return any(info.key == TORCH_METADATA_KEY for info in store.list(TORCH_METADATA_KEY))


def holds_rank_checkpoints(store: Store) -> bool:
    """Whether ranks have saved there on their own, each under ``rank-<r>/``."""
    names = (info.key.rpartition("/") for info in store.list("rank-"))
    return any("/" not in folder and manifest_number(name) is not None for folder, _, name in names)


def _not_found(store: Store, retrier: Retrier) -> CheckpointNotFoundError:
    has_data = retrier.call(lambda: next(iter(store.list("data/")), None)) is not None
    hint = (
        "what lies there is an unfinished or failed save. Load an older checkpoint (cloudckpt.latest(root) finds the "
        "newest)"
        if has_data
        else "nothing lies there. Check the URI, or list what there is with cloudckpt.list_checkpoints(root)"
    )
    return CheckpointNotFoundError(f"no checkpoint is committed at {store.uri}: {hint}", uri=store.uri)
