"""Plan and fill a load: plain tensors in bulk, with the result of torch's own planner."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.kit.options import make_options
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

import cloudckpt
from cloudckpt.dcp.load_items import find_wanted_items
from cloudckpt.dcp.load_planner import ExplainingLoadPlanner
from cloudckpt.dcp.torch_metadata import make_metadata
from cloudckpt.errors import CloudckptError, StateDictMismatchError, UnsupportedValueError
from cloudckpt.events import Event
from cloudckpt.format.model import Chunk, Manifest, StoredObject, StoredTensor
from cloudckpt.tensors.load_targets import BytesTarget

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
    assume(targets[0])  # a load of nothing is refused
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


def test_a_load_that_ends_early_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, tensors keep some of their old values, and nobody is told (G3, G4)."""
    cloudckpt.save({"w": torch.ones(4)}, tmp_path / "c", no_dist=True)
    nothing_done: Iterator[Any] = (request for request in ())
    monkeypatch.setattr("cloudckpt.pipeline.reader.run_as_completed", lambda *_, **__: nothing_done)
    with pytest.raises(cloudckpt.errors.CheckpointError, match="ended before all was read"):
        cloudckpt.load({"w": torch.zeros(4)}, tmp_path / "c", no_dist=True)


@pytest.mark.parametrize("begin", [0, 2], ids=["whole", "part"])
@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner()], ids=["ours", "torch's"])
def test_freed_memory_is_not_filled(tmp_path: Path, planner: LoadPlanner | None, begin: int) -> None:
    """If this fails, a load into a tensor without memory succeeds, and nothing of it is there, or it crashes."""
    cloudckpt.save({"w": torch.ones(3)}, tmp_path / "x")
    freed = torch.zeros(begin + 3)[begin:]
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match=r"cannot load 'w' .* memory was freed"):
        cloudckpt.load({"w": freed}, tmp_path / "x", planner=planner)


def test_a_tensor_whose_elements_share_memory_is_named(tmp_path: Path) -> None:
    """If this fails, a load into an expanded tensor ends in torch's error, without the name of the entry."""
    cloudckpt.save({"w": torch.arange(3)}, tmp_path / "x", no_dist=True)
    with pytest.raises(UnsupportedValueError, match=r"cannot load 'w' .* elements share memory"):
        cloudckpt.load({"w": torch.zeros(1, dtype=torch.int64).expand(3)}, tmp_path / "x", no_dist=True)


def filled_in_place(state_dict: dict[str, torch.Tensor], tensors: dict[str, StoredTensor]) -> set[str]:
    """The entries whose bytes are read into their own memory, of a load from one object."""
    stored = StoredObject(key="data/a/0-0.safetensors", size=1000, crc32c="")
    manifest = Manifest(
        format="cloudckpt",
        version=(1, 0),
        attempt="a",
        created_at="",
        world_size=1,
        software={},
        tile_bytes=1000,
        objects=[stored],
        tensors=tensors,
        values={},
    )
    metadata = make_metadata(manifest, checkpoint_id="here", load_id="", is_lazy=True)
    planner = ExplainingLoadPlanner("here")
    planner.set_up_planner(state_dict, metadata)
    items = planner.create_local_plan().items
    wanted = find_wanted_items(
        items,
        planner,
        manifest,
        metadata.storage_data,
        tensors_of=planner.tensors_of,
        on_value=print,
        allows_lossy_casts=False,
        uri="here",
        is_logged=False,
    )
    assert wanted.ranges(max_gap_bytes=0)
    copied = (item for item in wanted.items if item.target.is_copied or isinstance(item.target, BytesTarget))
    return set(state_dict) - {item.name for item in copied}


def stored_in(num_chunks: int, *shape: int, transforms: Sequence[str] = ()) -> StoredTensor:
    """A tensor of float32, of which each chunk has as many rows as the others."""
    rows, num_bytes = shape[0] // num_chunks, 4 * math.prod(shape) // num_chunks
    chunks = [
        Chunk((rows * n, *(0 for _ in shape[1:])), (rows, *shape[1:]), 0, 16 + num_bytes * n, 16 + num_bytes * (n + 1))
        for n in range(num_chunks)
    ]
    return StoredTensor(dtype="float32", shape=shape, chunks=chunks, transforms=list(transforms))


def test_targets_that_share_memory_are_filled_one_after_the_other() -> None:
    """If this fails, the reads of tied weights find each other's bytes when they check their own, now and then."""
    memory = torch.zeros(16)
    state_dict = {"tied": memory[:4], "twin": memory[:4], "alone": memory[12:], "parts": memory[4:6]}
    state_dict |= {"whole": memory[6:10], "end": memory[8:10]}
    stored = {name: stored_in(1, len(tensor)) for name, tensor in state_dict.items()}
    stored |= {"parts": stored_in(2, 2), "end": stored_in(2, 2)}
    assert filled_in_place(state_dict, stored) == {"alone", "parts"}


@pytest.mark.parametrize("transforms", [[], ["zlib"]], ids=["strided", "transformed"])
def test_targets_filled_by_copies_count_as_shared(transforms: list[str]) -> None:
    """If this fails, a tensor that is loaded beside its transpose is said to be damaged, now and then."""
    memory, elsewhere = torch.zeros(2, 2), torch.zeros(2, 2)
    stored = {"a": stored_in(1, 2, 2), "b": stored_in(1, 2, 2), "c": stored_in(1, 2, 2, transforms=transforms)}
    assert filled_in_place({"a": memory, "b": elsewhere, "c": memory.t()}, stored) == {"b"}


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 1)], ids=str)
def test_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """If this fails, a load fills a tensor with a part of the stored one, and says nothing."""
    cloudckpt.save({"w": torch.arange(3.0), "step": 1}, tmp_path / "c")
    target = torch.full(shape, -1.0)
    with pytest.raises(StateDictMismatchError, match=r"'w' was saved with shape \(3,\), and has"):
        cloudckpt.load({"w": target, "step": 0}, tmp_path / "c")
    assert torch.equal(target, torch.full(shape, -1.0))


def test_a_tensor_that_gets_less_memory_during_the_load_is_refused(tmp_path: Path) -> None:
    """If this fails, a load writes past the end of a tensor, into memory of others."""
    cloudckpt.save({"w": torch.arange(1000.0)}, tmp_path / "c")
    target, memory = torch.zeros(1000), torch.zeros(1000)

    def exchange(event: Event) -> None:
        if event.name == "load.planned":
            target.set_(memory[:10])

    with pytest.raises(CloudckptError, match=r"gave a tensor of shape \(10,\)"):
        cloudckpt.load({"w": target}, tmp_path / "c", options=cloudckpt.Options(on_event=exchange))
    assert not memory.any()


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
