"""The subscribers of events, and OpenTelemetry as one of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudckpt._messages import install_advice
from cloudckpt._workers import logging_failures
from cloudckpt.errors import MissingDependencyError
from cloudckpt.events import Event

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

_ends: list[Callable[[], None]] = []
"""The function that ends the instrumentation, if there is one."""


class _Subscriber(NamedTuple):
    """The functions of one subscriber, which are called in the thread of the event."""

    on_event: Callable[[Any], object]
    step: Callable[[str, str], AbstractContextManager[None]] | None


_subscribers: dict[object, _Subscriber] = {}


def subscribe(on_event: Callable[[Event], None]) -> Callable[[], None]:
    """Call a function with each event of this process's saves and loads.

    The thread that does the work calls it, or a thread that waits for that one. Its exceptions are logged only; use
    `Options.on_event` to stop a save.

    Args:
        on_event: Called with each event. It must be quick, and safe for use by several threads.

    Returns:
        A function that ends the subscription.

    Example::

        stop = cloudckpt.telemetry.subscribe(lambda event: print(event.name, event.uri))
        cloudckpt.save("s3://bucket/run/step-100", model=model)
        stop()

    """
    return _watch(on_event)


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make OpenTelemetry spans and metrics of all saves and loads of this process from here on.

    A second call replaces the first. The program brings the SDK and the exporters.

    Args:
        tracer_provider: Provider of the tracer. None for the global one.
        meter_provider: Provider of the meter. None for the global one.

    Raises:
        MissingDependencyError: The package ``opentelemetry-api`` is not installed.

    Example::

        cloudckpt.telemetry.instrument()
        cloudckpt.save("s3://bucket/run/step-100", model=model)
        cloudckpt.telemetry.uninstrument()

    """
    try:
        from cloudckpt.telemetry.opentelemetry import Instrumentation  # noqa: PLC0415  # the package may not be there
    except ImportError as error:
        raise MissingDependencyError(
            f"cloudckpt.telemetry.instrument needs opentelemetry-api: {install_advice('otel')}"
        ) from error
    instrumentation = Instrumentation(tracer_provider, meter_provider)
    uninstrument()
    _ends.append(_watch(instrumentation.on_event, instrumentation.step))


def uninstrument() -> None:
    """Undo `instrument`. Does nothing if it is not in force."""
    while _ends:
        _ends.pop()()


def is_watched() -> bool:
    """Return True if there is a subscriber."""
    return bool(_subscribers)


def deliver(event: Any) -> None:
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


def _logging_failures(name: str) -> AbstractContextManager[None]:
    return logging_failures("a subscriber of cloudckpt's events failed at %s; the operation continues", name)


def _watch(
    on_event: Callable[[Any], object], step: Callable[[str, str], AbstractContextManager[None]] | None = None
) -> Callable[[], None]:
    """Call `on_event` with each event, until the returned function is called.

    `step(operation, name)`, if given, returns a context that is entered and left with a step of an operation, in the
    thread that makes the step.
    """
    key = object()
    _subscribers[key] = _Subscriber(on_event, step)

    def end() -> None:
        _subscribers.pop(key, None)

    return end
