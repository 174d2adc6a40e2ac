"""`verify`: what it reads, what it makes of other saves' interference, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kit.in_memory import Memory, state_of
from tests.kit.options import make_options
from tests.kit.wrapped import permanent, transient

import cloudckpt
from cloudckpt import CorruptCheckpointError, Options
from cloudckpt.errors import StoreError
from cloudckpt.stores.base import crc32c_of

MIB = 2**20


def test_every_byte_is_read_once(memory: Memory) -> None:
    """If this fails, `verify` leaves bytes out, or costs twice what it should."""
    cloudckpt.save({"a": torch.randn(MIB), "b": torch.randn(100)}, memory.uri(), options=make_options(object_bytes=MIB))
    store = memory.at()
    store.calls.clear()
    report = cloudckpt.verify(memory.uri())
    sizes = [info.size_bytes for info in store.inner.list("data/")]
    assert len(sizes) == report.num_objects == 2
    assert report.num_bytes == sum(sizes) == store.num_bytes("read_into")
    assert (report.num_tensors, report.num_values) == (2, 0)
    assert report.bytes_per_s > 0
    cloudckpt.save({"number": 5, "empty": {}}, memory.uri("values"))
    assert cloudckpt.verify(memory.uri("values")).num_values == 2  # as `show` counts them


def test_verify_sees_damage_that_a_partial_load_skips(memory: Memory) -> None:
    """If this fails, either loads read what nobody asked for, or `verify` sees no more than a load does."""
    options = make_options(tile_bytes=4096)
    cloudckpt.save({"a": torch.ones(MIB), "b": torch.ones(MIB)}, memory.uri(), options=options)
    (key,) = memory.data_keys()
    good = memory.at().inner.read(key, max_bytes=2**30)
    for damaged in (bytes([good[0] ^ 1]) + good[1:], good[:20] + bytes([good[20] ^ 8]) + good[21:], good + b"\0"):
        memory.at().inner.put(key, [memoryview(damaged)], crc32c=crc32c_of([memoryview(damaged)]))
        state = {"b": torch.zeros(MIB)}
        cloudckpt.load(state, memory.uri(), options=options)
        assert bool((state["b"] == 1).all())
        with pytest.raises(CorruptCheckpointError, match=f"{key}.*(header|bytes were added)"):
            cloudckpt.verify(memory.uri(), options=options)


@pytest.mark.parametrize("tile_bytes", [4096, 16 * MIB])
def test_memory_is_bounded_by_the_option(memory: Memory, tile_bytes: int) -> None:
    """If this fails, verifying a checkpoint takes memory as its tiles are large, whatever the user allows."""
    cloudckpt.save(
        {"a": torch.randn(5 * MIB)}, memory.uri(), options=make_options(tile_bytes=tile_bytes, request_bytes=16 * MIB)
    )
    store = memory.at()
    store.calls.clear()
    allowed = make_options(tile_bytes=4096, request_bytes=2 * MIB, read_bytes=4 * MIB, connections=4)
    cloudckpt.verify(memory.uri(), options=allowed)
    sizes = [call.num_bytes for call in store.calls if call.operation == "read_into"]
    assert max(sizes) <= MIB  # four at once
    (key,) = memory.data_keys()
    data = bytearray(store.inner.read(key, max_bytes=2**30))
    data[17 * MIB] ^= 1
    store.inner.put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))
    with pytest.raises(CorruptCheckpointError, match="'a'"):
        cloudckpt.verify(memory.uri(), options=allowed)


def test_a_checkpoint_overwritten_during_verify_is_verified_again(memory: Memory) -> None:
    """If this fails, a checkpoint that is replaced while it is verified looks damaged."""
    cloudckpt.save(state_of(1.0), memory.uri())

    def overwrite() -> None:
        cloudckpt.save(state_of(2.0), memory.uri(), overwrite=True)

    memory.at().once_before("read_into", "data/", overwrite)
    report = cloudckpt.verify(memory.uri())
    state = state_of(-1.0)
    loaded = cloudckpt.load(state, memory.uri())
    assert loaded is not None
    assert report.attempt == loaded.attempt


@pytest.mark.parametrize(
    ("operation", "make"), [("head", permanent), ("read_into", transient), ("read", permanent), ("list", transient)]
)
def test_a_store_that_fails_is_not_damage(memory: Memory, operation: str, make: Callable[[str], StoreError]) -> None:
    """If this fails, whoever verifies during an outage deletes good checkpoints."""
    cloudckpt.save(state_of(1.0), memory.uri())
    memory.at().fail(operation, times=2)
    cloudckpt.verify(memory.uri())  # what passes is tried again
    error = make(operation)
    memory.at().fail(operation, error=lambda: error, times=100)
    with pytest.raises(StoreError) as caught:
        cloudckpt.verify(memory.uri(), options=Options(retries=1))
    assert caught.value is error
