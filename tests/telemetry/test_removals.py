"""What `gc` and `delete` tell of what they do."""

from __future__ import annotations

import logging

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.commit.gc.leftovers import LONG_AGO, put, save
from tests.in_memory import Memory

import cloudckpt
from cloudckpt import Event, Options, telemetry

LITTER = f"data/{LONG_AGO}/0-0.safetensors"


def told_of(memory: Memory) -> tuple[list[Event], Options]:
    events: list[Event] = []
    return events, Options(on_event=events.append, retries=1)


def test_what_gc_removes_is_told(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, nobody who watches a job sees that data was removed, how much, and where."""
    save(memory.uri(), 1.0)
    put(memory.at().inner, LITTER)
    events, options = told_of(memory)
    cloudckpt.gc(memory.uri(), older_than=0.0, quiet=True, options=options)
    assert events == []  # a dry run removes nothing
    watched: list[Event] = []
    end = telemetry.subscribe(watched.append)
    with caplog.at_level(logging.INFO, "cloudckpt"):
        cloudckpt.gc(memory.uri(), older_than=0.0, dry_run=False, options=options)
    end()
    (event,) = events
    assert watched == events
    assert (event.name, event.uri, event.num_bytes) == ("gc.removed", memory.uri(), len(b"left over"))
    assert event.message.startswith("1 data object of 1 save")
    (record,) = [one for one in caplog.records if vars(one).get("event") == "gc.removed"]
    assert (record.levelname, vars(record)["uri"], vars(record)["num_bytes"]) == ("INFO", memory.uri(), 9)


def test_what_gc_cannot_remove_is_told(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a janitor that lacks a permission looks to a dashboard as one that has nothing to do."""
    save(memory.uri(), 1.0)
    put(memory.at().inner, LITTER)
    memory.at().fail("delete", times=100)
    events, options = told_of(memory)
    with caplog.at_level(logging.INFO, "cloudckpt"), pytest.raises(cloudckpt.errors.GarbageLeftError):
        cloudckpt.gc(memory.uri(), older_than=0.0, dry_run=False, options=options)
    assert {event.name for event in events} == {"retry", "gc.failed"}
    (failed,) = [event for event in events if event.name == "gc.failed"]
    assert (failed.uri, failed.error) == (f"{memory.uri()}/{LITTER}", "TransientStoreError")
    assert failed.message
    assert "WARNING" in {one.levelname for one in caplog.records if vars(one).get("event") == "gc.failed"}


def test_removals_are_counted(memory: Memory) -> None:
    """If this fails, no dashboard shows that a janitor does nothing, or that nobody may remove what is paid for."""
    reader = InMemoryMetricReader()
    telemetry.instrument(meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    try:
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
    finally:
        telemetry.uninstrument()
    points: dict[tuple[str, object, object], float] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for part in data.resource_metrics:
        for metric in (one for scope in part.scope_metrics for one in scope.metrics):
            for point in metric.data.data_points:
                attributes = dict(point.attributes)
                name = metric.name, attributes.get("cloudckpt.operation"), attributes.get("error.type")
                points[name] = getattr(point, "value", 0)
    assert points["cloudckpt.removals", "gc", "TransientStoreError"] == 1
    assert points["cloudckpt.removals", "gc", None] == 1
    assert points["cloudckpt.removals", "delete", None] == 1
    assert points["cloudckpt.removals", "retention", None] == 1
    assert points["cloudckpt.garbage", None, None] == sum(event.num_bytes for event in events) > len(b"left over")
