"""A save of a snapshot stores the same as a save of the original, whatever planners ask of its values."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from tests import scaled
from tests.kit.ranks import run_ranks
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import cloudckpt
from cloudckpt import Options
from cloudckpt.background.stager import PinnedStager
from cloudckpt.inspect.comparison import open_reader

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")

WAIT_S = 120.0
ROWS, COLUMNS = 3, 4
"""The rows of one rank, and the columns."""
HAS_PARTS = hasattr(torch.distributed.checkpoint, "CheckpointableTensor")
"""True since torch 2.14."""


class Odd(torch.Tensor):
    """A subclass with state of its own."""


class Rows(NamedTuple):
    """Rows of a larger tensor, and where they lie."""

    begin: int
    tensor: torch.Tensor


class HookedByClass(torch.Tensor):
    """Says by its class where its rows lie."""

    rows: list[Rows]
    num_rows: int

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return write_items(fqn, self.rows, self.num_rows)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(tensor for begin, tensor in self.rows if index.offset == torch.Size([begin, 0]))


def chunk_of(rows: Rows) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([rows.begin, 0]), sizes=rows.tensor.size())


def write_items(fqn: str, rows: list[Rows], num_rows: int) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size([one.begin, 0])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk_of(one),
                properties=TensorProperties.create_from_tensor(one.tensor),
                size=torch.Size([num_rows, COLUMNS]),
            ),
        )
        for one in rows
    ]


class Layout:
    """The hooks of a tensor as methods of something that knows it by its name."""

    def __init__(self, name: str, rows: list[Rows], num_rows: int) -> None:
        self.rows, self.num_rows = {name: rows}, num_rows

    def write_items(self, fqn: str, _: object) -> list[WriteItem]:
        return write_items(fqn, self.rows[fqn], self.num_rows)

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(one) for rows in self.rows.values() for one in rows]

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        return next(one.tensor for one in self.rows[index.fqn] if index.offset == torch.Size([one.begin, 0]))


class Maker:
    """Makes values of each kind on one rank, and can overwrite the memory of all of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.num_ranks = mesh, mesh.get_rank(), mesh.size()
        self.num_rows = ROWS * self.num_ranks
        self._made: list[torch.Tensor] = []
        self._seeds = itertools.count()

    def overwrite(self) -> None:
        """Change all of the memory, as training does."""
        for tensor in self._made:
            tensor.untyped_storage().fill_(0xA5)

    def same(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that all ranks have."""
        generator = torch.Generator().manual_seed(next(self._seeds))
        made = torch.randn(shape, generator=generator, dtype=dtype)
        self._made.append(made)
        return made

    def own(self, num_rows: int = ROWS) -> torch.Tensor:
        """Rows that this rank has alone."""
        made = self.same(num_rows, COLUMNS)
        made += 100 * self.rank
        return made

    def rows(self, local: torch.Tensor) -> list[Rows]:
        """The rows of `local`, which lie in two places, neither of which is that of its rank in a DTensor."""
        begin = ROWS * (self.num_ranks - 1 - self.rank)
        return [Rows(begin + 2, local[:1]), Rows(begin, local[1:])]

    def hook(self, target: Any, name: str, local: torch.Tensor) -> Any:
        layout = Layout(name, self.rows(local), self.num_rows)
        target.__create_write_items__ = layout.write_items
        target.__create_chunk_list__ = layout.chunks
        target.__get_tensor_shard__ = functools.partial(Layout.shard, layout)
        return target

    def dtensor(self, local: torch.Tensor) -> DTensor:
        shape = torch.Size([self.num_rows, COLUMNS])
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(COLUMNS, 1))

    def make(self, kind: str, name: str) -> Any:
        return getattr(self, f"_{kind}")(name)

    def _plain(self, _: str) -> Any:
        return self.same(5, 3)

    def _transposed(self, _: str) -> Any:
        return self.same(5, 3).t()[1:]

    def _conjugate(self, _: str) -> Any:
        return self.same(5, dtype=torch.complex64).conj()

    def _negative(self, _: str) -> Any:
        return torch._neg_view(self.same(5))

    def _channels_last(self, _: str) -> Any:
        return self.same(2, 3, 4, 5).to(memory_format=torch.channels_last)

    def _empty(self, _: str) -> Any:
        return torch.empty(0, 3, requires_grad=True)

    def _parameter(self, _: str) -> Any:
        return torch.nn.Parameter(self.same(5))

    def _frozen_parameter(self, _: str) -> Any:
        return torch.nn.Parameter(self.same(5), requires_grad=False)

    def _not_a_leaf(self, _: str) -> Any:
        made = self.same(5).requires_grad_() * 2
        self._made.append(made)
        return made

    def _with_attributes(self, _: str) -> Any:
        made: Any = torch.nn.Parameter(self.same(5))
        made.is_sharded, made.note, made.grad_copy = True, "text", self.same(2)
        return made

    def _text(self, _: str) -> Any:
        return "text"

    def _array(self, _: str) -> Any:
        return np.arange(3)

    def _subclass(self, _: str) -> Any:
        made: Any = self.same(5).as_subclass(Odd)
        made.state = self.same(2)
        return made

    def _wrapper(self, _: str) -> Any:
        return scaled.Scaled(self.same(2, 4), self.same(2, 1), [1, 4], scaled.Recipe())

    def _parts(self, _: str) -> Any:
        made: Any = self.own() if HAS_PARTS else self.same(ROWS, COLUMNS)  # before, torch took it for a whole tensor
        begin = ROWS * (self.num_ranks - 1 - self.rank)
        made.global_shape = (self.num_rows, COLUMNS)
        made.global_offsets, made.local_offsets = ((begin + 2, 0), (begin, 0)), ((0, 0), (1, 0))
        made.local_sizes = ((1, COLUMNS), (2, COLUMNS))
        return made

    def _hooked(self, name: str) -> Any:
        local = self.own()
        return self.hook(local, name, local)

    def _hooked_parameter(self, name: str) -> Any:
        local = self.own()
        return self.hook(torch.nn.Parameter(local), name, local)

    def _hooked_subclass(self, name: str) -> Any:
        local = self.own()
        return self.hook(local.as_subclass(Odd), name, local)

    def _hooked_by_class(self, _: str) -> Any:
        made: Any = self.own().as_subclass(HookedByClass)
        made.rows, made.num_rows = self.rows(made.as_subclass(torch.Tensor)), self.num_rows
        return made

    def _hooked_elsewhere(self, name: str) -> Any:
        return self.hook(torch.empty(0), name, self.own(ROWS + 4)[1 : 1 + ROWS])

    def _dtensor(self, _: str) -> Any:
        return self.dtensor(self.own())

    def _offset_dtensor(self, _: str) -> Any:
        return self.dtensor(self.own(ROWS + 1)[1:])

    def _replicated(self, _: str) -> Any:
        return DTensor.from_local(self.same(5), self.mesh, [Replicate()], run_check=False)

    def _dtensor_parameter(self, _: str) -> Any:
        return torch.nn.Parameter(self.dtensor(self.own()))

    def _hooked_shard(self, name: str) -> Any:
        local = self.own()
        made = self.dtensor(local)
        self.hook(made._local_tensor, name, local)
        return made

    def _hooked_shard_parameter(self, name: str) -> Any:
        made = torch.nn.Parameter(self._hooked_shard(name))
        return self.hook(made._local_tensor, name, made._local_tensor.detach())

    def _hooked_dtensor(self, name: str) -> Any:
        local = self.own()
        return self.hook(self.dtensor(local), name, local)

    def _shards_wrapper(self, _: str) -> Any:
        first, second = self.own()[:, :3].contiguous(), self.own()[:, 3:].contiguous()
        self._made += [first, second]
        begin = ROWS * (self.num_ranks - 1 - self.rank)
        return self.dtensor(LocalShardsWrapper([first, second], [(begin, 0), (begin, 3)]))

    def _sharded(self, _: str) -> Any:
        placed = ShardMetadata([ROWS * self.rank, 0], [ROWS, COLUMNS], f"rank:{self.rank}/cpu")
        return init_from_local_shards([LocalShard(self.own(), placed)], self.num_rows, COLUMNS)


OF_ONE_RANK = [
    *("plain", "transposed", "conjugate", "negative", "channels_last", "empty", "parameter", "frozen_parameter"),
    *("with_attributes", "text", "array"),
]
KINDS = [
    *OF_ONE_RANK,
    *("not_a_leaf", "subclass", "wrapper", "parts", "hooked", "hooked_parameter", "hooked_subclass", "hooked_by_class"),
    *("hooked_elsewhere", "dtensor", "offset_dtensor", "replicated", "dtensor_parameter", "hooked_shard"),
    *("hooked_shard_parameter", "hooked_dtensor", "shards_wrapper", "sharded"),
]


class Both(NamedTuple):
    """A tuple of a class of its own."""

    first: Any
    second: Any


def build(form: Any, maker: Maker, name: str = "") -> Any:
    """The value of a form: the name of a kind, or a container of forms."""
    if isinstance(form, str):
        return maker.make(form, name)
    prefix = f"{name}." if name else ""
    if isinstance(form, dict):
        return type(form)({key: build(one, maker, f"{prefix}{key}") for key, one in form.items()})
    made = [build(one, maker, f"{prefix}{number}") for number, one in enumerate(form)]
    return made if isinstance(form, list) else Both(*made) if isinstance(form, Both) else tuple(made)


_values = st.recursive(
    st.sampled_from(OF_ONE_RANK), lambda inner: st.tuples(inner, inner) | st.builds(Both, inner, inner), max_leaves=3
)
_forms = st.recursive(
    st.sampled_from(KINDS) | st.tuples(_values, _values),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=10,
)


EVERYTHING = {
    **{kind: kind for kind in KINDS},
    "list": KINDS,
    "nested": {"a": {3: ["hooked_shard", {"b": "conjugate"}]}, "empty": {}, "none": []},
    "tuple": tuple(OF_ONE_RANK),
    "pair": Both("parameter", ("with_attributes", ["frozen_parameter", {"a": "negative"}])),
}


def shown(value: Any) -> Any:
    """Return what a loaded value is, so that it can be compared."""
    if isinstance(value, scaled.Scaled):
        return [shown(value.data_), shown(value.scale)]
    if isinstance(value, torch.Tensor):
        attributes = {name: shown(one) for name, one in value.__dict__.items()}
        return type(value), value.dtype, value.tolist(), value.requires_grad, attributes
    if isinstance(value, dict):
        return [(key, shown(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shown(one) for one in value]
    return type(value), np.asarray(value).tolist()


def stored(uri: str) -> Any:
    """All that a checkpoint says of its entries, but for where their bytes lie."""
    manifest = open_reader(uri, Options()).manifest
    tensors = {
        name: (one.dtype, one.shape, one.requires_grad, sorted((chunk.offsets, chunk.lengths) for chunk in one.chunks))
        for name, one in manifest.tensors.items()
    }
    structure = manifest.nesting, manifest.typed_nesting, manifest.empty_mappings, manifest.wrappers
    return tensors, structure, shown(cloudckpt.read(uri))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.serialization.safe_globals([Both, *scaled.ALLOWED]):
        yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """The snapshot for a thread."""
    staging = PinnedStager(num_threads=2).begin(state)
    staging.completed.result(WAIT_S)
    return staging.state_dict


def sent(state: dict[str, Any]) -> dict[str, Any]:
    """The snapshot as torch's process gets it."""
    received: dict[str, Any] = pickle.loads(ForkingPickler.dumps(PinnedStager(shared=True).stage(state)))
    return received


_numbers = itertools.count()


@pytest.mark.parametrize("snapshot", [copied, sent])
@example(form=EVERYTHING)
@given(form=st.dictionaries(st.sampled_from("wxyz"), _forms, min_size=1))
def test_a_snapshot_is_saved_as_its_original(
    mesh: DeviceMesh, snapshot: Callable[[dict[str, Any]], dict[str, Any]], form: dict[str, Any]
) -> None:
    """If this fails, a background save stores other values than `save`, at other places, or reads changed memory."""
    uri = f"memory://answers-{next(_numbers)}"
    maker = Maker(mesh)
    state = build(form, maker)
    cloudckpt.save(state, f"{uri}/save")
    taken = snapshot(state)
    maker.overwrite()
    cloudckpt.save(taken, f"{uri}/snapshot")
    assert stored(f"{uri}/snapshot") == stored(f"{uri}/save")


def save_in_all_ways(root: str) -> None:
    """On each rank: save one state in each way, and change its memory as soon as a way allows that."""
    maker = Maker(init_device_mesh("cpu", (dist.get_world_size(),)))
    for way, save in WAYS.items():
        maker = Maker(maker.mesh)
        state = build(EVERYTHING, maker)
        handle = save(state, f"{root}/{way}")
        if handle is not None:
            handle.staged.result(WAIT_S)
            maker.overwrite()
            handle.result(WAIT_S)
    cloudckpt.close()


WAYS: dict[str, Callable[..., Any]] = {
    "save": lambda *args: cloudckpt.save(*args) and None,
    "async_save": cloudckpt.async_save,
    "async_overlap": functools.partial(cloudckpt.async_save, options=Options(async_overlap=True)),
    "stager": lambda *args: cloudckpt.async_save(*args, async_stager=PinnedStager()),
    "process": functools.partial(cloudckpt.async_save, async_checkpointer_type=AsyncCheckpointerType.PROCESS),
}


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ways_to_save_store_the_same(tmp_path: Path, num_ranks: int) -> None:
    """If this fails, rows of a tensor are stored in each other's places, or another way loses what `save` stores."""
    run_ranks(save_in_all_ways, str(tmp_path), world_size=num_ranks)
    with torch.serialization.safe_globals([Both, *scaled.ALLOWED]):
        expected = stored(f"{tmp_path}/save")
        for way in WAYS:
            assert stored(f"{tmp_path}/{way}") == expected, way
