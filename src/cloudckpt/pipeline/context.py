"""The state of one save or load on one rank: its location, its client, and its events."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.distributed as dist

from cloudckpt import _this_process
from cloudckpt._display import transferred
from cloudckpt._workers import logging_failures
from cloudckpt.errors import SaveCancelledError, raised_via
from cloudckpt.events import LEVELS, Event, EventName, log_fields
from cloudckpt.io.client import StoreClient, open_client
from cloudckpt.io.upload import UploadSession
from cloudckpt.options import Options
from cloudckpt.report import LoadReport, SaveReport, place_of
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store
from cloudckpt.telemetry import subscribers
from cloudckpt.telemetry.timeline import Recorder
from cloudckpt.uri import Location

_log = logging.getLogger("cloudckpt")


class Context:
    """One location in one save or load of one rank. Belongs to one process; opens its store on first use."""

    def __init__(self, location: Location, options: Options, *, rank: int, recorder: Recorder | None = None) -> None:
        _this_process.refuse_in_fork()
        self.location = location
        self.options = options
        self.rank = rank
        self.recorder = recorder if recorder is not None else Recorder()
        self._lock = threading.Lock()
        self._client: StoreClient | None = None
        self._siblings: dict[str, Store] = {}
        self._stopped_by: list[BaseException | None] = []
        """The arguments of `stop` before the client was opened."""
        self.on_sent: Callable[[int], None] = lambda _num_bytes: None
        """Called with the size of each part that the store has."""

    @property
    def client(self) -> StoreClient:
        """The client of the location's store, opened on first use."""
        with self._lock:
            if self._client is None:
                self._client = open_client(
                    self.location,
                    self.options,
                    on_retry=lambda error: self.emit("retry", key=error.key, error=error),
                    on_hedge=lambda: self.announce("hedge"),
                    recorder=self.recorder,
                )
                for refusal in self._stopped_by:
                    self._client.stop(refusal)
            return self._client

    def client_at(self, folder: str) -> StoreClient:
        """Return a client of a folder beside the location; for an empty name, of the location itself."""
        if not folder:
            return self.client
        with self._lock:
            store = self._siblings.get(folder)
            if store is None:
                store = self._siblings[folder] = open_store(self.location.parent.child(folder), self.options)
        return self.client.at(store)

    def stop(self, refusal: BaseException | None = None) -> None:
        """Stop the client, as `StoreClient.stop` does. For any thread, and before the client is opened."""
        with self._lock:
            self._stopped_by.append(refusal)
            if self._client is not None:
                self._client.stop(refusal)

    def new_uploads(
        self,
        *,
        part_bytes: int,
        tile_bytes: int,
        client: StoreClient | None = None,
        resumable: bool = False,
        daemon: bool = False,
    ) -> UploadSession:
        """Return an upload session that emits events about its progress. None as `client` stands for the context's."""
        return UploadSession(
            client or self.client,
            part_bytes=part_bytes,
            tile_bytes=tile_bytes,
            resumable=resumable,
            daemon=daemon,
            on_part=lambda key, num_bytes: self.emit("save.part_uploaded", key=key, num_bytes=num_bytes),
            on_completing=lambda key: self.emit("save.completing", key=key),
            on_object=lambda key, num_bytes: self.emit("save.object_uploaded", key=key, num_bytes=num_bytes),
        )

    @property
    def uri(self) -> str:
        return self.location.uri

    @property
    def store(self) -> Store:
        return self.client.store

    @property
    def max_connections(self) -> int:
        """Maximum number of requests in flight, before throttling (`Hedger.connections_now` is the present number)."""
        return self.client.hedger.max_connections

    def emit(self, name: EventName, *, key: str = "", num_bytes: int = 0, error: BaseException | None = None) -> None:
        """Hand an event to all listeners. Raises the error of the user's `Options.on_event`."""
        if name == "save.part_uploaded":
            self.on_sent(num_bytes)
        if self.options.on_event is None and not subscribers.is_watched():
            return
        event = Event(
            name=name,
            uri=self.uri,
            rank=self.rank,
            place=place_of(self.options.metadata),
            key=key,
            num_bytes=num_bytes,
            operation=self.recorder.operation,
            error="" if error is None else type(error).__name__,
            message="" if error is None else str(error),
        )
        subscribers.deliver(event)
        if self.options.on_event is not None:
            self.options.on_event(event)

    def announce(self, name: EventName) -> None:
        """Emit an event from a thread that no caller waits for. The error of the user's function is logged."""
        with logging_failures("Options.on_event failed at %s", name):
            self.emit(name)


class Lifecycle:
    """Emits events and log records when the save or load of a writer or reader begins and ends."""

    def __init__(self, verb: Literal["save", "load"], options: Options, *, via: str = "") -> None:
        self._verb: Literal["save", "load"] = verb
        self.via = via
        self._options = options
        self._uri = self._operation = ""
        self._rank = 0
        self._begun_s: float | None = None
        self._is_set_up = False

    def begin(self, uri: str, *, operation: str, rank: int | None, is_set_up: bool) -> None:
        """Emit the first event. If the user's call and then the set-up (`is_set_up`) call this, the first call counts.

        None as `rank` stands for the rank in the default process group.
        """
        if self._begun_s is None or self._is_set_up:
            if rank is None:
                rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._uri, self._operation, self._rank, self._begun_s = uri, operation, rank, time.monotonic()
            self._announce("save.begun" if self._verb == "save" else "load.begun", f"{self._verb} of {uri} begins")
        self._is_set_up = is_set_up

    def end_staging(self, num_bytes: int) -> None:
        """Emit the event that the snapshot of a background save is complete."""
        if self._begun_s is not None:
            seconds = time.monotonic() - self._begun_s
            text = f"{num_bytes} bytes for {self._uri} are copied"
            self._announce("save.staged", text, num_bytes=num_bytes, seconds=seconds)

    def end(self, outcome: BaseException | SaveReport | LoadReport | None = None) -> None:
        """Emit the last event, once, and only after `begin`."""
        if self._begun_s is None:
            return
        seconds, self._begun_s = time.monotonic() - self._begun_s, None
        if isinstance(outcome, BaseException):
            cause = _cause_of(outcome)
            name: EventName = "save.failed" if self._verb == "save" else "load.failed"
            if isinstance(cause, SaveCancelledError):
                name = "save.cancelled"
            kind = type(cause).__name__
            self._announce(
                name, f"{name} {self._uri}: {kind}: {cause}", seconds=seconds, error=kind, message=str(cause)
            )
            return
        num_bytes = outcome.num_bytes if isinstance(outcome, SaveReport) else 0
        if isinstance(outcome, LoadReport):
            num_bytes = outcome.num_bytes_read
        done: EventName = "save.done" if self._verb == "save" else "load.done"
        text = f"{'saved' if self._verb == 'save' else 'loaded'} {self._uri}{transferred(num_bytes, seconds)}"
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            text += f" on rank {self._rank}"
        self._announce(done, text, seconds=seconds, num_bytes=num_bytes, report=outcome)

    @contextlib.contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """If the body raises, emit the failure, and set `CloudckptError.via` on the error."""
        try:
            with raised_via(self.via):
                yield
        except BaseException as error:
            self.end(error)
            raise

    def _announce(self, name: EventName, text: str, **fields: Any) -> None:
        place = place_of(self._options.metadata)
        event = Event(name=name, uri=self._uri, rank=self._rank, place=place, operation=self._operation, **fields)
        log_and_deliver(event, self._options, words=text)

    def __reduce__(self) -> tuple[Callable[..., Lifecycle], tuple[object, ...]]:
        """Leave out the current operation, which belongs to its process."""
        return functools.partial(Lifecycle, via=self.via), (self._verb, self._options)


def log_and_deliver(event: Event, options: Options, *, words: str) -> None:
    """Log the event, and hand it to all listeners. An error of a listener is logged, and changes no outcome."""
    report = event.report
    extra = log_fields(
        event=event.name,
        uri=event.uri,
        rank=event.rank,
        place=None if event.place == "root" else event.place,
        operation=event.operation,
        attempt=None if report is None else report.attempt,
        num_bytes=event.num_bytes,
        seconds=event.seconds,
        error=event.error,
    )
    if event.name in LEVELS:
        level = LEVELS[event.name]
        if event.rank and event.name != "drain.failed":  # only rank 0 warns of what concerns all ranks
            level = min(level, logging.INFO)
        _log.log(level, "%s", words, extra=extra)
    subscribers.deliver(event)
    if options.on_event is not None:
        with logging_failures("Options.on_event failed at %s", event.name):
            options.on_event(event)


def _cause_of(error: BaseException) -> BaseException:
    """Return the cause on the first failing rank of torch's exception; any other `error` itself."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        failure = failures[min(failures)]
        failure = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(failure, BaseException):
            return failure
    return error
