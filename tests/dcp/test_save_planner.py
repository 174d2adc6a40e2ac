"""The save planner and the collector's threshold, without any store."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from cloudckpt._collecting import rare_collections
from cloudckpt._dcp.save_planner import BalancedSavePlanner, entries_of


def planned(
    states: list[dict[str, Any]], *, declared: bool = False
) -> tuple[list[BalancedSavePlanner], list[SavePlan], Any]:
    """What each rank's planner makes of its state, by way of a coordinator; with its tensors as ones of DTensors."""
    planners = [BalancedSavePlanner(entries=entries_of(state), min_piece_bytes=64) for state in states]
    for rank, planner in enumerate(planners):
        planner.set_up_planner({}, is_coordinator=rank == 0)
    local = [pickle.loads(pickle.dumps(planner.create_local_plan())) for planner in planners]
    if declared:
        local = [
            dataclasses.replace(
                plan, items=[dataclasses.replace(item, type=WriteItemType.SHARD) for item in plan.items]
            )
            for plan in local
        ]
    plans, metadata = planners[0].create_global_plan(local)
    return planners, pickle.loads(pickle.dumps(plans)), metadata


def test_pieces_hold_the_rows_that_they_say() -> None:
    """If this fails, a replicated tensor that several ranks save comes back with its rows mixed up."""
    whole = torch.arange(3000, dtype=torch.int64).reshape(1, 300, 10)
    states = [{"model": {"w": whole.clone(), "b": torch.ones(2)}} for _ in range(3)]
    planners, plans, metadata = planned(states, declared=True)
    rebuilt = torch.full_like(whole, -1)
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            if item.index.fqn != "model.w":
                continue
            data = planner.resolve_data(item)
            assert data.is_contiguous()  # and so goes out from where it lies
            begin, length = item.tensor_data.chunk.offsets[1], item.tensor_data.chunk.sizes[1]
            assert torch.equal(rebuilt[:, begin : begin + length], torch.full_like(data, -1))
            rebuilt[:, begin : begin + length] = data
    assert torch.equal(rebuilt, whole)
    assert len(metadata.state_dict_metadata["model.w"].chunks) == 3


def test_what_differs_between_ranks_is_not_mixed() -> None:
    """If this fails, ranks that hold tensors of two shapes under one name save something that none of them had."""
    _, plans, _ = planned([{"w": torch.zeros(100, 10)}, {"w": torch.zeros(10, 100)}], declared=True)
    assert [item.tensor_data.chunk.sizes.numel() for plan in plans for item in plan.items] == [1000]


def test_plain_tensors_of_one_name_are_not_mixed() -> None:
    """If this fails, buffers that differ between ranks are saved as something that no rank had."""
    _, plans, _ = planned([{"buffer": torch.full((100, 10), float(rank))} for rank in range(3)])
    assert [item.tensor_data.chunk.sizes.numel() for plan in plans for item in plan.items] == [1000]


def test_tied_tensors_go_where_the_first_of_them_goes() -> None:
    """If this fails, ranks that hold the same tied weights save them once for each name."""
    states = []
    for _ in range(3):
        weight = torch.arange(3000.0).reshape(300, 10)
        states.append({"a": torch.zeros(500), "embed": weight, "b": torch.zeros(700), "head": weight})
    for declared in (False, True):
        _, plans, metadata = planned(states, declared=declared)
        pieces = {
            name: [
                (rank, item.index.offset, item.tensor_data.chunk.sizes)
                for rank, plan in enumerate(plans)
                for item in plan.items
                if item.index.fqn == name
            ]
            for name in states[0]
        }
        assert pieces["head"] == pieces["embed"]
        assert len(pieces["head"]) == (3 if declared else 1)
        assert len(metadata.state_dict_metadata["head"].chunks) == len(pieces["head"])
        # What is stored once weighs once: the other tensors are not all with the ranks that have no part of it.
        own_bytes = [
            sum(item.tensor_data.chunk.sizes.numel() * 4 for item in plan.items if item.index.fqn != "head")
            for plan in plans
        ]
        assert not declared or max(own_bytes) < 1.2 * sum(own_bytes) / 3


def test_what_is_tied_on_one_rank_alone_is_saved_under_each_name() -> None:
    """If this fails, ranks that disagree about what is tied save one tensor under the name of another."""
    weight = torch.ones(300)
    tied = {"a": weight, "b": weight}
    for states in ([tied, {"a": torch.ones(300), "b": torch.zeros(300)}], [tied, {"a": torch.ones(300)}]):
        _, plans, _ = planned(states)
        assert sorted(item.index.fqn for plan in plans for item in plan.items) == ["a", "b"]
        if len(states[1]) == 2:
            assert [len(plan.items) for plan in plans] == [1, 1]


def test_stateful_objects_are_asked_for_their_state() -> None:
    """If this fails, objects with a state_dict() of their own are pickled whole, instead of what they want saved."""

    class Counter:
        def state_dict(self) -> dict[str, Any]:
            return {"count": torch.tensor([7])}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError(state_dict)

    planner = BalancedSavePlanner(entries=entries_of({"counter": Counter()}))
    planner.set_up_planner({}, is_coordinator=True)
    assert [item.index.fqn for item in planner.create_local_plan().items] == ["counter.count"]


def test_the_collector_comes_back_as_it_was() -> None:
    """If this fails, a save changes for good how often Python looks for garbage, also one that fails."""
    before = gc.get_threshold()
    both_inside = threading.Barrier(2, timeout=30)

    def inside() -> None:
        with rare_collections():
            both_inside.wait()

    other = threading.Thread(target=inside)
    with pytest.raises(KeyError), rare_collections():  # noqa: PT012  # what else is in it cannot raise that
        assert gc.get_threshold()[0] > before[0]
        other.start()
        both_inside.wait()
        raise KeyError
    other.join(30)
    assert not other.is_alive()
    assert gc.get_threshold() == before


def test_a_threshold_set_meanwhile_stays() -> None:
    """If this fails, a save undoes what the user's program set while it ran."""
    before = gc.get_threshold()
    try:
        with rare_collections():
            gc.set_threshold(1234)
        assert gc.get_threshold()[0] == 1234
    finally:
        gc.set_threshold(*before)
