"""What there is under a root: checkpoints, saves under way, and what saves have left behind."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from datetime import datetime, timedelta, timezone

from cloudckpt._commit.commit_time import CommitTimes, commit_order, datetime_of
from cloudckpt._commit.garbage import Found, Inventory, attempt_time
from cloudckpt._commit.resolve import (
    MOST_LOOKS,
    TORCH_METADATA_KEY,
    Entry,
    holds_rank_checkpoints,
    list_entries,
    manifest_key,
    ranks_of,
    read_log,
    settle,
)
from cloudckpt._commit.status import CheckpointState, CheckpointStatus, denied_status
from cloudckpt._commit.summaries import Summaries
from cloudckpt._commit.uploads import noting, uploads_by_name
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location, parse_location
from cloudckpt._workers import each_done
from cloudckpt.catalog import can_be_opened
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointError,
    UnsupportedFormatError,
)
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores.base import ObjectInfo, Store, UploadInfo
from cloudckpt.stores.open import open_store

__all__ = ["CheckpointState", "CheckpointStatus", "survey"]

_ONE_HOUR = timedelta(hours=1)
_UNCOMMITTED = ("in progress", "garbage")
_DAMAGED: CheckpointState = "damaged"
_NEWER: CheckpointState = "newer"


def survey(
    root: str | os.PathLike[str],
    *,
    alive_within: timedelta = _ONE_HOUR,
    check: bool = False,
    options: Options | None = None,
) -> list[CheckpointStatus]:
    """All that saves have left at `root` and directly under it, oldest first, in whatever state it is.

    Data of a save that is not committed counts as in progress where something of it was written in the last
    `alive_within`, and the save began after the last commit there; else it is garbage. A manifest whose checksum is
    right counts as committed, but where what it says of objects cannot be; with `check`, all that it says of each
    tensor is looked at too, as a load does, which takes some twenty times the computing.

    Makes two listings of the root's directories and two of unfinished uploads, and for each directory one of its
    manifests, one of its data, and one read of the manifest that counts, `Options.connections` at once: listings take
    a request for each thousand keys. What is replaced meanwhile is looked at again, and so is each directory where
    nothing is committed. Unfinished uploads that may not be listed are left out; a directory that may not be looked at
    is in the list as such, unless that is so of all. Raises `StoreError` subclasses, and `CheckpointChangedError`
    where all changes so fast that what is committed cannot be told.
    """
    options = options or Options()
    location = parse_location(root)
    store = open_store(location.uri, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    alive_since = datetime.now(timezone.utc) - alive_within
    look = _Look(location, options, Summaries(retrier, check=check), alive_since, retrier)
    found: dict[str, list[CheckpointStatus]] = {}
    settle(
        lambda: (None, _look_again(look, found, store, retrier, options)),
        changing=lambda: _changing(location),
    )
    everything = [one for at in found.values() for one in at]
    if look.denied and len(look.denied) == len(found):
        raise look.denied[0]
    return sorted(everything, key=lambda one: (*commit_order(one.moment, one.name), one.attempt))


def _look_again(
    look: _Look, found: dict[str, list[CheckpointStatus]], store: Store, retrier: Retrier, options: Options
) -> Hashable:
    """Look at what nothing was found to be committed at before; return the names of all that this is still so of."""
    names = [name for name in retrier.call(lambda: list(store.list_directories())) if can_be_opened(look.root, name)]
    uploads = uploads_by_name(store, retrier, is_local=look.root.scheme == "file")

    def look_at(name: str) -> None:
        try:
            found[name] = look.at(name, uploads.get(name, ()))
        except AccessDeniedError as error:
            look.denied.append(error)
            found[name] = [denied_status(look.root.child(name) if name else look.root, error)]

    is_something_here = "data" in names or read_log(store, retrier, is_confirmed=False, is_lenient=True).entries
    places = [*names, *([""] if is_something_here else [])]
    for name in [name for name in found if _is_missing(found[name])]:
        del found[name]
    for _ in each_done(
        [name for name in places if name not in found],
        look_at,
        num_threads=options.connections or DEFAULT_CONNECTIONS,
        name="cloudckpt-survey",
        on_failure=retrier.stop,
    ):
        pass
    if not any(found.values()) and "" not in places:  # torch's writer may have been here, which leaves folders, or none
        look_at("")
    # One listing may lack a folder, so the names, too, are believed from two.
    return tuple(sorted(places)), tuple(sorted(name for name, at in found.items() if _is_missing(at)))


def _is_missing(found: Sequence[CheckpointStatus]) -> bool:
    """Whether nothing is committed at a place, as far as one look tells."""
    return all(one.state in _UNCOMMITTED for one in found)


class _Look:
    """What lies at one location after the other."""

    def __init__(
        self, root: Location, options: Options, summaries: Summaries, alive_since: datetime, retrier: Retrier
    ) -> None:
        self.root, self._options, self._summaries = root, options, summaries
        self._alive_since, self._retrier = alive_since, retrier
        self._times = CommitTimes()
        self.denied: list[AccessDeniedError] = []

    def at(self, name: str, uploads: Iterable[UploadInfo]) -> list[CheckpointStatus]:
        """`name` is a directory's, or empty for the root itself. What is replaced meanwhile is looked at once more."""
        location = self.root.child(name) if name else self.root
        store = open_store(location, self._options)
        vanished: set[tuple[int, int | None]] = set()
        for _ in range(MOST_LOOKS):
            with contextlib.suppress(CheckpointChangedError):
                return self._at(location, store, uploads, vanished)
        raise _changing(location)

    def _at(
        self, location: Location, store: Store, uploads: Iterable[UploadInfo], vanished: set[tuple[int, int | None]]
    ) -> list[CheckpointStatus]:
        inventory = self._retrier.call(lambda: _inventory(store, is_local=location.scheme == "file"))
        for upload in uploads:
            inventory.add_upload(upload)
        counting, rest = self._counting(location, store, inventory.at(""), vanished)
        denied = [denied_status(location, error) for error in set(inventory.unlisted.values())]
        if counting is None and not rest and not denied:
            others = self._others(location, store)
            # What ranks saved on their own at the root is found as what lies directly under it.
            return [one for one in others if location != self.root or one.state == "torch"]
        return [*([counting] if counting is not None else []), *self._attempts(location, rest, counting), *denied]

    def _counting(
        self, location: Location, store: Store, found: Sequence[Found], vanished: set[tuple[int, int | None]]
    ) -> tuple[CheckpointStatus | None, list[Found]]:
        """What is committed, and what was found beside it. Raises `CheckpointChangedError` where it has vanished since,
        but if it was `vanished` before: nobody who goes by the rules removes what counts.
        """
        log = summary = None
        problem, state = "", _DAMAGED
        try:
            log = read_log(store, self._retrier, is_confirmed=False)
            if log.counting is not None:
                summary = self._summaries.read(store, log) if log.counting_entry is not None else None
                if summary is None and (log.top, log.counting) not in vanished:
                    vanished.add((log.top, log.counting))
                    raise _changing(location)
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
            counting = CheckpointStatus(
                uri=location.uri,
                name=location.name,
                state="committed",
                moment=entry.modified_at if committed_at_ns is None else datetime_of(committed_at_ns),
                num_bytes=summary.num_bytes,
                num_objects=len(summary.objects),
                attempt=summary.attempt,
                world_size=summary.world_size,
                num_tensors=len(summary.tensors),
                num_overwrites=entry.number,
                metadata=summary.metadata,
            )
            return counting, [item for item in found if item.key not in named]
        if not problem:
            return None, list(found)
        entries = log.entries if log is not None else list_entries(store, self._retrier)
        return _unusable(location, entries, found, problem, state), []

    def _attempts(
        self, location: Location, found: Iterable[Found], counting: CheckpointStatus | None
    ) -> Iterable[CheckpointStatus]:
        """Each save of which something lies there, and that is not the one that counts."""
        by_attempt: defaultdict[str, list[Found]] = defaultdict(list)
        for item in found:
            by_attempt[item.attempt].append(item)
        for attempt, items in by_attempt.items():
            moment = max(item.moment for item in items)
            objects = [item for item in items if item.kind == "data"]
            is_alive = moment >= self._alive_since and (
                counting is None or (attempt > counting.attempt and _began(attempt, moment) >= counting.moment)
            )
            yield CheckpointStatus(
                uri=location.uri,
                name=location.name,
                state="in progress" if is_alive else "garbage",
                moment=moment,
                num_bytes=sum(item.size_bytes for item in objects),
                num_objects=len(objects),
                num_uploads=sum(item.kind == "upload" for item in items),
                attempt=attempt,
                world_size=len({_rank_of(item.key) for item in items if item.kind != "probe"}),
            )

    def _others(self, location: Location, store: Store) -> list[CheckpointStatus]:
        """What is neither: what ranks saved on their own, or torch's writer."""
        infos = self._retrier.call(lambda: [*store.list("rank-"), *store.list(TORCH_METADATA_KEY)])
        torch_metadata = [info for info in infos if info.key == TORCH_METADATA_KEY]
        inventory = Inventory(has_hidden_uploads=False)
        for info in infos:
            inventory.add_object(info)
        ranks = ranks_of(prefix.removesuffix("/") for prefix in inventory.locations)
        if ranks and holds_rank_checkpoints(store, self._retrier):
            objects = [item for prefix in inventory.locations for item in inventory.at(prefix) if item.kind == "data"]
            return [
                CheckpointStatus(
                    uri=location.uri,
                    name=location.name,
                    state="committed",
                    moment=self._committed_at_ranks(store, infos),
                    num_bytes=sum(item.size_bytes for item in objects),
                    num_objects=len(objects),
                    world_size=len(ranks),
                )
            ]
        if torch_metadata:
            files = self._retrier.call(lambda: _files_of_torchs(store))
            return [
                CheckpointStatus(
                    uri=location.uri,
                    name=location.name,
                    state="torch",
                    moment=torch_metadata[0].modified_at,
                    num_bytes=sum(info.size_bytes for info in files),
                    num_objects=len(files),
                )
            ]
        return []

    def _committed_at_ranks(self, store: Store, infos: Sequence[ObjectInfo]) -> datetime:
        """The time of rank 0's manifest, by which a manager orders such checkpoints, too."""
        entry = read_log(store, self._retrier, prefix="rank-0/", is_confirmed=False, is_lenient=True).counting_entry
        if entry is None:
            return max(info.modified_at for info in infos)
        return (
            self._times.read(store, f"rank-0/{manifest_key(entry.number)}", entry, self._retrier) or entry.modified_at
        )


def _files_of_torchs(store: Store) -> list[ObjectInfo]:
    """Those of the checkpoint at the store's root: s3torchconnector's prefix strategies put some into folders."""
    infos = list(store.list())
    others = tuple(
        info.key.removesuffix(TORCH_METADATA_KEY) for info in infos if info.key.endswith(f"/{TORCH_METADATA_KEY}")
    )
    own = (info for info in infos if not info.key.startswith(others))
    return [info for info in own if "/" not in info.key or info.key.endswith(".distcp")]


def _inventory(store: Store, *, is_local: bool) -> Inventory:
    inventory = Inventory(has_hidden_uploads=is_local)
    with noting(inventory.unlisted):
        for info in store.list("data/"):
            inventory.add_object(info)
    return inventory


def _changing(location: Location) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"what lies at {location.uri} changes all the time: what is committed could not be told. Look again",
        uri=location.uri,
    )


def _unusable(
    location: Location, entries: Sequence[Entry], found: Sequence[Found], problem: str, state: CheckpointState
) -> CheckpointStatus:
    moments = [entry.modified_at for entry in entries] or [item.moment for item in found]
    return CheckpointStatus(
        uri=location.uri,
        name=location.name,
        state=state,
        moment=max(moments, default=datetime.now(timezone.utc)),
        num_bytes=sum(item.size_bytes for item in found),
        num_objects=sum(item.kind == "data" for item in found),
        num_uploads=sum(item.kind == "upload" for item in found),
        problem=problem,
    )


def _began(attempt: str, otherwise: datetime) -> datetime:
    try:
        return attempt_time(attempt)
    except ValueError:
        return otherwise


def _rank_of(key: str) -> str:
    return key.rpartition("/")[2].partition("-")[0]
