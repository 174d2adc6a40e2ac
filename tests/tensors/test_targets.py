"""From read requests to filled tensors, against numpy's indexing."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.samples import DTYPES, array_of, bytes_for
from tests.tensors.test_data_objects import NoArena

from cloudckpt.format.model import Chunk, ItemLocation, StoredTensor
from cloudckpt.io.boxes import Box
from cloudckpt.io.reads import plan_reads
from cloudckpt.stores.base import copy_into
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.load_targets import (
    RunTarget,
    Target,
    find_tensor_runs,
    find_whole_address,
    new_box_target,
    open_request,
)
from cloudckpt.tensors.tensor_bytes import bytes_view, dtype_name

TILE_BYTES = 64


def location(begin: int, lengths: tuple[int, ...], dtype: torch.dtype) -> ItemLocation:
    return ItemLocation(
        object_index=0,
        begin=begin,
        end=begin + math.prod(lengths) * dtype.itemsize,
        dtype=dtype_name(dtype),
        lengths=lengths,
        transforms=(),
    )


def fill(
    stored: bytes, targets: Sequence[Target], *, arena: Arena, request_bytes: int = 256, max_gap_bytes: int = 0
) -> int:
    """Carry out the reads of `targets` from an object that holds `stored`; how many bytes were read."""
    wants = [want for index, target in enumerate(targets) for want in target.ranges(index, max_gap_bytes=max_gap_bytes)]
    requests = plan_reads(
        wants,
        object_sizes_bytes={0: len(stored)},
        tile_bytes=TILE_BYTES,
        request_bytes=request_bytes,
        max_gap_bytes=max_gap_bytes,
        max_over_read=0.0,
    )
    for request in requests:
        with open_request(request, targets, arena) as views:
            position = request.begin
            for view in views:
                view[:] = stored[position : position + len(view)]
                position += len(view)
            assert position == request.end
    return sum(request.end - request.begin for request in requests)


def blank(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """A tensor to fill, in one kind of memory; what it must not touch is next to it."""
    if kind == "contiguous":
        return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)
    wider = tuple(2 * extent + 1 for extent in shape)
    memory = torch.zeros(math.prod(wider) * dtype.itemsize, dtype=torch.uint8).view(dtype)
    if kind == "transposed":
        strided = memory.view(tuple(reversed(wider))).permute(tuple(reversed(range(len(shape)))))
    else:
        strided = memory.view(wider)
    for dim, extent in enumerate(shape):
        strided = strided.narrow(dim, 1, extent) if kind == "narrowed" else strided.narrow(dim, 0, extent)
    return strided


@st.composite
def reads(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.dtype, list[tuple[Box, str]]]:
    """A chunk's shape and type, and the blocks of it that are read, into which kinds of memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = tuple(draw(st.integers(0 if draw(st.booleans()) else 1, extent)) for extent in shape)
        offsets = tuple(draw(st.integers(0, extent - n)) for extent, n in zip(shape, lengths, strict=True))
        blocks.append((Box(offsets, lengths), draw(st.sampled_from(["contiguous", "transposed", "narrowed"]))))
    return shape, dtype, blocks


@settings(max_examples=300)
@given(
    case=reads(),
    before_bytes=st.integers(0, 9).map(lambda count: count * 16),
    request_bytes=st.sampled_from([64, 128, 1024]),
    max_gap_bytes=st.sampled_from([0, 8, 64, 1000]),
)
def test_every_block_gets_exactly_its_bytes(
    case: tuple[tuple[int, ...], torch.dtype, list[tuple[Box, str]]],
    before_bytes: int,
    request_bytes: int,
    max_gap_bytes: int,
) -> None:
    """If this fails, resharding puts wrong values into tensors (G4), for some type, shape, layout or overlap."""
    shape, dtype, blocks = case
    content = bytes_for(math.prod(shape) * dtype.itemsize, dtype)
    stored = b"\xaa" * before_bytes + content + b"\xbb" * 40
    tensors = [blank(box.lengths, dtype, kind) for box, kind in blocks]
    targets = [
        new_box_target(location(before_bytes, shape, dtype), box, tensor)
        for (box, _), tensor in zip(blocks, tensors, strict=True)
    ]
    fill(stored, targets, arena=Arena(budget_bytes=1 << 20), request_bytes=request_bytes, max_gap_bytes=max_gap_bytes)
    array = array_of(content, dtype, shape)
    for (box, _), tensor, target in zip(blocks, tensors, targets, strict=True):
        expected = array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))].tobytes()
        assert target.num_bytes == len(expected)
        plain = torch.empty_strided(
            tensor.shape, torch.empty(tensor.shape).stride(), dtype=torch.uint8 if dtype.itemsize == 1 else dtype
        )
        plain.copy_(tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor)
        assert bytes(bytes_view(plain)) == expected


@pytest.mark.parametrize("saved", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["contiguous", "transposed"])
def test_types_are_converted_as_torch_does(saved: torch.dtype, wanted: torch.dtype, kind: str) -> None:
    """If this fails, loading a float32 checkpoint into a bfloat16 model gives garbage."""
    chunk = torch.arange(60, dtype=torch.float32).div(7).view(5, 12).to(saved)
    stored = bytes(16) + bytes(bytes_view(chunk))
    tensor = blank((3, 5), wanted, kind)
    target = new_box_target(location(16, (5, 12), saved), Box((1, 4), (3, 5)), tensor)
    fill(stored + bytes(64), [target], arena=Arena(budget_bytes=1 << 20), request_bytes=64)
    assert torch.equal(tensor, chunk[1:4, 4:9].to(wanted))


def test_shared_range_is_read_once_and_copied() -> None:
    """If this fails, loads of tied weights and of all that lies beside them take a buffer of their size."""
    stored = bytes_for(192, torch.float32)
    before, one, other, after = torch.zeros(8), torch.zeros(16), torch.zeros(16), torch.zeros(24)
    targets = [
        new_box_target(location(begin, tuple(tensor.shape), torch.float32), Box((0,), tuple(tensor.shape)), tensor)
        for begin, tensor in ((0, before), (32, one), (32, other), (96, after))
    ]
    assert fill(stored, targets, arena=NoArena()) == 192
    for begin, tensor in ((0, before), (32, one), (32, other), (96, after)):
        assert bytes(bytes_view(tensor)) == stored[begin : begin + tensor.nbytes]


BEGIN = 64


def address_for(tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> int:
    """The address of a tensor that is stored as one chunk."""
    chunk = chunk_of(tensor, BEGIN)
    return find_whole_address(
        tensor, StoredTensor(dtype=dtype_name(dtype or tensor.dtype), shape=chunk.lengths, chunks=[chunk])
    )


def chunk_of(tensor: torch.Tensor, begin: int, *, object_index: int = 0) -> Chunk:
    shape = tuple(tensor.size())
    return Chunk((0,) * len(shape), shape, object_index, begin, begin + tensor.numel() * tensor.itemsize)


def runs_of(*placed: tuple[torch.Tensor, Chunk]) -> list[RunTarget]:
    tensors = [tensor for tensor, _ in placed]
    return find_tensor_runs(tensors, [chunk for _, chunk in placed], [tensor.data_ptr() for tensor in tensors])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_the_memory_of_a_whole_tensor_is_filled(dtype: torch.dtype) -> None:
    """If this fails, a load of small tensors writes elsewhere in memory than it should."""
    tensor = torch.zeros(5, 3).to(dtype)
    assert address_for(tensor) == tensor.data_ptr()
    (target,) = runs_of((tensor, chunk_of(tensor, BEGIN)))
    num_bytes = 15 * dtype.itemsize
    expected = torch.tensor([number % 2 for number in range(num_bytes)], dtype=torch.uint8)
    for low, high in ((0, 7), (7, num_bytes - 4), (num_bytes - 4, num_bytes)):
        (view,) = target.direct_views(BEGIN + low, BEGIN + high)
        view[:] = bytes(expected[low:high].tolist())
    assert torch.equal(tensor.view(torch.uint8).flatten(), expected)
    for low, high in ((num_bytes - 1, num_bytes + 1), (-8, 4), (num_bytes, num_bytes + 8), (8, 4)):
        with pytest.raises(ValueError, match="are not within"):
            target.direct_views(BEGIN + low, BEGIN + high)


def test_tensors_that_are_stored_side_by_side_are_one_run() -> None:
    """If this fails, a load of many small tensors plans each, or bytes of one tensor reach another."""
    one, two, three, apart, elsewhere = (torch.zeros(number, dtype=torch.uint8) for number in (3, 4, 5, 6, 7))
    runs = runs_of(
        (three, chunk_of(three, 17)),
        (apart, chunk_of(apart, 23)),
        (elsewhere, chunk_of(elsewhere, 22, object_index=1)),
        (one, chunk_of(one, 10)),
        (two, chunk_of(two, 13)),
    )
    wants = [want for number, run in enumerate(runs) for want in run.ranges(number, max_gap_bytes=0)]
    assert [(want.object_index, want.begin, want.end) for want in wants] == [(0, 10, 22), (0, 23, 29), (1, 22, 29)]
    assert [run.num_bytes for run in runs] == [12, 6, 7]
    for begin, end, lengths in ((10, 22, [3, 4, 5]), (10, 13, [3]), (11, 18, [2, 4, 1]), (14, 16, [2])):
        views = runs[0].direct_views(begin, end)
        assert [len(view) for view in views] == lengths
        copy_into(views, memoryview(bytes(range(begin, end))))
    assert [*one.tolist(), *two.tolist(), *three.tolist()] == [*range(10, 22)]
    assert not torch.cat([apart, elsewhere]).any()


def test_range_of_several_names_joins_no_run() -> None:
    """If this fails, loads of tied weights and of all that lies beside them take a buffer of their size."""
    stored = bytes_for(192, torch.float32)
    placed = [(torch.zeros(length), begin) for length, begin in ((8, 0), (16, 32), (16, 32), (24, 96))]
    runs = runs_of(*((tensor, chunk_of(tensor, begin)) for tensor, begin in placed))
    assert len(runs) == 4
    assert fill(stored, runs, arena=NoArena()) == 192
    for tensor, begin in placed:
        assert bytes(bytes_view(tensor)) == stored[begin : begin + tensor.nbytes]


def test_a_view_keeps_the_memory_alive() -> None:
    """If this fails, a read that ends after a failed load writes into memory that is somebody else's by then."""
    tensor = torch.nn.Parameter(torch.zeros(1000))
    (target,) = runs_of((tensor, chunk_of(tensor, BEGIN)))
    (view,) = target.direct_views(BEGIN, BEGIN + 4000)
    kept = weakref.ref(tensor)
    del tensor, target
    gc.collect()
    assert kept() is not None
    del view
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 3).t(),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch._neg_view(torch.zeros(3)),  # alone in being contiguous
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "conjugated", "negated", "negated in place", "meta", "sparse"],
)
def test_tensors_whose_memory_is_not_their_bytes_are_left(tensor: torch.Tensor) -> None:
    """If this fails, bytes are written over memory that holds them in another order or form, or over none."""
    assert address_for(tensor) == 0


def test_a_tensor_without_its_memory_is_left() -> None:
    """If this fails, a load into parameters whose memory FSDP has freed writes to address 0, or to one near it."""
    for tensor in (torch.zeros(8), torch.zeros(8)[5:]):
        tensor.untyped_storage().resize_(0)
        assert address_for(tensor) == 0


def test_a_tensor_that_is_stored_otherwise_is_left() -> None:
    """If this fails, stored bytes of one type are taken for those of another, or a chunk for the whole."""
    tensor = torch.zeros(4)
    assert address_for(tensor, dtype=torch.int32) == 0
    for stored in (
        StoredTensor(dtype="float32", shape=(4,), chunks=[]),
        StoredTensor(dtype="float32", shape=(4,), chunks=[Chunk((0,), (4,), 0, 0, 16)], transforms=["zlib"]),
        StoredTensor(dtype="float32", shape=(4,), chunks=[Chunk((i,), (1,), 0, 4 * i, 4 * i + 4) for i in range(4)]),
    ):
        assert find_whole_address(tensor, stored) == 0


def test_failed_read_leaves_the_targets_alone() -> None:
    """If this fails, bytes that were never verified are copied into tensors."""
    tensor = torch.zeros(16, dtype=torch.float64)
    target = new_box_target(location(0, (16,), torch.float32), Box((0,), (16,)), tensor)
    (want,) = target.ranges(0, max_gap_bytes=0)
    (request,) = plan_reads(
        [want], object_sizes_bytes={0: 64}, tile_bytes=64, request_bytes=64, max_gap_bytes=0, max_over_read=0.0
    )
    arena = Arena(budget_bytes=1 << 20)

    def read() -> None:
        with open_request(request, [target], arena) as views:
            views[0][:] = b"\x01" * 64
            raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        read()
    assert not tensor.any()
