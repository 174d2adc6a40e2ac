"""Subscribers that take their time."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.in_memory import Memory

import cloudckpt
from cloudckpt import Event, Options, telemetry

WAIT_S = 60.0


@pytest.mark.parametrize("name", ["save.set_up", "save.part_uploaded", "save.written", "save.committed", "save.done"])
def test_one_that_hangs_holds_up_no_training(memory: Memory, name: str) -> None:
    """If this fails, a dashboard that does not answer stops the training, or a save that it held up is not whole."""
    reached, go_on = threading.Event(), threading.Event()

    def hang(event: Event) -> None:
        if event.name == name:
            reached.set()
            assert go_on.wait(WAIT_S)

    end = telemetry.subscribe(hang)
    try:
        options = Options(part_bytes=16384, tile_bytes=4096, object_bytes=65536, timeout_s=5.0)
        handle = cloudckpt.async_save({"w": torch.ones(50_000)}, memory.uri(), no_dist=True, options=options)
        assert reached.wait(WAIT_S)
        handle.staged.result(WAIT_S)  # the training goes on
        assert not handle.done()
    finally:
        go_on.set()
        end()
    handle.result(WAIT_S)
    loaded = {"w": torch.zeros(50_000)}
    cloudckpt.load(loaded, memory.uri(), no_dist=True)
    assert torch.equal(loaded["w"], torch.ones(50_000))
