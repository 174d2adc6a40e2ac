"""What `gc` and `delete` tell of what they do."""

from __future__ import annotations

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
