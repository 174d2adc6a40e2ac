"""Copies of one entry on several ranks: which of them are compared, which are refused, and whose is saved."""

from __future__ import annotations

import itertools
import logging
import pickle
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt.dcp import replicas
from cloudckpt.dcp.live.entry import find_synchronized
from cloudckpt.dcp.live.objects import LiveObjects
from cloudckpt.dcp.replicas import CompareReplicas, SynchronizedNames, windows_of
from cloudckpt.dcp.save_planner import BalancedSavePlanner
from cloudckpt.errors import StateDictMismatchError
from cloudckpt.options import KIB, MIB

NOTHING = SynchronizedNames()
TRAINED = SynchronizedNames(keys=frozenset({"model"}), exceptions=frozenset({"model.mean"}))


def plan(
    states: Sequence[dict[str, Any]], *, compare: CompareReplicas = "sample", synchronized: SynchronizedNames = NOTHING
) -> tuple[list[SavePlan], list[SavePlan]]:
    """Return the plans of ranks with these states, before and after the coordinator has seen them."""
    planners = [BalancedSavePlanner(compare=compare, synchronized=synchronized) for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, StorageMeta(checkpoint_id="memory://here"), is_coordinator=rank == 0)
    local = [pickle.loads(pickle.dumps(planner.create_local_plan())) for planner in planners]
    return local, planners[0].create_global_plan(local)[0]


def savers(plans: Sequence[SavePlan]) -> dict[str, int]:
    """Return the rank that saves each name."""
    return {item.index.fqn: rank for rank, one in enumerate(plans) for item in one.items}


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """States of ranks with unequal loads: entries on some of the ranks, tied on some, differing on some, and values."""
    num_ranks = draw(st.integers(2, 5))
    states: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
    some_ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True)
    sizes = draw(st.lists(st.sampled_from([0, 5, 300]), min_size=1, max_size=8))
    for number, size in enumerate(sizes):
        differs, tied_on = draw(st.booleans()), draw(some_ranks)
        tied_to = draw(st.sampled_from([f"t{earlier}" for earlier in range(number) if sizes[earlier] == size] or [""]))
        for rank in draw(some_ranks):
            own = torch.full((size,), float(rank if differs else number))
            states[rank][f"t{number}"] = states[rank].get(tied_to, own) if rank in tied_on else own
    for rank in draw(some_ranks):
        states[rank]["value"] = rank
    return states


@given(jobs())
@settings(deadline=None, max_examples=200)
def test_every_entry_is_saved_once_by_a_rank_that_holds_its_state(states: list[dict[str, Any]]) -> None:
    """If this fails, an entry is lost from plan and manifest, or the state that is saved is that of no rank."""
    local, plans = plan(states)
    held: dict[MetadataIndex, list[int]] = {}
    for rank, one in enumerate(local):
        for item in one.items:
            held.setdefault(item.index, []).append(rank)
    saved = [item.index for one in plans for item in one.items]
    assert sorted(saved, key=str) == sorted(held, key=str)
    for rank, one in enumerate(plans):
        for item in one.items:
            assert rank in held[item.index]
            lowest, mine = (states[of][item.index.fqn] for of in (held[item.index][0], rank))
            assert torch.equal(lowest, mine) if item.tensor_data else lowest == mine


@given(st.integers(0, 3 * 2**30))
def test_the_windows_of_a_tensor_reach_from_its_begin_to_its_end(num_bytes: int) -> None:
    """If this fails, a part of each tensor is never compared, or more is compared than is promised."""
    windows = windows_of(num_bytes)
    assert [begin for begin, _ in windows] == sorted({begin for begin, _ in windows})
    assert all(begin < end and begin % 16 == 0 for begin, end in windows)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(windows))
    if num_bytes:
        assert (windows[0][0], windows[-1][1]) == (0, num_bytes)
    compared_bytes = sum(end - begin for begin, end in windows)
    assert compared_bytes >= (num_bytes if num_bytes <= 16 * KIB else 3 * 64)
    assert compared_bytes >= min(num_bytes // (16 * MIB) * 4, 256) * KIB
    assert compared_bytes <= max(16 * KIB, KIB * num_bytes / (4 * MIB) + KIB)
    whole = windows_of(num_bytes, is_whole=True)
    assert sum(end - begin for begin, end in whole) == num_bytes
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(whole))


FORMS: Mapping[str, Any] = {
    "plain": lambda tensor: tensor.clone(),
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "strided": lambda tensor: torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]],
    "negated": lambda tensor: torch.complex(torch.zeros(tensor.shape, dtype=tensor.dtype), -tensor).conj().imag,
    "parameter": lambda tensor: torch.nn.Parameter(tensor.clone()),
}


@pytest.mark.parametrize("compare", ["sample", "whole"])
@pytest.mark.parametrize("shape", [(3, 5), (200, 70), (131, 37)])
def test_copies_are_compared_by_their_values_and_not_by_their_layout(
    shape: tuple[int, int], compare: CompareReplicas
) -> None:
    """If this fails, ranks with equal tensors of another memory format are refused, or a difference is overlooked."""
    tensor = torch.randn(shape, dtype=torch.float64)
    other = tensor.clone()
    other[-1, -1] += 1
    for form in FORMS.values():
        plan([{"model": {"w": tensor}}, {"model": {"w": form(tensor)}}], compare=compare, synchronized=TRAINED)
        for states in ([tensor, form(other)], [form(other), tensor]):
            with pytest.raises(StateDictMismatchError, match=r"'model\.w' of rank 1 differs from that of rank 0"):
                plan([{"model": {"w": one}} for one in states], compare=compare, synchronized=TRAINED)


CHANGES: Mapping[str, Any] = {
    "negated": torch.neg,
    "reversed": lambda tensor: tensor.flip(0),
    "rolled": lambda tensor: tensor.roll(8),
    "doubled": lambda tensor: tensor * 2,
    "two signs": lambda tensor: torch.cat([-tensor[:2], tensor[2:]]),
    "two swapped": lambda tensor: torch.cat([tensor[:2].flip(0), tensor[2:]]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_changes_that_keep_sums_and_magnitudes_are_found(dtype: torch.dtype, change: Any) -> None:
    """If this fails, copies that differ by signs or by order alone, as by a common mistake, are taken for equal."""
    tensor = torch.arange(1, 16_001).to(dtype)
    states = [{"model": {"w": one}} for one in (tensor, change(tensor))]
    plan([states[0], states[0]], synchronized=TRAINED)
    with pytest.raises(StateDictMismatchError, match=re.escape("'model.w' of rank 1")):
        plan(states, synchronized=TRAINED)


NUMBERS: Mapping[str, Any] = {
    "parameter without dimensions": lambda rank: torch.nn.Parameter(torch.tensor(float(rank))),
    "step": lambda rank: torch.tensor(100 + rank),
    "integer": lambda rank: rank,
    "learning rate of a scheduler": np.float64,
    "pair": lambda rank: (0.9, 0.99 + rank),
    "nested": lambda rank: [1, [None, "é" * rank]],
    "flag": bool,
    "None": lambda rank: rank or None,
}


@pytest.mark.parametrize("make", NUMBERS.values(), ids=NUMBERS)
def test_numbers_and_values_of_live_objects_are_compared(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a checkpoint has the learning rate or the step of one rank, and the others hear of success."""
    states = [{"model": {"w": torch.ones(3), "n": make(int(rank == 2))}} for rank in range(3)]
    _, plans = plan([states[0], states[0]], synchronized=TRAINED)
    if not isinstance(make(0), torch.Tensor):
        assert savers(plans)["model.n"] == 0
    with pytest.raises(StateDictMismatchError, match=re.escape("'model.n' of rank 2 differs from that of rank 0")):
        plan(states, synchronized=TRAINED)
    _, plans = plan(states, compare="never", synchronized=TRAINED)
    assert savers(plans)["model.n"] == 0
    assert not caplog.messages


OF_USERS: dict[str, Callable[[int], Any]] = {
    "set": lambda rank: {"a", f"b{rank}"},
    "array": lambda rank: np.arange(8).reshape(2, 4)[:, ::2] + rank,
    "dates": lambda rank: np.array([f"2020-01-0{rank + 1}"], dtype="M8[D]"),
    "shape": lambda rank: np.zeros((rank, 3)),
    "nested": lambda rank: ["a", ({rank}, 1)],
    "class": lambda rank: object() if rank else None,
}


@pytest.mark.parametrize("make", OF_USERS.values(), ids=OF_USERS)
def test_values_of_users_that_differ_are_named(make: Callable[[int], Any], caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, all ranks get the value of rank 0 after a restore, and nobody is told; or equal ones are named."""
    synchronized = SynchronizedNames(users=frozenset({"extra"}))
    plan([{"extra": {"same": make(0), "w": torch.ones(3)}} for _ in range(2)], synchronized=synchronized)
    assert not caplog.messages
    name = uuid.uuid4().hex  # each is named once in a process
    plan([{"extra": {name: make(rank)}} for rank in range(2)], synchronized=synchronized)
    (message,) = caplog.messages
    assert message.startswith(f"'extra.{name}' of rank 1 differs from that of rank 0 in memory://here")


def test_objects_of_one_class_are_not_compared() -> None:
    """If this fails, ranks whose optimizer has a function or an object among its settings cannot save."""
    states = [{"model": {"f": object(), "g": (object(), 1), "h": SynchronizedNames()}} for _ in range(2)]
    _, plans = plan(states, synchronized=TRAINED)
    assert set(savers(plans).values()) == {0}


def test_one_changed_byte_of_a_large_tensor_is_found_by_a_whole_comparison() -> None:
    """If this fails, the option that compares all bytes does not."""
    ours, theirs = torch.zeros(5 * MIB, dtype=torch.uint8), torch.zeros(5 * MIB, dtype=torch.uint8)
    theirs[123_456] = 1
    states = [{"model": {"w": one}} for one in (ours, theirs)]
    plan(states, synchronized=TRAINED)  # what is sampled is not there
    with pytest.raises(StateDictMismatchError, match=re.escape("'model.w' of rank 1")):
        plan(states, compare="whole", synchronized=TRAINED)


def test_differing_buffer_comes_from_the_lowest_rank_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, statistics that each rank has of its own data are mixed, are refused, or fill the log."""
    states = [
        {
            "own": {f"{rank}": torch.ones(50_000 * (3 - rank))},
            "model": {"w": torch.ones(9_000), "mean": torch.full((100,), float(rank)), "v": torch.ones(9_000)},
            "other": torch.full((70,), float(rank == 2)),
            "more": torch.full((70,), float(rank)),
            "n": rank,
            "count": torch.tensor(rank),
        }
        for rank in range(3)
    ]
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        _, plans = plan(states, synchronized=TRAINED)
        plan(states, synchronized=TRAINED)
    found = savers(plans)
    assert {name: found[name] for name in ("model.mean", "other", "more", "n", "count")} == dict.fromkeys(
        ("model.mean", "other", "more", "n", "count"), 0
    )
    assert {found["model.w"], found["model.v"]} == {2}  # equal, so the rank with the least saves them
    (message,) = caplog.messages
    assert message.startswith("'other' of rank 2 differs from that of rank 0 in memory://here, and so for 2 more. ")


def test_compare_never_saves_the_entries_of_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, ranks that differ on purpose cannot save, or save a mixture."""
    states = [{"model": {f"w{n}": torch.full((100,), float(rank)) for n in range(4)}} for rank in range(3)]
    _, plans = plan(states, compare="never", synchronized=TRAINED)
    assert set(savers(plans).values()) == {0}
    assert not caplog.messages


def test_a_rank_without_memory_for_an_entry_does_not_save_it() -> None:
    """If this fails, stages of a pipeline that hold the others' layers on the meta device cannot save."""
    layers = {name: torch.ones(9) for name in "ab"}
    states = [{**layers, name: torch.ones(9, device="meta")} for name in "ab"]
    _, plans = plan([{"model": state} for state in states], synchronized=TRAINED)
    assert savers(plans) == {"model.a": 1, "model.b": 0}


def test_a_difference_is_told_with_its_first_entry_and_the_ranks() -> None:
    """If this fails, nobody finds out which of the ranks of a large job went astray, or what to do."""
    states = [{"model": {"a": torch.ones(7), "b": torch.full((9,), float(rank in {3, 5}))}} for rank in range(6)]
    with pytest.raises(StateDictMismatchError) as caught:
        plan(states, synchronized=TRAINED)
    assert str(caught.value).startswith(
        "ranks hold different values under one name in memory://here: 'model.b' of ranks 3, 5 differs from that of "
        "rank 0. Nothing was written. "
    )
    assert "DistributedDataParallel" in str(caught.value)
    assert "compare_replicas" in str(caught.value)
    assert caught.value.uri == "memory://here"


class Normed(torch.nn.Module):
    """A model with buffers, one of them in a module that has two names, and with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.norm = self.again = torch.nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(4))

    def get_extra_state(self) -> dict[str, Any]:
        return {"amax": torch.ones(5)}


def test_buffers_may_differ_and_parameters_and_moments_may_not() -> None:
    """If this fails, jobs whose batch statistics differ cannot save, or models that differ are saved as one."""
    models: list[Any] = [Normed(), torch.compile(Normed(), backend="eager"), {"net": Normed()}]
    for model in models:
        module: Any = model["net"] if isinstance(model, dict) else model
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        objects = LiveObjects(model, optimizer, None, None, {"w": torch.ones(3)}, has_random_state=True)
        found = find_synchronized(objects.entries(rank=0, num_ranks=2, is_strict=True))
        prefix = "model.net" if isinstance(model, dict) else "model"
        for name in ("seen", "norm.running_mean", "norm.running_mean.data_", "again.running_var", "_extra_state.amax"):
            assert found.find_rule(f"{prefix}.{name}") is replicas.DifferenceRule.BUFFER
        for name in ("linear.weight", "linear.weight.data_", "norm.weight", "again.bias"):
            assert found.find_rule(f"{prefix}.{name}") is replicas.DifferenceRule.MUST_AGREE
        assert found.find_rule("optimizer.state.linear.weight.momentum_buffer") is replicas.DifferenceRule.MUST_AGREE
        assert found.find_rule("optimizer.param_groups.0.lr") is replicas.DifferenceRule.MUST_AGREE
        assert found.find_rule("optimizer.param_groups.0.params") is replicas.DifferenceRule.BUFFER
        assert found.find_rule("extra.w") is replicas.DifferenceRule.MAY_DIFFER


class Waits:
    """A snapshot in progress that notes which memory is waited for."""

    def __init__(self) -> None:
        self.waited: list[tuple[int, int]] = []

    def wait(self, address: int, num_bytes: int) -> None:
        self.waited.append((address, num_bytes))


def test_a_comparison_waits_for_the_snapshot_of_what_it_reads() -> None:
    """If this fails, memory is compared before it is filled, or a save waits for tensors that no other rank holds."""
    state: dict[str, Any] = {
        "large": torch.zeros(100, 100),
        "strided": torch.zeros(7, 9).t(),
        "number": torch.zeros(()),
        "value": 3,
    }
    planner, waits = BalancedSavePlanner(), Waits()
    planner.snapshot = waits  # type: ignore[assignment]  # all that is asked of a snapshot here
    planner.set_up_planner(state, is_coordinator=True)
    planner.create_local_plan()
    large = state["large"].data_ptr()
    assert sorted(waits.waited) == sorted(
        [(large + begin, end - begin) for begin, end in windows_of(40_000)]
        + [(state["strided"].data_ptr(), 7 * 9 * 4), (state["number"].data_ptr(), 4)]
    )
    waits.waited.clear()
    planner.is_alone = True
    planner.create_local_plan()
    assert not waits.waited
