"""Makes OpenTelemetry spans and metrics of events and steps. ``docs/telemetry.md`` lists names and attributes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Span, Status, StatusCode, TracerProvider

from cloudckpt._version import __version__
from cloudckpt.events import Event
from cloudckpt.report import LoadReport, SaveReport
from cloudckpt.uri import store_attributes

_NAME = "cloudckpt"
_MAX_RUNNING = 256
"""The most operations in memory. The end of some is never reported, such as on most ranks of torch's own `save`."""
_SPAN_OF_STEP = {"set_up": "plan", "write": "upload", "commit": "commit", "read": "read"}
_COUNTED_BY_VERB = {"gc": "removals", "delete": "removals", "retention": "removals", "drain": "drains"}
_COUNTED = {"retry": "retries", "load.skipped": "skipped", "save.tolerated": "tolerated"}
_BYTES_ON_THEIR_WAY = {"save.part_uploaded": "transmit", "load.range_read": "receive"}

Attributes: TypeAlias = dict[str, str | int | float]

METRICS = {
    "cloudckpt.operation.duration": ("histogram", "s", "each save and load, by how it ended (`error.type`)"),
    "cloudckpt.phase.duration": ("histogram", "s", "each of their phases (`cloudckpt.phase`)"),
    "cloudckpt.operation.active": ("up-down counter", "{operation}", "saves and loads that are under way"),
    "cloudckpt.operation.size": ("histogram", "By", "bytes that a save sent or a load read"),
    "cloudckpt.io": ("counter", "By", "bytes as they move (`network.io.direction`)"),
    "cloudckpt.retries": ("counter", "{request}", "requests made again after a failure (`error.type`)"),
    "cloudckpt.hedges": ("counter", "{request}", "requests made twice because they took too long"),
    "cloudckpt.skipped": ("counter", "{checkpoint}", "checkpoints that `load_latest` passed over"),
    "cloudckpt.tolerated": ("counter", "{save}", "failed saves that did not end training (`error.type`)"),
    "cloudckpt.removals": ("counter", "{removal}", "what `gc`, `delete` and retention removed or not (`error.type`)"),
    "cloudckpt.drains": (
        "counter",
        "{checkpoint}",
        "copies of a fast place's checkpoints to its root, made or failed (`error.type`)",
    ),
    "cloudckpt.garbage": ("counter", "By", "bytes of objects that `gc` removed"),
}
"""Kind, unit and meaning of each metric."""


class _Running:
    """One operation that has begun and not ended."""

    def __init__(self, span: Span, event: Event, *, verb: str) -> None:
        self.span = span
        self.context: Context = trace.set_span_in_context(span)
        self.kind: Attributes = {"cloudckpt.operation": verb, **_place_of(event)}
        self.begun_ns = time.time_ns()
        self.plan: Span | None = None
        self.plan_begun_ns = 0


class Instrumentation:
    """A subscriber that makes spans and metrics. Safe to use from many threads."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._tracer = trace.get_tracer(_NAME, __version__, tracer_provider)
        meter = metrics.get_meter(_NAME, __version__, meter_provider)
        make: dict[str, Any] = {
            "histogram": meter.create_histogram,
            "counter": meter.create_counter,
            "up-down counter": meter.create_up_down_counter,
        }
        self._metrics = {
            name.removeprefix("cloudckpt."): make[kind](name, unit, meaning.replace("`", ""))
            for name, (kind, unit, meaning) in METRICS.items()
        }
        self._lock = threading.Lock()
        self._running: OrderedDict[str, _Running] = OrderedDict()

    def on_event(self, event: Event) -> None:
        """Update the spans and metrics that `event` concerns."""
        verb, _, kind = event.name.partition(".")
        if kind == "begun":
            self._begin(event)
        elif event.name in _BYTES_ON_THEIR_WAY:
            direction = _BYTES_ON_THEIR_WAY[event.name]
            self._metrics["io"].add(event.num_bytes, {"network.io.direction": direction, **_place_of(event)})
        elif event.name == "hedge":
            self._metrics["hedges"].add(1, _place_of(event))
        elif event.name in _COUNTED:
            self._metrics[_COUNTED[event.name]].add(1, {"error.type": event.error, **_place_of(event)})
        elif verb in _COUNTED_BY_VERB:
            self._count(event, verb)
        elif event.name == "save.staged":
            self._record_staging(event)
        elif kind in ("done", "failed", "cancelled") and verb in ("save", "load"):
            self._end(event)

    @contextlib.contextmanager
    def step(self, operation: str, name: str) -> Iterator[None]:
        """Make the span of the step's phase the current one, so that it is the parent of other spans in the step."""
        running = self._running.get(operation)
        phase = _SPAN_OF_STEP.get(name)
        if running is None or phase is None:
            yield
            return
        if phase == "plan":
            if running.plan is None:
                running.plan_begun_ns = time.time_ns()
                running.plan = self._tracer.start_span("cloudckpt.plan", running.context)
            with trace.use_span(running.plan):
                yield
            return
        if phase in ("upload", "read"):
            self._end_plan(running)
        begun_ns = time.time_ns()
        span = self._tracer.start_span(f"cloudckpt.{phase}", running.context, start_time=begun_ns)
        try:
            with trace.use_span(span, end_on_exit=True):
                yield
        finally:
            self._phase_took(running, phase, begun_ns)

    def _begin(self, event: Event) -> None:
        verb = event.name.partition(".")[0]
        span = self._tracer.start_span(f"cloudckpt.{verb}", attributes=_attributes_of(event))
        running = _Running(span, event, verb=verb)
        if verb == "load":
            running.plan_begun_ns = running.begun_ns
            running.plan = self._tracer.start_span("cloudckpt.plan", running.context)
        with self._lock:
            forgotten = [self._running.pop(event.operation, None)]
            self._running[event.operation] = running
            if len(self._running) > _MAX_RUNNING:
                forgotten.append(self._running.popitem(last=False)[1])
        self._metrics["operation.active"].add(1, running.kind)
        for operation in forgotten:
            if operation is not None:  # its end was never reported
                self._end_plan(operation)
                operation.span.end()
                self._metrics["operation.active"].add(-1, operation.kind)

    def _count(self, event: Event, verb: str) -> None:
        store = _place_of(event)
        # _OTHER is OpenTelemetry's name for an unknown cause. Events of retention and of a drain have no cause.
        error: Attributes = {"error.type": event.error or "_OTHER"} if event.name.endswith(".failed") else {}
        self._metrics[_COUNTED_BY_VERB[verb]].add(1, {"cloudckpt.operation": verb, **store, **error})
        if event.name == "gc.removed":
            self._metrics["garbage"].add(event.num_bytes, store)

    def _record_staging(self, event: Event) -> None:
        running = self._running.get(event.operation)
        if running is not None:
            attributes: Attributes = {"cloudckpt.bytes": event.num_bytes}
            begun_ns = time.time_ns() - int(event.seconds * 1e9)
            span = self._tracer.start_span(
                "cloudckpt.stage", running.context, attributes=attributes, start_time=begun_ns
            )
            span.end()
            self._phase_took(running, "stage", begun_ns)

    def _end(self, event: Event) -> None:
        with self._lock:
            running = self._running.pop(event.operation, None)
        if running is None:
            return
        self._end_plan(running)
        attributes = running.kind
        self._metrics["operation.active"].add(-1, attributes)
        if event.report is not None:
            self._metrics["operation.size"].record(event.num_bytes, attributes)
        if event.error:
            attributes = {**attributes, "error.type": event.error}
            running.span.set_attribute("error.type", event.error)
            running.span.set_status(Status(StatusCode.ERROR, event.message))
        for name, value in _of_report(event.report).items():
            running.span.set_attribute(name, value)
        self._metrics["operation.duration"].record(event.seconds, attributes)
        running.span.end()

    def _end_plan(self, running: _Running) -> None:
        if running.plan is not None:
            running.plan.end()
            running.plan = None
            self._phase_took(running, "plan", running.plan_begun_ns)

    def _phase_took(self, running: _Running, phase: str, begun_ns: int) -> None:
        self._metrics["phase.duration"].record(
            (time.time_ns() - begun_ns) / 1e9, {**running.kind, "cloudckpt.phase": phase}
        )


def _place_of(event: Event) -> Attributes:
    """Return the attributes that name the kind of store, and the place in a run: few values, as metrics need."""
    return {"cloudckpt.store": store_attributes(event.uri)["cloudckpt.store"], "cloudckpt.place": event.place}


def _attributes_of(event: Event) -> Attributes:
    return {
        "cloudckpt.uri": event.uri,
        "cloudckpt.rank": event.rank,
        "cloudckpt.operation.id": event.operation,
        "cloudckpt.place": event.place,
        **store_attributes(event.uri),
    }


def _of_report(report: SaveReport | LoadReport | None) -> Attributes:
    if report is None:
        return {}
    num_bytes = report.num_bytes if isinstance(report, SaveReport) else report.num_bytes_read
    return {
        "cloudckpt.attempt": report.attempt,
        "cloudckpt.bytes": num_bytes,
        "cloudckpt.requests": report.num_requests,
        "cloudckpt.retries": report.num_retries,
        "cloudckpt.hedges": report.num_hedges,
        "cloudckpt.stage_s": report.stage_s,
        "cloudckpt.transfer_s": report.transfer_s,
    }
