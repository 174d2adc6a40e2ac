"""From read requests to filled tensors, against numpy's indexing."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.samples import DTYPES, array_of, bytes_for
from tests.tensors.test_body import NoArena

from cloudckpt.format.model import ItemLocation
from cloudckpt.format.torch_metadata import dtype_name
from cloudckpt.io.boxes import Box
from cloudckpt.io.reads import plan_reads
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.targets import BytesTarget, Target, Targets, TensorTarget, WholeTensors, open_request
from cloudckpt.tensors.tensor_bytes import bytes_view

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")

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
    wants = [want for index, target in enumerate(targets) for want in target.wants(index, max_gap_bytes=max_gap_bytes)]
    requests = plan_reads(
        wants,
        object_sizes_bytes={0: len(stored)},
        tile_bytes=TILE_BYTES,
        request_bytes=request_bytes,
        max_gap_bytes=max_gap_bytes,
        max_over_read=0.0,
    )
    for request in requests:
        with open_request(request, Targets(WholeTensors(), targets), arena) as views:
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
        TensorTarget(location(before_bytes, shape, dtype), box, tensor)
        for (box, _), tensor in zip(blocks, tensors, strict=True)
    ]
    fill(
        stored,
        targets,
        arena=Arena(budget_bytes=1 << 20),
        request_bytes=request_bytes,
        max_gap_bytes=max_gap_bytes,
    )
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
    target = TensorTarget(location(16, (5, 12), saved), Box((1, 4), (3, 5)), tensor)
    fill(stored + bytes(64), [target], arena=Arena(budget_bytes=1 << 20), request_bytes=64)
    assert torch.equal(tensor, chunk[1:4, 4:9].to(wanted))


def test_values_go_into_lazy_views_as_values() -> None:
    """If this fails, a conjugated or negated target ends up with the wrong sign."""
    chunk = torch.complex(torch.arange(8.0), torch.ones(8))
    stored = bytes(bytes_view(chunk))
    conjugated = torch.zeros(8, dtype=torch.complex64).conj()
    target = TensorTarget(location(0, (8,), torch.complex64), Box((0,), (8,)), conjugated)
    fill(stored, [target], arena=Arena(budget_bytes=1 << 20))
    assert torch.equal(conjugated, chunk)
    negated = torch._neg_view(torch.zeros(16))
    target = TensorTarget(location(0, (16,), torch.float32), Box((0,), (16,)), negated)
    fill(stored, [target], arena=Arena(budget_bytes=1 << 20))
    assert torch.equal(negated, torch.view_as_real(chunk).reshape(-1))


def test_elements_are_aligned_in_the_buffer_too() -> None:
    """If this fails, objects in which small elements lie before large ones, as other writers may make, do not load."""
    stored = bytes_for(64, torch.uint8)
    strided_bytes, direct_bytes = torch.zeros(10, dtype=torch.uint8)[::2], torch.zeros(11, dtype=torch.uint8)
    strided_wide = torch.zeros(12, dtype=torch.int64)[::2]
    targets = [
        TensorTarget(location(0, (5,), torch.uint8), Box((0,), (5,)), strided_bytes),
        TensorTarget(location(5, (11,), torch.uint8), Box((0,), (11,)), direct_bytes),
        TensorTarget(location(16, (6,), torch.int64), Box((0,), (6,)), strided_wide),
    ]
    fill(stored, targets, arena=Arena(budget_bytes=1 << 20))
    filled = [strided_bytes, direct_bytes, strided_wide]
    assert b"".join(bytes(bytes_view(tensor.contiguous())) for tensor in filled) == stored


def test_contiguous_targets_are_read_in_place() -> None:
    """If this fails, a load copies everything once more than it need."""
    chunk = torch.arange(64, dtype=torch.float32).view(8, 8)
    rows, all_of_it = torch.zeros(4, 8), torch.zeros(8, 8)
    fill(
        bytes(bytes_view(chunk)),
        [TensorTarget(location(0, (8, 8), torch.float32), Box((4, 0), (4, 8)), rows)],
        arena=NoArena(),
    )
    assert torch.equal(rows, chunk[4:])
    fill(
        bytes(bytes_view(chunk)),
        [TensorTarget(location(0, (8, 8), torch.float32), Box((0, 0), (8, 8)), all_of_it)],
        arena=NoArena(),
    )
    assert torch.equal(all_of_it, chunk)


def test_two_that_want_the_same_read_it_once() -> None:
    """If this fails, a tensor that is asked for twice is fetched twice, or one of the two stays empty."""
    chunk = torch.arange(64, dtype=torch.float32)
    one, other = torch.zeros(64), torch.zeros(32)
    num_bytes_read = fill(
        bytes(bytes_view(chunk)),
        [
            TensorTarget(location(0, (64,), torch.float32), Box((0,), (64,)), one),
            TensorTarget(location(0, (64,), torch.float32), Box((16,), (32,)), other),
        ],
        arena=Arena(budget_bytes=1 << 20),
    )
    assert num_bytes_read == 256
    assert torch.equal(one, chunk)
    assert torch.equal(other, chunk[16:48])


def test_a_column_reads_its_runs_and_not_the_whole() -> None:
    """If this fails, every rank of a column-sharded model reads all columns (G8)."""
    chunk = torch.arange(8 * 1024, dtype=torch.float32).view(8, 1024)
    column = torch.zeros(8, 64)
    target = TensorTarget(location(0, (8, 1024), torch.float32), Box((0, 512), (8, 64)), column)
    num_bytes_read = fill(bytes(bytes_view(chunk)), [target], arena=NoArena())
    assert torch.equal(column, chunk[:, 512:576])
    assert num_bytes_read == column.numel() * 4


@given(st.integers(0, 200), st.integers(0, 100), st.booleans())
def test_bytes_arrive_whole(size_bytes: int, before_bytes: int, twice: bool) -> None:  # noqa: FBT001
    """If this fails, Python objects are cut or shifted."""
    content = bytes_for(size_bytes, torch.uint8)
    at = ItemLocation(
        object_index=0, begin=before_bytes, end=before_bytes + size_bytes, dtype=None, lengths=(), transforms=()
    )
    targets = [BytesTarget(at) for _ in range(1 + twice)]
    fill(
        bytes(before_bytes) + content + bytes(9),
        targets,
        arena=Arena(budget_bytes=1 << 20),
        request_bytes=64,
    )
    assert [bytes(target.content) for target in targets] == [content] * len(targets)
    assert targets[0].num_bytes == size_bytes


def test_what_fails_leaves_the_targets_alone() -> None:
    """If this fails, bytes that were never verified are copied into tensors."""
    tensor = torch.zeros(16, dtype=torch.float64)
    target = TensorTarget(location(0, (16,), torch.float32), Box((0,), (16,)), tensor)
    (want,) = target.wants(0, max_gap_bytes=0)
    (request,) = plan_reads(
        [want], object_sizes_bytes={0: 64}, tile_bytes=64, request_bytes=64, max_gap_bytes=0, max_over_read=0.0
    )
    arena = Arena(budget_bytes=1 << 20)

    def read() -> None:
        with open_request(request, Targets(WholeTensors(), [target]), arena) as views:
            views[0][:] = b"\x01" * 64
            raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        read()
    assert not tensor.any()


def test_what_several_want_is_read_into_one_and_copied() -> None:
    """If this fails, loads of tied weights and of all that lies beside them take a buffer of their size."""
    stored = bytes_for(192, torch.float32)
    before, one, other, after = torch.zeros(8), torch.zeros(16), torch.zeros(16), torch.zeros(24)
    targets = [
        TensorTarget(location(begin, tuple(tensor.shape), torch.float32), Box((0,), tuple(tensor.shape)), tensor)
        for begin, tensor in ((0, before), (32, one), (32, other), (96, after))
    ]
    assert fill(stored, targets, arena=NoArena()) == 192
    for begin, tensor in ((0, before), (32, one), (32, other), (96, after)):
        assert bytes(bytes_view(tensor)) == stored[begin : begin + tensor.nbytes]


def test_each_name_costs_the_same_however_many_are_tied() -> None:
    """If this fails, loading thousands of small tied tensors, such as a model under two names, takes seconds."""

    def num_calls(num_tied: int) -> int:
        stored = bytes_for(num_tied * 8, torch.float32)
        tensors = [(number * 8, torch.zeros(2)) for number in range(num_tied) for _ in range(2)]
        targets = [TensorTarget(location(begin, (2,), torch.float32), Box((0,), (2,)), at) for begin, at in tensors]
        made = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "c_call"

        sys.setprofile(count)
        try:
            fill(stored, targets, arena=NoArena(), request_bytes=len(stored))
        finally:
            sys.setprofile(None)
        assert all(bytes(bytes_view(at)) == stored[begin : begin + 8] for begin, at in tensors)
        return made

    assert num_calls(320) < 12 * num_calls(40)


def test_ranges_that_overlap_otherwise_are_copied() -> None:
    """If this fails, a read of a tensor goes into the memory of one that wants less, or other bytes."""
    stored = bytes_for(256, torch.float32)
    tensors = [(0, torch.zeros(32)), (64, torch.zeros(32)), (64, torch.zeros(8)), (128, torch.zeros(4))]
    targets = [
        TensorTarget(location(begin, tuple(tensor.shape), torch.float32), Box((0,), tuple(tensor.shape)), tensor)
        for begin, tensor in tensors
    ]
    fill(stored, targets, arena=Arena(budget_bytes=1024), request_bytes=128)
    for begin, tensor in tensors:
        assert bytes(bytes_view(tensor)) == stored[begin : begin + tensor.nbytes]
