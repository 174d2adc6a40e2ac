"""What every step of a save or load needs to know."""

from __future__ import annotations

from cloudckpt._trace import Recorder
from cloudckpt._transfer.retry import Retrier
from cloudckpt._transfer.traced import TracedStore
from cloudckpt._uri import Location
from cloudckpt.options import Options
from cloudckpt.report import Event, EventName
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store


class Context:
    """One location, seen from one rank of one save or load. Lives in one process; opens its store on first use."""

    def __init__(self, location: Location, options: Options, *, rank: int, recorder: Recorder | None = None) -> None:
        self.location = location
        self.options = options
        self.rank = rank
        self.recorder = recorder if recorder is not None else Recorder()
        self.retrier = self.new_retrier()
        self._store: Store | None = None

    def new_retrier(self) -> Retrier:
        """For calls that are to be made whatever became of the others."""
        return Retrier(
            retries=self.options.retries,
            timeout_s=self.options.timeout_s,
            on_retry=lambda error: self.emit("retry", key=error.key),
            recorder=self.recorder,
        )

    @property
    def uri(self) -> str:
        return self.location.uri

    @property
    def store(self) -> Store:
        if self._store is None:
            store = open_store(self.location, self.options)
            self._store = store if self.recorder.timeline is None else TracedStore(store, self.recorder)
        return self._store

    def emit(self, name: EventName, *, key: str = "", num_bytes: int = 0) -> None:
        """Tell the user's `Options.on_event`."""
        if self.options.on_event is not None:
            self.options.on_event(Event(name=name, uri=self.uri, rank=self.rank, key=key, num_bytes=num_bytes))
