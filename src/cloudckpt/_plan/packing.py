"""Which tensors share an object, and how an object is cut into parts."""

from __future__ import annotations

from collections.abc import Sequence

from cloudckpt.stores.base import Limits, Part

# A safetensors header may have at most 100 MB (https://github.com/huggingface/safetensors#format); an entry of it
# rarely passes 500 bytes.
MAX_TENSORS_PER_OBJECT = 100_000


def pack(sizes_bytes: Sequence[int], *, object_bytes: int, max_tensors: int = MAX_TENSORS_PER_OBJECT) -> list[range]:
    """Consecutive groups, each of at most `max_tensors` and, but for a single larger one, within `object_bytes`."""
    groups: list[range] = []
    begin, filled_bytes = 0, 0
    for index, size_bytes in enumerate(sizes_bytes):
        full = filled_bytes + size_bytes > object_bytes or index - begin >= max_tensors
        if index > begin and full:
            groups.append(range(begin, index))
            begin, filled_bytes = index, 0
        filled_bytes += size_bytes
    if begin < len(sizes_bytes):
        groups.append(range(begin, len(sizes_bytes)))
    return groups


def parts_of(size_bytes: int, *, part_bytes: int, tile_bytes: int, limits: Limits) -> list[Part]:
    """The parts of an object: whole tiles each, near `part_bytes`, within what the store accepts.

    Raises `ValueError` where no such parts exist, because the object or the tiles are too large for the store.
    """

    def up_to_tiles(num_bytes: int) -> int:
        return -(-num_bytes // tile_bytes) * tile_bytes

    step_bytes = max(
        up_to_tiles(min(part_bytes, limits.max_part_bytes)),
        up_to_tiles(limits.min_part_bytes),
        up_to_tiles(-(-size_bytes // limits.max_parts)),
    )
    if step_bytes > limits.max_part_bytes:
        step_bytes = limits.max_part_bytes // tile_bytes * tile_bytes
    too_small = step_bytes < min(size_bytes, limits.min_part_bytes)
    if not step_bytes or too_small or -(-size_bytes // step_bytes) > limits.max_parts:
        raise ValueError(
            f"an object of {size_bytes} bytes does not fit into {limits.max_parts} parts of {limits.min_part_bytes} "
            f"to {limits.max_part_bytes} bytes, in whole tiles of {tile_bytes}"
        )
    return [
        Part(number=number, offset_bytes=offset, size_bytes=min(step_bytes, size_bytes - offset))
        for number, offset in enumerate(range(0, size_bytes, step_bytes), start=1)
    ]
