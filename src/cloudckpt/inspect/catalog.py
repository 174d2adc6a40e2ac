"""List the checkpoints under a root, and on request everything else that saves wrote there."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from cloudckpt._workers import each_done
from cloudckpt.commit.collect import group_uploads
from cloudckpt.commit.commit_time import CommitTimes, commit_order, datetime_of
from cloudckpt.commit.garbage import FoundItem, Inventory, attempt_time
from cloudckpt.commit.manifest_log import (
    MOST_LOOKS,
    TORCH_METADATA_KEY,
    Entry,
    SummaryReader,
    holds_rank_checkpoints,
    list_entries,
    look_until_stable,
    manifest_key,
    parse_ranks,
    read_log,
)
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointError,
    InvalidURIError,
    StoreError,
    UnsupportedFormatError,
)
from cloudckpt.io.retry import Retrier
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores.base import ObjectInfo, Store, UploadInfo
from cloudckpt.stores.open import open_store
from cloudckpt.uri import Location, parse_location

CheckpointState = Literal["committed", "damaged", "newer", "denied", "in progress", "garbage", "torch"]

_ONE_HOUR = timedelta(hours=1)
_UNCOMMITTED_STATES = ("in progress", "garbage")
_DAMAGED: CheckpointState = "damaged"
_NEWER: CheckpointState = "newer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint, or the data of one save that is not committed. One location can have several of these.

    ``state`` is one of:

    - ``"committed"``: the checkpoint can be loaded.
    - ``"damaged"``: a manifest exists and cannot be read.
    - ``"newer"``: the format is one that only a newer cloudckpt reads.
    - ``"denied"``: this user may not look at the location.
    - ``"in progress"``: data of a save that may still be committed.
    - ``"garbage"``: data that no save will commit, or that shows no sign of life. `gc` removes it.
    - ``"torch"``: a checkpoint of torch's own writer, whose size is unknown.

    All states but the first, and all fields from `num_bytes` on, come from ``list_checkpoints(root, all=True)``.
    """

    uri: str
    name: str
    """The last segment of `uri`: ``step-100`` of ``s3://bucket/run/step-100``."""
    committed_at: datetime
    """Time of the commit in UTC, by the clock of the coordinator that wrote the manifest. The store's own time replaces
    it if the manifest has no time (format 1.0) or cannot be read. In the other states this is the time of the last
    write, by the store's clock; if denied, the time of the listing.
    """
    state: CheckpointState = "committed"
    num_bytes: int | None = None
    """Size of the data objects, without unfinished uploads. None if unknown."""
    num_objects: int | None = None
    """Number of data objects. None if unknown."""
    num_uploads: int = 0
    """Number of unfinished uploads."""
    attempt: str = ""
    """Identifier of the save."""
    world_size: int | None = None
    """Number of ranks that saved; of an uncommitted save, the number of ranks that have written data."""
    num_tensors: int | None = None
    num_overwrites: int = 0
    """Number of earlier saves that this checkpoint replaced."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """``Options.metadata`` of the save."""
    problem: str = ""
    """The reason why it cannot be read."""


def list_checkpoints(
    root: str | os.PathLike[str],
    *,
    all: bool = False,  # the word that users know from `ls --all`
    alive_within: timedelta = _ONE_HOUR,
    check: bool = False,
    options: Options | None = None,
) -> list[CheckpointInfo]:
    """List the committed checkpoints directly under `root`, oldest first.

    The order is that of `CheckpointInfo.committed_at`, which copies keep. Equal times are ordered by name, numbers by
    value. Each checkpoint costs one listing and one small read of the head of its manifest. A folder without a
    checkpoint is listed twice, because absence is believed only from two equal answers.

    With `all`, the list also has what is not a committed checkpoint of cloudckpt, at `root` and directly under it, and
    each entry has its state and size. Each folder then costs two listings and a read of its whole manifest. Unfinished
    uploads that may not be listed are left out.

    Args:
        root: The folder of the checkpoints.
        all: Also list damaged checkpoints, uncommitted saves and checkpoints of torch's own writer.
        alive_within: With `all`, an uncommitted save is in progress if it wrote something in this time and began after
            the last commit; otherwise it is garbage.
        check: With `all`, validate what each manifest says of every tensor, as a load does. Takes about twenty times
            the computing.
        options: How to reach the store.

    Raises:
        StoreError: A request failed, or this user may look at none of the folders.
        CheckpointChangedError: The folders change so fast that no two looks agree.

    """
    options = options or Options()
    location = parse_location(root)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    reader = None
    if all:
        alive_since = datetime.now(timezone.utc) - alive_within
        reader = _StateReader(location, options, retrier, alive_since=alive_since, check=check)
    listing = _Listing(location, options, retrier, reader)
    look_until_stable(lambda: (None, listing.look()), changing=lambda: _changing_error(location))
    if listing.denials and len(listing.denials) == len(listing.found):
        raise listing.denials[0]
    found = [info for infos in listing.found.values() for info in infos]
    return sorted(found, key=lambda info: (*commit_order(info.committed_at, info.name), info.attempt))


def latest(root: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointInfo | None:
    """Return the checkpoint directly under `root` that was committed last, or None if there is none.

    It may be damaged; `load_latest` skips damaged checkpoints. Raises what `list_checkpoints` raises.
    """
    return next(reversed(list_checkpoints(root, options=options)), None)


def is_openable(location: Location, name: str) -> bool:
    """Return True if a checkpoint can have this name. Other tools can write folders whose names are no valid URI."""
    try:
        parse_location(location.child(name).uri)
    except InvalidURIError:
        return False
    return True


class _Listing:
    """The checkpoints found so far under one root. Each look adds to them."""

    def __init__(self, root: Location, options: Options, retrier: Retrier, reader: _StateReader | None) -> None:
        self._root, self._options, self._retrier, self._reader = root, options, retrier, reader
        self._store = open_store(root.uri, options)
        self._times = CommitTimes()
        self._missing: dict[str, Hashable] = {}
        """The folders in which the last look found no checkpoint, with what it found instead."""
        self.found: dict[str, list[CheckpointInfo]] = {}
        """By the name of the folder; ``""`` is the root itself."""
        self.denials: list[AccessDeniedError] = []

    def look(self) -> Hashable:
        """Look at every folder in which no checkpoint was found before. Return what two looks in a row must agree on.

        These are the names of all folders, because one listing may lack one, and the folders without a checkpoint.
        """
        store, retrier = self._store, self._retrier
        names = [name for name in retrier.collect(store.list_directories) if is_openable(self._root, name)]
        places, uploads = list(names), dict[str, list[UploadInfo]]()
        if self._reader is not None:
            if self._root.scheme != "file":  # there, each folder is listed by itself: some may be closed
                uploads.update(group_uploads(store, retrier))
            if "data" in names or read_log(store, retrier, is_confirmed=False, is_lenient=True).entries:
                places.append("")
        for name in self._missing:
            self.found.pop(name, None)
        self._missing.clear()

        def look_at(name: str) -> None:
            if self._reader is None:
                self._find_commit(name)
            else:
                self._read_states(self._reader, name, uploads.get(name, ()))

        for _ in each_done(
            [name for name in places if name not in self.found],
            look_at,
            num_threads=self._options.connections or DEFAULT_CONNECTIONS,
            name="cloudckpt-list",
            on_failure=retrier.stop,
        ):
            pass
        if self._reader is not None and not any(self.found.values()) and "" not in places:
            look_at("")  # torch's writer leaves nothing by which a listing of folders shows it
        return tuple(sorted(places)), tuple(sorted(self._missing.items()))

    def _find_commit(self, name: str) -> None:
        store, retrier = self._store, self._retrier
        log = read_log(store, retrier, prefix=f"{name}/", is_confirmed=False, is_lenient=True)
        entry, time = log.counting_entry, None
        if entry is not None:
            time = self._times.read(store, f"{name}/{manifest_key(entry.number)}", entry, retrier)
        if time is None:
            self._missing[name] = log
        else:
            self.found[name] = [CheckpointInfo(uri=self._root.child(name).uri, name=name, committed_at=time)]

    def _read_states(self, reader: _StateReader, name: str, uploads: Iterable[UploadInfo]) -> None:
        location = self._root.child(name) if name else self._root
        try:
            infos = reader.read(location, uploads)
        except AccessDeniedError as error:
            self.denials.append(error)
            infos = [_denied_info(location, error)]
        self.found[name] = infos
        if {info.state for info in infos}.issubset(_UNCOMMITTED_STATES):
            self._missing[name] = True


class _StateReader:
    """Reads the state of everything at one location. Several threads use it."""

    def __init__(
        self, root: Location, options: Options, retrier: Retrier, *, alive_since: datetime, check: bool
    ) -> None:
        self._root, self._options, self._retrier = root, options, retrier
        self._summaries = SummaryReader(retrier, check=check)
        self._alive_since = alive_since
        self._times = CommitTimes()

    def read(self, location: Location, uploads: Iterable[UploadInfo]) -> list[CheckpointInfo]:
        """Return what lies at `location`. A checkpoint that is replaced during the look is looked at again."""
        store = open_store(location, self._options)
        vanished: set[tuple[int, int | None]] = set()
        for _ in range(MOST_LOOKS):
            with contextlib.suppress(CheckpointChangedError):
                return self._read_once(location, store, uploads, vanished)
        raise _changing_error(location)

    def _read_once(
        self, location: Location, store: Store, uploads: Iterable[UploadInfo], vanished: set[tuple[int, int | None]]
    ) -> list[CheckpointInfo]:
        is_local = location.scheme == "file"
        inventory = Inventory(has_hidden_uploads=is_local)
        for info in self._retrier.collect(store.list, "data/"):
            inventory.add_object(info)
        if is_local:
            uploads = self._retrier.collect(store.list_uploads, "data/" if location == self._root else "")
        for upload in uploads:
            inventory.add_upload(upload)
        checkpoint, rest = self._read_checkpoint(location, store, inventory.at(""), vanished)
        if checkpoint is None and not rest:
            others = self._read_other_formats(location, store)
            # The folders of ranks that saved separately at the root are listed as entries of their own.
            return [info for info in others if location != self._root or info.state == "torch"]
        return [
            *([checkpoint] if checkpoint is not None else []),
            *self._describe_attempts(location, rest, checkpoint),
        ]

    def _read_checkpoint(
        self, location: Location, store: Store, found: Sequence[FoundItem], vanished: set[tuple[int, int | None]]
    ) -> tuple[CheckpointInfo | None, list[FoundItem]]:
        """Return the checkpoint, if any, and the data beside it.

        Raises `CheckpointChangedError` if its manifest vanished since the listing. If the same one is in `vanished`,
        it is damaged instead: no program that follows the protocol removes a manifest that counts.
        """
        log = summary = None
        problem, state = "", _DAMAGED
        try:
            log = read_log(store, self._retrier, is_confirmed=False)
            if log.counting is not None:
                summary = self._summaries.read(store, log) if log.counting_entry is not None else None
                if summary is None and (log.top, log.counting) not in vanished:
                    vanished.add((log.top, log.counting))
                    raise _changing_error(location)
                if summary is None:
                    problem = f"{manifest_key(log.counting)} was removed by other means than cloudckpt's"
        except CheckpointChangedError:
            raise
        except UnsupportedFormatError as error:
            problem, state = str(error), _NEWER
        except CheckpointError as error:
            problem = str(error)
        entry = log.counting_entry if log is not None else None
        if summary is not None and entry is not None:
            named = {stored.key for stored in summary.objects}
            committed_at_ns = summary.committed_at_ns
            checkpoint = CheckpointInfo(
                uri=location.uri,
                name=location.name,
                committed_at=entry.modified_at if committed_at_ns is None else datetime_of(committed_at_ns),
                num_bytes=summary.num_bytes,
                num_objects=len(summary.objects),
                attempt=summary.attempt,
                world_size=summary.world_size,
                num_tensors=len(summary.tensors),
                num_overwrites=entry.number,
                metadata=summary.metadata,
            )
            return checkpoint, [item for item in found if item.key not in named]
        if not problem:
            return None, list(found)
        entries = log.entries if log is not None else list_entries(store, self._retrier)
        return _unreadable_info(location, entries, found, problem, state), []

    def _describe_attempts(
        self, location: Location, found: Iterable[FoundItem], checkpoint: CheckpointInfo | None
    ) -> Iterable[CheckpointInfo]:
        """Describe each save that has data in `found`."""
        by_attempt: defaultdict[str, list[FoundItem]] = defaultdict(list)
        for item in found:
            by_attempt[item.attempt].append(item)
        for attempt, items in by_attempt.items():
            last_write = max(item.moment for item in items)
            objects = [item for item in items if item.kind == "data"]
            is_alive = last_write >= self._alive_since and (
                checkpoint is None
                or (attempt > checkpoint.attempt and _begin_of(attempt, last_write) >= checkpoint.committed_at)
            )
            yield CheckpointInfo(
                uri=location.uri,
                name=location.name,
                committed_at=last_write,
                state="in progress" if is_alive else "garbage",
                num_bytes=sum(item.size_bytes for item in objects),
                num_objects=len(objects),
                num_uploads=sum(item.kind == "upload" for item in items),
                attempt=attempt,
                world_size=len({_rank_of(item.key) for item in items if item.kind != "probe"}),
            )

    def _read_other_formats(self, location: Location, store: Store) -> list[CheckpointInfo]:
        """Describe what ranks saved separately at `location`, or else what torch's own writer saved there."""
        infos = self._retrier.call(lambda: [*store.list("rank-"), *store.list(TORCH_METADATA_KEY)])
        inventory = Inventory(has_hidden_uploads=False)
        for info in infos:
            inventory.add_object(info)
        ranks = parse_ranks(prefix.removesuffix("/") for prefix in inventory.locations)
        if ranks and holds_rank_checkpoints(store, self._retrier):
            objects = [item for prefix in inventory.locations for item in inventory.at(prefix) if item.kind == "data"]
            return [
                CheckpointInfo(
                    uri=location.uri,
                    name=location.name,
                    committed_at=self._read_rank_commit_time(store, infos),
                    num_bytes=sum(item.size_bytes for item in objects),
                    num_objects=len(objects),
                    world_size=len(ranks),
                )
            ]
        return [
            CheckpointInfo(uri=location.uri, name=location.name, committed_at=info.modified_at, state="torch")
            for info in infos
            if info.key == TORCH_METADATA_KEY
        ]

    def _read_rank_commit_time(self, store: Store, infos: Sequence[ObjectInfo]) -> datetime:
        """Read the commit time of rank 0, by which a `CheckpointManager` orders such checkpoints, too."""
        entry = read_log(store, self._retrier, prefix="rank-0/", is_confirmed=False, is_lenient=True).counting_entry
        if entry is None:
            return max(info.modified_at for info in infos)
        key = f"rank-0/{manifest_key(entry.number)}"
        return self._times.read(store, key, entry, self._retrier) or entry.modified_at


def _changing_error(location: Location) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"the checkpoints at {location.uri} change all the time, so that no two looks found the same. List them again",
        uri=location.uri,
    )


def _unreadable_info(
    location: Location, entries: Sequence[Entry], found: Sequence[FoundItem], problem: str, state: CheckpointState
) -> CheckpointInfo:
    times = [entry.modified_at for entry in entries] or [item.moment for item in found]
    return CheckpointInfo(
        uri=location.uri,
        name=location.name,
        committed_at=max(times, default=datetime.now(timezone.utc)),
        state=state,
        num_bytes=sum(item.size_bytes for item in found),
        num_objects=sum(item.kind == "data" for item in found),
        num_uploads=sum(item.kind == "upload" for item in found),
        problem=problem,
    )


def _denied_info(location: Location, error: StoreError) -> CheckpointInfo:
    return CheckpointInfo(
        uri=location.uri,
        name=location.name,
        committed_at=datetime.now(timezone.utc),
        state="denied",
        problem=str(error),
    )


def _begin_of(attempt: str, default: datetime) -> datetime:
    try:
        return attempt_time(attempt)
    except ValueError:
        return default


def _rank_of(key: str) -> str:
    return key.rpartition("/")[2].partition("-")[0]
