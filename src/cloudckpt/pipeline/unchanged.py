"""Chunks of an earlier checkpoint that a save names instead of sending the same bytes again.

`docs/design/037-references.md` has the protocol.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cloudckpt.commit.log import read_current
from cloudckpt.commit.publish import find_missing
from cloudckpt.commit.references import drop_claims, is_current, put_claims
from cloudckpt.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidOptionError
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import ItemReceipts, Manifest, ObjectRef
from cloudckpt.io.client import StoreClient
from cloudckpt.pipeline.context import Context
from cloudckpt.tensors.hashing import HashedChunk

_MIN_USED_SHARE = 0.5
"""A save refers to an object only if at least this share is unchanged: the object stays while one chunk is used."""

ChunkKey: TypeAlias = tuple[str, tuple[int, ...] | None]
"""The FQN of a tensor, and the offsets of a chunk in it."""


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
    """The chunks that a rank may find unchanged. Rank 0 sends them to it."""

    chunks: Mapping[ChunkKey, KnownChunk]
    objects: Mapping[int, ObjectRef]
    content_bytes: Mapping[int, int]
    """The size of each object without its header."""


def find_unchanged(
    chunks: Mapping[int, HashedChunk], known: KnownChunks | None, aliases: Mapping[int, int]
) -> tuple[dict[int, KnownChunk], set[int]]:
    """Return the known chunks that a save need not send, and the positions of unchanged chunks that it sends.

    It sends an unchanged chunk again if most bytes of its object have changed. Aliases stay together.
    """
    if known is None:
        return {}, set()
    unchanged = {
        position: known_chunk
        for position, chunk in chunks.items()
        if (known_chunk := known.chunks.get((chunk.fqn, chunk.offsets))) is not None
        and known_chunk[:3] == (chunk.xxh3_128.hex(), chunk.dtype, chunk.lengths)
    }
    families: defaultdict[int, set[int]] = defaultdict(set)
    for follower, first in aliases.items():
        families[first] |= {first, follower}
    _drop_incomplete(unchanged, families.values())
    used_bytes: defaultdict[int, int] = defaultdict(int)
    for object_index, begin, end in {
        (known_chunk.object_index, known_chunk.begin, known_chunk.end) for known_chunk in unchanged.values()
    }:
        used_bytes[object_index] += end - begin
    named = {index for index, used in used_bytes.items() if used >= _MIN_USED_SHARE * known.content_bytes[index]}
    unsent = {position: known_chunk for position, known_chunk in unchanged.items() if known_chunk.object_index in named}
    _drop_incomplete(unsent, families.values())
    return unsent, unchanged.keys() - unsent.keys()


def _drop_incomplete(chunks: dict[int, KnownChunk], families: Iterable[set[int]]) -> None:
    """Remove from `chunks` all aliases of a tensor if it lacks one of them."""
    for family in families:
        if not family <= chunks.keys():
            for position in family & chunks.keys():
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


class Base:
    """A committed checkpoint beside a save, to whose objects the save may refer. Belongs to the rank that commits.

    The constructor puts the claims of the save. `keep_claims` or `drop_claims` must follow.

    Args:
        context: The place of the save.
        folder: The folder of the checkpoint.
        attempt: The attempt of the save.

    Raises:
        CheckpointNotFoundError: There is no checkpoint in `folder`.
        CheckpointChangedError: The checkpoint is being replaced or removed.
        InvalidOptionError: The checkpoint was saved without hashes, or with tiles of another length.
        CheckpointError: The manifest is damaged.

    """

    def __init__(self, context: Context, folder: str, *, attempt: str) -> None:
        client, own_folder = context.client_at(folder), context.location.name
        _, manifest = read_current(client)
        if manifest is None:
            raise CheckpointNotFoundError(f"there is no checkpoint at {client.uri} to refer to", uri=client.uri)
        _check_fit(manifest, client.uri, tile_bytes=context.options.advanced.tile_bytes)
        self._context, self._attempt, self._tile_bytes = context, attempt, manifest.tile_bytes
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
            self.drop_claims()
            raise
        self._missing = frozenset[str]().union(*missing)

    def known_chunks(self, keys: Iterable[ChunkKey]) -> KnownChunks:
        """Return the chunks of the checkpoint with one of `keys`, if their objects exist."""
        chunks = {
            key: chunk
            for key in keys
            if (chunk := self._chunks.get(key)) is not None
            and self._objects[chunk.object_index].key not in self._missing
        }
        used = {chunk.object_index for chunk in chunks.values()}
        return KnownChunks(
            chunks=chunks,
            objects={index: self._ref(index) for index in used},
            content_bytes={index: self._objects[index].size - self._header_ends[index] for index in used},
        )

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
        put_claims(context.client_at, claims, attempt=self._attempt, folder=context.location.name)

    def drop_claims(self) -> None:
        """Remove the claims, after a save that can have no commit any more."""
        context = self._context
        drop_claims(
            lambda folder: context.client_at(folder).restarted(),
            self._claims,
            attempt=self._attempt,
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
