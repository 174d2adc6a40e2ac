"""Who is told what saves and loads of this process do, besides each one's `Options.on_event`. Nothing here raises."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cloudckpt._forks import in_child

_log = logging.getLogger("cloudckpt")
_log.addHandler(logging.NullHandler())  # or Python would print warnings where the program set up no logging

FIELDS = ("event", "uri", "rank", "operation", "attempt", "key", "num_bytes", "seconds", "error")
"""What a log record can have besides its text."""


class Watcher(Protocol):
    """Told by whichever thread it happens in."""

    def on_event(self, event: Any) -> None:
        """A `cloudckpt.Event`."""

    def step(self, operation: str, name: str) -> AbstractContextManager[None]:
        """Entered and left with a step of an operation, in the thread that makes it."""


_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()


@in_child
def _unlock() -> None:
    global _lock  # noqa: PLW0603  # a thread that is not in the child may have held it
    _lock = threading.Lock()


def watch(watcher: Watcher) -> Callable[[], None]:
    """From here on it is told; until the function that this returns is called."""
    global _watchers  # noqa: PLW0603  # of the process
    with _lock:
        _watchers = (*_watchers, watcher)

    def end() -> None:
        global _watchers  # noqa: PLW0603  # as above
        with _lock:
            _watchers = tuple(one for one in _watchers if one is not watcher)

    return end


def is_watched() -> bool:
    """Whether there is anybody to tell."""
    return bool(_watchers)


def tell(event: Any) -> None:
    """Tell all; what one of them raises is logged."""
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
    except Exception:  # noqa: BLE001  # it is the subscriber's, and must not fail a save
        _log.exception("a subscriber of cloudckpt's events failed at %s; the operation goes on", name)


def step(operation: str, name: str) -> AbstractContextManager[None]:
    """All are told of the step in this context."""
    watchers = _watchers
    return _guarded(watchers, operation, name) if watchers else contextlib.nullcontext()


def fields(**known: object) -> dict[str, object]:
    """For a log record's ``extra``: those of `FIELDS` that are known."""
    return {name: value for name, value in known.items() if value not in ("", None)}
