"""The exchange of shared reads between ranks that are threads, and its plan."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.options import make_options

import cloudckpt
from cloudckpt.commit.log import resolve
from cloudckpt.format.model import locate_chunk
from cloudckpt.io.boxes import Box
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.shared_reads import MemoryTransfer, SharedReads, plan_rounds
from cloudckpt.pipeline.wanted_items import WantedItems, new_wanted_box
from cloudckpt.report import LoadReport
from cloudckpt.uri import parse_location

TIMEOUT_S = 60.0
KIB = 1024
OPTIONS = make_options(tile_bytes=4 * KIB, part_bytes=64 * KIB, request_bytes=32 * KIB, read_bytes=256 * KIB)
TENSOR = torch.arange(200_000, dtype=torch.int32)


class Group:
    """The state that the threads share."""

    def __init__(self, size: int, harm: Callable[[torch.Tensor], None]) -> None:
        self.size, self.harm = size, harm
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.words: dict[int, Any] = {}
        self.sent: dict[tuple[int, int, int], torch.Tensor] = {}


class ThreadRank:
    """The collectives of one thread. `Group.harm` changes what arrives."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self.rank = group, rank

    def all_gather_object(self, value: Any) -> list[Any]:
        self._group.words[self.rank] = value
        self._group.barrier.wait()
        words = [self._group.words[rank] for rank in range(self._group.size)]
        self._group.barrier.wait()
        return words

    def exchange(self, sends: Sequence[MemoryTransfer], receives: Sequence[MemoryTransfer]) -> None:
        group = self._group
        group.sent.update({(self.rank, send.rank, send.tag): send.memory for send in sends})
        group.barrier.wait()
        for receive in receives:
            receive.memory.copy_(group.sent.pop((receive.rank, self.rank, receive.tag)))
            group.harm(receive.memory)
        group.barrier.wait()
        assert not group.sent


def load_on_threads(place: Path, harm: Callable[[torch.Tensor], None]) -> list[LoadReport]:
    """Load the tensor on three ranks, compare it, and return the reports."""
    group = Group(3, harm)

    def load(rank: int) -> LoadReport:
        context = Context(parse_location(place), OPTIONS, rank=rank)
        reader, target = CheckpointReader(context, resolve(context.client).manifest), torch.zeros_like(TENSOR)
        stored = reader.manifest.tensors["w"]
        wanted = [
            new_wanted_box(
                "w",
                locate_chunk(stored, chunk),
                Box((0,), chunk.lengths),
                target[chunk.offsets[0] : chunk.offsets[0] + chunk.lengths[0]],
            )
            for chunk in stored.chunks
        ]
        report = reader.read(WantedItems(wanted), shared=SharedReads(ThreadRank(group, rank), takes_part=True))
        assert torch.equal(target, TENSOR)
        return report

    with ThreadPoolExecutor(group.size) as threads:
        return list(threads.map(load, range(group.size)))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    cloudckpt.save({"w": TENSOR}, tmp_path / "c", no_dist=True, options=OPTIONS)
    return tmp_path / "c"


def test_each_byte_is_read_once(place: Path) -> None:
    """If this fails, ranks read what another has read for them."""
    reports = load_on_threads(place, lambda _: None)
    assert sum(report.num_bytes_read for report in reports) <= 1.02 * TENSOR.nbytes
    assert all(report.num_bytes_read + report.num_bytes_received >= TENSOR.nbytes for report in reports)


def test_piece_that_arrives_damaged_is_read_from_the_store(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, bits that flip between two ranks are loaded into the model."""
    numbers = itertools.count()

    def harm(memory: torch.Tensor) -> None:
        if not next(numbers) % 3:
            memory[-1] ^= 1
            memory[0] ^= 128

    load_on_threads(place, harm)


OFFERS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), unique=True, max_size=12), min_size=1, max_size=6
)


@given(OFFERS, st.integers(8, 200))
def test_plan_gives_each_range_one_reader_and_all_others_that_want_it(
    offers: list[list[tuple[int, int]]], read_bytes: int
) -> None:
    """If this fails, ranks wait for bytes that nobody sends, a range is read twice, or too much is held."""
    ranges = [[(index, 10 * begin, 10 * begin + 3 + begin) for index, begin in offer] for offer in offers]
    wanted_by: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
    for rank, offer in enumerate(ranges):
        for offered in offer:
            wanted_by[offered].add(rank)
    rounds = plan_rounds(ranges, read_bytes=read_bytes)
    pieces = [piece for of_round in rounds for piece in of_round]
    found = {piece[:3]: {piece.reader, *piece.receivers} for piece in pieces}
    assert found == {offered: ranks for offered, ranks in wanted_by.items() if len(ranks) > 1}
    assert len(pieces) == len(found)
    assert all(piece.reader not in piece.receivers for piece in pieces)
    for of_round in rounds:
        for rank in range(len(offers)):
            own = [piece.num_bytes for piece in of_round if piece.reader == rank]
            received = [piece.num_bytes for piece in of_round if rank in piece.receivers]
            assert len(of_round) == 1 or sum(own) <= read_bytes / 8
            assert len(of_round) == 1 or sum(received) <= 3 * read_bytes / 8


def test_ranks_read_equal_parts_in_turn() -> None:
    """If this fails, one rank reads while the others wait for it."""
    offer = [(0, begin, begin + 10) for begin in range(0, 400, 10)]
    rounds = plan_rounds([offer] * 4, read_bytes=80)
    assert {tuple(sorted(piece.reader for piece in of_round)) for of_round in rounds} == {(0, 1, 2, 3)}
