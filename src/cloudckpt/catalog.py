"""Which checkpoints there are under a root."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from datetime import datetime

from cloudckpt._commit.fence import MAX_FENCE_BYTES, decode_fence
from cloudckpt._commit.resolve import MANIFEST_PREFIX, Entry, entry_of, manifest_key
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location, parse_location
from cloudckpt._workers import each_done
from cloudckpt.errors import CheckpointChangedError, CheckpointError, InvalidURIError, ObjectNotFoundError
from cloudckpt.options import FIRST_CONNECTIONS, Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_DIGITS = re.compile(r"([0-9]+)")
_MOST_LOOKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint."""

    uri: str
    name: str
    """Its last segment: ``step-100`` of ``s3://bucket/run/step-100``."""
    committed_at: datetime
    """When, by the store's clock, the manifest that counts was written."""


def list_checkpoints(root: str | os.PathLike[str], *, options: Options | None = None) -> list[CheckpointInfo]:
    """The committed checkpoints directly under `root`, oldest first.

    What is unfinished, failed or foreign is not in the list. The order is that in which the store got the manifests:
    a copy of checkpoints made by other tools has the order of the copying. Commits within the resolution of the
    store's clock are ordered by name, numbers by value. Only listings are made; no manifest is opened, and of
    what gc and deletions left only the hundred bytes that count. Raises `StoreError` subclasses, and
    `CheckpointChangedError` where they change so fast that it cannot be told whether there is one.
    """
    options = options or Options()
    location = parse_location(root)
    store = open_store(location.uri, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    names, found = _look(location, store, retrier, options)
    # One look takes its time, in which a job can commit a checkpoint that was not listed yet and remove the one that
    # was. So that there is none is believed only if another look finds the same.
    for _ in range(_MOST_LOOKS):
        if found or not names:
            break
        before = names
        names, found = _look(location, store, retrier, options)
        if not found and names == before:
            break
    else:
        if not found:
            raise CheckpointChangedError(
                f"the checkpoints under {location.uri} change all the time: whether there is one could not be told. "
                "List them again",
                uri=location.uri,
            )
    return sorted(found, key=lambda info: (info.committed_at, by_name(info.name)))


def _look(
    location: Location, store: Store, retrier: Retrier, options: Options
) -> tuple[list[str], list[CheckpointInfo]]:
    """The folders that there are, and the checkpoints in them, each as it was when it was looked at."""
    names = [name for name in retrier.call(lambda: list(store.list_directories())) if can_be_opened(location, name)]
    committed_at: dict[str, datetime | None] = {}

    def look(name: str) -> None:
        committed_at[name] = _committed_at(store, name, retrier)

    for _ in each_done(
        names,
        look,
        num_threads=options.connections or FIRST_CONNECTIONS,
        name="cloudckpt-list",
        on_failure=retrier.stop,
    ):
        pass
    found = [
        CheckpointInfo(uri=location.child(name).uri, name=name, committed_at=moment)
        for name in names
        if (moment := committed_at[name]) is not None
    ]
    return sorted(names), found


def can_be_opened(location: Location, name: str) -> bool:
    """Whether a checkpoint can have this name. A bucket can hold others, which some other tool has written."""
    try:
        parse_location(location.child(name).uri)
    except InvalidURIError:
        return False
    return True


def latest(root: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointInfo | None:
    """The checkpoint directly under `root` that was committed last; None where there is none.

    By the store's clock, and damaged or not: `load_latest` passes over damaged ones. Raises what `list_checkpoints`
    does.
    """
    return next(reversed(list_checkpoints(root, options=options)), None)


def _committed_at(store: Store, name: str, retrier: Retrier) -> datetime | None:
    prefix = f"{name}/"
    times: dict[int, datetime] = {}
    for _ in range(2):
        entries = retrier.call(lambda: _entries(store, prefix))
        times = {entry.number: entry.modified_at for entry in entries}
        if not entries or not entries[-1].is_fence:
            break
        counting = _kept(store, prefix, entries, retrier)
        if counting is None or counting in times:
            return None if counting is None else times[counting]
        # Replaced or removed between the two looks.
    return times[max(times)] if times and not entries[-1].is_fence else None


def _entries(store: Store, prefix: str) -> list[Entry]:
    found = (entry_of(info.key.removeprefix(prefix), info) for info in store.list(prefix + MANIFEST_PREFIX))
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.number)


def _kept(store: Store, prefix: str, entries: list[Entry], retrier: Retrier) -> int | None:
    """The number that the fence on top keeps; -1 where it has vanished.

    Of a fence that cannot be read, what lies below stands for the checkpoint, or itself where nothing does (it may be a
    manifest that was cut): whoever opens it hears what is wrong.
    """
    number = entries[-1].number
    key = prefix + manifest_key(number)
    for _ in range(2):  # what is damaged may have been so on its way
        with contextlib.suppress(CheckpointError):
            try:
                document = retrier.call(lambda: store.read(key, max_bytes=MAX_FENCE_BYTES))
            except ObjectNotFoundError:
                return -1
            return decode_fence(document, number=number, uri=store.url(key)).keeps
    return max((entry.number for entry in entries if not entry.is_fence), default=number)


def by_name(name: str) -> list[tuple[int, str]]:
    """``step-2`` before ``step-10``."""
    return [(int(text), "") if _DIGITS.fullmatch(text) else (-1, text) for text in _DIGITS.split(name)]
