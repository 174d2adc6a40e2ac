"""Events, log records, and OpenTelemetry's spans and metrics of saves and loads."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.commit.gc.leftovers import LONG_AGO, put, save
from tests.docs.tables import ROOT, marked
from tests.kit.in_memory import Memory
from tests.kit.options import make_options

import cloudckpt
from cloudckpt import Event, Options, telemetry
from cloudckpt.telemetry.opentelemetry import METRICS
from cloudckpt.telemetry.subscribers import is_watched
from cloudckpt.testing.servers import S3Server

SMALL: dict[str, Any] = {"part_bytes": 16384, "tile_bytes": 4096}


class Exported:
    """The spans and metrics that OpenTelemetry received."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        telemetry.instrument(tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self) -> dict[str, ReadableSpan]:
        """By name, each of which there is one of."""
        found = self.exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found), [span.name for span in found]
        return {span.name: span for span in found}

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        metrics = [one for part in data.resource_metrics for scope in part.scope_metrics for one in scope.metrics]
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> S3Server:
    s3_server.reset()
    s3_server.create_bucket("watched")
    return s3_server


@pytest.fixture
def exported() -> Iterator[Exported]:
    found = Exported()
    yield found
    telemetry.uninstrument()
    found.tracers.shutdown()
    found.meters.shutdown()
    assert not is_watched()


def state_of(fill: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((20_000,), fill), "step": 3}


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_a_save_and_a_load_are_spans_below_the_callers(exported: Exported, tmp_path: Path) -> None:
    """If this fails, a trace of a training step does not show where its checkpoint's time went."""
    with exported.tracers.get_tracer("test").start_as_current_span("step") as step:
        cloudckpt.save(state_of(), tmp_path / "c", no_dist=True, options=make_options(**SMALL))
    spans = exported.spans()
    assert spans.keys() == {"step", "cloudckpt.save", "cloudckpt.plan", "cloudckpt.upload", "cloudckpt.commit"}
    save = spans["cloudckpt.save"]
    assert parent_of(save) == step.get_span_context().span_id
    assert {parent_of(spans[f"cloudckpt.{name}"]) for name in ("plan", "upload", "commit")} == {save.context.span_id}
    assert save.attributes is not None
    assert save.attributes["cloudckpt.uri"] == str(tmp_path / "c")
    assert save.attributes["cloudckpt.rank"] == 0
    assert save.attributes["cloudckpt.store"] == "file"
    assert save.attributes["cloudckpt.bytes"] > 80_000
    phases = [spans[f"cloudckpt.{name}"] for name in ("plan", "upload", "commit")]
    times = [(span.start_time, span.end_time) for span in phases]
    assert times == sorted(times)
    exported.exporter.clear()

    cloudckpt.load(state_of(0.0), tmp_path / "c", no_dist=True)
    spans = exported.spans()
    assert spans.keys() == {"cloudckpt.load", "cloudckpt.plan", "cloudckpt.read"}
    of_load = spans.pop("cloudckpt.load").context.span_id
    assert {parent_of(span) for span in spans.values()} == {of_load}


def test_a_background_save_belongs_to_who_began_it(exported: Exported, tmp_path: Path) -> None:
    """If this fails, background saves are traces of their own, which nobody finds from the step that began them."""
    with exported.tracers.get_tracer("test").start_as_current_span("step") as step:
        handle = cloudckpt.async_save(state_of(), tmp_path / "c", no_dist=True, options=make_options(**SMALL))
    handle.result(120)
    spans = exported.spans()
    names = ("save", "stage", "plan", "upload", "commit")
    assert spans.keys() == {"step", *(f"cloudckpt.{name}" for name in names)}
    assert parent_of(spans["cloudckpt.save"]) == step.get_span_context().span_id
    assert spans["cloudckpt.stage"].attributes == {"cloudckpt.bytes": 80_000}
    assert exported.points("cloudckpt.io")[0].value > 80_000
    cloudckpt.close()


def test_telemetry_of_a_bucket_holds_no_secret(
    exported: Exported, s3_bucket: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, credentials reach whoever reads traces or logs; or nobody can tell which bucket is slow."""
    secret = "not-for-the-log-0123456789abcdef"  # noqa: S105  # of moto
    storage = {"endpoint_url": s3_bucket.endpoint_url, "aws_access_key_id": "who", "aws_secret_access_key": secret}
    events: list[Event] = []
    options = make_options(storage_options=storage, on_event=events.append, extensions=[cloudckpt.Zstandard()], **SMALL)
    uri = "s3://watched/told"
    with caplog.at_level(logging.DEBUG, "cloudckpt"):
        cloudckpt.save(state_of(), uri, no_dist=True, options=options)
        with pytest.raises(dcp.api.CheckpointException):
            cloudckpt.save(state_of(), uri, no_dist=True, options=options)
        state = state_of(0.0)
        cloudckpt.load(state, uri, no_dist=True, options=options)
    assert torch.equal(state["w"], state_of()["w"])
    spans = exported.exporter.get_finished_spans()
    buckets = {(span.attributes or {}).get("aws.s3.bucket") for span in spans if span.parent is None}
    assert buckets == {"watched"}
    text = " ".join(
        [*(span.to_json() for span in spans), *map(repr, events), *(str(vars(one)) for one in caplog.records)]
    )
    assert uri in text
    assert secret not in text


def test_a_failed_save_says_so(exported: Exported, memory: Memory) -> None:
    """If this fails, dashboards show failed saves as saves, or as ones that never end."""
    memory.at().fail("read_into")
    cloudckpt.save(state_of(), memory.uri(), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException):
        cloudckpt.save(state_of(), memory.uri(), no_dist=True)
    cloudckpt.load(state_of(0.0), memory.uri(), no_dist=True)
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.load(state_of(0.0), memory.uri() + "-not", no_dist=True)
    ended = [
        span for span in exported.exporter.get_finished_spans() if span.name in ("cloudckpt.save", "cloudckpt.load")
    ]
    errors = [(span.name, (span.attributes or {}).get("error.type")) for span in ended]
    assert errors == [
        ("cloudckpt.save", None),
        ("cloudckpt.save", "CheckpointExistsError"),
        ("cloudckpt.load", None),
        ("cloudckpt.load", "CheckpointNotFoundError"),
    ]
    assert [span.status.is_ok for span in ended] == [True, False, True, False]
    durations = {
        (point.attributes["cloudckpt.operation"], point.attributes.get("error.type")): point.count
        for point in exported.points("cloudckpt.operation.duration")
    }
    assert durations == {(name.removeprefix("cloudckpt."), error): 1 for name, error in errors}
    (retries,) = exported.points("cloudckpt.retries")
    assert (retries.value, retries.attributes["error.type"]) == (1, "TransientStoreError")
    assert {point.value for point in exported.points("cloudckpt.operation.active")} == {0}


def test_exported_metrics_match_the_document(exported: Exported, memory: Memory) -> None:
    """If this fails, dashboards are built on names that are not there."""
    cloudckpt.async_save(state_of(), memory.uri(), no_dist=True).result(60)
    cloudckpt.load_latest(state_of(0.0), memory.uri().rpartition("/")[0], no_dist=True)
    spans = re.findall(r"^\| `([\w.]+)`", marked((ROOT / "docs/telemetry.md").read_text(), "spans"), re.MULTILINE)
    assert {span.name for span in exported.exporter.get_finished_spans()} == set(spans)
    data = exported.reader.get_metrics_data()
    assert data is not None
    found = {
        one.name: one.unit for part in data.resource_metrics for scope in part.scope_metrics for one in scope.metrics
    }
    assert found.items() <= {name: unit for name, (_, unit, _) in METRICS.items()}.items()
    assert len(found) >= 5  # the others count what did not happen here


def test_a_subscriber_that_fails_changes_nothing(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a broken dashboard costs a checkpoint; or Options.on_event can undo what is committed."""

    def break_off(_: Event) -> None:
        raise RuntimeError("no dashboard")

    end = telemetry.subscribe(break_off)
    try:
        cloudckpt.save(state_of(), memory.uri(), no_dist=True)
        cloudckpt.load(state_of(0.0), memory.uri(), no_dist=True)
    finally:
        end()
    assert not is_watched()
    assert "a subscriber of cloudckpt's events failed at save.done" in caplog.text

    def at_the_ends(event: Event) -> None:
        if event.name in ("save.begun", "save.done", "load.begun", "load.done"):
            raise RuntimeError("no dashboard")

    options = Options(on_event=at_the_ends)
    cloudckpt.save(state_of(), memory.uri(), no_dist=True, options=options, overwrite=True)
    cloudckpt.load(state_of(0.0), memory.uri(), no_dist=True, options=options)


@pytest.mark.slow
def test_only_warnings_are_printed_by_default_and_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    """If this fails, jobs print noise, or skip a damaged checkpoint in silence; or an import loads OpenTelemetry."""
    script = f"""
import sys, warnings
warnings.simplefilter("ignore")
import torch, cloudckpt
options = cloudckpt.Options()
cloudckpt.save({{"w": torch.ones(3)}}, {str(tmp_path / "c")!r}, no_dist=True)
try:
    cloudckpt.save({{"w": torch.ones(3)}}, {str(tmp_path / "c")!r}, no_dist=True)
except BaseException as error:
    assert "already exists" in str(error)
assert not [name for name in sys.modules if name == "cloudckpt.telemetry.opentelemetry"]
sys.modules["opentelemetry"] = sys.modules["opentelemetry.context"] = None
try:
    cloudckpt.telemetry.instrument()
except cloudckpt.errors.MissingDependencyError as error:
    assert "extra 'otel'" in str(error)
else:
    raise SystemExit("no error")
cloudckpt.save({{"w": torch.ones(3)}}, {str(tmp_path / "d")!r}, no_dist=True)
open({str(tmp_path / "d/manifest.json")!r}, "w").write("damaged")
cloudckpt.load_latest({{"w": torch.zeros(3)}}, {str(tmp_path)!r}, no_dist=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [line.split(" and trying")[0] for line in done.stderr.splitlines()] == [f"skipping {tmp_path}/d"]


LITTER = f"data/{LONG_AGO}/0-0.safetensors"


def told_of(memory: Memory) -> tuple[list[Event], Options]:
    events: list[Event] = []
    return events, Options(on_event=events.append, retries=1)


def test_records_of_saves_and_loads_are_lines_to_read(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, the log of a run has a dataclass with seventeen digits where somebody looks for size and time."""
    state = {"w": torch.zeros(2**18)}
    with caplog.at_level(logging.INFO, "cloudckpt"):
        cloudckpt.save(state, memory.uri())
        cloudckpt.load(state, memory.uri())
        cloudckpt.async_save({}, memory.uri("empty")).result()
    amount = r"1\.0 MiB in ([\d.]+ ms|\d+\.\d s), [\d.]+ [MG]B/s"
    for verb, record in zip(("saved", "loaded"), caplog.records, strict=False):
        assert re.fullmatch(f"{verb} {memory.uri()}: {amount}", record.getMessage())
    assert re.fullmatch(rf"saved {memory.uri('empty')}.* in [\d.]+ m?s.*", caplog.records[-1].getMessage())


def test_failures_that_training_survives_are_counted(exported: Exported, memory: Memory) -> None:
    """If this fails, no dashboard shows that training goes on without checkpoints."""
    memory.at("step-1").fail("put", error=lambda: cloudckpt.errors.AccessDeniedError("no", key="k", operation="put"))
    manager = cloudckpt.CheckpointManager(memory.root, on_failure="warn", async_=False, no_dist=True)
    for step in (1, 2):
        manager.save(step, state_of())
    (tolerated,) = exported.points("cloudckpt.tolerated")
    assert (tolerated.value, tolerated.attributes["error.type"]) == (1, "AccessDeniedError")


def test_copies_from_a_fast_place_are_counted(exported: Exported, memory: Memory, tmp_path: Path) -> None:
    """If this fails, no dashboard shows that the bucket has no step of the last hours."""
    manager = cloudckpt.CheckpointManager(memory.root, fast=tmp_path / "fast", async_=False, no_dist=True)
    manager.save(1, state_of())
    manager.wait()
    denied = cloudckpt.errors.AccessDeniedError("no", key="k", operation="put")
    memory.at("step-2").fail("put", error=lambda: denied, times=100)
    manager.save(2, state_of())
    with pytest.raises(cloudckpt.errors.CheckpointError, match="does not have all steps"):
        manager.close()
    drains = {
        (point.attributes["cloudckpt.store"], point.attributes.get("error.type")): point.value
        for point in exported.points("cloudckpt.drains")
    }
    assert drains == {("memory", None): 1, ("file", "_OTHER"): 1}


def test_removals_are_counted(exported: Exported, memory: Memory) -> None:
    """If this fails, no dashboard shows that a janitor does nothing, or that nobody may remove what is paid for."""
    save(memory.uri(), 1.0)
    put(memory.at().inner, LITTER)
    memory.at().fail("delete", times=100)
    with pytest.raises(cloudckpt.errors.GarbageLeftError):
        cloudckpt.gc(memory.uri(), older_than=0.0, dry_run=False, options=Options(retries=0))
    memory.at()._faults.clear()
    events, options = told_of(memory)
    cloudckpt.gc(memory.uri(), older_than=0.0, dry_run=False, options=options)
    cloudckpt.delete(memory.uri())
    with cloudckpt.CheckpointManager(memory.uri("run"), keep_last=1, async_=False, no_dist=True) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)})
    removals = {
        (point.attributes["cloudckpt.operation"], point.attributes.get("error.type")): point.value
        for point in exported.points("cloudckpt.removals")
    }
    assert removals == {("gc", "TransientStoreError"): 1, ("gc", None): 1, ("delete", None): 1, ("retention", None): 1}
    (garbage,) = exported.points("cloudckpt.garbage")
    assert garbage.value == sum(event.num_bytes for event in events) == len(b"left over")
