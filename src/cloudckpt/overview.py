"""What there is under a root: checkpoints, saves under way, and what saves have left behind."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from cloudckpt._commit.fence import MAX_FENCE_BYTES
from cloudckpt._commit.garbage import Found, Inventory, attempt_time
from cloudckpt._commit.resolve import (
    TORCH_METADATA_KEY,
    Entry,
    list_entries,
    manifest_key,
    ranks_of,
    read_log,
)
from cloudckpt._commit.summaries import Summaries
from cloudckpt._commit.uploads import uploads_by_name
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location, parse_location
from cloudckpt._workers import each_done
from cloudckpt.catalog import by_name, can_be_opened
from cloudckpt.errors import CheckpointChangedError, CheckpointError
from cloudckpt.options import FIRST_CONNECTIONS, Options
from cloudckpt.stores.base import Store, UploadInfo
from cloudckpt.stores.open import open_store

CheckpointState = Literal["committed", "damaged", "in progress", "garbage", "torch"]

_ONE_HOUR = timedelta(hours=1)
_MOST_LOOKS = 8
_UNCOMMITTED = ("in progress", "garbage")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """A checkpoint, or what saves have written beside none. One location can have several: each in a state of its own.

    ``"committed"``: it can be loaded. ``"damaged"``: something counts there, and cannot be read. ``"in progress"``:
    data of a save that may still be committed. ``"garbage"``: data that no save will commit any more, or that has
    shown no sign of life for long; `gc` removes it by and by. ``"torch"``: a checkpoint of torch's own writer.
    """

    uri: str
    name: str
    """Its last segment: ``step-100`` of ``s3://bucket/run/step-100``."""
    state: CheckpointState
    moment: datetime
    """When it was committed, or the last sign of life, by the store's clock."""
    num_bytes: int
    """Of data objects. What unfinished uploads hold, no store says."""
    num_objects: int
    num_uploads: int = 0
    """Unfinished ones."""
    attempt: str = ""
    """Of the save."""
    world_size: int | None = None
    """How many ranks saved; of what is not committed, how many have written something so far."""
    num_tensors: int | None = None
    num_overwrites: int = 0
    """How often what counts had been saved before."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """``Options.metadata`` of the save."""
    problem: str = ""
    """Why it cannot be read."""


def survey(
    root: str | os.PathLike[str], *, alive_within: timedelta = _ONE_HOUR, options: Options | None = None
) -> list[CheckpointStatus]:
    """All that saves have left at `root` and directly under it, oldest first, in whatever state it is.

    Data of a save that is not committed counts as in progress where something of it was written in the last
    `alive_within`, and the save began after the last commit there; else it is garbage.

    Makes one listing of the root's directories and one of unfinished uploads, and for each directory one of its
    manifests, one of its data, and one read of the manifest that counts, `Options.connections` at once: listings take
    a request for each thousand keys. What is replaced meanwhile is looked at again, and so is a root where nothing is
    committed. Unfinished uploads that may not be listed are left out. Raises `StoreError` subclasses, and
    `CheckpointChangedError` where all changes so fast that what is committed cannot be told.
    """
    options = options or Options()
    location = parse_location(root)
    store = open_store(location.uri, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    alive_since = datetime.now(timezone.utc) - alive_within
    look = _Look(location, options, retrier, alive_since)
    before = None
    # One look takes its time, in which a job can commit a checkpoint that was not listed yet and remove the one that
    # was. So that nothing is committed is believed only if another look finds the same.
    for _ in range(_MOST_LOOKS):
        names = [name for name in retrier.call(lambda: list(store.list_directories())) if can_be_opened(location, name)]
        found = _looked_at(look, names, store, retrier, options)
        if not names or names == before or any(one.state not in _UNCOMMITTED for one in found):
            return sorted(found, key=lambda one: (one.moment, by_name(one.name), one.attempt))
        before = names
    raise _changing(location)


def _looked_at(
    look: _Look, names: Sequence[str], store: Store, retrier: Retrier, options: Options
) -> list[CheckpointStatus]:
    uploads = uploads_by_name(store, retrier, is_local=look.root.scheme == "file")
    found: list[CheckpointStatus] = []

    def look_at(name: str) -> None:
        found.extend(look.at(name, uploads.get(name, ())))  # a list takes it whole, from any thread

    places = [*names, *([""] if "data" in names or retrier.call(lambda: list_entries(store)) else [])]
    for _ in each_done(
        places,
        look_at,
        num_threads=options.connections or FIRST_CONNECTIONS,
        name="cloudckpt-survey",
        on_failure=retrier.stop,
    ):
        pass
    return found


class _Look:
    """What lies at one location after the other."""

    def __init__(self, root: Location, options: Options, retrier: Retrier, alive_since: datetime) -> None:
        self.root, self._options, self._retrier, self._alive_since = root, options, retrier, alive_since
        self._summaries = Summaries(retrier)

    def at(self, name: str, uploads: Iterable[UploadInfo]) -> list[CheckpointStatus]:
        """`name` is a directory's, or empty for the root itself. What is replaced meanwhile is looked at once more."""
        location = self.root.child(name) if name else self.root
        store = open_store(location, self._options)
        vanished: set[tuple[int, int | None]] = set()
        for _ in range(_MOST_LOOKS):
            with contextlib.suppress(CheckpointChangedError):
                return self._at(location, store, uploads, vanished)
        raise _changing(location)

    def _at(
        self, location: Location, store: Store, uploads: Iterable[UploadInfo], vanished: set[tuple[int, int | None]]
    ) -> list[CheckpointStatus]:
        inventory = Inventory(has_hidden_uploads=location.scheme == "file")
        for info in self._retrier.call(lambda: list(store.list("data/"))):
            inventory.add_object(info)
        for upload in uploads:
            inventory.add_upload(upload)
        counting, rest = self._counting(location, store, inventory.at(""), vanished)
        if counting is None and not rest and location != self.root:
            return self._others(location, store)
        return [*([counting] if counting is not None else []), *self._attempts(location, rest, counting)]

    def _counting(
        self, location: Location, store: Store, found: Sequence[Found], vanished: set[tuple[int, int | None]]
    ) -> tuple[CheckpointStatus | None, list[Found]]:
        """What is committed, and what was found beside it. Raises `CheckpointChangedError` where it has vanished since,
        but if it was `vanished` before: nobody who goes by the rules removes what counts.
        """
        log = summary = None
        problem = ""
        try:
            log = read_log(store, self._retrier)
            if log.counting is not None:
                summary = self._summaries.read(store, log)
                if summary is None and (log.top, log.counting) not in vanished:
                    vanished.add((log.top, log.counting))
                    raise _changing(location)
                if summary is None:
                    problem = f"{manifest_key(log.counting)} was removed by other means than cloudckpt's"
        except CheckpointChangedError:
            raise
        except CheckpointError as error:
            problem = str(error)
        if summary is not None and log is not None and log.counting is not None:
            named = {stored.key for stored in summary.objects}
            (moment,) = (entry.modified_at for entry in log.entries if entry.number == log.counting)
            counting = CheckpointStatus(
                uri=location.uri,
                name=location.name,
                state="committed",
                moment=moment,
                num_bytes=summary.num_bytes,
                num_objects=len(summary.objects),
                attempt=summary.attempt,
                world_size=summary.world_size,
                num_tensors=len(summary.tensors),
                num_overwrites=log.counting,
                metadata=summary.metadata,
            )
            return counting, [item for item in found if item.key not in named]
        if not problem:
            return None, list(found)
        entries = log.entries if log is not None else self._retrier.call(lambda: list_entries(store))
        return _damaged(location, entries, found, problem), []

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
        manifests = [info for info in infos if info.key.endswith(".json") and info.size_bytes > MAX_FENCE_BYTES]
        if ranks and manifests:
            objects = [item for prefix in inventory.locations for item in inventory.at(prefix) if item.kind == "data"]
            return [
                CheckpointStatus(
                    uri=location.uri,
                    name=location.name,
                    state="committed",
                    moment=max(info.modified_at for info in manifests),
                    num_bytes=sum(item.size_bytes for item in objects),
                    num_objects=len(objects),
                    world_size=len(ranks),
                )
            ]
        if torch_metadata:
            files = self._retrier.call(lambda: [info for info in store.list() if "/" not in info.key])
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


def _changing(location: Location) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"what lies at {location.uri} changes all the time: what is committed could not be told. Look again",
        uri=location.uri,
    )


def _damaged(location: Location, entries: Sequence[Entry], found: Sequence[Found], problem: str) -> CheckpointStatus:
    moments = [entry.modified_at for entry in entries] or [item.moment for item in found]
    return CheckpointStatus(
        uri=location.uri,
        name=location.name,
        state="damaged",
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
