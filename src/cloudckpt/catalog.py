"""Which checkpoints there are under a root."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import datetime

from cloudckpt._commit.commit_time import CommitTimes, commit_order
from cloudckpt._commit.resolve import Log, manifest_key, read_log, settle
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location, parse_location
from cloudckpt._workers import each_done
from cloudckpt.errors import CheckpointChangedError, InvalidURIError
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint."""

    uri: str
    name: str
    """Its last segment: ``step-100`` of ``s3://bucket/run/step-100``."""
    committed_at: datetime
    """When the manifest that counts was committed, by the clock of the coordinator that wrote it; in UTC.

    The store's own time stands in where the manifest has none (format 1.0) or cannot be read.
    """


def list_checkpoints(root: str | os.PathLike[str], *, options: Options | None = None) -> list[CheckpointInfo]:
    """The committed checkpoints directly under `root`, oldest first.

    What is unfinished, failed or foreign is not in the list. The order is that of `CheckpointInfo.committed_at`, which
    copies keep; equal times are ordered by name, numbers by value. Besides listings, one small read is made for each
    checkpoint, of the head of its manifest. A folder without a checkpoint is looked at twice. Raises `StoreError`
    subclasses, and `CheckpointChangedError` where they change so fast that it cannot be told which there are.
    """
    options = options or Options()
    location = parse_location(root)
    store = open_store(location.uri, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    found: dict[str, CheckpointInfo] = {}
    times = CommitTimes()
    settle(
        lambda: (None, _look(location, store, retrier, options, found=found, times=times)),
        changing=lambda: CheckpointChangedError(
            f"the checkpoints under {location.uri} change all the time: which there are could not be told. List them "
            "again",
            uri=location.uri,
        ),
    )
    return sorted(found.values(), key=lambda info: commit_order(info.committed_at, info.name))


def _look(
    location: Location,
    store: Store,
    retrier: Retrier,
    options: Options,
    *,
    found: dict[str, CheckpointInfo],
    times: CommitTimes,
) -> Hashable:
    """Add the checkpoints to those `found` before; return what two looks in a row have to say alike.

    That is the names of all folders, since one listing may lack one, and the logs of those without a checkpoint.
    """
    names = [name for name in retrier.call(lambda: list(store.list_directories())) if can_be_opened(location, name)]
    missing: dict[str, Log] = {}

    def look(name: str) -> None:
        log = read_log(store, retrier, prefix=f"{name}/", is_confirmed=False, is_lenient=True)
        entry = log.counting_entry
        moment = None if entry is None else times.read(store, f"{name}/{manifest_key(entry.number)}", entry, retrier)
        if moment is None:
            missing[name] = log
        else:
            found[name] = CheckpointInfo(uri=location.child(name).uri, name=name, committed_at=moment)

    for _ in each_done(
        [name for name in names if name not in found],
        look,
        num_threads=options.connections or DEFAULT_CONNECTIONS,
        name="cloudckpt-list",
        on_failure=retrier.stop,
    ):
        pass
    return tuple(sorted(names)), tuple(sorted(missing.items()))


def can_be_opened(location: Location, name: str) -> bool:
    """Whether a checkpoint can have this name. A bucket can hold others, which some other tool has written."""
    try:
        parse_location(location.child(name).uri)
    except InvalidURIError:
        return False
    return True


def latest(root: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointInfo | None:
    """The checkpoint directly under `root` that was committed last; None where there is none.

    Damaged or not: `load_latest` passes over damaged ones. Raises what `list_checkpoints` does.
    """
    return next(reversed(list_checkpoints(root, options=options)), None)
