"""What one turn does and counts, with ranks and a store that note what they are told."""

from __future__ import annotations

from benchmarks.fleet import Measured
from benchmarks.measure import Usage
from benchmarks.outcomes import Outcome
from benchmarks.payloads import KIB, uniform
from benchmarks.sweeps import Cell
from benchmarks.turns import turn

SMALL = uniform(8, 64 * KIB)


class NotingRanks:
    """Two ranks that take the time they are given."""

    def __init__(self, store):
        self._store = store
        self.commands = []

    def do(self, command):
        self.commands.append(command)

    def prepare(self, payload, layout):
        assert payload == SMALL
        self.commands.append(layout)

    def measure(self, verb, uri):
        self.commands.append((verb, uri))
        self._store.sent += 100
        return [
            measured(wall_s=1.0, cpu_s=0.5, peak=10, outcome=Outcome(num_bytes_read=3, blocking_s=0.1)),
            measured(wall_s=2.0, cpu_s=0.25, peak=30, outcome=Outcome(num_bytes_read=4, blocking_s=0.3)),
        ]


class NotingStore:
    def __init__(self, *, counts=True):
        self._counts = counts
        self.sent = 5
        self.num_uris = 0
        self.num_cleared = 0

    def new_uri(self, system):
        self.num_uris += 1
        return f"s3://bucket/{system}-{self.num_uris}"

    def clear(self):
        self.num_cleared += 1

    def num_bytes_sent(self):
        return self.sent if self._counts else None


def measured(*, wall_s, cpu_s, peak, outcome):
    usage = Usage(wall_s=wall_s, cpu_s=cpu_s, extra_peak_bytes=peak, peak_method="VmHWM")
    return Measured(usage=usage, outcome=outcome)


def take(verbs, *, repetition=1, store=None):
    store = store or NotingStore()
    ranks = NotingRanks(store)
    cell = Cell(payload=SMALL, verbs=verbs)
    samples = dict(turn(cell, ranks, store, system="cloudckpt", repetition=repetition))
    return samples, ranks.commands, store


def test_the_warm_up_is_compared_to_the_bit():
    """A load would be timed with tensors that hold the right values already, or wrong values count as a fast load."""
    samples, commands, store = take(("save", "load"), repetition=0)
    uri = "s3://bucket/cloudckpt-1"
    assert commands == ["sharded", ("save", uri), "zero", ("load", uri), "verify", "release"]
    assert list(samples) == ["save", "load"]
    assert all(sample.repetition == 0 for sample in samples.values())
    assert store.num_cleared == 1


def test_ranks_are_put_together():
    """A save would be as fast as its fastest rank, or cost the CPU seconds of one."""
    samples, _, _ = take(("save", "load"), store=NotingStore(counts=False))
    save, load = samples["save"], samples["load"]
    assert (save.wall_s, save.cpu_s, save.peak_bytes, save.blocking_s) == (2.0, 0.75, 30, 0.3)
    assert load.num_bytes_read == 7
