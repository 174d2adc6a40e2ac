"""Ranks of one job, whose calls are the real ones (`cloudckpt._ranks.group.Call`) on the scheduler's clock, store and
threads, and on a gloo of its own.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pytest
import torch.distributed as dist
from tests.ranks.scheduler import Condition, Lock, Scheduler, Task, Thread
from tests.ranks.store import Store
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._ranks import group as groups
from cloudckpt._ranks import meetings, notices, signs, waiting
from cloudckpt._ranks.company import accompanied, failure_by_loss
from cloudckpt._ranks.group import Call
from cloudckpt._ranks.met_group import MetGroup
from cloudckpt.errors import RankLostError

TIMEOUT_S = 4.0
NUM_COLLECTIVES = 2
_LONGEST_PAUSE_S = 0.2
"""Before a call; mostly it is far shorter."""

Kind: TypeAlias = Literal[
    "makes", "misses", "leaves", "drops", "is interrupted", "dies", "differs", "is slow", "is late"
]
"""What a rank does in a call: makes it; is not asked for it; leaves it by an error of its own; forgets to end it; gets
Ctrl-C in it; its process ends in it; comes to do something else; takes longer than `timeout_s` for its own part; comes
so late.
"""


PART_S: dict[Kind, float] = {"is slow": 3 * TIMEOUT_S, "is late": 1.5 * TIMEOUT_S}
"""How long a rank is about something of its own, in a call and before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What one rank does when the job comes to one save."""

    kind: Kind = "makes"
    at: int = 0
    """After how many collectives or, for what comes at any moment, steps of its thread."""

    def __str__(self) -> str:
        return self.kind if self.kind in ("makes", "misses", "differs", "is late") else f"{self.kind} at {self.at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What became of an act, for its rank."""

    outcome: Literal["made", "failed", "left", "missed", "died"]
    lost: tuple[int, ...] = ()
    text: str = ""
    begun_s: float = 0.0
    ended_s: float = 0.0

    def __str__(self) -> str:
        why = self.text.partition("given up on ")[2].partition(". Nothing")[0] or self.text
        return f"{self.outcome} {list(self.lost) if self.text else ''} {why} [{self.begun_s:.2f}, {self.ended_s:.2f}]"


Program: TypeAlias = Sequence[Sequence[Act]]
"""Of each save, in order, what each rank does."""


@dataclass(slots=True)
class Gathering:
    """A collective: nobody comes out of it before all have come to it."""

    waiting: list[Task] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    """What each rank came with."""


class World:
    """`is_in_step`: the job has the ranks meet between saves, as by training."""

    def __init__(
        self,
        program: Program,
        *,
        seed: int | str,
        delays: Mapping[int, float],
        is_in_step: bool,
        uris: Sequence[str] | None = None,
    ) -> None:
        self.program, self.is_in_step = program, is_in_step
        self.uris = [f"save-{number}" for number in range(len(program))] if uris is None else uris
        self.num_ranks = len(program[0])
        self.scheduler = Scheduler(seed, delays=delays)
        self.store = Store(self.scheduler)
        self.gatherings: dict[tuple[str, int], Gathering] = {}
        self.told: list[list[Told]] = [[] for _ in range(self.num_ranks)]
        self.dead: set[int] = set()
        self._random = random.Random(seed)
        self._arrived = [0] * self.num_ranks
        self._before: list[Task] = []

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self._put_in_place(patch)
            mains = [
                self.scheduler.spawn(lambda r=rank: self._work(r), rank=rank, name=f"rank {rank}")
                for rank in range(self.num_ranks)
            ]
            self.scheduler.run(mains)

    def __str__(self) -> str:
        """What each rank did, and what it was told."""
        lines = []
        for rank, told in enumerate(self.told):
            acts = [row[rank] for row in self.program]
            lines += [f"rank {rank}:", *(f"  {act} -> {one}" for act, one in zip(acts, told, strict=False))]
        return "\n".join(lines)

    def gather(self, key: tuple[str, int], label: str, timeout_s: float) -> None:
        """As gloo does it, which is not interrupted."""
        scheduler, me = self.scheduler, self.scheduler.me()
        one = self.gatherings.setdefault(key, Gathering())
        one.labels[me.rank] = label
        deadline_s = scheduler.now_s + timeout_s
        if len(one.labels) == self.num_ranks:
            for task in one.waiting:
                scheduler.wake(task)
        one.waiting.append(me)
        while len(one.labels) < self.num_ranks:
            if scheduler.now_s >= deadline_s or self.dead - one.labels.keys():
                raise RuntimeError("Timed out waiting, or connection closed by peer")
            scheduler.park(deadline_s)

    def _work(self, rank: int) -> None:
        me, source = self.scheduler.me(), _Source(self, rank)
        for number, acts in enumerate(self.program):
            if self.is_in_step:
                self._come(number, rank)
            self.scheduler.sleep(_LONGEST_PAUSE_S * self._random.random() ** 4)
            begun_s = self.scheduler.now_s
            outcome, error = self._act(source, acts[rank], self.uris[number])
            me.interrupted_at = math.inf
            self.told[rank].append(
                Told(
                    outcome=outcome,  # type: ignore[arg-type]
                    lost=() if error is None else error.ranks,
                    text="" if error is None else str(error),
                    begun_s=begun_s,
                    ended_s=self.scheduler.now_s,
                )
            )

    def _act(self, source: _Source, act: Act, uri: str) -> tuple[str, RankLostError | None]:
        me = self.scheduler.me()
        if act.kind == "misses":
            return "missed", None
        if act.kind == "is late":
            self.scheduler.sleep(PART_S[act.kind])
        if act.kind == "is interrupted":
            me.interrupted_at = me.num_steps + act.at
        try:
            self._call(source, act, uri if act.kind != "differs" else f"{uri}-differs")
        except CheckpointException as failure:
            error, *_ = [error for error, _ in failure.failures.values()]
            if not isinstance(error, RankLostError):
                raise
            return "failed", error
        except (KeyboardInterrupt, _OwnError):
            return "left", None
        return ("left" if act.kind == "drops" else "made"), None

    def _call(self, source: _Source, act: Act, uri: str) -> None:
        try:
            call = Call((source, "foreground"), doing="saving", uri=uri, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        except RankLostError as error:
            raise failure_by_loss(error) from None
        if act.kind == "drops":
            try:
                for number in range(min(act.at, NUM_COLLECTIVES)):
                    call.group.together(f"{uri}/{number}")  # type: ignore[attr-defined]
            except RankLostError as error:
                raise failure_by_loss(error) from None
            return
        with accompanied(call):
            for number in range(NUM_COLLECTIVES):
                if act.kind == "leaves" and act.at == number:
                    raise _OwnError
                if act.kind == "is slow" and act.at == number:
                    self.scheduler.sleep(PART_S[act.kind])
                if act.kind == "dies" and act.at == number:
                    self._die(source.rank)
                call.group.together(f"{uri}/{number}")  # type: ignore[attr-defined]
            if act.kind == "leaves" and act.at >= NUM_COLLECTIVES:
                raise _OwnError

    def _die(self, rank: int) -> None:
        self.dead.add(rank)
        self.told[rank] += [Told(outcome="died")] * (len(self.program) - len(self.told[rank]))
        for one in self.gatherings.values():
            for task in one.waiting:
                self.scheduler.wake(task)
        self._arrived[rank] = len(self.program)
        self.scheduler.kill(rank)

    def _come(self, number: int, rank: int) -> None:
        self._arrived[rank] = number + 1
        for task in self._before:
            self.scheduler.wake(task)
        self._before.clear()
        while min(self._arrived) <= number:
            self._before.append(self.scheduler.me())
            self.scheduler.park()

    def _put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        scheduler = self.scheduler
        clock = types.SimpleNamespace(monotonic=lambda: scheduler.now_s)
        for module in (groups, meetings, notices, waiting):
            patch.setattr(module, "time", clock)
        patch.setattr(notices, "threading", types.SimpleNamespace(RLock=lambda: Lock(scheduler)))
        patch.setattr(notices, "Condition", Condition)
        patch.setattr(notices, "Thread", lambda run, *, name, daemon: Thread(scheduler, run, name=name))
        patch.setattr(notices, "under", lambda prefix, store: store.under(prefix))
        patch.setattr(notices, "connection_of_its_own", lambda store: store)
        patch.setattr(signs, "own_process", lambda: f"{scheduler.me().rank}:0:here")
        patch.setattr(waiting, "has_ended", lambda process: int(process.partition(":")[0]) in self.dead)
        torch_distributed = types.SimpleNamespace(
            get_rank=lambda: scheduler.me().rank,
            get_process_group_ranks=lambda _: list(range(self.num_ranks)),
            PrefixStore=lambda prefix, store: store.under(prefix),
        )
        # What is left of a call when the world is over is nobody's.
        patch.setattr(groups, "os", types.SimpleNamespace(getpid=lambda: int(not scheduler.is_over)))
        patch.setattr(groups, "dist", torch_distributed)
        patch.setattr(groups, "c10d", lambda: _Classes)
        patch.setattr(groups, "new_group", lambda ranks, founding: _Group(self, founding))
        for name in ("_companies", "_groups", "_num_calls"):
            patch.setattr(groups, name, {})


class _OwnError(Exception):
    """That DCP does not hand on."""


class _Classes:
    """Of torch's, as far as they are asked for."""

    TCPStore = dist.TCPStore

    class PrefixStore:
        def __new__(cls, prefix: str, store: Store) -> Any:
            return store.under(prefix)


class _Source:
    """The user's group, as one rank sees it."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self._store = world.store

    def get_group_store(self) -> Store:
        return self._store


class _Group:
    """As `MetGroup`, whose meeting is the real one."""

    _meet: Any = MetGroup._meet
    _done: Any = MetGroup._done

    def __init__(self, world: World, founding: meetings.Meetings) -> None:
        self._world = world
        self.begin_anew = lambda: None
        self.meet_by(founding)

    def meet_by(self, founding: meetings.Meetings) -> None:
        self._prefix, self._num_gathered, self._timeout_s = founding.store.prefix, 0, founding.timeout_s
        self._gather("connecting")
        self.meetings = founding

    def wait_at_most(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def together(self, label: str) -> None:
        self._meet()
        self._done(lambda: self._gather(label))

    def _gather(self, label: str) -> Any:
        self._num_gathered += 1
        self._world.gather((self._prefix, self._num_gathered), label, self._timeout_s)
        return types.SimpleNamespace(wait=lambda: None)
