"""Plan and fill a load: plain tensors in bulk, with the result of torch's own planner."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.options import make_options
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

import cloudckpt
from cloudckpt.dcp.load_planner import ExplainingLoadPlanner
from cloudckpt.errors import StateDictMismatchError, UnsupportedValueError
from cloudckpt.format.model import Chunk, ItemLocation, StoredTensor
from cloudckpt.io.boxes import Box
from cloudckpt.io.reads import RangeRead
from cloudckpt.pipeline.consumers import Consumer, Consumers, Finisher, whole_item
from cloudckpt.tensors.load_targets import BytesTarget, find_whole_target, new_block_target

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

OPTIONS = make_options(tile_bytes=4096, request_bytes=8192)


def filled(make: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """One of everything: `make` gives each tensor its values."""
    base = make(40, 30)
    return {
        "plain": make(700),
        "more": {"deep": make(33, 5), "list": [make(3), {"x": make(4)}], "step": 7},
        "parameter": torch.nn.Parameter(make(9, 9)),
        "frozen": torch.nn.Parameter(make(2), requires_grad=False),
        "half": make(50).bfloat16(),
        "complex": make(5).to(torch.complex64),
        "scalar": make(1).sum(),
        "empty": make(0, 4),
        "transposed": base.t(),
        "rows": base[3:5],
        "columns": make(20, 6)[:, 1:3],
        "name": "run",
    }


def entries(state_dict: dict[str, Any]) -> dict[str, Any]:
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state_dict, Metadata({}), is_coordinator=True)
    return planner.state_dict


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    mine, its = entries(one), entries(other)
    assert list(mine) == list(its)
    for fqn, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == its[fqn].dtype
            assert torch.equal(value, its[fqn]), fqn
        else:
            assert value == its[fqn], fqn


shapes = st.lists(st.integers(0, 40), max_size=3)
kinds = st.sampled_from(["same", "parameter", "other dtype", "transposed", "strided", "tied", "left out"])


@settings(max_examples=25, deadline=None)
@given(drawn=st.lists(st.tuples(shapes, kinds, st.booleans()), min_size=1, max_size=8), verify=st.booleans())
def test_the_load_is_the_one_of_torchs_planner(drawn: list[tuple[list[int], str, bool]], *, verify: bool) -> None:
    """If this fails, a load without a planner of the user's fills other tensors, or with other bytes (G4)."""
    saved: dict[str, Any] = {}
    targets: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number, (shape, kind, is_nested) in enumerate(drawn):
        name = f"t{number}"
        (saved.setdefault("inner", {}) if is_nested else saved)[name] = torch.rand(shape)
        for state_dict in targets:
            target: torch.Tensor = torch.zeros(shape)
            if kind == "parameter":
                target = torch.nn.Parameter(target)
            elif kind == "other dtype":
                target = target.double()
            elif kind == "transposed":
                target = torch.zeros(shape[::-1]).permute(list(range(len(shape)))[::-1])
            elif kind == "strided":
                target = torch.zeros([*shape, 2])[..., 0]
            elif kind == "tied" and number and not is_nested:
                before = state_dict.get(f"t{number - 1}")
                if before is not None and before.shape == target.shape:
                    target = before
                    saved[name] = saved[f"t{number - 1}"]
            if kind != "left out":
                (state_dict.setdefault("inner", {}) if is_nested else state_dict)[name] = target
    options = make_options(tile_bytes=4096, request_bytes=8192, verify=verify)
    with tempfile.TemporaryDirectory() as folder:
        uri = str(Path(folder) / "c")
        cloudckpt.save(saved, uri, options=OPTIONS)
        ours, its = targets
        report = cloudckpt.load(ours, uri, options=options)
        expected = cloudckpt.load(its, uri, planner=DefaultLoadPlanner(), options=options)
    assert_same(ours, its)
    assert report is not None
    assert expected is not None
    assert report.num_bytes_wanted == expected.num_bytes_wanted
    assert report.num_bytes_read == expected.num_bytes_read


class Telling(DefaultLoadPlanner):
    """A user's, which wants to know of each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.resolved: list[str] = []
        self.committed: list[str] = []
        self.values: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.resolved.append(read_item.dest_index.fqn)
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


def test_a_planner_of_the_users_is_told_of_every_item(tmp_path: Path) -> None:
    """If this fails, planners that convert, count or move what is loaded miss some of it."""
    cloudckpt.save(filled(torch.rand), tmp_path / "c")
    planner = Telling()
    cloudckpt.load(filled(torch.zeros), tmp_path / "c", planner=planner)
    tensors = [fqn for fqn, value in entries(filled(torch.zeros)).items() if isinstance(value, torch.Tensor)]
    assert sorted(planner.resolved) == sorted(planner.committed) == sorted(set(tensors) - {"empty"})
    assert sorted(planner.values) == ["more.step", "name"]


class Curious(cloudckpt.ObjectStoreReader):
    """A user's, which looks at what it is given."""

    metadata: Metadata
    items: Any

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata = super().read_metadata(*args, **kwargs)
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.items = plan.items
        return super().read_data(plan, planner)


def test_a_reader_of_the_users_gets_what_torch_would_give_it(tmp_path: Path) -> None:
    """If this fails, readers that change the metadata or the plan meet something that they cannot change."""
    saved, target = filled(torch.rand), filled(torch.zeros)
    cloudckpt.save(saved, tmp_path / "c")
    reader = Curious(tmp_path / "c")
    cloudckpt.load(target, storage_reader=reader)
    assert_same(target, saved)
    assert type(reader.metadata.state_dict_metadata) is dict
    assert type(reader.items) is list
    assert reader.metadata.planner_data["more.deep"] == ("more", "deep")


def consumers_of_wholes(*tensors: torch.Tensor, others: Sequence[Consumer] = ()) -> Consumers:
    """Whole tensors, each stored as one chunk at byte 0, and `others`."""
    wholes = []
    for tensor in tensors:
        shape = tuple(tensor.shape)
        chunk = Chunk((0,) * len(shape), shape, 0, 0, tensor.nbytes)
        wholes.append(find_whole_target(tensor, StoredTensor(dtype="float32", shape=shape, chunks=[chunk])))
    return Consumers("abc"[: len(wholes)], [target for target in wholes if target is not None], others)


def test_a_load_that_ends_early_is_no_success() -> None:
    """If this fails, tensors keep some of their old values, and nobody is told (G3, G4)."""
    consumers = consumers_of_wholes(torch.zeros(4))
    context: Any = SimpleNamespace(uri="memory://here")
    finisher = Finisher(context, transforms=None, allow_pickle=False)  # type: ignore[arg-type]  # there are none
    requests = [
        RangeRead(
            object_index=0,
            begin=begin,
            end=begin + 8,
            wants=tuple(consumers.wants(max_gap_bytes=0)),
            overlapping=False,
            continues=False,
        )
        for begin in (0, 8)
    ]
    planner = ExplainingLoadPlanner("here")
    finisher.finish_all(consumers, planner, requests, iter(requests))
    with pytest.raises(cloudckpt.errors.CheckpointError, match="ended before all was read"):
        finisher.finish_all(consumers, planner, requests, iter(requests[:1]))


@pytest.mark.parametrize("begin", [0, 2], ids=["whole", "part"])
@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner()], ids=["ours", "torch's"])
def test_freed_memory_is_not_filled(tmp_path: Path, planner: LoadPlanner | None, begin: int) -> None:
    """If this fails, a load into a tensor without memory succeeds, and nothing of it is there, or it crashes."""
    cloudckpt.save({"w": torch.ones(3)}, tmp_path / "x")
    freed = torch.zeros(begin + 3)[begin:]
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match=r"cannot load 'w' .* memory was freed"):
        cloudckpt.load({"w": freed}, tmp_path / "x", planner=planner)


def test_what_shares_memory_is_not_filled_by_two_reads_at_once() -> None:
    """If this fails, the reads of tied weights find each other's bytes when they check their own, now and then."""
    memory = torch.zeros(12)
    location = ItemLocation(object_index=0, begin=16, end=48, dtype="float32", lengths=(8,), transforms=())
    others = []
    for begin, length in ((6, 2), (10, 2)):
        target = new_block_target(location, Box((0,), (length,)), memory[begin : begin + length])
        others.append(Consumer(whole_item("part", [length]), location, target, memory))
    consumers = consumers_of_wholes(memory[:4], memory[:4], memory[8:], others=others)
    consumers.wants(max_gap_bytes=0)
    consumers.keep_apart()
    assert consumers.are_copied() == [True, True, True, False, True]


@pytest.mark.parametrize("is_packed", [False, True], ids=["strided", "transformed"])
def test_what_is_copied_to_counts_as_shared_too(*, is_packed: bool) -> None:
    """If this fails, a tensor that is loaded beside its transpose is said to be damaged, now and then."""
    memory, elsewhere = torch.zeros(2, 2), torch.zeros(2, 2)
    location = ItemLocation(object_index=0, begin=16, end=32, dtype="float32", lengths=(2, 2), transforms=())
    target = BytesTarget(location) if is_packed else new_block_target(location, Box((0, 0), (2, 2)), memory.t())
    others = [Consumer(whole_item("c", [2, 2]), location, target, memory.t())]
    consumers = consumers_of_wholes(memory, elsewhere, others=others)
    consumers.wants(max_gap_bytes=0)
    consumers.keep_apart()
    assert consumers.are_copied()[:2] == [True, False]


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 1)], ids=str)
def test_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """If this fails, a load fills a tensor with a part of the stored one, and says nothing."""
    cloudckpt.save({"w": torch.arange(3.0), "step": 1}, tmp_path / "c")
    target = torch.full(shape, -1.0)
    with pytest.raises(StateDictMismatchError, match=r"'w' was saved with shape \(3,\), not"):
        cloudckpt.load({"w": target, "step": 0}, tmp_path / "c")
    assert torch.equal(target, torch.full(shape, -1.0))


def test_values_are_put_back_after_success_alone(tmp_path: Path) -> None:
    """If this fails, numbers and strings keep their old values after a load, or a failed load changes them."""
    cloudckpt.save(filled(torch.rand), tmp_path / "c")
    target = filled(torch.zeros) | {"name": "old"}
    target["more"]["step"] = 0
    with pytest.raises(StateDictMismatchError):
        cloudckpt.load(target | {"missing": torch.ones(1)}, tmp_path / "c")
    assert (target["name"], target["more"]["step"]) == ("old", 0)
    cloudckpt.load(target, tmp_path / "c")
    assert (target["name"], target["more"]["step"]) == ("run", 7)
