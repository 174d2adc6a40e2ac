"""The simulated job: what each rank plans and says that it wrote, as torch and cloudckpt would have it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from operator import add

import torch
from awscrt.checksums import crc32c
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.format.model import ItemReceipts, ObjectRef
from cloudckpt.format.safetensors import HeaderEntry, lay_out
from cloudckpt.tensors.tensor_bytes import dtype_name

TILE_BYTES = 2**20
ATTEMPT = "20260131T235959123Z-1f2e3d4c5b6a"
_PARAMETERS = 100
_KINDS = (
    ("model.{}.weight", torch.bfloat16),
    ("optimizer.state.{}.weight.exp_avg", torch.float32),
    ("optimizer.state.{}.weight.exp_avg_sq", torch.float32),
)
NUM_TENSORS = _PARAMETERS * len(_KINDS)
_VALUES = ("optimizer.param_groups.lr", "step")
_VALUE_BYTES = 512
_ROWS, _COLUMNS = 64, 4096  # of one rank's shard
_TENSOR_PARALLEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """One tensor of the job."""

    fqn: str
    dtype: torch.dtype
    is_on_mesh: bool
    """True if it is split along two dimensions, as by tensor parallelism beside FSDP; else by rows."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """`num_ranks` ranks with one shard of each of 300 tensors: 100 parameters with their Adam moments, a third of
    them on a mesh of two dimensions; and two values that all ranks hold.
    """

    num_ranks: int

    @property
    def num_chunks(self) -> int:
        return self.num_ranks * NUM_TENSORS

    @cached_property
    def tensors(self) -> list[Sharded]:
        return [
            Sharded(fqn=name.format(f"layers.{number}"), dtype=dtype, is_on_mesh=number % 3 == 2)
            for number in range(_PARAMETERS)
            for name, dtype in _KINDS
        ]

    def shape_of(self, tensor: Sharded) -> torch.Size:
        columns = _TENSOR_PARALLEL if tensor.is_on_mesh else 1
        return torch.Size((self.num_ranks // columns * _ROWS, columns * _COLUMNS))

    def chunk_of(self, tensor: Sharded, rank: int, *, num_ranks: int | None = None) -> ChunkStorageMetadata:
        """Return the chunk of `rank`; with `num_ranks`, in a job of another size that holds the same tensors."""
        columns = _TENSOR_PARALLEL if tensor.is_on_mesh else 1
        rows = self.shape_of(tensor)[0] * columns // (num_ranks or self.num_ranks)
        row, column = divmod(rank, columns)
        return ChunkStorageMetadata(
            offsets=torch.Size((row * rows, column * _COLUMNS)), sizes=torch.Size((rows, _COLUMNS))
        )

    def metadata(self) -> Metadata:
        """Return the metadata that torch's default planner makes of all ranks' plans."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            tensor.fqn: TensorStorageMetadata(
                properties=TensorProperties(dtype=tensor.dtype),
                size=self.shape_of(tensor),
                chunks=[self.chunk_of(tensor, rank) for rank in range(self.num_ranks)],
            )
            for tensor in self.tensors
        }
        entries.update((fqn, BytesStorageMetadata()) for fqn in _VALUES)
        return Metadata(entries, planner_data={fqn: tuple(fqn.split(".")) for fqn in entries})

    def plan_of(self, rank: int, *, with_values: bool = True) -> SavePlan:
        """The local plan that torch's default planner makes on that rank."""
        items = []
        for tensor in self.tensors:
            chunk = self.chunk_of(tensor, rank)
            data = TensorWriteData(
                chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=self.shape_of(tensor)
            )
            index = MetadataIndex(tensor.fqn, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        if with_values:
            items += [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO) for fqn in _VALUES]
        fqns = [item.index.fqn for item in items]
        return SavePlan(items=items, planner_data={fqn: tuple(fqn.split(".")) for fqn in fqns})

    def results_of(self, plan: SavePlan, rank: int) -> list[WriteResult]:
        """Return the results of that rank, whose part of the global `plan` went into one object."""
        entries = [_entry(item) for item in plan.items]
        layout = lay_out(entries)
        stored_in = ObjectRef(
            key=f"data/{ATTEMPT}/{rank}-0.safetensors",
            size_bytes=layout.size_bytes,
            tile_bytes=TILE_BYTES,
            tile_crc32cs=_checksums(rank, -(-layout.size_bytes // TILE_BYTES)),
        )
        receipts = ItemReceipts(
            stored_in=stored_in,
            fqns=[item.index.fqn for item in plan.items],
            offsets=[None if item.index.offset is None else tuple(item.index.offset) for item in plan.items],
            begins=array("q", layout.begins),
            ends=array("q", map(add, layout.begins, (entry.num_bytes for entry in entries))),
            dtypes=[entry.dtype for entry in entries],
            lengths=[entry.shape if entry.dtype else () for entry in entries],
            transforms=[()] * len(entries),
        )
        return [
            WriteResult(index=MetadataIndex(stored_in.key), size_in_bytes=stored_in.size_bytes, storage_data=receipts)
        ]


def _checksums(rank: int, num_tiles: int) -> tuple[int, ...]:
    """Return checksums that compress as badly as real ones."""
    return tuple(crc32c(b"%d-%d" % (rank, tile)) for tile in range(num_tiles))


def _entry(item: WriteItem) -> HeaderEntry:
    if item.tensor_data is None:
        return HeaderEntry(fqn=item.index.fqn, dtype=None, shape=(_VALUE_BYTES,), offsets=None, num_bytes=_VALUE_BYTES)
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
    return HeaderEntry(
        fqn=item.index.fqn,
        dtype=dtype_name(dtype),
        shape=tuple(chunk.sizes),
        offsets=tuple(chunk.offsets),
        num_bytes=chunk.sizes.numel() * dtype.itemsize,
    )
