"""Checksums of whole tensors from pieces, and differences of pieces, against what the bytes say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import CorruptCheckpointError, UnsupportedValueError
from cloudckpt.io.boxes import Box
from cloudckpt.publication.deltas import TILE_BYTES, apply_delta, delta_name, encode, parse_delta_name
from cloudckpt.publication.pieces import HeldPiece, combine_sums, sum_pieces
from cloudckpt.publication.versions import find_superseded_versions
from cloudckpt.tensors.tensor_bytes import bytes_view, dtype_name

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, except that a bool is 0 or 1."""
    num_bytes = math.prod(shape) * dtype.itemsize
    most = 2 if dtype is torch.bool else 256
    content = torch.randint(0, most, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return content.view(dtype).view(shape)


def cut(box: Box, cuts: list[tuple[int, int]]) -> list[Box]:
    """Cut a box in two, again and again: each cut names a dimension and a place in it."""
    boxes = [box]
    for dim, place in cuts:
        parts = []
        for offsets, lengths in boxes:
            if lengths and lengths[dim % len(lengths)] > 1:
                axis = dim % len(lengths)
                first = 1 + place % (lengths[axis] - 1)
                for begin, length in ((0, first), (first, lengths[axis] - first)):
                    parts.append(
                        Box(
                            tuple(o + begin * (d == axis) for d, o in enumerate(offsets)),
                            tuple(length if d == axis else n for d, n in enumerate(lengths)),
                        )
                    )
            else:
                parts.append(Box(offsets, lengths))
        boxes = parts
    return boxes


def pieces_of(tensor: torch.Tensor, boxes: list[Box]) -> list[HeldPiece]:
    shape = tuple(tensor.shape)
    return [HeldPiece("t", box, shape, dtype_name(tensor.dtype), tensor[box.slices]) for box in boxes]


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
cuts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4)


@given(shape=shapes, cuts=cuts, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_pieces_give_the_checksum_of_the_whole(
    shape: tuple[int, ...], cuts: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    """If this fails, readers in another layout than the publisher's find a wrong state, or none they can use."""
    tensor = tensor_of(dtype, shape, seed)
    boxes = cut(Box((0,) * len(shape), shape), cuts)
    expected: Any = bytes(bytes_view(tensor.contiguous()))
    by_rank = [sum_pieces([piece]) for piece in pieces_of(tensor, boxes)]
    found = combine_sums([*by_rank, *by_rank], uri="memory://x")  # each piece has a replica
    assert found["t"].crc32c == crc32c(expected)
    if len(boxes) > 1:
        with pytest.raises(UnsupportedValueError, match="do not make up all"):
            combine_sums(by_rank[1:], uri="memory://x")


def test_replicas_that_differ_are_refused() -> None:
    """If this fails, the checksum and the bytes of a version may come from different replicas."""
    shape = (4, 3)
    whole = [Box((0, 0), shape)]
    by_rank = [sum_pieces(pieces_of(tensor_of(torch.float32, shape, seed), whole)) for seed in (1, 2)]
    with pytest.raises(UnsupportedValueError, match="different values of 't'"):
        combine_sums(by_rank, uri="memory://x")


@given(shape=shapes, of_publisher=cuts, of_reader=cuts, dtype=st.sampled_from(DTYPES), changed=st.integers(0, 99))
def test_a_difference_brings_any_layout_to_the_new_bits(
    shape: tuple[int, ...],
    of_publisher: list[tuple[int, int]],
    of_reader: list[tuple[int, int]],
    dtype: torch.dtype,
    changed: int,
) -> None:
    """If this fails, a pull into other shards writes wrong bits."""
    old = tensor_of(dtype, shape, 1)
    new = tensor_of(dtype, shape, 2) if changed % 3 else old.clone()
    model = old.clone()
    whole = Box((0,) * len(shape), shape)
    targets = pieces_of(model, cut(whole, of_reader))
    if changed % 2:  # shards with memory of their own, as ranks have them
        targets = [piece._replace(tensor=piece.tensor.contiguous()) for piece in targets]
    for piece in pieces_of(new, cut(whole, of_publisher)):
        copy = torch.tensor(bytes_view(old[piece.box.slices].contiguous()), dtype=torch.uint8)
        change = encode(piece.bytes(), copy)
        assert bytes(copy.numpy()) == bytes(piece.bytes())  # the copy is that of the new version
        if change is None:
            assert same_bits(new[piece.box.slices], old[piece.box.slices])
            continue
        assert parse_delta_name(delta_name("a.b[0]", piece.box)) == ("a.b[0]", piece.box)
        for target in targets:
            apply_delta(
                bytes_view(change), piece.box, target.tensor, target.box, target.dtype, name="t", uri="memory://a"
            )
    for target in targets:
        assert same_bits(target.tensor, new[target.box.slices])


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bytes(bytes_view(first.contiguous())) == bytes(bytes_view(second.contiguous()))


def test_tiles_that_have_not_changed_are_not_sent() -> None:
    """If this fails, a large tensor of which a part trains is sent as if all of it did, or tiles are mixed up."""
    old = tensor_of(torch.bfloat16, (5 * TILE_BYTES // 4 + 7,), 1)
    new = old.clone()
    new[-1] = 0.125
    num_tiles = -(-new.nbytes // TILE_BYTES)
    assert num_tiles == 3
    change = encode(bytes_view(new), old.clone().view(torch.uint8))
    assert change is not None
    lengths = change[: 4 * num_tiles].view(torch.int32).tolist()
    assert [length > 0 for length in lengths] == [False, False, True]
    whole = Box((0,), tuple(new.shape))
    for target in (old.clone(), torch.stack([old, old], dim=1)[:, 0]):  # contiguous, and not
        apply_delta(bytes_view(change), whole, target, whole, "bfloat16", name="t", uri="memory://a")
        assert same_bits(target, new)


@pytest.mark.parametrize("cut_bytes", [1, 5])
def test_a_difference_of_another_length_is_refused(cut_bytes: int) -> None:
    """If this fails, a publisher's defect writes a part of a tensor."""
    old, new = tensor_of(torch.float32, (100,), 1), tensor_of(torch.float32, (100,), 2)
    change = encode(bytes_view(new), old.clone().view(torch.uint8))
    assert change is not None
    whole = Box((0,), (100,))
    with pytest.raises(CorruptCheckpointError):
        apply_delta(bytes_view(change)[:-cut_bytes], whole, old.clone(), whole, "float32", name="t", uri="memory://a")
    longer = Box((0,), (101,))
    with pytest.raises(CorruptCheckpointError):
        apply_delta(
            bytes_view(change),
            longer,
            tensor_of(torch.float32, (101,), 1),
            longer,
            "float32",
            name="t",
            uri="memory://a",
        )


@given(
    gaps=st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
    keep_chains=st.integers(1, 3),
    pins=st.sets(st.integers(0, 11), max_size=2),
)
def test_retention_leaves_whole_chains_at_each_moment(
    gaps: list[tuple[int, bool]], keep_chains: int, pins: set[int]
) -> None:
    """If this fails, retention removes what a recent or pinned version needs, or a crash leaves one without it."""
    anchors: dict[int, int] = {}
    base: dict[int, int] = {}
    number = anchor = -1
    for gap, is_anchor in gaps:
        previous, number = number, number + gap
        if is_anchor or anchor < 0:
            anchor = number
        else:
            base[number] = previous
        anchors[number] = anchor
    pinned = {[*anchors][index] for index in pins if index < len(anchors)}
    left = set(anchors)
    for removed in find_superseded_versions(anchors, keep_chains=keep_chains, pinned=pinned):
        left.remove(removed)
        assert all(base[version] in left for version in left if version in base)
    newest = sorted(set(anchors.values()))[-keep_chains:]
    assert {version for version, of in anchors.items() if of in newest} | pinned <= left
    assert {anchors[version] for version in left} == {*newest, *(anchors[version] for version in pinned)}
