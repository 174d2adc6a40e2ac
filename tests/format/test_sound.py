"""The checks on whole arrays say what the checks of each chunk say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.format import validation
from cloudckpt.format.chunk_arrays import is_sound
from cloudckpt.format.model import Chunk, StoredTensor

SIDE = 5
NUM_CHUNKS = SIDE * SIDE
ITEMSIZE_BYTES = 4
CHUNK_BYTES = 2 * 3 * ITEMSIZE_BYTES
OBJECT_SIZES_BYTES = np.array([NUM_CHUNKS * CHUNK_BYTES] * 2, dtype=np.int64)


def tensor_on_a_mesh() -> StoredTensor:
    chunks = [
        Chunk((2 * row, 3 * column), (2, 3), row % 2, number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES)
        for number, (row, column) in enumerate((row, column) for row in range(SIDE) for column in range(SIDE))
    ]
    return StoredTensor(dtype="float32", shape=(2 * SIDE, 3 * SIDE), chunks=chunks)


def with_chunk(position: int, **changes: Any) -> StoredTensor:
    tensor = tensor_on_a_mesh()
    tensor.chunks[position] = msgspec.structs.replace(tensor.chunks[position], **changes)
    return tensor


def test_a_sound_tensor_is_sound() -> None:
    """If this fails, each chunk of a large job's checkpoint is looked at by itself, which takes minutes."""
    assert is_sound(tensor_on_a_mesh(), ITEMSIZE_BYTES, OBJECT_SIZES_BYTES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    field: str
    value: Callable[[Any], Any]


DAMAGE = {
    "moved": Damage(field="offsets", value=lambda offsets: (offsets[0] + 1, offsets[1])),
    "before the tensor": Damage(field="offsets", value=lambda offsets: (-2, offsets[1])),
    "past the tensor": Damage(field="offsets", value=lambda offsets: (offsets[0], 3 * SIDE)),
    "in a wrapped place": Damage(field="offsets", value=lambda offsets: (offsets[0], 2**63 - 1)),
    "beyond 64 bits": Damage(field="offsets", value=lambda offsets: (offsets[0], 2**64)),
    "of fewer dimensions": Damage(field="offsets", value=lambda offsets: offsets[:1]),
    "without dimensions": Damage(field="lengths", value=lambda _: ()),
    "longer": Damage(field="lengths", value=lambda lengths: (lengths[0], lengths[1] + 1)),
    "negative": Damage(field="lengths", value=lambda lengths: (-lengths[0], -lengths[1])),
    "empty": Damage(field="lengths", value=lambda lengths: (0, lengths[1])),
    "endless": Damage(field="lengths", value=lambda _: (2**32, 2**32)),
    "in no object": Damage(field="object_index", value=lambda _: 2),
    "in the last object from behind": Damage(field="object_index", value=lambda _: -1),
    "begun before its object": Damage(field="begin", value=lambda _: -CHUNK_BYTES),
    "not aligned": Damage(field="begin", value=lambda begin: begin + 2),
    "past its object": Damage(field="end", value=lambda end: end + NUM_CHUNKS * CHUNK_BYTES),
    "too long": Damage(field="end", value=lambda end: end + ITEMSIZE_BYTES),
    "too short": Damage(field="end", value=lambda end: end - ITEMSIZE_BYTES),
    "backwards": Damage(field="end", value=lambda _: 0),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("position", [1, NUM_CHUNKS // 2, NUM_CHUNKS - 1])
def test_no_damage_is_sound(name: str, position: int) -> None:
    """If this fails, a manifest of a large job chooses what a load reads, allocates or leaves unfilled."""
    damage = DAMAGE[name]
    before = getattr(tensor_on_a_mesh().chunks[position], damage.field)
    tensor = with_chunk(position, **{damage.field: damage.value(before)})
    assert not is_sound(tensor, ITEMSIZE_BYTES, OBJECT_SIZES_BYTES)


@given(
    position=st.integers(0, NUM_CHUNKS - 1),
    offsets=st.lists(st.integers(-1, 15), min_size=2, max_size=2).map(tuple),
    lengths=st.lists(st.integers(-1, 4), min_size=2, max_size=2).map(tuple),
    object_index=st.integers(-1, 2),
    begin=st.integers(-1, NUM_CHUNKS).map(lambda number: number * CHUNK_BYTES),
    num_bytes=st.integers(-1, 12).map(lambda number: number * 2),
    are_kept=st.sets(st.sampled_from(["offsets", "lengths", "object_index", "begin", "end"])),
    is_transformed=st.booleans(),
)
def test_arrays_say_what_each_chunk_says(
    *, position: int, begin: int, num_bytes: int, are_kept: set[str], is_transformed: bool, **changes: Any
) -> None:
    """If this fails, the fast check passes what the thorough one refuses, or makes a good manifest slow to read."""
    changes |= {"begin": begin, "end": begin + num_bytes}
    tensor = with_chunk(position, **{name: value for name, value in changes.items() if name not in are_kept})
    if is_transformed:
        tensor = msgspec.structs.replace(tensor, transforms=["zstd"])
    is_fine = is_sound(tensor, ITEMSIZE_BYTES, OBJECT_SIZES_BYTES)
    assert is_fine == (not list(problems_one_by_one(tensor)))


def problems_one_by_one(tensor: StoredTensor) -> list[str]:
    """What `problems_of` finds in so few chunks that it makes no arrays of them."""
    sizes = OBJECT_SIZES_BYTES.tolist()
    objects = [validation.StoredObject(key="", size=size_bytes, crc32c="") for size_bytes in sizes]
    problems = [
        text for chunk in tensor.chunks for text in validation._chunk_problems(chunk, tensor, ITEMSIZE_BYTES, objects)
    ]
    blocks = ((chunk.offsets, chunk.lengths) for chunk in tensor.chunks)
    return problems or ([] if validation.fills_once(blocks, tensor.shape) else ["not filled once"])
