"""The body of a data object: its header and tensors, sent from where they lie, or copied part by part."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from cloudckpt.io.boxes import split_into_boxes
from cloudckpt.tensors.copying import CudaStream, Staging, copies_queued_on
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import address_range, as_carrier, bytes_view, is_viewable

_ALIGNMENT_BYTES = 16  # the size of the largest element


def wait_for_content(pending: Staging, content: torch.Tensor | memoryview) -> None:
    """Wait until all that `content` refers to is there. It must not be read before."""
    if isinstance(content, memoryview):
        if len(content):
            address: int = np.frombuffer(content, dtype=np.uint8).__array_interface__["data"][0]
            pending.wait(address, len(content))
        return
    addresses = address_range(content)
    if addresses is not None:
        begin, end = addresses
        pending.wait(begin, end - begin)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The content at byte `begin` of an object: bytes in memory, or a tensor that must be copied to become bytes."""

    begin: int
    num_bytes: int
    content: memoryview | torch.Tensor
    address: int = 0
    """The address of the first byte; 0 if it is not known yet."""


def new_piece(content: torch.Tensor | memoryview, *, begin: int, address: int = 0) -> Piece:
    """Return a piece that refers to `content` and copies nothing. `address`, if given, is that of its first element."""
    num_bytes = content.nbytes
    if isinstance(content, torch.Tensor) and is_viewable(content):
        content = bytes_view(content)
    return Piece(begin=begin, num_bytes=num_bytes, content=content, address=address)


def new_side_streams(contents: Iterable[object]) -> dict[torch.device, CudaStream]:
    """Return a stream for each CUDA device that holds any of `contents`. See `CudaStream`."""
    devices = {item.device for item in contents if isinstance(item, torch.Tensor) and item.is_cuda}
    return {device: CudaStream(device) for device in devices}


class PieceBody:
    """Pieces back to back (see `cloudckpt.io.upload.Body`).

    A tensor that cannot be sent from where it lies (on a GPU, or strided) is copied into a buffer of `arena` when a
    part is opened, and only that part of it. The copies of a device go to its stream in `streams`, if there is one:
    behind those of other parts, and each part waits for its own.

    If the memory is still `pending`, opening a part waits for the bytes of that part.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        arena: Arena,
        pending: Staging | None = None,
        streams: Mapping[torch.device, CudaStream] | None = None,
    ) -> None:
        self._pieces = [piece for piece in pieces if piece.num_bytes]
        self._pending = pending
        self._streams = streams or {}
        self._begins = [piece.begin for piece in self._pieces]
        self._arena = arena
        self.size_bytes = sum(piece.num_bytes for piece in self._pieces)
        self.copied_bytes = sum(piece.num_bytes for piece in self._pieces if isinstance(piece.content, torch.Tensor))
        """The number of bytes that go through a buffer."""

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Give views of bytes ``[begin, end)``. Bounds lie on tiles, and so never within an element."""
        if self._pending is not None:
            self._wait(self._pending, begin, end)
        inside = list(self._pieces_between(begin, end))
        copied_bytes = sum(_align(high - low) for piece, low, high in inside if isinstance(piece.content, torch.Tensor))
        empty = contextlib.nullcontext(torch.empty(0, dtype=torch.uint8, device="cpu"))
        with self._arena.lend(copied_bytes) if copied_bytes else empty as buffer:
            views: list[memoryview] = []
            copies: list[_PieceCopy] = []
            used_bytes = 0
            for piece, low, high in inside:
                if isinstance(piece.content, memoryview):
                    views.append(piece.content[low:high])
                    continue
                target = buffer[used_bytes : used_bytes + high - low]
                copies.append(_PieceCopy(piece.content, low, high, target))
                views.append(bytes_view(target))
                used_bytes += _align(high - low)
            _make_copies(copies, self._streams)
            yield views

    def _wait(self, pending: Staging, begin: int, end: int) -> None:
        for piece, low, high in self._pieces_between(begin, end):
            if not isinstance(piece.content, memoryview):
                wait_for_content(pending, piece.content)
            elif piece.address:
                pending.wait(piece.address + low, high - low)
            else:
                wait_for_content(pending, piece.content[low:high])

    def _pieces_between(self, begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """Give the pieces in ``[begin, end)``, each with the range of its own bytes in it."""
        for index in range(max(bisect.bisect_right(self._begins, begin) - 1, 0), len(self._pieces)):
            piece = self._pieces[index]
            if piece.begin >= end:
                return
            low, high = max(begin - piece.begin, 0), min(end - piece.begin, piece.num_bytes)
            if low < high:
                yield piece, low, high


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _PieceCopy(NamedTuple):
    """A copy of bytes ``[begin, end)`` of `source`, in row-major order, into the ``uint8`` tensor `target`."""

    source: torch.Tensor
    begin: int
    end: int
    target: torch.Tensor


def _make_copies(copies: Sequence[_PieceCopy], streams: Mapping[torch.device, CudaStream]) -> None:
    """Return when all copies are made; or raise, and then none is still being made."""
    for device in dict.fromkeys(copy.source.device for copy in copies):
        of_device = [copy for copy in copies if copy.source.device == device]
        stream = streams.get(device)
        with contextlib.nullcontext() if stream is None else copies_queued_on(stream):
            for copy in of_device:
                _copy_range(copy, non_blocking=stream is not None)
            if stream is not None:
                stream.record_event().synchronize()


def _copy_range(copy: _PieceCopy, *, non_blocking: bool) -> None:
    source = as_carrier(copy.source)
    flat = copy.target.view(source.dtype)
    itemsize_bytes = source.element_size()
    position = 0
    for box in split_into_boxes(copy.begin // itemsize_bytes, copy.end // itemsize_bytes, source.shape):
        block = source[box.slices]
        flat[position : position + block.numel()].view(box.lengths).copy_(block, non_blocking=non_blocking)
        position += block.numel()
