"""What a manager keeps through any history of saves, overwrites, restarts and deaths, against an oracle of its own."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import settings as with_settings
from hypothesis import strategies as st
from tests.wrapped import Call, WrappedStore, permanent

import cloudckpt
from cloudckpt import CheckpointManager, Options
from cloudckpt.stores.base import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

WAIT_S = 60.0
CHANGES = {"put", "delete", "create_multipart", "complete_multipart", "abort_multipart"}
_names = itertools.count()
_T = TypeVar("_T")


class Life:
    """Of a process: after so many changes to the store, none reaches it any more, and nothing is answered."""

    def __init__(self, num_changes: int | None) -> None:
        self.num_left = math.inf if num_changes is None else num_changes

    def wrap(self, store: Store) -> Store:
        return _Mortal(store, self)


class _Mortal(WrappedStore):
    def __init__(self, inner: Store, life: Life) -> None:
        super().__init__(inner)
        self._life = life

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        if self._life.num_left < 0 or (call.operation in CHANGES and self._life.num_left == 0):
            self._life.num_left = -1
            raise permanent(call.operation)
        if call.operation in CHANGES:
            self._life.num_left -= 1
        return action()


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One step of a history."""

    step: int
    loss: float | None
    dies_after: int | None
    """Changes to the store."""


@dataclass(slots=True, kw_only=True)
class Oracle:
    """What has ever been committed, in the order of the commits: step, which save it was, its loss."""

    last: int
    every: int | None
    best: int
    commits: list[tuple[int, int, float | None]] = field(default_factory=list)

    def committed(self, step: int, number: int, loss: float | None) -> None:
        self.commits = [one for one in self.commits if one[0] != step] + [(step, number, loss)]

    def must_be_there(self) -> set[int]:
        """Whatever was removed, and by whoever died: these never are."""
        newest = {step for step, _, _ in self.commits[len(self.commits) - min(self.last, len(self.commits)) :]}
        multiples = {step for step, _, _ in self.commits if self.every is not None and step % self.every == 0}
        scored = [
            (loss, -order, step)
            for order, (step, _, loss) in enumerate(self.commits)
            if loss is not None and not math.isnan(loss)
        ]
        return newest | multiples | {step for _, _, step in sorted(scored)[: self.best]}


losses = st.none() | st.sampled_from([0.0, 1.0, 2.0, math.nan])
saves = st.builds(
    Save, step=st.integers(0, 9), loss=losses, dies_after=st.none() | st.integers(0, 14) | st.integers(2, 5)
)


@pytest.mark.faults
@with_settings(max_examples=25, deadline=None)
@given(
    history=st.lists(saves, min_size=1, max_size=9),
    last=st.integers(1, 3),
    every=st.none() | st.integers(2, 4),
    best=st.integers(0, 2),
)
def test_no_history_loses_what_is_kept(history: list[Save], last: int, every: int | None, best: int) -> None:
    """If this fails, some order of saves, overwrites and deaths costs a job a checkpoint that it relied on."""
    root = f"memory://history-{next(_names)}"
    oracle = Oracle(last=last, every=every, best=best)
    for number, save in enumerate(history):
        life = Life(save.dies_after)
        manager = CheckpointManager(  # a restart before each save: what it knows, it knows from the store
            root,
            keep_last=last,
            keep_every=every,
            keep_best=("loss", "min", best) if best else None,
            async_=False,
            options=Options(wrap_store=life.wrap, retries=0),
        )
        state = {"w": torch.full((64,), float(number)), "number": number}
        metrics = None if save.loss is None else {"loss": save.loss}
        with contextlib.suppress(cloudckpt.CloudckptError):
            manager.save(save.step, state, metrics=metrics, overwrite=True)
        manager.wait(WAIT_S)
        found = _what_is_there(root)
        if found.get(save.step) == number:
            oracle.committed(save.step, number, save.loss)
        known = {step: number for step, number, _ in oracle.commits}
        assert {step: known.get(step) for step in found} == found, "something else than what was committed last"
        assert oracle.must_be_there() <= set(found)
        if save.dies_after is None:
            assert manager.retention is not None
            spared = {one.uri: one.reason for one in manager.retention.failed}
            # Who died while it overwrote may live elsewhere, for all that the store shows within a day.
            assert set(spared.values()) <= {"another save is writing there"}
            assert {manager.uri_of(step) for step in set(found) - oracle.must_be_there()} == set(spared)
            newest = manager.restore({"w": torch.zeros(64), "number": -1})
            assert newest is not None
            assert newest.step == save.step


def _what_is_there(root: str) -> dict[int, int]:
    """The steps that readers find, each whole, and which save it is of."""
    found: dict[int, int] = {}
    for info in cloudckpt.list_checkpoints(root):
        cloudckpt.verify(info.uri)
        state: dict[str, Any] = {"w": torch.zeros(64), "number": -1}
        cloudckpt.load(state, info.uri)
        assert state["w"].tolist() == [float(state["number"])] * 64
        found[int(info.name.removeprefix("step-"))] = state["number"]
    return found
