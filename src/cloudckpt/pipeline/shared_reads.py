"""Reads that several ranks plan alike: one rank makes each of them, and sends the bytes to the others.

See ``docs/design/042-read-once.md``.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Protocol

import torch

from cloudckpt._workers import start_in_thread
from cloudckpt.errors import CheckpointError
from cloudckpt.io.reads import RangeRead
from cloudckpt.options import MIB
from cloudckpt.tensors.tensor_bytes import bytes_view

_NUM_PLACING_THREADS = 2


class MemoryTransfer(NamedTuple):
    """Memory to send to `rank`, or to receive from it. `tag` tells the transfers between two ranks apart."""

    rank: int
    tag: int
    memory: torch.Tensor


class Ranks(Protocol):
    """The collectives that an exchange needs (`cloudckpt.dcp.ranks.collectives.CollectiveCall`)."""

    rank: int

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""

    def exchange(self, sends: Sequence[MemoryTransfer], receives: Sequence[MemoryTransfer]) -> None:
        """Send and receive, directly after another collective."""


class SharedRange(NamedTuple):
    """Bytes ``[begin, end)`` of an object, which `reader` reads and sends to the `receivers`."""

    object_index: int
    begin: int
    end: int
    reader: int
    receivers: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def plan_rounds(offers: Sequence[Sequence[tuple[int, int, int]]], *, read_bytes: int) -> list[list[SharedRange]]:
    """Share out the ranges that several ranks offer among these, by bytes, and divide them into rounds.

    `offers` has the ranges of each rank: object, begin, end. In a round, a rank reads at most 1/8 of `read_bytes`, and
    receives at most 3/8, unless that is one range. All ranks compute the same rounds.
    """
    ranks_of: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, ranges in enumerate(offers):
        for offered in ranges:
            ranks_of[offered].append(rank)
    share_bytes = [0] * len(offers)
    turns: list[tuple[int, SharedRange]] = []
    for (index, begin, end), ranks in sorted(ranks_of.items()):
        if len(ranks) > 1:
            reader = min(ranks, key=share_bytes.__getitem__)
            shared = SharedRange(index, begin, end, reader, tuple(rank for rank in ranks if rank != reader))
            turns.append((share_bytes[reader], shared))
            share_bytes[reader] += end - begin
    rounds: list[list[SharedRange]] = []
    held: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for _, shared in sorted(turns):  # the readers take turns
        uses = [(shared.reader, True), *((rank, False) for rank in shared.receivers)]
        if not rounds or any(8 * (held[use] + shared.num_bytes) > read_bytes * (1 if use[1] else 3) for use in uses):
            rounds.append([])
            held.clear()
        rounds[-1].append(shared)
        for use in uses:
            held[use] += shared.num_bytes
    return rounds


class SharedReads:
    """The reads that this rank shares with others in one load.

    All ranks make the same steps, also those that share nothing. In a step, each rank says a word to all ranks, and
    then may send and receive. A rank that fails says None in place of its next word (`leave`). All ranks stop there, so
    none waits for bytes that do not come.

    Args:
        ranks: The collectives of the load.
        takes_part: This rank offers its reads.

    """

    max_range_bytes = 2 * MIB
    """16 of them are what a rank reads in a round with the default `read_bytes`."""

    def __init__(self, ranks: Ranks, *, takes_part: bool) -> None:
        self._ranks, self._takes_part = ranks, takes_part
        self._is_awaited = True
        """The other ranks wait for a word of this one."""
        self._rounds: list[list[SharedRange]] = []
        self._buffer_bytes = 0
        self._requests: dict[tuple[int, int, int], RangeRead] = {}
        """The requests of this rank whose bytes are not in the tensors yet."""
        self._free: list[torch.Tensor] = []
        self.num_bytes_received = 0
        self.is_stopped = False
        """True once another rank has failed."""

    def plan(self, requests: Sequence[RangeRead], *, read_bytes: int) -> bool:
        """Agree with the other ranks on the reads to share. Returns False if no ranks have any in common.

        `read_bytes` is `Options.read_bytes`.
        """
        self._requests = {(read.object_index, read.begin, read.end): read for read in requests}
        offers = self._gather(([*self._requests] if self._takes_part else [], read_bytes))
        self._rounds = plan_rounds([ranges for ranges, _ in offers], read_bytes=min(most for _, most in offers))
        self._buffer_bytes = max((shared.num_bytes for ranges in self._rounds for shared in ranges), default=0)
        self._is_awaited = bool(self._rounds)
        return self._is_awaited

    def run(
        self, read: Callable[..., None], read_all: Callable[..., Iterator[Any]], stop: Callable[[], None]
    ) -> Generator[RangeRead, None, None]:
        """Yield each request once its bytes are in the tensors: first those that are shared, then the others.

        The reads of a round go on while the round before it is exchanged and placed. `read` reads one request into the
        tensors (`CheckpointReader.read_tiles`), `read_all` calls a function for each of many (`run_as_completed`), and
        `stop` ends reads.
        """
        rank, ahead = self._ranks.rank, self._begin_reads(0, read, read_all)
        try:
            for number, ranges in enumerate(self._rounds):
                here = ahead.result()
                # All that may fail on this rank alone comes before its word: the others then send and receive.
                ahead = self._begin_reads(number + 1, read, read_all)
                received = {shared: self._take_memory(shared) for shared in ranges if rank in shared.receivers}
                self._gather(True)  # noqa: FBT003  # any word but None
                self._exchange(ranges, here, received)
                here |= received
                self._is_awaited = number + 1 < len(self._rounds)

                def place(shared: SharedRange, here: dict[SharedRange, torch.Tensor] = here) -> None:
                    is_received = shared.reader != rank
                    read(self._requests[shared[:3]], received=bytes_view(here[shared]), is_verified=is_received)

                for shared in read_all([*here], place, num_threads=_NUM_PLACING_THREADS):
                    self.num_bytes_received += shared.num_bytes * (shared.reader != rank)
                    yield self._requests.pop(shared[:3])
                self._free += (memory.new_empty(0).set_(memory.untyped_storage()) for memory in here.values())
            self._free.clear()
            yield from read_all([*self._requests.values()], read)
        except BaseException:
            stop()
            raise
        finally:
            futures.wait([ahead])

    def leave(self) -> bool:
        """Say that this rank has failed, if the others wait for its word. Returns True if they do."""
        was_awaited, self._is_awaited = self._is_awaited, False
        if was_awaited:
            self._ranks.all_gather_object(None)
        return was_awaited

    def _gather(self, word: object) -> list[Any]:
        self._is_awaited = False  # a failure of the collective itself reaches all ranks
        words = self._ranks.all_gather_object(word)
        if None in words:
            self.is_stopped = True
            raise CheckpointError("another rank has failed", uri="")  # all ranks raise the error of that rank
        self._is_awaited = True
        return words

    def _begin_reads(
        self, number: int, read: Callable[..., None], read_all: Callable[..., Iterator[Any]]
    ) -> futures.Future[dict[SharedRange, torch.Tensor]]:
        """Read the ranges of this rank for a round into memory, in threads."""
        ranges = self._rounds[number] if number < len(self._rounds) else []
        memory = {shared: self._take_memory(shared) for shared in ranges if shared.reader == self._ranks.rank}

        def fetch(shared: SharedRange) -> None:
            view = bytes_view(memory[shared])
            read(self._requests[shared[:3]], open_views=lambda _: contextlib.nullcontext([view]), event=None)

        def fetch_all() -> dict[SharedRange, torch.Tensor]:
            for _ in read_all([*memory], fetch):
                pass
            return memory

        return start_in_thread(fetch_all, name="cloudckpt-share")

    def _exchange(
        self,
        ranges: Sequence[SharedRange],
        read: dict[SharedRange, torch.Tensor],
        received: dict[SharedRange, torch.Tensor],
    ) -> None:
        """Send what this rank has `read`, and fill what it has `received`."""
        tags = {shared: tag for tag, shared in enumerate(ranges)}
        self._is_awaited = False
        self._ranks.exchange(
            [
                MemoryTransfer(rank, tags[shared], memory)
                for shared, memory in read.items()
                for rank in shared.receivers
            ],
            [MemoryTransfer(shared.reader, tags[shared], memory) for shared, memory in received.items()],
        )

    def _take_memory(self, shared: SharedRange) -> torch.Tensor:
        if not self._free:  # memory that was used before needs no new pages
            self._free.append(torch.empty(self._buffer_bytes, dtype=torch.uint8, device="cpu"))
        return self._free.pop()[: shared.num_bytes]
