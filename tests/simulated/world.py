"""One checkpoint, everything that saves, loads and removes it at once, and the judgement on what came of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

import torch
from tests.kit.options import make_options
from tests.simulated.oracle import Operation, can_have_happened
from tests.simulated.scheduler import Actor, Fate

import cloudckpt
from cloudckpt.commit.entries import MAX_FENCE_BYTES
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptCheckpointError,
)
from cloudckpt.stores.base import ObjectInfo, Store
from cloudckpt.stores.memory import BUCKETS, MemoryStore
from cloudckpt.testing.faults import WrappedStore

Kind: TypeAlias = Literal["save", "overwrite", "load", "delete", "gc"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_worlds = itertools.count()
_LARGE = 3000  # elements: more than a part, so that it goes up in parts
_SMALL = 3
Wrap = Callable[[Store], Store]


def options_for(wrap_store: Wrap) -> cloudckpt.Options:
    return make_options(
        wrap_store=wrap_store, connections=1, retries=1, timeout_s=3600.0, tile_bytes=4096, part_bytes=8192
    )


def state_of(value: int, num_elements: int) -> dict[str, Any]:
    return {"a": torch.full((num_elements,), value), "b": torch.full((2,), float(value))}


class _YoungFences(WrappedStore):
    """Lists fences as younger than anything that gc removes, which `older_than` promises while a save runs."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in self.inner.list(prefix):
            is_fence = info.key.rpartition("/")[2].startswith("manifest") and info.size_bytes <= MAX_FENCE_BYTES
            yield replace(info, modified_at=info.modified_at + timedelta(days=1)) if is_fence else info


class World:
    """The actors and the store, run in the order of a schedule. `trace` is the history in words."""

    def __init__(self) -> None:
        self.name = f"simulated-{next(_worlds)}"
        self.root = f"memory://{self.name}"
        self.uri = f"{self.root}/checkpoint"
        self.store = MemoryStore(self.name, "checkpoint")
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self._clock = itertools.count()
        self._values = itertools.count(1)
        self._all: list[tuple[str, int | None, Actor]] = []

    @property
    def running(self) -> list[Actor]:
        return [actor for _, _, actor in self._all if not actor.has_ended]

    @property
    def late(self) -> list[Actor]:
        """Actors with a request under way that nobody waits for."""
        return [actor for _, _, actor in self._all if actor.late]

    @property
    def num_begun(self) -> int:
        return len(self._all)

    def begin(self, kind: Kind, *, is_large: bool = False) -> Actor:
        if kind in ("save", "overwrite"):
            return self.save(overwrite=kind == "overwrite", is_large=is_large)
        return {"load": self.load, "delete": self.delete, "gc": self.collect}[kind]()

    def save(self, *, overwrite: bool, is_large: bool = False) -> Actor:
        value = next(self._values)
        state = state_of(value, _LARGE if is_large else _SMALL)

        def run(wrap: Wrap) -> None:
            cloudckpt.save(state, self.uri, no_dist=True, overwrite=overwrite, options=options_for(wrap))

        return self._begin("overwrite" if overwrite else "save", value, run)

    def load(self) -> Actor:
        def run(wrap: Wrap) -> int:
            for num_elements in (_SMALL, _LARGE):
                state = state_of(-1, num_elements)
                try:
                    cloudckpt.load(state, self.uri, no_dist=True, options=options_for(wrap))
                except cloudckpt.errors.StateDictMismatchError:
                    continue
                (value,) = {int(element) for tensor in state.values() for element in tensor.unique()}
                return value
            raise CheckpointChangedError("small and large ones took turns", uri=self.uri)

        return self._begin("load", None, run)

    def delete(self) -> Actor:
        return self._begin("delete", None, lambda wrap: cloudckpt.delete(self.uri, options=options_for(wrap)))

    def collect(self) -> Actor:
        """gc without mercy: whatever is not committed is old enough, but for the fence of a deletion."""

        def run(wrap: Wrap) -> None:
            options = options_for(lambda store: _YoungFences(wrap(store)))
            cloudckpt.gc(self.root, older_than=0.0, dry_run=False, options=options)

        return self._begin("gc", None, run)

    def step(self, actor: Actor, fate: Fate = "done") -> None:
        self.counts["steps"] += 1
        if fate != "done":
            self.counts[fate] += 1
        self.trace.append(actor.step(fate))
        if actor.has_ended:
            self._look_at(actor)

    def deliver(self, actor: Actor) -> None:
        """A request arrives on which nobody waits any more."""
        self.counts["delivered"] += 1
        self.trace.append(f"{actor.name}: a request arrives late")
        actor.last_arrival_at = next(self._clock)
        try:
            actor.late.pop(0)()
        except cloudckpt.errors.StoreError as error:
            self.trace.append(f"  and is refused: {error}")

    def run(self, actor: Actor) -> Actor:
        """To its end, undisturbed."""
        while not actor.has_ended:
            self.step(actor)
        return actor

    def finish(self) -> None:
        """All die that still run; then what is there must be what may be, and good for those that come after."""
        for actor in self.running:
            self.step(actor, "dies")
        self._check_nothing_is_left(self.run(self.collect()))
        found = self.run(self.load())
        self._require(
            found.error is None or isinstance(found.error, CheckpointNotFoundError),
            f"a load that is alone fails: {found.error!r}",
        )
        saved = self.run(self.save(overwrite=True))
        self._require(saved.error is None, f"a save that is alone fails: {saved.error!r}")

    def close(self) -> None:
        for actor in self.running:
            actor.end()
        BUCKETS.pop(self.name, None)

    def _begin(self, kind: str, value: int | None, function: Callable[[Wrap], Any]) -> Actor:
        name = f"{kind} {value}" if value is not None else f"{kind} #{len(self._all)}"
        self.trace.append(f"{name} begins")
        self.counts[kind] += 1
        actor = Actor(name, function, clock=self._clock)
        self._all.append((kind, value, actor))
        return actor

    def _look_at(self, actor: Actor) -> None:
        """Check the outcome of an actor, by itself and among all the others."""
        self.counts[f"{actor.name.split()[0]} -> {actor.outcome if actor.error or actor.is_dead else 'done'}"] += 1
        if actor.is_dead:
            return
        self._require(not isinstance(actor.error, CorruptCheckpointError), f"{actor.name}: {actor.error!r}")
        self._require(
            actor.error is None
            or actor.was_disturbed
            or isinstance(actor.error, cloudckpt.errors.CheckpointError)
            # What gc takes away from a save that runs makes that fail, which is all that may happen to it.
            or (isinstance(actor.error, cloudckpt.errors.ObjectNotFoundError) and self._others_removed(actor)),
            f"{actor.name} failed for no reason: {actor.error!r}",
        )
        operations = [found for item in self._all if (found := self._operation(*item)) is not None]
        self._require(can_have_happened(operations), "no order of events explains what was seen")

    def _operation(self, kind: str, value: int | None, actor: Actor) -> Operation | None:
        """Return what the oracle has to explain; None for what had no effect, nor may have had one."""
        changes = kind in ("save", "overwrite", "delete")
        error, begun_at = actor.error, actor.begun_at
        ended_at = math.inf if actor.ended_at is None else actor.ended_at
        is_unknown = actor.is_dead or not actor.has_ended or isinstance(error, CommitUnknownError) or kind == "delete"
        found: Operation | None = None
        if error is None and actor.has_ended and not actor.is_dead and kind != "gc":
            found = Operation(
                "read" if kind == "load" else kind, value if changes else actor.result, begun_at, ended_at
            )
        elif changes and is_unknown:
            latest = math.inf if actor.late else max(ended_at, actor.last_arrival_at)
            found = Operation(kind, value, begun_at, latest, is_certain=False)
        elif kind == "load" and isinstance(error, CheckpointNotFoundError):
            found = Operation("read", None, begun_at, ended_at)
        elif kind == "save" and isinstance(error, CheckpointExistsError) and not self._others_removed(actor):
            found = Operation("refused", value, begun_at, ended_at)
        return found

    def _others_removed(self, actor: Actor) -> bool:
        """Return True if a deletion or gc came between. Then a save can be refused without another's commit."""
        return any(kind in ("delete", "gc") and other.begun_at < (actor.ended_at or 0) for kind, _, other in self._all)

    def _check_nothing_is_left(self, collector: Actor) -> None:
        self._require(collector.error is None, f"gc fails: {collector.error!r}")
        attempts = {info.key.split("/")[1] for info in self.store.list("data/")}
        self._require(len(attempts) <= 1, f"gc leaves data of {attempts}")
        self._require(not list(self.store.list_uploads()), "gc leaves unfinished uploads")

    def _require(self, condition: bool, what: str) -> None:  # noqa: FBT001
        assert condition, "\n".join([what, "schedule:", *self.trace])
