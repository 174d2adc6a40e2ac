"""The data objects of a save: its items packed and laid out, and sent in place or copied part by part."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from cloudckpt.format.model import ItemReceipts
from cloudckpt.format.safetensors import HeaderEntry, lay_out
from cloudckpt.io.boxes import split_into_boxes
from cloudckpt.options import MIB
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.snapshot import CudaStream, Snapshot, copies_queued_on
from cloudckpt.tensors.tensor_bytes import ALIGNMENT_BYTES, address_range, as_carrier, bytes_view, is_viewable

# The layout of an object needs all of its tensors. It is made while the object before is sent, so objects have few.
_TENSORS_PER_OBJECT = 4096
# Transformed tensors are held until the layout of their object is known.
_MAX_TRANSFORMED_OBJECT_BYTES = 256 * MIB
# A safetensors header may have at most 100 MB (https://github.com/huggingface/safetensors#format); an entry of it
# rarely passes 500 bytes.
_MAX_HEADER_ENTRIES = 100_000


def wait_for_content(snapshot: Snapshot, content: torch.Tensor | memoryview) -> None:
    """Wait until `snapshot` has copied the bytes of `content`. They must not be read before."""
    if isinstance(content, memoryview):
        if len(content):
            address: int = np.frombuffer(content, dtype=np.uint8).__array_interface__["data"][0]
            snapshot.wait(address, len(content))
        return
    addresses = address_range(content)
    if addresses is not None:
        begin, end = addresses
        snapshot.wait(begin, end - begin)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The content at byte `begin` of an object: bytes in memory, or a tensor that must be copied to become bytes."""

    begin: int
    num_bytes: int
    content: memoryview | torch.Tensor
    address: int = 0
    """The address of the first byte; 0 if it is not known yet."""


def new_piece(content: torch.Tensor | memoryview, *, begin: int, address: int = 0) -> Piece:
    """Return a piece that refers to `content`, without a copy. `address` is as in `Piece`."""
    num_bytes = content.nbytes
    if isinstance(content, torch.Tensor) and is_viewable(content):
        content = bytes_view(content)
    return Piece(begin=begin, num_bytes=num_bytes, content=content, address=address)


def new_side_streams(contents: Iterable[object]) -> dict[torch.device, CudaStream]:
    """Return a stream for each CUDA device that holds any of `contents`. See `CudaStream`."""
    devices = {item.device for item in contents if isinstance(item, torch.Tensor) and item.is_cuda}
    return {device: CudaStream(device) for device in devices}


class PieceBody:
    """Pieces back to back (see `cloudckpt.io.body.Body`).

    When a part is opened, a tensor that cannot be sent in place (on a GPU, or strided) is copied into a buffer of
    `arena`, as far as it is in the part. Copies from a device are queued on its stream in `streams`, if there is one.
    Each part waits for its own copies.

    With a `snapshot`, opening a part waits until the bytes of that part are copied.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        arena: Arena,
        snapshot: Snapshot | None = None,
        streams: Mapping[torch.device, CudaStream] | None = None,
    ) -> None:
        self._pieces = [piece for piece in pieces if piece.num_bytes]
        self._snapshot = snapshot
        self._streams = streams or {}
        self._begins = [piece.begin for piece in self._pieces]
        self._arena = arena
        self.size_bytes = sum(piece.num_bytes for piece in self._pieces)
        self.copied_bytes = sum(piece.num_bytes for piece in self._pieces if isinstance(piece.content, torch.Tensor))
        """The number of bytes that pass through a buffer."""

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Yield views of bytes ``[begin, end)``. Both bounds are bounds of tiles, so no element is cut."""
        if self._snapshot is not None:
            self._wait(self._snapshot, begin, end)
        ranges = list(self._pieces_between(begin, end))
        positions: list[int] = []
        used_bytes = 0
        for piece, low, high in ranges:
            positions.append(used_bytes + (piece.begin + low - begin - used_bytes) % ALIGNMENT_BYTES)
            if isinstance(piece.content, torch.Tensor):
                used_bytes = positions[-1] + high - low
        empty = contextlib.nullcontext(torch.empty(0, dtype=torch.uint8, device="cpu"))
        with self._arena.lend(used_bytes) if used_bytes else empty as buffer:
            views: list[memoryview] = []
            copies: list[_PieceCopy] = []
            for (piece, low, high), position in zip(ranges, positions, strict=True):
                if isinstance(piece.content, memoryview):
                    views.append(piece.content[low:high])
                    continue
                target = buffer[position : position + high - low]
                copies.append(_PieceCopy(piece.content, low, high, target))
                views.append(bytes_view(target))
            _make_copies(copies, self._streams)
            yield views

    def _wait(self, snapshot: Snapshot, begin: int, end: int) -> None:
        for piece, low, high in self._pieces_between(begin, end):
            if not isinstance(piece.content, memoryview):
                wait_for_content(snapshot, piece.content)
            elif piece.address:
                snapshot.wait(piece.address + low, high - low)
            else:
                wait_for_content(snapshot, piece.content[low:high])

    def _pieces_between(self, begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield the pieces in ``[begin, end)``, each with the range of its own bytes there."""
        for index in range(max(bisect.bisect_right(self._begins, begin) - 1, 0), len(self._pieces)):
            piece = self._pieces[index]
            if piece.begin >= end:
                return
            low, high = max(begin - piece.begin, 0), min(end - piece.begin, piece.num_bytes)
            if low < high:
                yield piece, low, high


class _PieceCopy(NamedTuple):
    """A copy of bytes ``[begin, end)`` of `source`, in row-major order, into the ``uint8`` tensor `target`."""

    source: torch.Tensor
    begin: int
    end: int
    target: torch.Tensor


def _make_copies(copies: Sequence[_PieceCopy], streams: Mapping[torch.device, CudaStream]) -> None:
    """Make all copies, and wait for them, also after an error."""
    for device in dict.fromkeys(copy.source.device for copy in copies):
        copies_from_device = [copy for copy in copies if copy.source.device == device]
        stream = streams.get(device)
        with contextlib.nullcontext() if stream is None else copies_queued_on(stream):
            for copy in copies_from_device:
                _copy_range(copy, non_blocking=stream is not None)
            if stream is not None:
                stream.record_event().synchronize()


def _copy_range(copy: _PieceCopy, *, non_blocking: bool) -> None:
    source = as_carrier(copy.source)
    if source.is_contiguous():  # one copy instead of one for each box
        source = source.view(-1)
    flat = copy.target.view(source.dtype)
    itemsize_bytes = source.element_size()
    position = 0
    for box in split_into_boxes(copy.begin // itemsize_bytes, copy.end // itemsize_bytes, source.shape):
        elements = source[box.slices]
        flat[position : position + elements.numel()].view(box.lengths).copy_(elements, non_blocking=non_blocking)
        position += elements.numel()


class StagedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a save, ready to be laid out. `content` refers to the item's own memory."""

    entry: HeaderEntry
    index_offsets: tuple[int, ...] | None
    """The offsets in the item's index."""
    content: torch.Tensor | memoryview
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]
    address: int = 0
    """The address of a tensor's first element; 0 if the content is no tensor's memory."""


def _is_same_content(item: StagedItem, first: StagedItem) -> bool:
    """Return True if two items that were planned as aliases have the same bytes."""
    return (
        0 < item.address == first.address
        and type(item.content) is type(first.content)
        and (item.dtype, item.lengths, item.transforms) == (first.dtype, first.lengths, first.transforms)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveItems:
    """The items of a save on one rank."""

    sizes_bytes: Sequence[int]
    """The estimated size of each item; 0 for an alias."""
    aliases: Mapping[int, int]
    """The position of an earlier item that has the same bytes, by the position of each alias."""
    are_transformed: bool
    """True if extensions compute the stored bytes, so that no item is sent in place."""
    are_repeatable: Sequence[bool]
    """True for each tensor that `stage` returns with the same bytes however often it is called."""
    hashes: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    """The hashes of chunks (`HashedChunk`), by position, for the receipts."""
    stage: Callable[[Sequence[int]], Iterable[StagedItem]]
    """Returns the items at these positions, with their data. Called object by object, so that computed tensors are not
    all held at once."""

    def select(self, positions: Sequence[int], hashes: Mapping[int, bytes]) -> SaveItems:
        """Return the items at `positions`, in that order, with their `hashes`. Both have positions in this object.

        `positions` has an alias and its first item, or neither.
        """
        index_of = {position: index for index, position in enumerate(positions)}
        return SaveItems(
            sizes_bytes=[self.sizes_bytes[position] for position in positions],
            aliases={
                index_of[follower]: index_of[first] for follower, first in self.aliases.items() if follower in index_of
            },
            are_transformed=self.are_transformed,
            are_repeatable=[self.are_repeatable[position] for position in positions],
            hashes={index_of[position]: digest for position, digest in hashes.items() if position in index_of},
            stage=lambda indices: self.stage([positions[index] for index in indices]),
        )


def lay_out_objects(
    save_items: SaveItems, arena: Arena, snapshot: Snapshot | None, *, object_bytes: int
) -> Iterator[tuple[PieceBody, Callable[..., ItemReceipts]]]:
    """Yield the body of each data object, and a function that makes its receipts from its `ObjectRef` (`stored_in`).

    An object has up to `object_bytes`. Aliases of one tensor are in one object, the first one first.
    """
    if save_items.are_transformed:
        object_bytes = min(object_bytes, _MAX_TRANSFORMED_OBJECT_BYTES)
    aliases = save_items.aliases
    firsts = [position for position in range(len(save_items.sizes_bytes)) if position not in aliases]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for follower, first in aliases.items():
        followers[first].append(follower)
    sizes_of_firsts = [save_items.sizes_bytes[position] for position in firsts]
    for group in pack(sizes_of_firsts, object_bytes=object_bytes, max_tensors=_TENSORS_PER_OBJECT):
        positions = [position for i in group for position in (firsts[i], *followers.get(firsts[i], ()))]
        items = list(save_items.stage(positions))
        index_of = {position: index for index, position in enumerate(positions)}
        same_as = {index_of[position]: index_of[aliases[position]] for position in positions if position in aliases}
        same_as = {i: first for i, first in same_as.items() if _is_same_content(items[i], items[first])}
        hashes = [save_items.hashes.get(position, b"") for position in positions] if save_items.hashes else []
        yield _lay_out_object(items, same_as, hashes, arena, snapshot)


def _lay_out_object(
    items: Sequence[StagedItem],
    same_as: Mapping[int, int],
    hashes: list[bytes],
    arena: Arena,
    snapshot: Snapshot | None,
) -> tuple[PieceBody, Callable[..., ItemReceipts]]:
    layout = lay_out([item.entry for item in items], same_as=same_as)
    pieces = [new_piece(memoryview(layout.header), begin=0)]
    pieces += [new_piece(items[i].content, begin=layout.begins[i], address=items[i].address) for i in layout.order]
    make_receipts = functools.partial(
        ItemReceipts,
        fqns=[item.entry.fqn for item in items],
        offsets=[item.index_offsets for item in items],
        begins=array("q", layout.begins),
        ends=array("q", [begin + item.entry.num_bytes for item, begin in zip(items, layout.begins, strict=True)]),
        dtypes=[item.dtype for item in items],
        lengths=[item.lengths for item in items],
        transforms=[item.transforms for item in items],
        hashes=hashes,
    )
    return PieceBody(pieces, arena, snapshot, new_side_streams(item.content for item in items)), make_receipts


def pack(sizes_bytes: Sequence[int], *, object_bytes: int, max_tensors: int = _MAX_HEADER_ENTRIES) -> list[range]:
    """Cut positions into groups of at most `max_tensors` and `object_bytes`. A larger tensor has its own group."""
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
