"""The body of a data object: its header and its tensors, in place where possible, copied part by part where not."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from cloudckpt._plan.boxes import boxes_of
from cloudckpt._stage.arena import Arena
from cloudckpt._stage.cuda_copying import CudaStream, Stream, Waitable
from cloudckpt._stage.targets import address_range_of
from cloudckpt._stage.tensors import as_carrier, bytes_view, is_viewable


class Filled(Protocol):
    """Memory that is being filled meanwhile, as a snapshot is while it is copied. Many threads may ask at once."""

    def wait(self, address: int, num_bytes: int) -> None:
        """Until the bytes at these addresses are there; at once for other memory. Raises what ended the filling."""


def wait_for(filled: Filled, content: torch.Tensor | memoryview) -> None:
    """Until all that `content` refers to is there. It may not be read before."""
    if isinstance(content, memoryview):
        if len(content):
            filled.wait(_address_of(content), len(content))
        return
    addresses = address_range_of(content)
    if addresses is not None:
        begin, end = addresses
        filled.wait(begin, end - begin)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Something at byte `begin` of an object: bytes in memory, or a tensor that must be copied to become bytes."""

    begin: int
    num_bytes: int
    content: memoryview | torch.Tensor
    address: int = 0
    """Of a view's first byte; 0 where it has to be asked for."""


def piece_of(content: torch.Tensor | memoryview, *, begin: int, address: int = 0) -> Piece:
    """A piece that refers to `content` and copies nothing. `address`, if given, is that of its first element."""
    if isinstance(content, torch.Tensor):
        num_bytes = content.numel() * content.element_size()
        if is_viewable(content):
            content = bytes_view(content)
        return Piece(begin=begin, num_bytes=num_bytes, content=content, address=address)
    return Piece(begin=begin, num_bytes=len(content), content=content, address=address)


def side_streams(contents: Iterable[object]) -> dict[torch.device, Stream]:
    """Of each CUDA device that holds any of `contents`, the stream for copies from there.

    They begin after what the calling thread's current stream has to do now, and run beside what it is given later.
    Devices that hold none of the contents are left alone.
    """
    devices = {item.device for item in contents if isinstance(item, torch.Tensor) and item.is_cuda}
    return {device: CudaStream(device) for device in devices}


class PieceBody:
    """Pieces back to back (see `cloudckpt._transfer.upload.Body`).

    Tensors that cannot be sent from where they lie (on a GPU, or strided) are copied into a buffer of `arena` when
    their part is opened, and only that part of them: on the one of `streams` that is their device's, where there is
    one. Those who open other parts queue their copies behind these, and each waits for its own.

    Of memory that is still being `filled`, opening a part waits for what it holds.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        arena: Arena,
        filled: Filled | None = None,
        streams: Mapping[torch.device, Stream] | None = None,
    ) -> None:
        self._pieces = [piece for piece in pieces if piece.num_bytes]
        self._filled = filled
        self._streams = streams or {}
        self._begins = [piece.begin for piece in self._pieces]
        self._arena = arena
        contents = [piece.content for piece in self._pieces if isinstance(piece.content, memoryview)]
        self._contents = contents if len(contents) == len(self._pieces) else None
        self.size_bytes = sum(piece.num_bytes for piece in self._pieces)
        self.copied_bytes = sum(piece.num_bytes for piece in self._pieces if isinstance(piece.content, torch.Tensor))
        """Of all of them, those that go through a buffer."""

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Views of bytes ``[begin, end)``. Bounds lie on tiles, and so never inside of an element."""
        if self._filled is not None:
            for piece, low, high in self._inside(begin, end):
                if not isinstance(piece.content, memoryview):
                    wait_for(self._filled, piece.content)
                elif piece.address:
                    self._filled.wait(piece.address + low, high - low)
                else:
                    wait_for(self._filled, piece.content[low:high])
        if self._contents is not None:
            yield self._views(self._contents, begin, end)
            return
        inside = list(self._inside(begin, end))
        copied_bytes = sum(
            _aligned(high - low) for piece, low, high in inside if isinstance(piece.content, torch.Tensor)
        )
        with self._arena.lend(copied_bytes) if copied_bytes else contextlib.nullcontext() as buffer:
            views: list[memoryview] = []
            copies: list[_Copy] = []
            filled_bytes = 0
            for piece, low, high in inside:
                if isinstance(piece.content, memoryview):
                    views.append(piece.content[low:high])
                    continue
                assert buffer is not None  # noqa: S101  # copied_bytes counted this piece
                target = buffer[filled_bytes : filled_bytes + high - low]
                copies.append(_Copy(piece.content, low, high, target))
                views.append(bytes_view(target))
                filled_bytes += _aligned(high - low)
            _make(copies, self._streams)
            yield views

    def _views(self, contents: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
        """The same where nothing is to be copied: all but the first and the last are whole."""
        first, last = max(bisect.bisect_right(self._begins, begin) - 1, 0), bisect.bisect_left(self._begins, end)
        views = list(contents[first:last])
        if views:
            views[-1] = views[-1][: end - self._begins[last - 1]]
            views[0] = views[0][max(begin - self._begins[first], 0) :]
        return views

    def _inside(self, begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces in ``[begin, end)``, each with the range of its own bytes that lies there."""
        for index in range(max(bisect.bisect_right(self._begins, begin) - 1, 0), len(self._pieces)):
            piece = self._pieces[index]
            if piece.begin >= end:
                return
            low, high = max(begin - piece.begin, 0), min(end - piece.begin, piece.num_bytes)
            if low < high:
                yield piece, low, high


def _address_of(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


class _Copy(NamedTuple):
    """Of bytes ``[begin, end)`` of `source`, in row-major order, into the ``uint8`` tensor `target`."""

    source: torch.Tensor
    begin: int
    end: int
    target: torch.Tensor


def _make(copies: Sequence[_Copy], streams: Mapping[torch.device, Stream]) -> None:
    """Returns when all of them have been made; or raises, and then none is still being made."""
    marks: list[Waitable] = []
    used: list[Stream] = []
    has_ended = False
    try:
        for device in dict.fromkeys(copy.source.device for copy in copies):
            stream = streams.get(device)
            of_device = [copy for copy in copies if copy.source.device == device]
            if stream is None:
                for copy in of_device:
                    _copy_range(*copy, non_blocking=False)
                continue
            used.append(stream)
            with torch.no_grad(), stream.use():
                for copy in of_device:
                    _copy_range(*copy, non_blocking=True)
                marks.append(stream.mark())
        for mark in marks:
            mark.synchronize()
        has_ended = True
    finally:
        if not has_ended:  # the buffer is going to be lent again
            for stream in used:
                stream.drain()


def _copy_range(tensor: torch.Tensor, begin: int, end: int, target: torch.Tensor, *, non_blocking: bool) -> None:
    source = as_carrier(tensor)
    flat = target.view(source.dtype)
    itemsize_bytes = source.element_size()
    position = 0
    for box in boxes_of(begin // itemsize_bytes, end // itemsize_bytes, source.shape):
        block = source
        for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            block = block.narrow(dim, offset, length)
        flat[position : position + block.numel()].view(box.lengths).copy_(block, non_blocking=non_blocking)
        position += block.numel()
