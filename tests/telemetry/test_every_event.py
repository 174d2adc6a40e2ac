"""Every event that there is, told by the real thing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.commit.gc.leftovers import LONG_AGO, put
from tests.e2e.servers import FlakyS3, serve
from tests.in_memory import Memory
from tests.options import make_options

import cloudckpt
from cloudckpt import Event, Options, telemetry
from cloudckpt.events import EVENTS
from cloudckpt.io import hedging
from cloudckpt.options import MIB
from cloudckpt.testing.servers import Server
from cloudckpt.testing.wire import StallAnswer, StallRequest, Wire, WireRule

SMALL: dict[str, Any] = {"part_bytes": 16384, "tile_bytes": 4096, "object_bytes": 65536, "retries": 1}
WAIT_S = 60.0


@pytest.fixture
def told() -> Iterator[list[Event]]:
    """What is told from here on."""
    events: list[Event] = []
    end = telemetry.subscribe(events.append)
    yield events
    end()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An S3 server; requests that stall are hedged soon, as in tests/e2e/test_hedging.py."""
    monkeypatch.setattr(hedging, "LEAST_S", 0.2)
    monkeypatch.setattr(hedging, "_LEAST_ALLOWED", 100)
    with serve(FlakyS3()) as started:
        started.create_bucket("told")
        yield started


def state_of(fill: float) -> dict[str, Any]:
    return {"w": torch.full((50_000,), fill), "step": fill}


def save(uri: str, fill: float, **more: Any) -> None:
    overwrite = more.pop("overwrite", False)
    cloudckpt.save(state_of(fill), uri, no_dist=True, overwrite=overwrite, options=make_options(**SMALL, **more))


def saves_and_loads(memory: Memory) -> None:
    """Committed, overwritten, refused, resumed, cancelled; loaded, not found, passed over; verified."""
    root = memory.uri("steps/x").rpartition("/")[0]
    save(f"{root}/a", 1.0)
    save(f"{root}/a", 2.0, overwrite=True)
    with pytest.raises(dcp.api.CheckpointException):
        save(f"{root}/a", 3.0)

    def die(event: Event) -> None:
        if event.name == "save.committing":
            raise RuntimeError("killed")

    with pytest.raises(dcp.api.CheckpointException):
        save(f"{root}/b", 1.0, resume=True, on_event=die)
    save(f"{root}/b", 1.0, resume=True)
    reached, go_on = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if event.name == "save.written":
            reached.set()
            assert go_on.wait(WAIT_S)

    options = make_options(on_event=hold, **SMALL)
    handle = cloudckpt.async_save(state_of(1.0), f"{root}/c", no_dist=True, options=options)
    assert reached.wait(WAIT_S)
    assert handle.cancel()
    go_on.set()
    assert isinstance(handle.exception(WAIT_S), cloudckpt.errors.SaveCancelledError)
    cloudckpt.verify(f"{root}/a")
    store = memory.at("steps/b").inner
    store.delete([next(iter(store.list("data/"))).key])
    cloudckpt.load_latest(state_of(0.0), root, no_dist=True)


def removals(memory: Memory) -> None:
    """By retention, `gc` and `delete`; and each of them in vain."""
    root = memory.uri("kept/x").rpartition("/")[0]
    with cloudckpt.CheckpointManager(root, keep_last=1, async_=False, options=make_options(**SMALL)) as manager:
        manager.save(1, state_of(1.0))
        manager.save(2, state_of(2.0))
        manager.wait()
        memory.at(manager.uri_of(2).removeprefix(memory.uri("")).lstrip("/")).fail("delete", times=1000)
        manager.save(3, state_of(3.0))
        manager.wait()
    save(memory.uri("litter"), 1.0)
    put(memory.at("litter").inner, f"data/{LONG_AGO}/0-0.safetensors")
    cloudckpt.gc(memory.uri("litter"), older_than=0.0, dry_run=False)
    put(memory.at("litter").inner, f"data/{LONG_AGO}/0-0.safetensors")
    memory.at("litter").fail("delete", times=1000)
    with pytest.raises(cloudckpt.errors.GarbageLeftError):
        cloudckpt.gc(memory.uri("litter"), older_than=0.0, dry_run=False, options=Options(retries=1))
    save(memory.uri("doomed"), 1.0)
    cloudckpt.delete(memory.uri("doomed"))
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.delete(memory.uri("doomed"))


def stalls(server: Server) -> None:
    """A part, and then a range, that a second request has to bring."""
    values = {"w": torch.arange(10 * MIB, dtype=torch.float32)}

    def options_at(url: str) -> Options:
        storage = {**server.storage_options, "endpoint_url": url}
        return make_options(storage_options=storage, connections=2, part_bytes=5 * MIB, request_bytes=8 * MIB)

    rules = (
        WireRule(action=StallRequest(after_bytes=MIB), method="PUT", path=r"/data/.*partNumber=", skip=4),
        WireRule(action=StallAnswer(after_bytes=MIB), method="GET", path=r"/data/", skip=4),
    )
    with Wire(server.endpoint_url, *rules) as wire:
        cloudckpt.save(values, "s3://told/run", no_dist=True, options=options_at(wire.url))
        loaded = {"w": torch.zeros(10 * MIB)}
        cloudckpt.load(loaded, "s3://told/run", no_dist=True, options=options_at(wire.url))
        assert wire.num_acted == 2
    assert torch.equal(loaded["w"], values["w"])


def test_every_event_is_told_by_what_it_is_about(told: list[Event], memory: Memory, server: Server) -> None:
    """If this fails, the document lists an event that nothing tells any more, or does not list one that is told."""
    saves_and_loads(memory)
    removals(memory)
    before = len(told)
    stalls(server)
    assert sorted({event.name for event in told}) == sorted(EVENTS)
    hedges = [event for event in told[before:] if event.name == "hedge"]
    assert {event.uri for event in hedges} == {"s3://told/run"}
    begun = {event.operation: event.name for event in told if event.name in ("save.begun", "load.begun")}
    assert {begun[event.operation] for event in hedges} == {"save.begun", "load.begun"}
