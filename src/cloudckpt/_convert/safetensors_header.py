"""What a safetensors file says it holds, checked before anything is believed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES, SAFETENSORS_TAG
from cloudckpt._plan.header import LENGTH_BYTES

_METADATA_KEY = "__metadata__"
# Tags that this package does not write, because older readers do not know them.
_DTYPE_OF_TAG = {tag: dtype for dtype, tag in SAFETENSORS_TAG.items()} | {
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_NDIM = 64


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


# Made on import, by one thread: two that have msgspec look into one type for the first time can crash the process.
_ENTRY_DECODER = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor of a file; its bytes are ``[begin, end)`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """A file's tensors, in the order of their bytes, and its own metadata."""

    tensors: tuple[FileTensor, ...]
    metadata: dict[str, str]


def parsed_header(header: bytes, *, size_bytes: int) -> FileHeader:
    """Of the file's bytes up to the header's end. Raises `ValueError` for what is no safetensors file, or a cut one."""
    try:
        members = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(members.pop(_METADATA_KEY, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: _ENTRY_DECODER.decode(raw) for name, raw in members.items()}
    except _UNDECODABLE as error:
        raise ValueError(f"its header is not that of a safetensors file: {error}") from error
    tensors = [_tensor(name, entry, len(header)) for name, entry in entries.items()]
    tensors.sort(key=lambda each: (each.begin, each.end))
    ends = [len(header), *(each.end for each in tensors)]
    begins = [*(each.begin for each in tensors), size_bytes]
    if ends != begins:
        if ends[-1] > size_bytes:
            raise ValueError(f"it has {size_bytes} bytes, but its header speaks of {ends[-1]}: it was cut")
        raise ValueError("its tensors do not lie back to back, from the header's end to the file's")
    return FileHeader(tensors=tuple(tensors), metadata=metadata)


def _tensor(name: str, entry: _Entry, base: int) -> FileTensor:
    dtype = _DTYPE_OF_TAG.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{name!r:.200} has the dtype {entry.dtype!r:.20}, which torch or cloudckpt does not have")
    begin, end = entry.data_offsets
    if not 0 <= begin <= end or len(entry.shape) > _MAX_NDIM or any(length < 0 for length in entry.shape):
        raise ValueError(f"{name!r:.200} has the impossible shape {entry.shape!r:.200} at [{begin}, {end})")
    if end - begin != math.prod(entry.shape) * ITEMSIZE_BYTES[dtype]:
        raise ValueError(f"{name!r:.200} has {end - begin} bytes, which is not what {entry.shape!r:.200} takes")
    return FileTensor(name=name, dtype=dtype, shape=entry.shape, begin=base + begin, end=base + end)
