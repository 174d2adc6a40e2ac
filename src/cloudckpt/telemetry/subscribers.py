"""Delivers the events and steps of saves and loads to the subscribers of this process. Nothing here raises."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

_log = logging.getLogger("cloudckpt")
_log.addHandler(logging.NullHandler())  # otherwise Python prints warnings if the program has set up no logging

FIELDS = ("event", "uri", "rank", "operation", "attempt", "key", "num_bytes", "seconds", "error")
"""The fields that a log record can have besides its text."""


class _Subscriber(NamedTuple):
    """The functions of one subscriber. The thread in which something happens calls them."""

    on_event: Callable[[Any], object]
    step: Callable[[str, str], AbstractContextManager[None]] | None


_subscribers: dict[object, _Subscriber] = {}


def watch(
    on_event: Callable[[Any], object], step: Callable[[str, str], AbstractContextManager[None]] | None = None
) -> Callable[[], None]:
    """Call `on_event` with each `cloudckpt.Event`, until the returned function is called.

    `step(operation, name)`, if given, returns a context that is entered and left with a step of an operation, in the
    thread that makes the step.
    """
    key = object()
    _subscribers[key] = _Subscriber(on_event, step)

    def end() -> None:
        _subscribers.pop(key, None)

    return end


def is_watched() -> bool:
    """Return True if there is a subscriber."""
    return bool(_subscribers)


def tell(event: Any) -> None:
    """Deliver `event` to all subscribers. Their exceptions are logged."""
    for subscriber in list(_subscribers.values()):
        with _logging_failures(event.name):
            subscriber.on_event(event)


@contextlib.contextmanager
def step(operation: str, name: str) -> Iterator[None]:
    """Keep all subscribers in the step while the context lasts. Their exceptions are logged."""
    with contextlib.ExitStack() as stack:
        for subscriber in list(_subscribers.values()):
            if subscriber.step is not None:
                with _logging_failures(name):
                    context = subscriber.step(operation, name)
                    context.__enter__()
                    stack.push(functools.partial(_leave, name, context))
        yield


def _leave(name: str, context: AbstractContextManager[None], *failure: Any) -> None:
    with _logging_failures(name):
        context.__exit__(*failure)


@contextlib.contextmanager
def _logging_failures(name: str) -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001  # a subscriber must not fail a save
        _log.exception("a subscriber of cloudckpt's events failed at %s; the operation goes on", name)


def fields(**known: object) -> dict[str, object]:
    """Return the known ones of `FIELDS`, for a log record's ``extra``."""
    return {name: value for name, value in known.items() if value not in ("", None)}
