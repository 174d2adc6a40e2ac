"""Watching what saves and loads of this process do: events for functions, spans and metrics for OpenTelemetry.

See ``docs/telemetry.md``. Nothing of this can fail a save or a load, and without it nothing of it costs anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from cloudckpt._forks import in_child
from cloudckpt._trace import watchers
from cloudckpt.errors import MissingDependencyError
from cloudckpt.report import Event

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["instrument", "subscribe", "uninstrument"]

_lock = threading.Lock()
_end: Callable[[], None] | None = None


@in_child
def _unlock() -> None:
    global _lock  # noqa: PLW0603  # a thread that is not in the child may have held it
    _lock = threading.Lock()


def subscribe(on_event: Callable[[Event], None]) -> Callable[[], None]:
    """Have `on_event` called with each event of this process's saves and loads, until the returned function is called.

    By whichever thread made the step, or one that waits for it; it must be quick. What it raises is logged, and
    changes nothing: that is what `Options.on_event` is for.
    """
    return watchers.watch(_Subscriber(on_event))


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make OpenTelemetry spans and metrics of all saves and loads of this process from here on.

    For the providers that are given, or the global ones. A second call takes the place of the first. Raises
    `MissingDependencyError` without ``opentelemetry-api``; who exports brings the SDK.
    """
    try:
        from cloudckpt._opentelemetry import Instrumentation  # noqa: PLC0415  # the package may not be there
    except ImportError as error:
        raise MissingDependencyError(
            "cloudckpt.telemetry.instrument needs opentelemetry-api: pip install 'cloudckpt[otel]'"
        ) from error
    watcher = Instrumentation(tracer_provider, meter_provider)
    global _end  # noqa: PLW0603  # of the process
    with _lock:
        if _end is not None:
            _end()
        _end = watchers.watch(watcher)


def uninstrument() -> None:
    """Undo `instrument`."""
    global _end  # noqa: PLW0603  # as above
    with _lock:
        if _end is not None:
            _end()
        _end = None


class _Subscriber:
    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.on_event = on_event

    def step(self, operation: str, name: str) -> AbstractContextManager[None]:  # noqa: ARG002  # it is no event
        return nullcontext()
