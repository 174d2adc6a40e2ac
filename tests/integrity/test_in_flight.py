"""Bits that flip between store and memory: the tile is read again, and only a third bad read counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.kit.in_memory import Memory
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.wrapped import WrappedStore

import cloudckpt
from cloudckpt import CorruptCheckpointError, Options
from cloudckpt.stores.base import Store, Views

TILE_BYTES = 4096
SETTINGS = {"tile_bytes": TILE_BYTES, "request_bytes": 4 * TILE_BYTES, "connections": 1, "max_gap_bytes": 0}


class BadWire(WrappedStore):
    """Flips a bit in the first tile of each read whose number is in `bad`; the numbers count from 0."""

    def __init__(self, inner: Store, bad: Iterable[int]) -> None:
        super().__init__(inner)
        self.bad = set(bad)
        self.numbers = itertools.count()
        self.reads: list[tuple[int, int]] = []

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        super().read_into(key, offset_bytes, views)
        self.reads.append((offset_bytes, sum(len(view) for view in views)))
        if next(self.numbers) in self.bad:
            views[0][0] ^= 1


def values() -> dict[str, Any]:
    return {"a": torch.arange(5000), "b": torch.arange(9000).to(torch.bfloat16), "n": 5}


def blank() -> dict[str, Any]:
    return {"a": torch.zeros(5000, dtype=torch.int64), "b": torch.zeros(9000, dtype=torch.bfloat16), "n": 0}


def loaded(uri: str, options: Options) -> None:
    state = blank()
    cloudckpt.load(state, uri, options=options)
    assert_same(state, values())


def verified(uri: str, options: Options) -> None:
    cloudckpt.verify(uri, options=options)


@pytest.fixture
def uri(memory: Memory) -> str:
    cloudckpt.save(values(), memory.uri(), options=make_options(tile_bytes=TILE_BYTES))
    return memory.uri()


def reads_of(call: Callable[[str, Options], None], uri: str, bad: Iterable[int]) -> list[tuple[int, int]]:
    wires: list[BadWire] = []

    def wrap(store: Store) -> Store:
        wires.append(BadWire(store, bad))
        return wires[-1]

    try:
        call(uri, make_options(**SETTINGS, wrap_store=wrap))
    finally:
        reads = [read for wire in wires for read in wire.reads]
    return reads


@pytest.mark.parametrize("call", [loaded, verified])
def test_one_bad_read_of_each_range_is_no_damage(uri: str, call: Callable[[str, Options], None]) -> None:
    """If this fails, a flaky network card makes good checkpoints look damaged."""
    good = reads_of(call, uri, ())
    assert len(good) >= 4
    for number, (offset, num_bytes) in enumerate(good):
        reads = reads_of(call, uri, {number})
        again = (offset, min(TILE_BYTES, num_bytes))  # one tile, not all that came with it
        assert reads == [*good[: number + 1], again, *good[number + 1 :]]


@pytest.mark.parametrize("call", [loaded, verified])
def test_three_bad_reads_are_damage(uri: str, call: Callable[[str, Options], None]) -> None:
    """If this fails, a load reads damaged bytes again for ever, or takes them."""
    for number in range(len(reads_of(call, uri, ()))):
        with pytest.raises(CorruptCheckpointError, match="safetensors"):
            reads_of(call, uri, {number, number + 1, number + 2})
