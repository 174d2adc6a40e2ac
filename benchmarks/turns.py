"""One turn of one system: what is done in it, and what is counted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from benchmarks.fleet import Measured
from benchmarks.payloads import Payload
from benchmarks.results.model import Sample
from benchmarks.servers import Counts
from benchmarks.state import Layout
from benchmarks.sweeps import IN_BACKGROUND, NUM_PARTS_OF_A_SHARD, Cell, Verb

Item = TypeVar("Item")


class Ranks(Protocol):
    """Methods of a `Fleet` that a turn needs."""

    def do(self, command: str) -> object: ...
    def prepare(self, payload: Payload, layout: Layout) -> None: ...
    def measure(self, verb: Verb, uri: str) -> list[Measured]: ...


class Store(Protocol):
    """Methods of a `Place` that a turn needs."""

    def new_uri(self, system: str) -> str: ...
    def clear(self) -> None: ...
    def counts(self) -> Counts | None: ...


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """`items` beginning with another one at each `turn`, so that none always runs first."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def num_bytes_of(verb: Verb, payload: Payload) -> int:
    """Return the bytes that the verb moves or wants, each counted once."""
    if verb != "resharded_load":
        return payload.num_bytes
    whole = sum(group.count * group.tensor_bytes for group in payload.tensors if not group.shape)
    return whole + (payload.num_bytes - whole) // NUM_PARTS_OF_A_SHARD


def turn(cell: Cell, ranks: Ranks, store: Store, *, system: str, repetition: int) -> Iterator[tuple[Verb, Sample]]:
    """Do what the cell says once, and hand out each sample as it is there.

    Only what is counted is yielded: a load needs a save. In the warm-up, repetition 0, all that is loaded is compared
    to the bit, outside of what is timed. Stored bytes are forgotten after each part.
    """
    this = _Turn(cell=cell, ranks=ranks, store=store, system=system, repetition=repetition)
    wanted = set(cell.verbs)
    if wanted & {"save", "load", *IN_BACKGROUND}:
        yield from this.sharded(wanted)
    if "resharded_load" in wanted:
        yield "resharded_load", this.resharded()
    ranks.do("release")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    cell: Cell
    ranks: Ranks
    store: Store
    system: str
    repetition: int

    def sharded(self, wanted: Collection[Verb]) -> Iterator[tuple[Verb, Sample]]:
        """Save, load and save in the background, as far as it is wanted, with the same tensors."""
        self.ranks.prepare(self.cell.payload, "sharded")
        if "save" in wanted or "load" in wanted:
            uri = self.store.new_uri(self.system)
            saved = self._measured("save", uri)
            if "save" in wanted:
                yield "save", saved
            if "load" in wanted:
                yield "load", self._loaded("load", uri)
            self.store.clear()
        for verb in IN_BACKGROUND:
            if verb in wanted:
                yield verb, self._measured(verb, self.store.new_uri(self.system))
                self.store.clear()

    def resharded(self) -> Sample:
        """Save the whole tensors, and load a part of each shard."""
        self.ranks.prepare(self.cell.payload, "sharded")
        uri = self.store.new_uri(self.system)
        self.ranks.measure("save", uri)
        self.ranks.prepare(self.cell.payload, "part")
        sample = self._loaded("resharded_load", uri)
        self.store.clear()
        return sample

    def _loaded(self, verb: Verb, uri: str) -> Sample:
        self.ranks.do("zero")
        sample = self._measured(verb, uri)
        if self.repetition == 0:
            self.ranks.do("verify")
        return sample

    def _measured(self, verb: Verb, uri: str) -> Sample:
        before = self.store.counts()
        of_ranks = self.ranks.measure(verb, uri)
        after = self.store.counts()
        sample = _sample(of_ranks, self.repetition)
        if before is None or after is None:
            return sample
        sent = after.num_bytes_sent - before.num_bytes_sent if "load" in verb else sample.num_bytes_read
        return replace(sample, num_bytes_read=sent, num_requests=after.num_requests - before.num_requests)


def _sample(of_ranks: Sequence[Measured], repetition: int) -> Sample:
    peaks = [one.usage.extra_peak_bytes for one in of_ranks if one.usage.extra_peak_bytes is not None]
    blocked = [one.outcome.blocking_s for one in of_ranks if one.outcome.blocking_s is not None]
    read = [one.outcome.num_bytes_read for one in of_ranks if one.outcome.num_bytes_read is not None]
    return Sample(
        repetition=repetition,
        wall_s=max(one.usage.wall_s for one in of_ranks),
        cpu_s=sum(one.usage.cpu_s for one in of_ranks),
        peak_bytes=max(peaks, default=None),
        num_bytes_read=sum(read) if len(read) == len(of_ranks) else None,
        blocking_s=max(blocked, default=None),
        steps_per_s=min(_said(of_ranks, "steps_per_s"), default=None),
        steps_per_s_alone=min(_said(of_ranks, "steps_per_s_alone"), default=None),
        waiting_share=max(_said(of_ranks, "waiting_share"), default=None),
        copy_s=max(_said(of_ranks, "copy_s"), default=None),
    )


def _said(of_ranks: Sequence[Measured], name: str) -> list[float]:
    return [reported for one in of_ranks if (reported := getattr(one.outcome, name)) is not None]
