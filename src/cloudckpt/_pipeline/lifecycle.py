"""That a save or load has begun, and how it ended: told once, and logged."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch.distributed as dist

from cloudckpt._trace import watchers
from cloudckpt._trace.watchers import fields
from cloudckpt.errors import SaveCancelledError
from cloudckpt.options import Options
from cloudckpt.report import Event, EventName, LoadReport, SaveReport

_Method = TypeVar("_Method", bound=Callable[..., Any])
_log = logging.getLogger("cloudckpt")

LEVELS: dict[EventName, int] = {
    "save.begun": logging.DEBUG,
    "save.staged": logging.DEBUG,
    "save.done": logging.INFO,
    "save.cancelled": logging.INFO,
    "save.failed": logging.WARNING,
    "load.begun": logging.DEBUG,
    "load.done": logging.INFO,
    "load.failed": logging.WARNING,
    "load.skipped": logging.WARNING,
    "gc.removed": logging.INFO,
    "gc.failed": logging.WARNING,
    "delete.done": logging.INFO,
    "delete.failed": logging.WARNING,
}
"""Of the events that are written to the log."""


class Lifecycle:
    """Of the operation that a writer or reader is at. What listeners raise is logged: it changes no outcome."""

    def __init__(self, verb: Literal["save", "load"], options: Options) -> None:
        self._verb: Literal["save", "load"] = verb
        self._options = options
        self._uri = self._operation = ""
        self._rank = 0
        self._begun_s: float | None = None
        self._is_set_up = False

    def begin(self, uri: str, *, operation: str, rank: int | None, is_set_up: bool) -> None:
        """Nothing, where it has begun already, and not been set up. From its set-up on, the next is another one.

        The rank, where it is not known, is that in the default process group.
        """
        if self._begun_s is None or self._is_set_up:
            if rank is None:
                rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._uri, self._operation, self._rank, self._begun_s = uri, operation, rank, time.monotonic()
            self._tell("save.begun" if self._verb == "save" else "load.begun", f"{self._verb} of {uri} begins")
        self._is_set_up = is_set_up

    def staged(self, num_bytes: int) -> None:
        """The copy of a background save is complete."""
        if self._begun_s is not None:
            seconds = time.monotonic() - self._begun_s
            words = f"{num_bytes} bytes for {self._uri} are copied"
            self._tell("save.staged", words, num_bytes=num_bytes, seconds=seconds)

    def end(self, outcome: BaseException | SaveReport | LoadReport | None = None) -> None:
        """Nothing, where it has not begun, or has ended already."""
        if self._begun_s is None:
            return
        seconds, self._begun_s = time.monotonic() - self._begun_s, None
        if isinstance(outcome, BaseException):
            cause = _cause_of(outcome)
            name: EventName = "save.failed" if self._verb == "save" else "load.failed"
            if isinstance(cause, SaveCancelledError):
                name = "save.cancelled"
            text = f"{type(cause).__name__}: {cause}"
            self._tell(
                name, f"{name} {self._uri}: {text}", seconds=seconds, error=type(cause).__name__, message=str(cause)
            )
            return
        num_bytes = outcome.num_bytes if isinstance(outcome, SaveReport) else 0
        if isinstance(outcome, LoadReport):
            num_bytes = outcome.num_bytes_read
        done: EventName = "save.done" if self._verb == "save" else "load.done"
        words = f"{'saved' if self._verb == 'save' else 'loaded'} {outcome or self._uri}"
        self._tell(done, words, seconds=seconds, num_bytes=num_bytes, report=outcome)

    def _tell(self, name: EventName, words: str, **more: Any) -> None:
        event = Event(name=name, uri=self._uri, rank=self._rank, operation=self._operation, **more)
        tell(event, self._options, words=words)

    def __reduce__(self) -> tuple[Callable[..., Lifecycle], tuple[object, ...]]:
        """An operation that has begun belongs to its process."""
        return Lifecycle, (self._verb, self._options)


def tell(event: Event, options: Options, *, words: str) -> None:
    """Log it if it is to be, tell whoever watches, and call `Options.on_event`, whose error is logged."""
    report = event.report
    extra = fields(
        event=event.name,
        uri=event.uri,
        rank=event.rank,
        operation=event.operation,
        attempt=None if report is None else report.attempt,
        num_bytes=event.num_bytes,
        seconds=event.seconds,
        error=event.error,
    )
    if event.name in LEVELS:
        _log.log(LEVELS[event.name], "%s", words, extra=extra)
    watchers.tell(event)
    if options.on_event is not None:
        try:
            options.on_event(event)
        except Exception:  # noqa: BLE001  # it is the user's, and decides nothing
            _log.exception("Options.on_event failed at %s", event.name)


def told(method: _Method) -> _Method:
    """A method of what has a ``lifecycle``, which ends where the method raises."""

    @functools.wraps(method)
    def ending(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self.lifecycle.end(error)
            raise

    return cast("_Method", ending)


def _cause_of(error: BaseException) -> BaseException:
    """Of torch's exception, what the first of its ranks came to."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        found = failures[min(failures)]
        found = found[0] if isinstance(found, tuple) else found
        if isinstance(found, BaseException):
            return found
    return error
