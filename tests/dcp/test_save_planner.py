"""The save planner and the collector's threshold, without any store."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import pickle
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scaled import make_scaled
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from cloudckpt._torch_compat import problems_in
from cloudckpt.dcp.replicas import copies_of_items
from cloudckpt.dcp.save_planner import BalancedSavePlanner, ReplicatedItem, assign_ranks, check_agreement, merge_plans
from cloudckpt.dcp.write_items import describe_shards
from cloudckpt.errors import StateDictMismatchError, UnsupportedValueError
from cloudckpt.format.nesting import unflatten
from cloudckpt.io.boxes import Box


def planned(
    states: list[dict[str, Any]], *, declared: bool = False
) -> tuple[list[BalancedSavePlanner], list[SavePlan], Any]:
    """Return the planners, plans and metadata of ranks with these states; tensors `declared` as parts of DTensors."""
    planners = [BalancedSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, StorageMeta(checkpoint_id="memory://here"), is_coordinator=rank == 0)
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


@pytest.mark.parametrize("declared", [False, True])
def test_differing_replicas_are_not_mixed(*, declared: bool) -> None:
    """If this fails, ranks whose replicas have drifted apart save a tensor that none of them had."""
    _, plans, metadata = planned(
        [{"w": torch.full((4000, 1000), float(rank)), "b": torch.zeros(2)} for rank in range(3)], declared=declared
    )
    sizes = [item.tensor_data.chunk.sizes.numel() for plan in plans for item in plan.items if item.index.fqn == "w"]
    assert sizes == [4_000_000]
    assert len(metadata.state_dict_metadata["w"].chunks) == 1


DIFFERENT = [
    (torch.ones(4), "text", "a tensor of torch.float32 [4] on rank 0, a value on rank 1"),
    ("text", torch.ones(4), "a value on rank 0, a tensor of torch.float32 [4] on rank 1"),
    (
        torch.ones(100, 10),
        torch.ones(10, 100),
        "a tensor of torch.float32 [100, 10] on rank 0, a tensor of torch.float32 [10, 100] on",
    ),
    (
        torch.ones(4),
        torch.ones(4, dtype=torch.int32),
        "a tensor of torch.float32 [4] on rank 0, a tensor of torch.int32 [4] on rank 1",
    ),
    (torch.ones(()), torch.ones(1), "a tensor of torch.float32 [] on rank 0, a tensor of torch.float32 [1] on rank 1"),
]


@pytest.mark.parametrize(("one", "other", "message"), DIFFERENT)
def test_different_values_under_one_name_are_reported(one: Any, other: Any, message: str) -> None:
    """If this fails, one rank's entry is saved, and the others are lost and cannot load what was saved."""
    same = {"same": torch.ones(3), "n": 1}
    with pytest.raises(StateDictMismatchError, match=re.escape(f"'model.x' is {message}")) as caught:
        planned([{"model": {"x": one, **same}}, {"model": {"x": other, **same}}])
    assert "same" not in str(caught.value)
    assert caught.value.uri == "memory://here"
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        with pytest.raises(StateDictMismatchError):
            planned([{"x": one}, {"x": other}], declared=True)


@pytest.mark.parametrize("plain", [0, 1])
def test_a_whole_tensor_beside_a_shard_of_that_name_is_reported(plain: int) -> None:
    """If this fails, one rank's whole tensor is saved in the place of the shards of the others, or a part of it."""
    plans = []
    for rank in range(2):
        planner = BalancedSavePlanner()
        planner.set_up_planner({"same": torch.ones(2), "w": torch.ones(4)}, is_coordinator=rank == 0)
        items = list(planner.create_local_plan().items)
        if rank != plain:
            whole = items[1].tensor_data
            half = dataclasses.replace(whole, chunk=ChunkStorageMetadata(torch.Size([0]), torch.Size([2])))
            items[1] = dataclasses.replace(items[1], type=WriteItemType.SHARD, tensor_data=half)
        plans.append(SavePlan(items))
    message = "'w' is a .*tensor .* on rank 0, a .*tensor .* on rank 1. Nothing was written"
    with pytest.raises(StateDictMismatchError, match=message) as caught:
        check_agreement(copies_of_items(plans), plans, uri="memory://here")
    assert "a DTensor or sharded tensor of torch.float32 [4]" in str(caught.value)
    assert "same" not in str(caught.value)


@pytest.mark.parametrize("wrapped", [0, 1])
def test_a_plain_tensor_beside_a_wrapper_of_that_name_is_reported(wrapped: int) -> None:
    """If this fails, a checkpoint holds a quantized tensor and a plain one under one name, and no load takes both."""
    states = [{"model": {"w": make_scaled() if rank == wrapped else torch.ones(8, 6), "b": 1}} for rank in range(2)]
    with pytest.raises(
        StateDictMismatchError,
        match=r"'model\.w' is a wrapper of class .* on rank \d, a plain tensor or value on another",
    ):
        planned(states)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((torch.ones(2), 1), torch.ones(3), "is a tuple on rank 0, a value or a tensor on rank 1"),
        (5, {"a": 1}, "is a dict on rank 1, a value or a tensor on rank 0"),
        ([torch.ones(1)], (torch.ones(1),), "is a list on rank 0, a tuple on rank 1"),
        ({"a": {"b": 1}}, {"a": [torch.ones(1)]}, "is a dict on rank 0, a list on rank 1"),
    ],
)
def test_different_structures_under_one_name_are_reported(one: Any, other: Any, message: str) -> None:
    """If this fails, a save reports success, and what it has stored fits no state dict and cannot be read."""
    with pytest.raises(StateDictMismatchError, match=message):
        planned([{"same": 1, "k": {1: one}}, {"same": 1, "k": {1: other}}])


@pytest.mark.parametrize("placeholders", [None, [], (), {}])
@pytest.mark.parametrize("full", [{"a": torch.ones(1)}, [torch.ones(1)], (torch.ones(1), {"a": 2})])
def test_a_rank_may_have_nothing_in_the_place_of_a_container(placeholders: Any, full: Any) -> None:
    """If this fails, state that one rank alone has cannot be saved, or cannot be read."""
    for states in ([placeholders, full], [full, placeholders]):
        _, _, metadata = planned([{"k": state} for state in states])
        nesting = metadata.planner_data
        values = {name: copy.copy(placeholders) if name == "k" else name for name in metadata.state_dict_metadata}
        read = unflatten(values, {**nesting, **nesting.typed}, nesting.empty, nesting.tuples)
        assert type(read["k"]) is type(full)
        assert len(read["k"]) == len(full)


def test_ranks_may_hold_entries_and_values_of_their_own() -> None:
    """If this fails, stages of a pipeline cannot save, or ranks whose values differ, of which one is saved."""
    _, plans, metadata = planned([{"a": torch.ones(2), "n": 0}, {"b": torch.ones(3), "n": 1}, {"n": None}])
    assert set(metadata.state_dict_metadata) == {"a", "b", "n"}
    assert [[item.index.fqn for item in plan.items] for plan in plans] == [["a", "n"], ["b"], []]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[ReplicatedItem], list[int]]:
    """Items of any sizes, each on some of the ranks, and what each rank has beside them."""
    own_bytes = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=6))
    ranks = st.lists(st.integers(0, len(own_bytes) - 1), min_size=1, unique=True).map(tuple)
    return draw(st.lists(st.builds(ReplicatedItem, ranks=ranks, num_bytes=st.integers(0, 400)), max_size=12)), own_bytes


def loads_of(items: Sequence[ReplicatedItem], ranks: Sequence[int], own_bytes: Sequence[int]) -> list[int]:
    loads = list(own_bytes)
    for item, rank in zip(items, ranks, strict=True):
        loads[rank] += item.num_bytes
    return loads


@given(jobs())
@settings(deadline=None)
def test_each_item_is_saved_by_a_rank_that_holds_it(job: tuple[list[ReplicatedItem], list[int]]) -> None:
    """If this fails, an item is asked of a rank that does not have it, or two plans of one save differ."""
    items, own_bytes = job
    ranks = assign_ranks(items, own_bytes=own_bytes)
    assert all(rank in item.ranks for item, rank in zip(items, ranks, strict=True))
    assert assign_ranks(list(items), own_bytes=tuple(own_bytes)) == ranks


@given(st.lists(st.integers(1, 100), max_size=7), st.integers(2, 3))
@settings(deadline=None, max_examples=60)
def test_no_rank_has_much_more_than_in_the_best_assignment(sizes: list[int], num_ranks: int) -> None:
    """If this fails, all ranks wait for one that could have left some of its tensors to others."""
    items = [ReplicatedItem(ranks=tuple(range(num_ranks)), num_bytes=size) for size in sizes]
    nothing = [0] * num_ranks
    every = itertools.product(range(num_ranks), repeat=len(items))
    best = min(max(loads_of(items, ranks, nothing)) for ranks in every)
    assert max(loads_of(items, assign_ranks(items, own_bytes=nothing), nothing)) <= best * 4 / 3


def test_ranks_are_balanced_by_bytes_and_not_by_elements() -> None:
    """If this fails, the rank with the wide dtypes, such as float32 moments, writes while all others wait for it."""
    state = {"a": torch.zeros(1100), "b": torch.zeros(1100), "wide": torch.zeros(1000, dtype=torch.complex128)}
    _, plans, _ = planned([dict(state), dict(state)])
    assert sorted(sorted(item.index.fqn for item in plan.items) for plan in plans) == [["a", "b"], ["wide"]]


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
        assert len(pieces["head"]) == 1
        assert len(metadata.state_dict_metadata["head"].chunks) == 1
        # What is stored once weighs once: the other tensors are with the ranks that have no part of it.
        assert not {rank for name in ("a", "b") for rank, _, _ in pieces[name]} & {pieces["head"][0][0]}


def test_tensor_tied_on_one_rank_only_is_saved_under_each_name() -> None:
    """If this fails, ranks that disagree about what is tied save one tensor under the name of another."""
    weight = torch.ones(300)
    tied = {"a": weight, "b": weight}
    for states in ([tied, {"a": torch.ones(300), "b": torch.zeros(300)}], [tied, {"a": torch.ones(300)}]):
        _, plans, _ = planned(states)
        assert sorted(item.index.fqn for plan in plans for item in plan.items) == ["a", "b"]
        if len(states[1]) == 2:
            assert [len(plan.items) for plan in plans] == [1, 1]


tensors = st.builds(
    lambda shape, dtype, is_parameter: (
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype is torch.float32)
        if is_parameter
        else torch.zeros(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]),
    st.booleans(),
)


def with_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Two parts of a larger one, of which the rest is elsewhere; torch knows of such since 2.14."""
    rest, origin = tensor.shape, (0,) * tensor.dim()
    held: Any = torch.zeros(5, *rest, dtype=tensor.dtype)
    held.global_shape = (4, *rest)
    held.global_offsets, held.local_offsets = ((2, *origin), (0, *origin)), ((1, *origin), (3, *origin))
    held.local_sizes = ((2, *rest), (2, *rest))
    return held  # type: ignore[no-any-return]


def with_hook(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that says by itself that it is saved with a dimension more."""
    held: Any = tensor.detach()
    whole = held[None]
    held.__create_write_items__ = lambda fqn, _: create_default_local_save_plan({fqn: whole}, True).items  # noqa: FBT003
    return held  # type: ignore[no-any-return]


tensors |= tensors.map(lambda tensor: tensor.detach().mT if tensor.dim() > 1 else tensor)
tensors |= tensors.map(with_parts) | tensors.map(with_hook)
leaves = tensors | st.sampled_from([None, 7, "text", b"bytes", (1, 2), torch.zeros(4).to_sparse()])
names = st.text("ab.0", min_size=1, max_size=3)
states = st.dictionaries(
    names,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
    ),
    max_size=6,
)


def hints_of(plans: Sequence[SavePlan]) -> list[int | None]:
    """Return the part of the plans that their comparison leaves out."""
    return [item.index.index for plan in plans for item in plan.items]


@given(state=states)
def test_the_plan_of_one_rank_is_torchs(state: dict[str, Any]) -> None:
    """If this fails, something of a state dict is saved otherwise than torch would save it, or not at all."""
    torchs, ours = DefaultSavePlanner(), BalancedSavePlanner()
    try:
        torchs.set_up_planner(state, is_coordinator=True)
    except ValueError:
        with pytest.raises(UnsupportedValueError, match="two entries of the state dict"):
            ours.set_up_planner(state, is_coordinator=True)
        return
    ours.set_up_planner(state, is_coordinator=True)
    assert list(ours.state_dict) == list(torchs.state_dict)
    expected, local = torchs.create_local_plan(), ours.create_local_plan()
    assert local == expected
    assert [type(item) for item in local.items] == [WriteItem] * len(expected.items)
    expected_plans, expected_metadata = torchs.create_global_plan([expected])
    plans, metadata = ours.create_global_plan([local])
    assert (plans, metadata) == (expected_plans, expected_metadata)
    assert hints_of(plans) == hints_of(expected_plans)
    # The manifest has them in this order.
    assert list(metadata.state_dict_metadata) == list(expected_metadata.state_dict_metadata)
    assert list(metadata.planner_data) == list(expected_metadata.planner_data)
    assert pickle.loads(pickle.dumps(plans)) == expected_plans


@pytest.mark.parametrize(
    ("verdict", "problems"),
    [
        ([], []),
        (["key:w is wrong"], ["key:w is wrong"]),
        ({"wrong"}, ["wrong"]),
        (True, []),
        (False, ["see torch's log"]),
        (None, []),
    ],
)
def test_the_validation_of_every_torch_is_understood(
    monkeypatch: pytest.MonkeyPatch, verdict: object, problems: list[str]
) -> None:
    """If this fails, no save succeeds with the oldest torch, or what it finds wrong with a plan is overlooked."""
    assert problems_in(verdict) == problems
    monkeypatch.setattr("cloudckpt.dcp.save_planner.validate_global_plan", lambda *_: problems_in(verdict))
    expected = pytest.raises(ValueError, match=f"^Failed to validate global plan: {problems[0]}$") if problems else None
    with expected or contextlib.nullcontext():
        merge_plans([SavePlan([])])


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, Box]]]:
    """Draw the shape of a tensor, and boxes of ranks that often do not make it up."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axes = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    cells = [
        Box(tuple(begin for begin, _ in cell), tuple(end - begin for begin, end in cell))
        for cell in itertools.product(*(itertools.pairwise(axis) for axis in axes))
    ]
    kept = draw(st.lists(st.sampled_from(cells), max_size=len(cells) + 2)) if draw(st.booleans()) else cells
    return shape, [(draw(st.integers(0, 2)), box) for box in kept]


@given(cut_tensors())
def test_shards_that_do_not_make_up_a_tensor_are_named(cut: tuple[list[int], list[tuple[int, Box]]]) -> None:
    """If this fails, a save of wrong shards ends in an error without the tensor's name, or is refused though whole."""
    shape, shards = cut
    counts = torch.zeros(shape, dtype=torch.int64)
    plans = [SavePlan([]) for _ in range(3)]
    for rank, box in shards:
        counts[box.slices] += 1
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(shape))
        index = MetadataIndex("w", chunk.offsets)
        plans[rank].items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    if bool((counts == 1).all()):
        assert describe_shards(plans, merge_plans(plans)[1].state_dict_metadata) == ""
    elif shards:
        with pytest.raises(StateDictMismatchError, match="memory://a do not make up their tensors: 'w'") as raised:
            merge_plans(plans, uri="memory://a")
        text = str(raised.value)
        if found := re.search(r"no shard with the element \[([0-9, ]+)\]", text):
            assert counts[tuple(map(int, found[1].split(", ")))] == 0
            assert int(counts.max()) <= 1
        else:
            found = re.search(r"has \[([0-9:, ]+)\] on rank (\d) and on rank (\d)", text)
            assert found is not None
            part = tuple(slice(*map(int, one.split(":"))) for one in found[1].split(", "))
            assert int(counts[part].min()) > 1
            for rank in found[2], found[3]:
                assert any(counts.new_zeros(shape)[box.slices].numel() for who, box in shards if who == int(rank))
