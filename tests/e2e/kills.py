"""The ways to die in a save: at which step of the protocol, who, in which kind of save. Values alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from cloudckpt.events import EventName

Who = Literal["the coordinator", "another rank", "all ranks"]
How = Literal["save", "thread"]
Version = Literal["old", "new", "again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A moment of the protocol, as the rank sees it that comes to it first."""

    event: EventName
    nth: int = 1
    """The how many-eth event of this name."""
    when: Literal["at once", "carried out", "one key gone"] = "at once"
    """At the event; once the store has carried out the write after it, unanswered; or once one key is removed."""
    of_coordinator: bool = False
    """No other rank comes to it."""
    commits: bool = False
    """The new checkpoint counts from here on."""
    of_overwrite: bool = False
    """Only an overwrite comes to it."""
    leaves: bool = True
    """Something lies there that no checkpoint needs, on the way to the first commit."""


# A rank's one object goes up in three parts.
STEPS: Mapping[str, Step] = {
    "set up": Step(event="save.set_up", leaves=False),
    "first part": Step(event="save.part_uploaded", nth=1),
    "middle part": Step(event="save.part_uploaded", nth=2),
    "last part": Step(event="save.part_uploaded", nth=3),
    "before complete": Step(event="save.completing"),
    "complete carried out": Step(event="save.completing", when="carried out"),
    "after complete": Step(event="save.object_uploaded"),
    "all written": Step(event="save.written"),
    "before the manifest": Step(event="save.committing", of_coordinator=True),
    "manifest put carried out": Step(event="save.committing", when="carried out", of_coordinator=True, commits=True),
    "committed": Step(event="save.committed", of_coordinator=True, commits=True),
    "before old manifests go": Step(event="save.removing", of_coordinator=True, commits=True, of_overwrite=True),
    "removal of manifests carried out": Step(
        event="save.removing", when="carried out", of_coordinator=True, commits=True, of_overwrite=True
    ),
    "between manifests and data": Step(
        event="save.removing", nth=2, of_coordinator=True, commits=True, of_overwrite=True
    ),
    "in the middle of old data": Step(
        event="save.removing", nth=2, when="one key gone", of_coordinator=True, commits=True, of_overwrite=True
    ),
    "removal of data carried out": Step(
        event="save.removing", nth=2, when="carried out", of_coordinator=True, commits=True, of_overwrite=True
    ),
    "cleaned up": Step(event="save.cleaned_up", of_coordinator=True, commits=True, of_overwrite=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One way to die."""

    step: str
    who: Who = "the coordinator"
    how: How = "save"
    overwrite: bool = False
    world_size: int = 2

    def __str__(self) -> str:
        kind = "overwrite" if self.overwrite else "fresh"
        return f"{self.step}, {self.who} of {self.world_size}, {kind}, {self.how}"

    @property
    def moment(self) -> Step:
        """The step at which it kills."""
        return STEPS[self.step]

    @property
    def watching_rank(self) -> int:
        """The rank that comes to the step and sees to the killing."""
        return 0 if self.moment.of_coordinator or self.who == "the coordinator" else self.world_size - 1

    @property
    def victims(self) -> frozenset[int]:
        """The ranks that die."""
        return frozenset(range(self.world_size)) if self.who == "all ranks" else frozenset({self.watching_rank})

    @property
    def version_after(self) -> Version | None:
        """The one checkpoint that can be there."""
        if self.moment.commits:
            return "new"
        return "old" if self.overwrite else None


def _kills_at(name: str, world_sizes: Iterator[int]) -> list[Kill]:
    """Return each way to die at a step, each on as many ranks as comes next."""
    step = STEPS[name]
    return [
        Kill(step=name, who=who, how=how, overwrite=overwrite, world_size=next(world_sizes))
        for who, overwrite, how in itertools.product(get_args(Who), (False, True), get_args(How))
        if not (step.of_coordinator and who == "another rank") and (overwrite or not step.of_overwrite)
    ]


_world_sizes = itertools.cycle([2, 3, 4])
_BY_STEP = {name: _kills_at(name, _world_sizes) for name in STEPS}

ALL_KILLS = [kill for kills in _BY_STEP.values() for kill in kills]

KILL_AT_EACH_STEP = [kills[5 * number % len(kills)] for number, kills in enumerate(_BY_STEP.values())]
"""Each step once; who dies, how and over what changes from step to step."""

KILLS_ON_A_STORE = [
    Kill(step="middle part", who="another rank", world_size=3),
    Kill(step="complete carried out", how="thread", overwrite=True),
    Kill(step="before the manifest", who="all ranks"),
    Kill(step="manifest put carried out", overwrite=True),
    Kill(step="between manifests and data", how="thread", overwrite=True, who="all ranks"),
]
"""One for each state in which a store can be left."""
