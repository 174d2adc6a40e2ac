"""Saved on some ranks in some layout, loaded on others in another: every element is where it was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tests.kit.models import CPU, FEATURES, Training, assert_same, set_state, state_dict_of
from tests.kit.places import BucketPlace, LocalPlace
from tests.kit.ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)

import cloudckpt


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a tensor on a mesh: its ranks per mesh dimension, and a placement for each dimension."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def num_ranks(self) -> int:
        count = 1
        for size in self.mesh:
            count *= size
        return count

    def __str__(self) -> str:
        names = "".join(f"S{placement.dim}" if isinstance(placement, Shard) else "R" for placement in self.placements)
        return f"{'x'.join(map(str, self.mesh))}{names}"


ROWS_1 = Layout(mesh=(1,), placements=(Shard(0),))
ROWS_2 = Layout(mesh=(2,), placements=(Shard(0),))
ROWS_4 = Layout(mesh=(4,), placements=(Shard(0),))
COLUMNS_2 = Layout(mesh=(2,), placements=(Shard(1),))
COLUMNS_4 = Layout(mesh=(4,), placements=(Shard(1),))
REPLICATED_2 = Layout(mesh=(2,), placements=(Replicate(),))
BLOCKS_4 = Layout(mesh=(2, 2), placements=(Shard(0), Shard(1)))
HYBRID_4 = Layout(mesh=(2, 2), placements=(Replicate(), Shard(0)))
NESTED_4 = Layout(mesh=(2, 2), placements=(Shard(0), Shard(0)))

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (16, 8),
    "uneven": (7, 5),
    "fewer rows than ranks": (3, 9),  # the last ranks hold nothing
    "one row": (1, 6),
    "one column": (6, 1),
    "no rows": (0, 4),
    "no columns": (4, 0),
    "cube": (5, 3, 4),
}


def full_tensors() -> dict[str, Tensor]:
    """The whole of every tensor, each element different from every other."""
    tensors = {}
    start = 1
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + numel, dtype=torch.float32).reshape(shape)
        start += numel
    return tensors


def plain_values() -> dict[str, object]:
    """Values that every rank holds whole."""
    return {"zero-dim": torch.tensor(42.5), "step": 3, "name": "run"}


def save_in(layout: Layout, uri: str) -> None:
    mesh = init_device_mesh("cpu", layout.mesh)
    state: dict[str, object] = {
        name: distribute_tensor(full, mesh, layout.placements) for name, full in full_tensors().items()
    }
    cloudckpt.save(state | plain_values(), uri)


def load_in(layout: Layout, uri: str) -> None:
    mesh = init_device_mesh("cpu", layout.mesh)
    state: dict[str, object] = {
        name: zeros(*shape, device_mesh=mesh, placements=layout.placements) for name, shape in SHAPES.items()
    }
    pointers = {name: tensor.to_local().data_ptr() for name, tensor in state.items() if isinstance(tensor, DTensor)}
    state |= {"zero-dim": torch.tensor(0.0), "step": None, "name": None}
    cloudckpt.load(state, uri)
    for name, full in full_tensors().items():
        loaded = state.pop(name)
        assert isinstance(loaded, DTensor)
        assert loaded.to_local().data_ptr() == pointers[name]
        expected = distribute_tensor(full, mesh, layout.placements, src_data_rank=None)
        assert_same(loaded.to_local(), expected.to_local())
    assert_same(state, plain_values())


CHANGES = [
    (ROWS_4, ROWS_2),
    (ROWS_4, ROWS_1),
    (ROWS_2, ROWS_4),
    (ROWS_1, ROWS_4),
    (ROWS_4, COLUMNS_4),
    (COLUMNS_4, ROWS_2),
    (COLUMNS_2, COLUMNS_4),
    (BLOCKS_4, ROWS_1),
    (BLOCKS_4, COLUMNS_2),
    (ROWS_2, BLOCKS_4),
    (HYBRID_4, ROWS_4),
    (ROWS_2, HYBRID_4),
    (NESTED_4, COLUMNS_4),
    (ROWS_4, NESTED_4),
    (REPLICATED_2, BLOCKS_4),
    (BLOCKS_4, REPLICATED_2),
]


def save_in_each(layouts: list[Layout], root: str) -> None:
    for layout in layouts:
        save_in(layout, f"{root}/{layout}")


def load_in_each(changes: list[tuple[Layout, Layout]], root: str) -> None:
    for saved, wanted in changes:
        load_in(wanted, f"{root}/{saved}")


@pytest.mark.multirank
def test_a_checkpoint_loads_in_another_layout(local: LocalPlace) -> None:
    """If this fails, a job that resumes on another number of ranks trains on wrong weights."""
    layouts = list(dict.fromkeys(saved for saved, _ in CHANGES))
    for num_ranks in (1, 2, 4):
        fitting = [layout for layout in layouts if layout.num_ranks == num_ranks]
        run_ranks(save_in_each, fitting, local.root, world_size=num_ranks)
    for num_ranks in (1, 2, 4):
        wanted = [change for change in CHANGES if change[1].num_ranks == num_ranks]
        run_ranks(load_in_each, wanted, local.root, world_size=num_ranks)


@pytest.mark.multirank
@pytest.mark.every_store
@pytest.mark.slow
def test_a_checkpoint_on_a_bucket_loads_in_other_layouts(bucket: BucketPlace) -> None:
    """If this fails, resharding reads wrong byte ranges from an object store."""
    run_ranks(save_in, ROWS_4, bucket.uri(), world_size=4)
    run_ranks(load_in, COLUMNS_2, bucket.uri(), world_size=2)


@on_ranks(2)
def test_plain_tensors_load_into_sharded_ones_and_the_reverse(uri: str) -> None:
    """If this fails, a model saved whole cannot be loaded sharded, or the other way round."""
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(64.0).reshape(8, 8)
    cloudckpt.save(
        {
            "a": distribute_tensor(full, mesh, [Shard(0)]),
            "b": full,
            "c": distribute_tensor(full, mesh, [Replicate()]),
        },
        uri,
    )
    state = {
        "a": torch.zeros(8, 8),
        "b": zeros(8, 8, device_mesh=mesh, placements=[Shard(1)]),
        "c": zeros(8, 8, device_mesh=mesh, placements=[Shard(0)]),
    }
    cloudckpt.load(state, uri)
    assert_same(state["a"], full)
    rank = dist.get_rank()
    assert isinstance(state["b"], DTensor)
    assert isinstance(state["c"], DTensor)
    assert_same(state["b"].to_local(), full[:, 4 * rank : 4 * rank + 4].contiguous())
    assert_same(state["c"].to_local(), full[4 * rank : 4 * rank + 4])


def sharded_tensor(num_shards: int, *, fill_zero: bool) -> ShardedTensor:
    """The rows of one tensor as `num_shards` shards, dealt out to the ranks in turn: several to a rank."""
    full = torch.arange(48.0).reshape(12, 4)
    num_rows = 12 // num_shards
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shards = [
        LocalShard.from_tensor_and_offsets(
            torch.zeros(num_rows, 4) if fill_zero else full[begin : begin + num_rows].clone(), [begin, 0], rank
        )
        for number, begin in enumerate(range(0, 12, num_rows))
        if number * num_ranks // num_shards == rank
    ]
    return init_from_local_shards(shards, 12, 4)


@on_ranks(2)
def test_one_saved_chunk_fills_two_shards(root: str) -> None:
    """If this fails, ranks with several shards of one tensor cannot reshard: ranges in one chunk count as a clash."""
    for num_saved, num_wanted in [(2, 4), (4, 2), (2, 6), (6, 4), (4, 6)]:
        uri = f"{root}/{num_saved}-{num_wanted}"
        cloudckpt.save({"x": sharded_tensor(num_saved, fill_zero=False)}, uri)
        state = {"x": sharded_tensor(num_wanted, fill_zero=True)}
        cloudckpt.load(state, uri)
        expected = sharded_tensor(num_wanted, fill_zero=False)
        for loaded, wanted in zip(state["x"].local_shards(), expected.local_shards(), strict=True):
            assert_same(loaded.tensor, wanted.tensor)


NUM_LAYERS = 4


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(NUM_LAYERS)))


def parameter_of(name: str, tensor: Tensor) -> Tensor:
    """Return what a test can tell from any other: each name's own numbers."""
    first = sum(map(ord, name))
    return torch.arange(first, first + tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)


def load_shards(uri: str) -> None:
    mesh = init_device_mesh("cpu", (NUM_LAYERS,))
    model = FullyShardedDataParallel(layers(), device_mesh=mesh, device_id=CPU, use_orig_params=True)
    training = Training(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.5))
    state = state_dict_of(training)
    cloudckpt.load(state, uri)
    set_state(training, state)
    for name, tensor in state_dict_of(training)["model"].items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert_same(whole, parameter_of(name, whole))
    assert training.optimizer.param_groups[0]["lr"] == 0.01
    training.step(0)


@on_ranks(NUM_LAYERS)
def test_fsdp_loads_what_pipeline_stages_saved(root: str) -> None:
    """If this fails, a model that was trained by stages, a rank with layers of its own, cannot be loaded otherwise."""
    with torch.device("meta"):
        model = layers()
    stage = model.get_submodule(str(dist.get_rank())).to_empty(device=CPU)  # the other stages stay on meta
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.data.copy_(parameter_of(name, parameter))
    state = state_dict_of(Training(model=model, optimizer=torch.optim.Adam(stage.parameters(), lr=0.01)))
    mine = {name: tensor for name, tensor in state["model"].items() if not tensor.is_meta}
    assert len(mine) == 2
    cloudckpt.save({**state, "model": mine}, f"{root}/mine")
    load_shards(f"{root}/mine")
    cloudckpt.save(state, f"{root}/all")  # torch leaves the others' in, and one rank alone can write each
    load_shards(f"{root}/all")
