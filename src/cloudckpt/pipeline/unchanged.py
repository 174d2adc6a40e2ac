"""Chunks of an earlier checkpoint that a save names instead of sending the same bytes again, found by their hashes.

`docs/design/037-references.md` has the protocol.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
import torch

from cloudckpt._workers import run_as_completed
from cloudckpt.commit.commit import find_missing
from cloudckpt.commit.log import read_current
from cloudckpt.commit.references import drop_claims, is_current, put_claims
from cloudckpt.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidOptionError
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import ItemReceipts, Manifest, ObjectRef, StoredObject
from cloudckpt.io.client import StoreClient
from cloudckpt.options import MIB
from cloudckpt.pipeline.context import Context
from cloudckpt.tensors.data_objects import PieceBody, SaveItems, StagedItem, new_piece, new_side_streams, pack
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.snapshot import CudaStream, Snapshot

_READ_BYTES = 8 * MIB
_GROUP_BYTES = 64 * MIB  # small tensors are hashed in groups, since each task of a thread costs time
_MIN_USED_SHARE = 0.5
"""A save refers to an object only if at least this share of it is unchanged: the object stays as a whole."""

ChunkKey: TypeAlias = tuple[str, tuple[int, ...] | None]
"""The FQN of a tensor, and the offsets of a chunk in it."""


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
    for _ in run_as_completed(
        groups, hash_group, num_threads=num_threads, name="cloudckpt-hash", on_failure=lambda: None
    ):
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


class KnownChunk(NamedTuple):
    """A chunk of an earlier checkpoint."""

    xxh3_128: str
    dtype: str
    lengths: tuple[int, ...]
    object_index: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChunks:
    """The chunks of an earlier checkpoint that a rank compares with its own. Rank 0 sends them to the rank."""

    chunks: Mapping[ChunkKey, KnownChunk]
    objects: Mapping[int, ObjectRef]
    content_bytes: Mapping[int, int]
    """The size of each object without its header."""


def find_unchanged(
    chunks: Mapping[int, HashedChunk], known: KnownChunks | None, aliases: Mapping[int, int]
) -> tuple[dict[int, KnownChunk], set[int]]:
    """Return the known chunks that a save need not send, and the positions of the unchanged chunks that it sends.

    It sends an unchanged chunk again if most bytes of its object have changed. Either all aliases of a tensor are sent,
    or none of them.
    """
    if known is None:
        return {}, set()
    unchanged = {
        position: known_chunk
        for position, chunk in chunks.items()
        if (known_chunk := known.chunks.get((chunk.fqn, chunk.offsets))) is not None
        and known_chunk[:3] == (chunk.xxh3_128.hex(), chunk.dtype, chunk.lengths)
    }
    groups: defaultdict[int, set[int]] = defaultdict(set)
    for alias, first in aliases.items():
        groups[first] |= {first, alias}
    _drop_incomplete(unchanged, groups.values())
    used_bytes: defaultdict[int, int] = defaultdict(int)
    for object_index, begin, end in {
        (known_chunk.object_index, known_chunk.begin, known_chunk.end) for known_chunk in unchanged.values()
    }:
        used_bytes[object_index] += end - begin
    reused = {index for index, used in used_bytes.items() if used >= _MIN_USED_SHARE * known.content_bytes[index]}
    unsent = {position: chunk for position, chunk in unchanged.items() if chunk.object_index in reused}
    _drop_incomplete(unsent, groups.values())
    return unsent, unchanged.keys() - unsent.keys()


def _drop_incomplete(chunks: dict[int, KnownChunk], alias_groups: Iterable[set[int]]) -> None:
    """Remove from `chunks` each group of aliases of which it lacks one."""
    for group in alias_groups:
        if not group <= chunks.keys():
            for position in group & chunks.keys():
                del chunks[position]


def receipts_of(
    unsent: Mapping[int, KnownChunk], chunks: Mapping[int, HashedChunk], known: KnownChunks
) -> list[ItemReceipts]:
    """Return the receipts of the chunks that a save does not send, one for each object."""
    by_object: defaultdict[int, list[int]] = defaultdict(list)
    for position, known_chunk in unsent.items():
        by_object[known_chunk.object_index].append(position)
    return [
        ItemReceipts(
            stored_in=known.objects[object_index],
            offsets=[chunks[position].offsets for position in positions],
            begins=array("q", [unsent[position].begin for position in positions]),
            ends=array("q", [unsent[position].end for position in positions]),
            dtypes=[chunks[position].dtype for position in positions],
            lengths=[chunks[position].lengths for position in positions],
            transforms=[()] * len(positions),
            hashes=[chunks[position].xxh3_128 for position in positions],
            fqns=[chunks[position].fqn for position in positions],
        )
        for object_index, positions in by_object.items()
    ]


class BaseCheckpoint:
    """A committed checkpoint beside a save, to whose objects the save may refer.

    Only the rank that commits has one; if each host has a directory of its own, each rank. The constructor puts the
    claims of the save. `keep_claims` or `drop_claims` must follow.

    Args:
        context: The place of the save.
        folder: The folder of the checkpoint.
        attempt: The attempt of the save.
        base_attempt: The attempt that the checkpoint must have. Other ranks of this host put the same claims then, so
            the claims stay after an error. None: any attempt, and no other rank puts them.

    Raises:
        CheckpointNotFoundError: There is no checkpoint in `folder`.
        CheckpointChangedError: The checkpoint is being replaced or removed, or has another attempt.
        InvalidOptionError: The checkpoint was saved without hashes, or with tiles of another length.
        CheckpointError: The manifest is damaged.

    """

    def __init__(self, context: Context, folder: str, *, attempt: str, base_attempt: str | None = None) -> None:
        client, own_folder = context.client_at(folder), context.location.name
        _, manifest = read_current(client)
        if manifest is None:
            raise CheckpointNotFoundError(f"there is no checkpoint at {client.uri} to refer to", uri=client.uri)
        if base_attempt not in (None, manifest.attempt):
            raise CheckpointChangedError(f"{client.uri} is not the checkpoint of the other hosts", uri=client.uri)
        self.folder, self.attempt = folder, manifest.attempt
        _check_fit(manifest, client.uri, tile_bytes=context.options.advanced.tile_bytes)
        self._context, self._user_attempt, self._tile_bytes = context, attempt, manifest.tile_bytes
        self._objects = manifest.objects
        holders = [stored.folder or folder for stored in manifest.objects]
        self._holders: Sequence[str] = holders
        self._chunks: dict[ChunkKey, KnownChunk] = {
            (fqn, chunk.offsets): KnownChunk(
                xxh3_128, tensor.dtype, chunk.lengths, chunk.object_index, chunk.begin, chunk.end
            )
            for fqn, tensor in manifest.tensors.items()
            if tensor.xxh3_128s and not tensor.transforms
            for chunk, xxh3_128 in zip(tensor.chunks, tensor.xxh3_128s, strict=True)
            if holders[chunk.object_index] != own_folder  # the save may replace it, and then remove it
        }
        sizes_bytes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for index in {chunk.object_index for chunk in self._chunks.values()}:
            sizes_bytes[holders[index]][self._objects[index].key] = self._objects[index].size
        self._claims = {holder: frozenset(sizes) for holder, sizes in sizes_bytes.items()}
        self._header_ends = _find_header_ends(manifest)
        try:
            self._put_claims(self._claims)
            _check_current(client, manifest)
            missing = [find_missing(context.client_at(holder), sizes)[0] for holder, sizes in sizes_bytes.items()]
        except Exception:  # after an interrupt, gc removes the claims
            if base_attempt is None:
                self.drop_claims()
            raise
        self._missing_keys = frozenset[str]().union(*missing)

    def has(self, key: str) -> bool:
        """Return True if the object at `key` existed here when this was made."""
        return key not in self._missing_keys

    def known_chunks(self, keys: Iterable[ChunkKey]) -> KnownChunks:
        """Return the chunks of the checkpoint with one of `keys`, if their objects exist."""
        chunks = {
            key: chunk
            for key in keys
            if (chunk := self._chunks.get(key)) is not None
            and self._objects[chunk.object_index].key not in self._missing_keys
        }
        used = {chunk.object_index for chunk in chunks.values()}
        return KnownChunks(
            chunks=chunks,
            objects={index: self._ref(index) for index in used},
            content_bytes={index: self._objects[index].size - self._header_ends[index] for index in used},
        )

    def find_objects(self, manifest: Manifest) -> dict[int, StoredObject]:
        """Return the objects that `manifest`, of another place, need not bring along, each as a reference.

        Such an object equals one here in size and checksums, and each chunk that `manifest` has in it, in its hash.
        """
        if manifest.tile_bytes != self._tile_bytes:
            return {}
        found: dict[int, int] = {}
        others = {value.object_index for value in manifest.values.values()}
        for fqn, tensor in manifest.tensors.items():
            hashes = itertools.chain(tensor.xxh3_128s, itertools.repeat(""))
            for chunk, xxh3_128 in zip(tensor.chunks, hashes, strict=False):
                known = self._chunks.get((fqn, chunk.offsets))
                base_index = -1 if known is None else known.object_index
                wanted = (xxh3_128, tensor.dtype, chunk.lengths, base_index, chunk.begin, chunk.end)
                if known != wanted or found.setdefault(chunk.object_index, base_index) != base_index:
                    others.add(chunk.object_index)
        refs: dict[int, StoredObject] = {}
        for index, base_index in found.items():
            stored, base = manifest.objects[index], self._objects[base_index]
            is_there = base.key not in self._missing_keys
            if is_there and index not in others and (stored.size, stored.crc32c) == (base.size, base.crc32c):
                refs[index] = msgspec.structs.replace(base, folder=self._holders[base_index])
        return refs

    def _ref(self, index: int) -> ObjectRef:
        stored = self._objects[index]
        return ObjectRef(
            key=stored.key,
            size_bytes=stored.size,
            tile_bytes=self._tile_bytes,
            tile_crc32cs=tuple(unpack_tiles(stored.crc32c)),
            folder=self._holders[index],
        )

    def keep_claims(self, manifest: Manifest) -> None:
        """Reduce the claims to the objects that `manifest` names. These claims stay as long as the checkpoint."""
        used = {(stored.folder, stored.key) for stored in manifest.objects}
        self._put_claims(
            {holder: [key for key in keys if (holder, key) in used] for holder, keys in self._claims.items()}
        )

    def _put_claims(self, claims: Mapping[str, Collection[str]]) -> None:
        context = self._context
        put_claims(context.client_at, claims, attempt=self._user_attempt, folder=context.location.name)

    def drop_claims(self) -> None:
        """Remove the claims, after a save that can no longer commit."""
        context = self._context
        drop_claims(
            lambda folder: context.client_at(folder).unstopped_copy(),
            self._claims,
            attempt=self._user_attempt,
            folder=context.location.name,
        )


def _find_header_ends(manifest: Manifest) -> dict[int, int]:
    """Return the offset of the first tensor or value of each object."""
    ends: dict[int, int] = {}
    chunks = itertools.chain.from_iterable(tensor.chunks for tensor in manifest.tensors.values())
    begins = itertools.chain(
        ((chunk.object_index, chunk.begin) for chunk in chunks),
        ((value.object_index, value.begin) for value in manifest.values.values()),
    )
    for object_index, begin in begins:
        ends[object_index] = min(ends.get(object_index, begin), begin)
    return ends


def _check_current(client: StoreClient, manifest: Manifest) -> None:
    if not is_current(client, manifest.attempt):
        raise CheckpointChangedError(f"{client.uri} is being replaced or removed", uri=client.uri)


def _check_fit(manifest: Manifest, uri: str, *, tile_bytes: int) -> None:
    if not manifest.is_referable:
        raise InvalidOptionError(
            f"no save can refer to {uri}, which has no hashes of its tensors: it was saved without "
            "Options(unchanged='reference'), or by a planner of your own. Save it with that option"
        )
    if manifest.tile_bytes != tile_bytes:
        raise InvalidOptionError(
            f"this save cannot refer to {uri}, which has AdvancedOptions(tile_bytes={manifest.tile_bytes}), and this "
            f"save has {tile_bytes}. Pass the same"
        )
