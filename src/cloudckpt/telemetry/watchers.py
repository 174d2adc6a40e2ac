"""Delivers the events and steps of saves and loads to the subscribers of this process. Nothing here raises."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

_log = logging.getLogger("cloudckpt")
_log.addHandler(logging.NullHandler())  # otherwise Python prints warnings if the program has set up no logging

FIELDS = ("event", "uri", "rank", "operation", "attempt", "key", "num_bytes", "seconds", "error")
"""The fields that a log record can have besides its text."""


class Watcher(Protocol):
    """A subscriber. The thread in which something happens calls it."""

    def on_event(self, event: Any) -> None:
        """Receive a `cloudckpt.Event`."""

    def step(self, operation: str, name: str) -> AbstractContextManager[None]:
        """Return a context that is entered and left with a step of an operation, in the thread that makes the step."""


_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()


def watch(watcher: Watcher) -> Callable[[], None]:
    """Deliver all events to `watcher`, until the returned function is called."""
    global _watchers  # noqa: PLW0603  # the subscribers of the process
    with _lock:
        _watchers = (*_watchers, watcher)

    def end() -> None:
        global _watchers  # noqa: PLW0603  # the subscribers of the process
        with _lock:
            _watchers = tuple(one for one in _watchers if one is not watcher)

    return end


def is_watched() -> bool:
    """Return True if there is a subscriber."""
    return bool(_watchers)


def tell(event: Any) -> None:
    """Deliver `event` to all subscribers. Their exceptions are logged."""
    for watcher in _watchers:
        with _logging_what_fails(event.name):
            watcher.on_event(event)


@contextlib.contextmanager
def _guarded(watchers: tuple[Watcher, ...], operation: str, name: str) -> Iterator[None]:
    entered: list[AbstractContextManager[None]] = []
    for watcher in watchers:
        with _logging_what_fails(name):
            step = watcher.step(operation, name)
            step.__enter__()
            entered.append(step)
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        for step in reversed(entered):
            with _logging_what_fails(name):
                step.__exit__(None if failure is None else type(failure), failure, None)
        del failure  # whose traceback holds this frame


@contextlib.contextmanager
def _logging_what_fails(name: str) -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001  # a subscriber must not fail a save
        _log.exception("a subscriber of cloudckpt's events failed at %s; the operation goes on", name)


def step(operation: str, name: str) -> AbstractContextManager[None]:
    """Return a context in which all subscribers are in the step."""
    watchers = _watchers
    return _guarded(watchers, operation, name) if watchers else contextlib.nullcontext()


def fields(**known: object) -> dict[str, object]:
    """Return the known ones of `FIELDS`, for a log record's ``extra``."""
    return {name: value for name, value in known.items() if value not in ("", None)}
