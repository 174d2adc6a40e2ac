"""The difference of a piece between two versions: the XOR of its bytes, in tiles that zstd compresses.

``docs/format.md`` describes the bytes. Names of a delta's entries have the box: ``delta.<tensor>[0:4,2:8]``.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator

import numpy as np
import torch

from cloudckpt.errors import CorruptCheckpointError
from cloudckpt.format.model import ITEMSIZE_BYTES
from cloudckpt.format.safetensors import name_entry
from cloudckpt.io.boxes import Box, intersect
from cloudckpt.options import MIB
from cloudckpt.tensors.extensions import import_zstandard
from cloudckpt.tensors.tensor_bytes import as_carrier, dtype_of

TILE_BYTES = 4 * MIB
"""The bytes of a piece in one compressed tile; the last tile of a piece may be shorter."""
PREFIX = "delta."
_LEVEL = 1
_LENGTH_BYTES = 4
_NAME = re.compile(re.escape(PREFIX) + r"(?P<name>.*)\[(?P<ranges>[0-9:,]*)\]", re.DOTALL)


def delta_name(name: str, box: Box) -> str:
    """Return the name of a delta's entry."""
    return PREFIX + name_entry(name, box.offsets, box.lengths)


def parse_delta_name(entry: str) -> tuple[str, Box]:
    """Return the tensor and the box of a delta's entry; an empty name for another entry."""
    match = _NAME.fullmatch(entry)
    ends = [tuple(map(int, ends.split(":"))) for ends in match["ranges"].split(",") if ends] if match else []
    box = Box(tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))
    return (match["name"] if match else ""), box


def encode(new: memoryview, old: torch.Tensor) -> torch.Tensor | None:
    """Return the difference of a piece as bytes, or None if it has not changed. `old` then has the bytes of `new`."""
    now, before = np.frombuffer(new, dtype=np.uint8), old.numpy()
    compress = import_zstandard("a delta").ZstdCompressor(level=_LEVEL).compress
    tiles: list[bytes] = []
    for begin in range(0, len(now), TILE_BYTES):
        tile, of_old = now[begin : begin + TILE_BYTES], before[begin : begin + TILE_BYTES]
        np.bitwise_xor(tile, of_old, out=of_old)
        tiles.append(compress(of_old) if of_old.any() else b"")
        of_old[:] = tile
    if not any(tiles):
        return None
    content = bytearray(struct.pack(f"<{len(tiles)}I", *map(len, tiles)))
    for compressed in tiles:
        content += compressed
    return torch.frombuffer(content, dtype=torch.uint8)


def apply_delta(
    content: memoryview, box: Box, target: torch.Tensor, target_box: Box, dtype: str, *, name: str, uri: str
) -> None:
    """XOR the part of `target` that is in `box` with a difference. `target` is the box `target_box` of the tensor."""
    num_bytes = math.prod(box.lengths) * ITEMSIZE_BYTES[dtype]
    if box == target_box and target.is_contiguous():
        elements = _as_integers(target).view(-1)
        for begin, tile in _decode(content, num_bytes, name=name, uri=uri):
            change = torch.frombuffer(tile, dtype=torch.uint8).view(elements.dtype)
            first = begin // elements.itemsize
            elements[first : first + len(change)].bitwise_xor_(change.to(elements.device))
        return
    overlap = intersect(box, target_box)
    if overlap is None:
        return
    whole = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    for begin, tile in _decode(content, num_bytes, name=name, uri=uri):
        whole[begin : begin + len(tile)] = torch.frombuffer(tile, dtype=torch.uint8)
    change = _as_integers(whole.view(dtype_of(dtype)).view(box.lengths))[overlap.relative_to(box.offsets).slices]
    part = _as_integers(target)[overlap.relative_to(target_box.offsets).slices]
    part.bitwise_xor_(change.to(part.device))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of `tensor` as integers; an element of 16 bytes as two, in one more dimension."""
    carrier = as_carrier(tensor)
    return torch.view_as_real(carrier).view(torch.int64) if carrier.is_complex() else carrier


def _decode(content: memoryview, num_bytes: int, *, name: str, uri: str) -> Iterator[tuple[int, memoryview]]:
    """Yield the changed tiles of a difference, each with the offset of its first byte in the piece.

    A tile is overwritten by the next one.
    """
    zstandard = import_zstandard("a delta")
    decompressor, buffer = zstandard.ZstdDecompressor(), bytearray(min(TILE_BYTES, num_bytes))
    begins = range(0, num_bytes, TILE_BYTES)
    position = len(begins) * _LENGTH_BYTES
    try:
        for begin, length in zip(begins, struct.unpack_from(f"<{len(begins)}I", content), strict=True):
            if length:
                tile = memoryview(buffer)[: min(TILE_BYTES, num_bytes - begin)]
                frame = decompressor.stream_reader(content[position : position + length])
                if frame.readinto(tile) != len(tile) or frame.read(1):
                    raise struct.error("a tile has another length")  # noqa: TRY301  # the clause below names the tensor
                position += length
                yield begin, tile
    except (struct.error, zstandard.ZstdError) as error:
        raise CorruptCheckpointError(
            f"a delta of {name!r} of {uri} cannot be decoded, though undamaged: {error}", uri=uri
        ) from error
