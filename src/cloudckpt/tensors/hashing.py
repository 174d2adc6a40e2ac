"""Hashes of the chunks of a save, by which a later save finds what has not changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch

from cloudckpt._workers import each_done
from cloudckpt.options import MIB
from cloudckpt.tensors.data_objects import PieceBody, SaveItems, StagedItem, new_piece, new_side_streams, pack
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.snapshot import CudaStream, Snapshot

_READ_BYTES = 8 * MIB
_GROUP_BYTES = 64 * MIB  # small tensors are hashed in groups, since each task of a thread costs time


class HashedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The hash of a chunk that a save stores without transforms."""

    fqn: str
    offsets: tuple[int, ...] | None
    dtype: str
    lengths: tuple[int, ...]
    xxh3_128: bytes
    """XXH3-128 of the bytes (https://github.com/Cyan4973/xxHash), big endian."""


def hash_chunks(
    save_items: SaveItems, arena: Arena, snapshot: Snapshot | None, *, num_threads: int, check: Callable[[], None]
) -> Mapping[int, HashedChunk]:
    """Hash the chunks among `save_items`, by position, but not Python objects and tensors that a planner computes.

    Args:
        save_items: Items of a save.
        arena: Memory for tensors that cannot be read in place.
        snapshot: Memory that is still being filled. Each chunk waits for its own bytes.
        num_threads: Number of threads that hash.
        check: Called between groups of chunks. Raises an error to end the save.

    """
    chunks: dict[int, HashedChunk] = {}
    positions = [position for position, is_repeatable in enumerate(save_items.are_repeatable) if is_repeatable]
    # In the caller's thread: the copies from a GPU must come after what is queued on the caller's current stream.
    items = dict(zip(positions, save_items.stage(positions), strict=True))
    streams = new_side_streams(item.content for item in items.values())
    sizes_bytes = [save_items.sizes_bytes[position] for position in positions]

    def hash_group(group: range) -> None:
        for position in positions[group.start : group.stop]:
            if (dtype := items[position].dtype) is not None:
                chunks[position] = _hash_item(items[position], dtype, arena, snapshot, streams)

    groups = pack(sizes_bytes, object_bytes=_GROUP_BYTES)
    for _ in each_done(groups, hash_group, num_threads=num_threads, name="cloudckpt-hash", on_failure=lambda: None):
        check()
    return chunks


def _hash_item(
    item: StagedItem,
    dtype: str,
    arena: Arena,
    snapshot: Snapshot | None,
    streams: Mapping[torch.device, CudaStream],
) -> HashedChunk:
    import xxhash

    piece = new_piece(item.content, begin=0, address=item.address)
    body = PieceBody([piece], arena, snapshot, streams)
    hasher = xxhash.xxh3_128()
    for begin in range(0, body.size_bytes, _READ_BYTES):
        with body.open(begin, min(begin + _READ_BYTES, body.size_bytes)) as views:
            for view in views:
                hasher.update(view)
    return HashedChunk(
        fqn=item.entry.fqn,
        offsets=item.index_offsets,
        dtype=dtype,
        lengths=item.lengths,
        xxh3_128=hasher.digest(),
    )
