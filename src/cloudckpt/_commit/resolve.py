"""Finding the manifest that counts: what the entry with the highest number says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from cloudckpt._commit.fence import MAX_FENCE_BYTES, Fence, decode_fence, is_fence
from cloudckpt._manifest.codec import decode
from cloudckpt._manifest.model import Manifest
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidManifestError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.stores.base import ObjectInfo, Store

MANIFEST_PREFIX = "manifest"
TORCH_METADATA_KEY = ".metadata"
MAX_MANIFEST_BYTES = 2**31
_MOST_NAMED = 5
_BEGINNING = b'{"format":"cloudckpt'
"""Of every entry that cloudckpt writes, manifest or fence."""
_RANK_FOLDER = re.compile(r"rank-(0|[1-9][0-9]{0,17})")
_MANIFEST = re.compile(r"manifest(?:\.([1-9][0-9]{0,17}))?\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a checkpoint's log, as a listing shows it: a manifest or a fence."""

    number: int
    size_bytes: int
    modified_at: datetime

    @property
    def is_fence(self) -> bool:
        """By its size alone."""
        return self.size_bytes <= MAX_FENCE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The entries that there are, lowest number first, and what they amount to."""

    entries: tuple[Entry, ...]
    counting: int | None
    """The number of the manifest that counts; None where there is no checkpoint. It may have vanished."""

    @property
    def top(self) -> int:
        """The highest number there is; -1 where there is none."""
        return self.entries[-1].number if self.entries else -1


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


def entry_of(key: str, info: ObjectInfo) -> Entry | None:
    """The entry at `key`, seen from the checkpoint; None for a key that is no entry's."""
    number = manifest_number(key)
    if number is None:
        return None
    return Entry(number=number, size_bytes=info.size_bytes, modified_at=info.modified_at)


def list_entries(store: Store) -> tuple[Entry, ...]:
    """All entries there are, lowest first."""
    found = (entry_of(info.key, info) for info in store.list(MANIFEST_PREFIX))
    return tuple(sorted((entry for entry in found if entry is not None), key=lambda entry: entry.number))


def manifest_numbers(store: Store) -> list[int]:
    """The numbers of all entries there are, lowest first."""
    return [entry.number for entry in list_entries(store)]


def read_log(store: Store, retrier: Retrier) -> Log:
    """What counts. Only a fence is opened for it, and raises what `decode_fence` raises.

    A fence that vanishes between being listed and being read has been replaced, so the listing is made once more;
    then it is a `CheckpointChangedError`.
    """
    for _ in range(2):
        entries = retrier.call(lambda: list_entries(store))
        if not entries or not entries[-1].is_fence:
            return Log(entries=entries, counting=entries[-1].number if entries else None)
        found = read_entry(store, entries[-1].number, retrier)
        if isinstance(found, Fence):
            return Log(entries=entries, counting=found.keeps)
    raise _changing(store)


def resolve(store: Store, retrier: Retrier) -> Resolved:
    """The manifest that counts.

    Raises `CheckpointNotFoundError` where there is none, and what `decode` and `decode_fence` raise. A manifest that
    vanishes between being listed and being read has been superseded or removed, so the listing is made once more.
    """
    kept: set[tuple[int, int]] = set()
    for _ in range(2):
        log = read_log(store, retrier)
        if log.counting is None:
            raise _not_found(store, retrier, was_fenced=bool(log.entries))
        manifest = read_manifest(store, log.counting, retrier)
        if manifest is not None:
            return Resolved(number=log.counting, manifest=manifest)
        if (log.top, log.counting) in kept:
            # Nobody who goes by the rules removes what a fence keeps.
            raise CheckpointNotFoundError(
                f"the checkpoint at {store.uri} is gone: {manifest_key(log.counting)} was removed by other means than "
                "cloudckpt's. Load an older checkpoint (cloudckpt.latest(root) finds the newest)",
                uri=store.uri,
            )
        if log.counting != log.top:
            kept.add((log.top, log.counting))
    raise _changing(store)


def read_entry(store: Store, number: int, retrier: Retrier) -> Manifest | Fence | None:
    """The entry with that number, or None where there is none (any more). Raises what the decoders raise.

    One that is damaged is read once more: it may have been damaged on its way.
    """
    try:
        return _read_once(store, number, retrier)
    except InvalidManifestError:
        return _read_once(store, number, retrier)


def _read_once(store: Store, number: int, retrier: Retrier) -> Manifest | Fence | None:
    key = manifest_key(number)
    try:
        document = retrier.call(lambda: store.read(key, max_bytes=MAX_MANIFEST_BYTES))
    except ObjectNotFoundError:
        return None
    if is_fence(document):
        return decode_fence(document, number=number, uri=store.url(key))
    return decode(document, uri=store.url(key))


def read_manifest(store: Store, number: int, retrier: Retrier) -> Manifest | None:
    """The manifest with that number, or None where there is none (any more). Raises what `decode` raises.

    A fence is none: the number was freed meanwhile, and a gc that did not know it has put it there.
    """
    found = read_entry(store, number, retrier)
    return None if isinstance(found, Fence) else found


def check_ours(store: Store, entries: Iterable[Entry], retrier: Retrier) -> None:
    """Raises `InvalidManifestError` for an entry that another program wrote, by how it begins."""
    for entry in entries:
        key = manifest_key(entry.number)
        beginning = bytearray(min(entry.size_bytes, len(_BEGINNING)))
        try:
            if beginning:
                retrier.call(lambda key=key, into=beginning: store.read_into(key, 0, [memoryview(into)]))  # type: ignore[misc]  # mypy cannot see the defaults
        except ObjectNotFoundError:
            continue
        if not _BEGINNING.startswith(beginning):
            raise InvalidManifestError(
                f"{store.url(key)} is no cloudckpt checkpoint's: another program wrote it, and no data of a checkpoint "
                "lies beside it. Nothing was written or deleted",
                uri=store.uri,
            )


def holds_torch_checkpoint(store: Store) -> bool:
    """Whether a ``.metadata`` of torch's own writers lies there."""
    return any(info.key == TORCH_METADATA_KEY for info in store.list(TORCH_METADATA_KEY))


def holds_rank_checkpoints(store: Store) -> bool:
    """Whether ranks have saved there on their own, each under ``rank-<r>/``."""
    # By sizes alone: a rank's checkpoint that was deleted has left a fence.
    folders = {
        folder
        for info in store.list("rank-")
        for folder, _, name in [info.key.rpartition("/")]
        if (entry := entry_of(name, info)) is not None and not entry.is_fence
    }
    return bool(ranks_of(folders))


def ranks_of(folders: Iterable[str]) -> list[int]:
    """The ranks that have saved on their own, by the names of the folders that lie beside each other.

    Rank 0 is always one of them: a folder ``rank-8`` without it is a checkpoint with that name.
    """
    ranks = sorted(int(match.group(1)) for folder in folders if (match := _RANK_FOLDER.fullmatch(folder)))
    return ranks if ranks[:1] == [0] else []


def _not_found(store: Store, retrier: Retrier, *, was_fenced: bool) -> CheckpointNotFoundError:
    has_data = retrier.call(lambda: next(iter(store.list("data/")), None)) is not None
    if has_data:
        hint = (
            "what lies there is an unfinished or failed save. Load an older checkpoint (cloudckpt.latest(root) finds "
            "the newest)"
        )
    elif was_fenced:
        hint = (
            "it was deleted, or what was left of a failed save was. Load an older checkpoint (cloudckpt.latest(root) "
            "finds the newest)"
        )
    elif retrier.call(lambda: next(iter(store.list("rank-0/manifest")), None)) is not None:
        hint = f"ranks saved on their own there, and each has a checkpoint: name one, as {store.uri.rstrip('/')}/rank-0"
    elif retrier.call(lambda: holds_torch_checkpoint(store)):
        hint = (
            "one of torch's own writer lies there, of which cloudckpt.import_checkpoint(…, format='dcp') makes one of "
            "cloudckpt's"
        )
    else:
        try:
            hint = retrier.call(lambda: _instead(store))
        except StoreError:  # it is a hint, so no failure counts
            hint = "check the URI"
    return CheckpointNotFoundError(f"no checkpoint is committed at {store.uri}: {hint}", uri=store.uri)


def _instead(store: Store) -> str:
    """What lies there, where it is nothing that a save has written."""
    folders = list(store.list_directories())
    if folders:
        return (
            f"it has the {folders_named(folders)}. Name the checkpoint itself: cloudckpt.list_checkpoints(root) lists "
            "them"
        )
    if next(iter(store.list()), None) is not None:
        return (
            "what lies there is no cloudckpt's. Check the URI; of files, cloudckpt.import_checkpoint makes a checkpoint"
        )
    return "nothing lies there. Check the URI, or list what there is with cloudckpt.list_checkpoints(root)"


def folders_named(folders: Sequence[str]) -> str:
    """The first few of at least one, in words."""
    more = " and more" if len(folders) > _MOST_NAMED else ""
    return f"{'folder' if len(folders) == 1 else 'folders'} {', '.join(sorted(folders)[:_MOST_NAMED])}{more}"


def _changing(store: Store) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{store.uri} is being overwritten again and again: its manifest vanished twice while it was read. Load again",
        uri=store.uri,
    )
