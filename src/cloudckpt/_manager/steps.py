"""Which steps are committed under a root, and what was measured at them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeVar

from cloudckpt import _forks
from cloudckpt._commit.commit_time import CommitTimes
from cloudckpt._commit.resolve import (
    MOST_LOOKS,
    Entry,
    holds_torch_checkpoint,
    manifest_key,
    ranks_of,
    read_log,
    read_manifest,
    settle,
)
from cloudckpt._manager.metrics import metrics_in
from cloudckpt._manager.rule import StepInfo, newest_first
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location
from cloudckpt._workers import each_done
from cloudckpt.errors import AccessDeniedError, CheckpointChangedError, CheckpointError
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_T = TypeVar("_T")

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})(?:-again-([1-9][0-9]{0,17}))?")
_MOST_MANIFESTS = 4
"""In memory at once: those of large models take some."""


def name_of(step: int, again: int = 0) -> str:
    """The folder of a step, under the root; the `again`-th one that was saved beside damaged ones."""
    return f"step-{step}-again-{again}" if again else f"step-{step}"


def step_in(name: str) -> int | None:
    """The step that `name_of` gave this name; None for a folder that is no step's."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def step_at(uri: str) -> int:
    """The step that is saved at `uri`."""
    step = step_in(uri.rpartition("/")[2])
    assert step is not None  # noqa: S101  # it is one that a manager has named
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One step's folder, as it was found."""

    uri: str
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
    problem: str = ""
    """Why the metrics are unknown: the manifest is damaged, or of a newer format."""

    @property
    def is_missing(self) -> bool:
        """Whether nothing is committed there, as far as one look tells."""
        return self.info is None and self.denied is None


class Steps:
    """The steps under `root`. For several threads.

    Where ranks save on their own, `alone_ranks` says how many: a step is committed when all of them have saved it.
    """

    def __init__(self, root: Location, options: Options, *, alone_ranks: Callable[[], int] | None) -> None:
        self.root = root
        self._options = options
        self._alone_ranks = alone_ranks
        self._lock = threading.Lock()
        self.times = CommitTimes()
        self._metrics: dict[tuple[str, int, datetime], dict[str, float]] = {}
        _forks.watch(self)

    def after_fork(self) -> None:
        """A thread that is not in the child may have held its lock."""
        self._lock = threading.Lock()

    def uri_of(self, step: int, again: int = 0) -> str:
        """Where a step is saved."""
        return self.at(name_of(step, again))

    def at(self, name: str) -> str:
        """The URI of a folder."""
        return self.root.child(name).uri

    def latest_uri_of(self, step: int) -> str:
        """Return where a step was saved last, or would be saved. Raises as `found` does."""
        seen = self.seen(step=step)
        _raise_denied(seen)
        found = newest_first([one.info for one in seen if one.info is not None])
        return found[0].uri if found else self.uri_of(step)

    def found(self, *, with_metrics: bool) -> list[StepInfo]:
        """The committed ones, the newest first.

        Raises `StoreError`, also where one of them may not be looked at, and `CheckpointChangedError` where it cannot
        be told whether there are any.
        """

        def look() -> tuple[list[Seen], Hashable]:
            seen = self.seen()
            _raise_denied(seen)  # it can be the newest, or the only one
            if not with_metrics:
                return seen, None
            measured = self.measured(seen)
            _raise_denied(measured)
            return measured, tuple(one for one, before in zip(measured, seen, strict=True) if one.top != before.top)

        seen = settle(look, changing=self._changing)
        return newest_first([one.info for one in seen if one.info is not None])

    def _changing(self) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"the steps under {self.root.uri} change all the time: which are committed could not be told. Look again",
            uri=self.root.uri,
        )

    def of_torch(self) -> list[int]:
        """Those that a writer of torch's own has saved, the lowest first, whatever else is committed. Raises
        `StoreError`, and `CheckpointChangedError` where no two looks agree.
        """

        def look(name: str, retrier: Retrier) -> Literal[True] | None:
            return holds_torch_checkpoint(self._store(name), retrier, is_confirmed=False) or None

        return sorted(self._foreign(look))

    def in_other_form(self) -> dict[int, int]:
        """Those that a manager in the other mode, or of fewer ranks, has saved, where `found` finds none.

        The values are the numbers of ranks that saved on their own; 0 where all ranks saved one checkpoint together.
        Where a rank has begun to save on its own and has not committed, the step is unfinished, and none of these for
        such a manager. Raises as `of_torch` does.
        """

        def is_committed(store: Store, retrier: Retrier, prefix: str = "") -> bool:
            log = read_log(store, retrier, prefix=prefix, is_confirmed=False, is_lenient=True)
            return log.counting is not None

        def look(name: str, retrier: Retrier) -> int | None:
            store = self._store(name)
            if self._alone_ranks is None:
                if not is_committed(store, retrier, "rank-0/"):
                    return None
                return max(1, len(ranks_of(retrier.call(lambda: list(store.list_directories())))))
            if is_committed(store, retrier):
                return 0
            ranks = ranks_of(retrier.call(lambda: list(store.list_directories())))
            is_whole = ranks == list(range(len(ranks))) and 0 < len(ranks) < self._alone_ranks()
            return len(ranks) if is_whole and all(is_committed(store, retrier, f"rank-{r}/") for r in ranks) else None

        return self._foreign(look)

    def _foreign(self, look: Callable[[str, Retrier], _T | None]) -> dict[int, _T]:
        """The steps in whose folders `look` finds something, with what it finds, once two looks at all agree."""
        retrier = self._retrier()

        def look_at_all() -> tuple[dict[str, _T], Hashable]:
            found: dict[str, _T] = {}
            names = self._folders(retrier)

            def look_at(name: str) -> None:
                if (answer := look(name, retrier)) is not None:
                    found[name] = answer

            self._each(names, look_at, retrier)
            return found, (tuple(sorted(names)), tuple(sorted(found.items())))

        found = settle(look_at_all, changing=self._changing)
        return {step_at(self.at(name)): found[name] for name in sorted(found)}

    def seen(self, *, step: int | None = None, without: Iterable[str] = ()) -> list[Seen]:
        """Return what the folders hold, of all steps or of one, but for those at the URIs in `without`.

        A folder that may not be looked at says so.

        That nothing is committed in one is believed only where two looks, one after the other, are the same: in between
        it was so everywhere at once, for logs only grow. Raises `StoreError`, and `CheckpointChangedError` where no two
        are.
        """
        retrier, left_out = self._retrier(), set(without)
        found: dict[str, Seen] = {}

        def look(name: str) -> None:
            try:
                found[name] = self._seen(name, retrier)
            except AccessDeniedError as error:
                found[name] = Seen(uri=self.at(name), denied=error)

        def look_at_all() -> tuple[list[Seen], Hashable]:
            names = {
                name
                for name in self._folders(retrier)
                if self.at(name) not in left_out and step in (None, step_in(name))
            }
            for name in [name for name, one in found.items() if one.is_missing and name not in names]:
                del found[name]
            self._each([name for name in names if name not in found or found[name].is_missing], look, retrier)
            seen = [found[name] for name in sorted(found)]
            # One listing may lack a folder, so the names, too, are believed from two.
            return seen, (tuple(sorted(names)), tuple(one for one in seen if one.is_missing))

        return settle(look_at_all, changing=self._changing)

    def measured(self, seen: Sequence[Seen]) -> list[Seen]:
        """The same, the committed ones with their metrics. A manifest is read once, and then remembered.

        Of one that cannot be read because it is damaged no metrics are known. A step whose manifest is gone by now is
        looked at again. One that may not be read says so.
        """
        retrier = self._retrier()
        found: dict[str, Seen] = {one.uri: one for one in seen}
        committed = [one.uri for one in seen if one.info is not None]

        def look(uri: str) -> None:
            try:
                for _ in range(MOST_LOOKS):
                    info, number = found[uri].info, found[uri].number
                    if info is None or number is None:
                        return
                    metrics = self._metrics_of(info, number, retrier)
                    if metrics is not None:
                        found[uri] = replace(found[uri], info=replace(info, metrics=metrics))
                        return
                    found[uri] = self._seen(uri.rpartition("/")[2], retrier)
                raise self._changing()
            except AccessDeniedError as error:
                found[uri] = Seen(uri=uri, denied=error)
            except CheckpointChangedError:
                raise
            except CheckpointError as error:
                found[uri] = replace(found[uri], problem=str(error))

        width = min(self._options.connections or DEFAULT_CONNECTIONS, _MOST_MANIFESTS)
        for _ in each_done(committed, look, num_threads=width, name="cloudckpt-metrics", on_failure=retrier.stop):
            pass
        return [found[one.uri] for one in seen]

    def _folders(self, retrier: Retrier) -> list[str]:
        """The names of those of steps, whatever is in them."""
        store = open_store(self.root, self._options)
        names = retrier.call(lambda: list(store.list_directories()))
        return [name for name in names if step_in(name) is not None]

    def _each(self, names: Sequence[str], look: Callable[[str], None], retrier: Retrier) -> None:
        width = self._options.connections or DEFAULT_CONNECTIONS
        for _ in each_done(names, look, num_threads=width, name="cloudckpt-steps", on_failure=retrier.stop):
            pass

    def _seen(self, name: str, retrier: Retrier) -> Seen:
        while (seen := self._seen_once(name, retrier)) is None:
            pass  # the manifest was replaced or removed between two calls
        return seen

    def _seen_once(self, name: str, retrier: Retrier) -> Seen | None:
        store = self._store(name)
        if self._alone_ranks is not None:
            return self._seen_of_ranks(name, store, self._alone_ranks(), retrier)
        log = read_log(store, retrier, is_confirmed=False, is_lenient=True)
        if (entry := log.counting_entry) is not None:
            return self._committed(name, store, entry, log.top, retrier)
        is_fenced = log.counting is None and bool(log.entries)
        fenced_at = log.entries[-1].modified_at if is_fenced else None
        return Seen(uri=self.at(name), top=log.top, fenced_at=fenced_at)

    def _committed(self, name: str, store: Store, entry: Entry, top: int, retrier: Retrier) -> Seen | None:
        moment = self.times.read(store, manifest_key(entry.number), entry, retrier)
        if moment is None:
            return None
        info = StepInfo(step=step_at(name), uri=self.at(name), committed_at=moment)
        return Seen(uri=self.at(name), info=info, number=entry.number, top=top)

    def _seen_of_ranks(self, name: str, store: Store, num_ranks: int, retrier: Retrier) -> Seen | None:
        folders = retrier.call(lambda: list(store.list_directories()))
        ranks = ranks_of(folders)
        if not set(range(num_ranks)) <= set(ranks):
            return Seen(uri=self.at(name))
        logs = [
            read_log(store, retrier, prefix=f"rank-{rank}/", is_confirmed=False, is_lenient=True)
            for rank in range(num_ranks)
        ]
        top = sum(log.top for log in logs)
        counting = [log.counting_entry for log in logs if log.counting_entry is not None]
        if len(counting) == num_ranks:  # rank 0's time is that of the step: one clock orders all steps
            return self._committed(name, self._store(name, 0), counting[0], top, retrier)
        fences = [log.entries[-1].modified_at for log in logs if log.entries and log.counting is None]
        fenced_at = max(fences) if len(fences) == num_ranks else None
        return Seen(uri=self.at(name), top=top, fenced_at=fenced_at)

    def _metrics_of(self, info: StepInfo, number: int, retrier: Retrier) -> dict[str, float] | None:
        """Return the metrics in that manifest; None where it is gone. Raises what the decoder raises."""
        key = (info.uri, number, info.committed_at)
        with self._lock:
            known = self._metrics.get(key)
        if known is not None:
            return known
        store = self._store(info.uri.rpartition("/")[2], None if self._alone_ranks is None else 0)
        manifest = read_manifest(store, number, retrier)
        if manifest is None:
            return None
        values = metrics_in(manifest.metadata)
        with self._lock:
            self._metrics[key] = values
        return values

    def _store(self, name: str, rank: int | None = None) -> Store:
        location = self.root.child(name)
        return open_store(location if rank is None else location.child(f"rank-{rank}"), self._options)

    def _retrier(self) -> Retrier:
        return Retrier(retries=self._options.retries, timeout_s=self._options.timeout_s)


def _raise_denied(seen: Sequence[Seen]) -> None:
    for one in seen:
        if one.denied is not None:
            raise one.denied
