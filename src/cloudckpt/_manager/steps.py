"""Which steps are committed under a root, and what was measured at them."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from cloudckpt import _forks
from cloudckpt._commit.resolve import (
    Log,
    holds_torch_checkpoint,
    list_entries,
    ranks_of,
    read_log,
    read_manifest,
)
from cloudckpt._manager.metrics import metrics_in
from cloudckpt._manager.rule import StepInfo, newest_first
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location
from cloudckpt._workers import each_done
from cloudckpt.errors import AccessDeniedError, CheckpointChangedError, CheckpointError
from cloudckpt.options import FIRST_CONNECTIONS, Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_MOST_MANIFESTS = 4
"""In memory at once: those of large models take some."""
_MOST_LOOKS = 8


def name_of(step: int) -> str:
    """The folder of a step, under the root."""
    return f"step-{step}"


def step_in(name: str) -> int | None:
    """The reverse of `name_of`; None for a folder that is no step's."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One step's folder, as it was found."""

    step: int
    info: StepInfo | None = None
    """None where nothing is committed there."""
    number: int | None = None
    """Of the manifest that counts."""
    top: int = -1
    """The highest number in its log, or the sum of those of its ranks; -1 for each without one."""
    fenced_at: datetime | None = None
    """Where nothing is committed and a fence says so: since when."""
    denied: AccessDeniedError | None = None
    """Why it could not be told what is there, or what was measured; then all else is unknown."""


class Steps:
    """The steps under `root`. For several threads.

    Where ranks save on their own, `alone_ranks` says how many: a step is committed when all of them have saved it.
    """

    def __init__(self, root: Location, options: Options, *, alone_ranks: Callable[[], int] | None) -> None:
        self.root = root
        self._options = options
        self._alone_ranks = alone_ranks
        self._lock = threading.Lock()
        self._metrics: dict[tuple[str, int, datetime], dict[str, float]] = {}
        _forks.watch(self)

    def after_fork(self) -> None:
        """A thread that is not in the child may have held its lock."""
        self._lock = threading.Lock()

    def uri_of(self, step: int) -> str:
        """Where a step is saved."""
        return self.root.child(name_of(step)).uri

    def found(self, *, with_metrics: bool) -> list[StepInfo]:
        """The committed ones, the newest first.

        Raises `StoreError`, also where one of them may not be looked at, and `CheckpointChangedError` where it cannot
        be told whether there are any.
        """
        seen = self._settled()
        if with_metrics:
            seen = self.measured(seen)
            _raise_denied(seen)
        return newest_first([one.info for one in seen if one.info is not None])

    def _settled(self) -> list[Seen]:
        """As `seen`; but that nothing is committed is believed only where two looks, one after the other, are the same.

        One look takes its time, in which another job can commit a step that was not listed yet and remove the one that
        was. Logs only grow, so what is the same twice was so in between, everywhere at once.
        """
        seen = self._all_seen()
        for _ in range(_MOST_LOOKS):
            if not seen or any(one.info is not None for one in seen):
                return seen
            before, seen = seen, self._all_seen()
            if seen == before:
                return seen
        if any(one.info is not None for one in seen):
            return seen
        raise CheckpointChangedError(
            f"the steps under {self.root.uri} change all the time: whether one is committed could not be told. Look "
            "again",
            uri=self.root.uri,
        )

    def _all_seen(self) -> list[Seen]:
        """A step that may not be looked at can be the newest, or the only one: it is an error."""
        seen = self.seen()
        _raise_denied(seen)
        return seen

    def of_torch(self) -> list[int]:
        """Those that a writer of torch's own has saved, the lowest first, whatever else is committed. Raises
        `StoreError`.
        """
        retrier = self._retrier()
        found: set[int] = set()

        def look(step: int) -> None:
            if retrier.call(lambda: holds_torch_checkpoint(self._store(step))):
                found.add(step)

        self._each(self._folders(retrier), look, retrier)
        return sorted(found)

    def seen(self, *, without: Iterable[int] = ()) -> list[Seen]:
        """What the folders hold, but for those of the steps in `without`. One that may not be looked at says so."""
        retrier = self._retrier()
        left_out = set(without)
        steps = [step for step in self._folders(retrier) if step not in left_out]
        found: dict[int, Seen] = {}

        def look(step: int) -> None:
            try:
                found[step] = self._seen(step, retrier)
            except AccessDeniedError as error:
                found[step] = Seen(step=step, denied=error)

        self._each(steps, look, retrier)
        return [found[step] for step in sorted(found)]

    def measured(self, seen: Sequence[Seen]) -> list[Seen]:
        """The same, the committed ones with their metrics. A manifest is read once, and then remembered.

        Of one that cannot be read because it is damaged, or gone by now, no metrics are known. One that may not be read
        says so.
        """
        retrier = self._retrier()
        committed = [(one.info, one.number) for one in seen if one.info is not None and one.number is not None]
        found: dict[int, Seen] = {one.step: one for one in seen}

        def look(at: tuple[StepInfo, int]) -> None:
            info, number = at
            try:
                info = replace(info, metrics=self._metrics_of(info, number, retrier))
                found[info.step] = replace(found[info.step], info=info)
            except AccessDeniedError as error:
                found[info.step] = Seen(step=info.step, denied=error)

        width = min(self._options.connections or FIRST_CONNECTIONS, _MOST_MANIFESTS)
        for _ in each_done(committed, look, num_threads=width, name="cloudckpt-metrics", on_failure=retrier.stop):
            pass
        return [found[one.step] for one in seen]

    def _folders(self, retrier: Retrier) -> list[int]:
        """The steps that have one, whatever is in it."""
        store = open_store(self.root, self._options)
        names = retrier.call(lambda: list(store.list_directories()))
        return [step for name in names if (step := step_in(name)) is not None]

    def _each(self, steps: Sequence[int], look: Callable[[int], None], retrier: Retrier) -> None:
        width = self._options.connections or FIRST_CONNECTIONS
        for _ in each_done(steps, look, num_threads=width, name="cloudckpt-steps", on_failure=retrier.stop):
            pass

    def _seen(self, step: int, retrier: Retrier) -> Seen:
        store = self._store(step)
        if self._alone_ranks is not None:
            return self._seen_of_ranks(step, store, self._alone_ranks(), retrier)
        log = _log_of(store, retrier)
        entry = next((entry for entry in log.entries if entry.number == log.counting), None)
        if entry is not None:
            info = StepInfo(step=step, uri=self.uri_of(step), committed_at=entry.modified_at)
            return Seen(step=step, info=info, number=entry.number, top=log.top)
        is_fenced = log.counting is None and bool(log.entries)
        fenced_at = log.entries[-1].modified_at if is_fenced else None
        return Seen(step=step, top=log.top, fenced_at=fenced_at)

    def _seen_of_ranks(self, step: int, store: Store, num_ranks: int, retrier: Retrier) -> Seen:
        folders = retrier.call(lambda: list(store.list_directories()))
        ranks = ranks_of(folders)
        if not set(range(num_ranks)) <= set(ranks):
            return Seen(step=step)
        logs = [_log_of(self._store(step, rank), retrier) for rank in range(num_ranks)]
        top = sum(log.top for log in logs)
        times = [entry.modified_at for log in logs for entry in log.entries if entry.number == log.counting]
        if len(times) == num_ranks:
            info = StepInfo(step=step, uri=self.uri_of(step), committed_at=max(times))
            return Seen(step=step, info=info, number=logs[0].counting, top=top)
        fences = [log.entries[-1].modified_at for log in logs if log.entries and log.counting is None]
        fenced_at = max(fences) if len(fences) == num_ranks else None
        return Seen(step=step, top=top, fenced_at=fenced_at)

    def _metrics_of(self, info: StepInfo, number: int, retrier: Retrier) -> dict[str, float]:
        key = (info.uri, number, info.committed_at)
        with self._lock:
            known = self._metrics.get(key)
        if known is not None:
            return known
        store = self._store(info.step, None if self._alone_ranks is None else 0)
        try:
            manifest = read_manifest(store, number, retrier)
        except CheckpointError:
            return {}
        if manifest is None:
            return {}
        values = metrics_in(manifest.metadata)
        with self._lock:
            self._metrics[key] = values
        return values

    def _store(self, step: int, rank: int | None = None) -> Store:
        location = self.root.child(name_of(step))
        return open_store(location if rank is None else location.child(f"rank-{rank}"), self._options)

    def _retrier(self) -> Retrier:
        return Retrier(retries=self._options.retries, timeout_s=self._options.timeout_s)


def _raise_denied(seen: Sequence[Seen]) -> None:
    for one in seen:
        if one.denied is not None:
            raise one.denied


def _log_of(store: Store, retrier: Retrier) -> Log:
    """What counts there; of a fence that cannot be read, what lies below stands for the checkpoint."""
    try:
        return read_log(store, retrier)
    except CheckpointChangedError:
        return Log(entries=(), counting=None)  # replaced all the time: not to be had now
    except CheckpointError:
        entries = retrier.call(functools.partial(list_entries, store))
        below = [entry.number for entry in entries if not entry.is_fence]
        return Log(entries=entries, counting=max(below, default=entries[-1].number if entries else None))
