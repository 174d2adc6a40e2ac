"""Tells subscribers the events of this process's saves and loads, and makes OpenTelemetry spans and metrics of them.

Events come from the pipeline, the manager and garbage collection. A subscriber cannot fail a save or a load. See
``docs/telemetry.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cloudckpt.errors import MissingDependencyError
from cloudckpt.events import Event
from cloudckpt.telemetry import subscribers

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["instrument", "subscribe", "uninstrument"]

_ends: list[Callable[[], None]] = []
"""The function that ends the instrumentation, if there is one."""


def subscribe(on_event: Callable[[Event], None]) -> Callable[[], None]:
    """Call `on_event` with each event of this process's saves and loads, until the returned function is called.

    The thread that makes the step calls it, or one that waits for it, so it must be quick. Its exceptions are logged
    and change nothing; use `Options.on_event` to stop a save.
    """
    return subscribers.watch(on_event)


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make OpenTelemetry spans and metrics of all saves and loads of this process from here on.

    Uses the global providers by default. A second call replaces the first. Raises `MissingDependencyError` without
    ``opentelemetry-api``. The program brings the SDK and the exporters.
    """
    try:
        from cloudckpt.telemetry.opentelemetry import Instrumentation  # noqa: PLC0415  # the package may not be there
    except ImportError as error:
        raise MissingDependencyError(
            "cloudckpt.telemetry.instrument needs opentelemetry-api: pip install 'cloudckpt[otel]'"
        ) from error
    made = Instrumentation(tracer_provider, meter_provider)
    uninstrument()
    _ends.append(subscribers.watch(made.on_event, made.step))


def uninstrument() -> None:
    """Undo `instrument`."""
    while _ends:
        _ends.pop()()
