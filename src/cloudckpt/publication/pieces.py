"""The pieces of a model that one rank holds, and the checksums of whole tensors that ranks compute from their pieces.

CRC32C is linear: the checksum of a tensor is the XOR of what its disjoint boxes contribute. So ranks in any layout find
the checksum of the same bytes, each from its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from awscrt.checksums import combine_crc32c, crc32c

from cloudckpt._messages import quote_names
from cloudckpt._workers import num_cores_of_rank, run_all
from cloudckpt.dcp.live.objects import LiveObjects, Model
from cloudckpt.dcp.save_and_load import states_of
from cloudckpt.dcp.save_planner import BalancedSavePlanner
from cloudckpt.errors import StateDictMismatchError, UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES
from cloudckpt.io.boxes import Box, find_runs
from cloudckpt.publication.versions import PublishedTensor
from cloudckpt.tensors.tensor_bytes import (
    bytes_view,
    dtype_name,
    extent_bytes,
    holds_its_values,
    plain_tensor,
    synchronize_streams,
)

_MAX_THREADS = 4
_ALL_ONES = 0xFFFFFFFF
_OF_NO_TENSOR = -1

HeldPieceKey: TypeAlias = tuple[str, Box]
"""The name of a tensor, and a box of it."""


class HeldPiece(NamedTuple):
    """A box of a tensor of the model that this rank holds."""

    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: str
    tensor: torch.Tensor
    """The live memory of the box: strided, on any device."""

    @property
    def key(self) -> HeldPieceKey:
        return self.name, self.box

    @property
    def memory_key(self) -> object:
        """A key that two pieces have in common only if they are the same memory, such as tied weights."""
        tensor = self.tensor
        return (tensor.data_ptr(), tensor.stride(), self.dtype, self.box) if tensor.numel() else self.key

    def bytes(self) -> memoryview:
        """Return the bytes of the piece in row-major order, in host memory: in place if they are there already."""
        return bytes_view(self.tensor.contiguous().cpu())


class HeldPieceSum(NamedTuple):
    """A piece as another rank learns of it: its place, and its contribution to the checksum of the tensor."""

    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: str
    contribution: int


def resolve_model(model: Model, *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state dict that `cloudckpt.save` saves of a model."""
    objects = LiveObjects(model, None, None, None, None, has_random_state=False)
    return objects.entries(rank=rank, num_ranks=num_ranks, is_strict=True)


class HeldModel(NamedTuple):
    """The state of a model on this rank."""

    pieces: list[HeldPiece]
    has_values: bool
    """True if the state has Python objects."""
    put_back: Callable[[], None]
    """Gives the state to the model, after its pieces have changed. FSDP1 holds other memory than its state dict."""


def find_pieces(
    model: Model, *, rank: int, uri: str, published: Mapping[str, PublishedTensor] | None = None
) -> HeldModel:
    """Return the state of a model on this rank, by the names that `cloudckpt.save` gives.

    Raises `UnsupportedValueError` for a tensor without memory of its own. If the model is to get the `published`
    tensors, raises it also for a view that cannot be written to, and `StateDictMismatchError` for tied tensors that are
    published with different bytes.
    """
    entries = resolve_model(model, rank=rank, num_ranks=1)
    states = states_of(entries)
    planner = BalancedSavePlanner()
    planner.is_alone = True
    planner.set_up_planner(states, is_coordinator=True)
    pieces: dict[HeldPieceKey, HeldPiece] = {}
    has_values = False
    for item in planner.create_local_plan().items:
        name, data = item.index.fqn, item.tensor_data
        if data is None:
            has_values = True
            continue
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        held = planner.lookup_object(item.index)
        tensor = plain_tensor(held, name, uri=uri)
        if published is not None and not _is_writable(held, tensor):
            raise UnsupportedValueError(
                f"cannot pull {name!r} of {uri}: it is a view whose elements share memory, as expand() makes it, or a "
                "conjugate or negative one. Pull into a clone() of it",
                uri=uri,
            )
        pieces[name, box] = HeldPiece(name, box, tuple(data.size), dtype_name(tensor.dtype), tensor)

    if published is not None:
        _check_ties(pieces.values(), published, uri=uri)
    synchronize_streams(piece.tensor for piece in pieces.values())  # other threads read them

    def put_back() -> None:
        for key, entry in entries.items():
            entry.load_state_dict(states[key], where=key)

    return HeldModel([*pieces.values()], has_values, put_back)


def _is_writable(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if what is written to `tensor`, the `plain_tensor` of `held`, reaches each element of `held`."""
    is_expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return holds_its_values(held) and not is_expanded


def _check_ties(pieces: Iterable[HeldPiece], published: Mapping[str, PublishedTensor], *, uri: str) -> None:
    first: dict[object, HeldPiece] = {}
    for piece in pieces:
        tied = first.setdefault((piece.memory_key, piece.shape), piece)
        if tied.name in published and published.get(piece.name, published[tied.name]) != published[tied.name]:
            raise StateDictMismatchError(
                f"the model ties {tied.name!r} and {piece.name!r}, which have different values in {uri}. Nothing was "
                "changed. Untie them, or tie them where they are published",
                uri=uri,
            )


def sum_pieces(pieces: Sequence[HeldPiece]) -> list[HeldPieceSum]:
    """Compute the contribution of each piece to the checksum of its tensor."""
    sums: dict[HeldPieceKey, HeldPieceSum] = {}

    def add(piece: HeldPiece) -> None:
        itemsize_bytes = ITEMSIZE_BYTES[piece.dtype]
        contribution = contribution_of(piece.bytes(), piece.box, piece.shape, itemsize_bytes)
        sums[piece.key] = HeldPieceSum(piece.name, piece.box, piece.shape, piece.dtype, contribution)

    in_threads(pieces, add)
    return [sums[piece.key] for piece in pieces]


def without_aliases(pieces: Iterable[HeldPiece]) -> list[HeldPiece]:
    """Return one piece for each memory."""
    return [*{piece.memory_key: piece for piece in pieces}.values()]


def find_overlapping(pieces: Iterable[HeldPiece]) -> list[HeldPiece]:
    """Return the pieces whose memory may be in part that of others, such as views."""
    found: dict[HeldPieceKey, HeldPiece] = {}
    last, last_end = None, 0
    for piece in sorted((piece for piece in pieces if piece.tensor.numel()), key=lambda piece: piece.tensor.data_ptr()):
        begin, end = piece.tensor.data_ptr(), piece.tensor.data_ptr() + extent_bytes(piece.tensor)
        if last is not None and begin < last_end:
            found[last.key], found[piece.key] = last, piece
        if end > last_end:
            last, last_end = piece, end
    return [*found.values()]


def in_threads(items: Sequence[HeldPiece], work: Callable[[HeldPiece], None]) -> None:
    """Run `work` on all `items` in a few threads. Raises the first failure."""
    run_all(items, work, num_threads=min(num_cores_of_rank(), _MAX_THREADS), name="cloudckpt-publication")


def contribution_of(content: memoryview, box: Box, shape: Sequence[int], itemsize_bytes: int) -> int:
    """Return what the bytes of a box, in row-major order, contribute to the checksum of a tensor of `shape`."""
    total, reached, position = 0, 0, 0
    for begin, end in find_runs(shape, box, max_gap=0):
        num_bytes = (end - begin) * itemsize_bytes
        view: Any = content[position : position + num_bytes]  # crc32c takes any buffer
        run = crc32c(view) ^ crc32c_of_zeros(num_bytes)
        total = combine_crc32c(total, run, end * itemsize_bytes - reached)
        reached, position = end * itemsize_bytes, position + num_bytes
    return combine_crc32c(total, 0, math.prod(shape) * itemsize_bytes - reached)


def crc32c_of_zeros(num_bytes: int) -> int:
    """Return the CRC32C of so many bytes of 0."""
    return combine_crc32c(_ALL_ONES, 0, num_bytes) ^ _ALL_ONES


def combine_sums(
    sums_of_ranks: Iterable[Sequence[HeldPieceSum]], *, uri: str, allow_unequal: bool = False
) -> dict[str, PublishedTensor]:
    """Return the form and the checksum of each tensor, from the pieces of all ranks.

    With `allow_unequal`, a tensor whose replicas have different bytes has a checksum that no tensor has.

    Raises `UnsupportedValueError` unless the ranks hold each element of a tensor, and replicas of one box are equal.
    """
    found: dict[HeldPieceKey, HeldPieceSum] = {}
    tensors: dict[str, PublishedTensor] = {}
    missing: dict[str, int] = {}
    different: set[str] = set()
    unequal: set[str] = set()
    for piece in (piece for sums in sums_of_ranks for piece in sums):
        num_elements = math.prod(piece.shape)
        zeros = crc32c_of_zeros(num_elements * ITEMSIZE_BYTES[piece.dtype])
        tensor = tensors.get(piece.name, PublishedTensor(piece.dtype, piece.shape, zeros))
        is_replica = (piece.name, piece.box) in found
        known = found.setdefault((piece.name, piece.box), piece)
        if (tensor.dtype, tensor.shape) != (piece.dtype, piece.shape):
            different.add(piece.name)
        elif known != piece:
            unequal.add(piece.name)
        if not is_replica:
            tensors[piece.name] = PublishedTensor(tensor.dtype, tensor.shape, tensor.crc32c ^ piece.contribution)
            missing[piece.name] = missing.get(piece.name, num_elements) - math.prod(piece.box.lengths)
    if not allow_unequal:
        different |= unequal
    if different:
        raise UnsupportedValueError(
            f"the ranks hold different values of {quote_names(sorted(different))}, so {uri} would depend on the rank "
            "that is asked. Make the replicas equal: broadcast them from one rank",
            uri=uri,
        )
    if uneven := [name for name, num_elements in missing.items() if num_elements]:
        raise UnsupportedValueError(f"the shards of the ranks do not make up all of {quote_names(uneven)}", uri=uri)
    return tensors | {name: msgspec.structs.replace(tensors[name], crc32c=_OF_NO_TENSOR) for name in unequal}


def check_form(held: Mapping[str, PublishedTensor], published: Mapping[str, PublishedTensor], *, uri: str) -> None:
    """Raise `StateDictMismatchError` unless the model has the tensors that are published."""
    forms = [
        {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in tensors.items()} for tensors in (published, held)
    ]
    if different := sorted({name for name, _ in forms[0].items() ^ forms[1].items()}):
        there, own = (form.get(different[0], "no such tensor") for form in forms)
        raise StateDictMismatchError(
            f"{uri} and the model differ in the names, shapes or dtypes of {quote_names(different)}. The first is "
            f"{there} there, and {own} in the model. Nothing was changed. Pull into a model that has those of the "
            "publisher's",
            uri=uri,
        )
