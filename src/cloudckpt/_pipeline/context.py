"""What every step of a save or load needs to know."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cloudckpt import _forks
from cloudckpt._trace import watchers
from cloudckpt._trace.recorder import Recorder
from cloudckpt._transfer.concurrency import ConcurrencyLimit, connections_of_rank
from cloudckpt._transfer.hedged import HedgedStore
from cloudckpt._transfer.hedging import Hedger
from cloudckpt._transfer.retry import Retrier
from cloudckpt._transfer.traced import TracedStore
from cloudckpt._uri import Location
from cloudckpt._workers import num_cores_of_rank, ranks_of_host
from cloudckpt.options import Options
from cloudckpt.report import Event, EventName
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_log = logging.getLogger("cloudckpt")

_LEAST_FOR_FILES = 2  # while one waits for its device, another can copy
_MOST_FOR_FILES = 8


class Context:
    """One location, seen from one rank of one save or load. Lives in one process; opens its store on first use."""

    def __init__(self, location: Location, options: Options, *, rank: int, recorder: Recorder | None = None) -> None:
        self.location = location
        self.options = options
        self.rank = rank
        self.recorder = recorder if recorder is not None else Recorder()
        self._is_inherited = False
        self.retrier = self.new_retrier()
        connections = options.connections
        if connections is None and location.scheme == "file":
            connections = _threads_for_files()
        self.connections = connections_of_rank(connections, ranks_of_host=ranks_of_host())
        """Most requests in flight at once."""
        # Where only few requests fit into what a load may hold, none of it is left for second ones.
        self.hedge_bytes = options.read_bytes // 4 if options.read_bytes >= 4 * options.request_bytes else 0
        self.hedger = Hedger(
            ConcurrencyLimit(self.connections),
            budget_bytes=self.hedge_bytes,
            on_hedge=lambda: self.announce("hedge"),
        )
        self.on_sent: Callable[[int], None] = _ignore
        """Told the size of each part that the store has."""
        self._store: Store | None = None
        _forks.watch(self)

    def after_fork(self) -> None:
        """In a child that was forked in the middle of it, where not even cleaning up is to be done."""
        self._is_inherited = True

    def new_retrier(self) -> Retrier:
        """For calls that are to be made whatever became of the others."""
        retrier = Retrier(
            retries=self.options.retries,
            timeout_s=self.options.timeout_s,
            on_retry=lambda error: self.emit("retry", key=error.key, error=error),
            recorder=self.recorder,
        )
        if self._is_inherited:
            retrier.after_fork()
        return retrier

    @property
    def uri(self) -> str:
        return self.location.uri

    @property
    def store(self) -> Store:
        if self._store is None:
            store = open_store(self.location, self.options)
            traced = store if self.recorder.timeline is None else TracedStore(store, self.recorder)
            self._store = HedgedStore(traced, self.hedger)
        return self._store

    def emit(self, name: EventName, *, key: str = "", num_bytes: int = 0, error: BaseException | None = None) -> None:
        """Tell whoever watches, and the user's `Options.on_event`: what that raises, this raises."""
        if name == "save.part_uploaded":
            self.on_sent(num_bytes)
        if self.options.on_event is None and not watchers.is_watched():
            return
        event = Event(
            name=name,
            uri=self.uri,
            rank=self.rank,
            key=key,
            num_bytes=num_bytes,
            operation=self.recorder.operation,
            error="" if error is None else type(error).__name__,
            message="" if error is None else str(error),
        )
        self.deliver(event)

    def deliver(self, event: Event) -> None:
        """As `emit`, of an event that may come from another process."""
        watchers.tell(event)
        if self.options.on_event is not None:
            self.options.on_event(event)

    def announce(self, name: EventName) -> None:
        """As `emit`, from a thread that has nobody to raise anything to."""
        try:
            self.emit(name)
        except Exception:  # noqa: BLE001  # as it says
            _log.exception("Options.on_event failed at %s", name)


def _ignore(_number: int) -> None:
    """Where nobody wants to know."""


def _threads_for_files() -> int:
    """As many as this rank has cores: a file's bytes are copied by the CPU, and threads beyond only cost it more."""
    return min(max(num_cores_of_rank(), _LEAST_FOR_FILES), _MOST_FOR_FILES)
