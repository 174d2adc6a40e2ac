"""What the header of a data object must say, judged against the manifest: any bytes at all may stand there."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from cloudckpt._manifest.dtypes import SAFETENSORS_TAG
from cloudckpt._manifest.model import Manifest
from cloudckpt._plan.layout import Entry, name_of

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_METADATA_KEY = "__metadata__"
_VARIANT = re.compile(r"#[0-9]+\Z")
_MAX_NAMES = 5
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An entry of an object, and the bytes ``[begin, end)`` of the object that are its own."""

    entry: Entry
    begin: int
    end: int


class Contents:
    """What the manifest says lies in one object."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self.placed = sorted(placed, key=lambda one: (one.begin, one.end))
        self._begins = [one.begin for one in self.placed]
        # Entries may overlap in a manifest that somebody made up; this rises all the same.
        self._reached = list(accumulate((one.end for one in self.placed), max))

    def names(self, begin: int, end: int) -> str:
        """The tensors and values that bytes ``[begin, end)`` belong to, for a message."""
        first, last = bisect_right(self._reached, begin), bisect_left(self._begins, end)
        fqns = {one.entry.fqn: None for one in self.placed[first:last] if one.end > begin}
        names = [repr(fqn) for fqn in list(fqns)[:_MAX_NAMES]]
        if len(fqns) > _MAX_NAMES:
            names.append(f"{len(fqns) - _MAX_NAMES} more")
        if not self._begins or begin < self._begins[0]:
            names.insert(0, "the object's header")
        return ", ".join(names) or "nothing that the manifest names"


def contents_of(manifest: Manifest) -> list[Contents]:
    """Of each object, in the manifest's order."""
    placed: list[list[Placed]] = [[] for _ in manifest.objects]
    for fqn, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            num_bytes = chunk.end - chunk.begin
            entry = Entry(
                fqn=fqn,
                dtype=None if tensor.transforms else tensor.dtype,
                shape=() if tensor.transforms else chunk.lengths,
                offsets=None if tensor.transforms or chunk.lengths == tensor.shape else chunk.offsets,
                num_bytes=num_bytes,
            )
            placed[chunk.object_index].append(Placed(entry=entry, begin=chunk.begin, end=chunk.end))
    for fqn, value in manifest.values.items():
        entry = Entry(fqn=fqn, dtype=None, shape=(), offsets=None, num_bytes=value.end - value.begin)
        placed[value.object_index].append(Placed(entry=entry, begin=value.begin, end=value.end))
    return [Contents(members) for members in placed]


def header_end(prefix: bytes, *, size_bytes: int) -> int:
    """Where the header ends, by the object's first eight bytes. Raises `ValueError` where that cannot be."""
    if len(prefix) < LENGTH_BYTES:
        raise ValueError(f"the object has {size_bytes} bytes, too few for a header")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes, more than the {MAX_HEADER_BYTES} that are allowed")
    if LENGTH_BYTES + length > size_bytes:
        raise ValueError(f"its header would have {length} bytes, but the object has only {size_bytes}")
    return LENGTH_BYTES + length


class _HeaderEntry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


# Made on import, by one thread: two that have msgspec look into one type for the first time can crash the process.
_ENTRY_DECODER = msgspec.json.Decoder(_HeaderEntry)


def header_problems(header: bytes, contents: Contents, *, size_bytes: int) -> Iterator[str]:
    """Every respect in which an object's header is no safetensors header, or says other things than the manifest.

    `header` is the object's bytes up to the header's end. An empty entry may stand under a name with ``#2``, ``#3``, …
    at its end, as any other may. Bytes that the manifest has under several names stand under one of them.
    """
    base = len(header)
    try:
        members = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        if _METADATA_KEY in members:
            msgspec.json.decode(members.pop(_METADATA_KEY), type=dict[str, str])
        found = {name: _ENTRY_DECODER.decode(raw) for name, raw in members.items()}
    except _UNDECODABLE as error:
        yield f"its header is not that of a safetensors file: {error}"
        return
    wanted: Counter[tuple[object, ...]] = Counter(_expected(one, base) for one in contents.placed)
    for name, entry in found.items():
        rest: tuple[object, ...] = (entry.dtype, entry.shape, *entry.data_offsets)
        for key in ((name, *rest), (_VARIANT.sub("", name), *rest)):
            if wanted[key] > 0:
                wanted[key] -= 1
                break
        else:
            yield f"its header has {name!r:.200} as {_shown(rest)}, which the manifest does not say"
    named = {(entry.dtype, entry.shape, *entry.data_offsets) for entry in found.values()}
    for missing, count in wanted.items():
        if count > 0 and not (missing[1:] in named and _has_bytes(missing)):
            yield f"its header lacks {missing[0]!r:.200} as {_shown(missing[1:])}, which the manifest says"
    ranges = sorted(entry.data_offsets for entry in found.values())
    bounds = [(0, 0), *ranges, (size_bytes - base, size_bytes - base)]
    if any(low[1] != high[0] for low, high in pairwise(bounds)):
        yield "the entries of its header do not lie back to back, from the header's end to the object's"


def _expected(one: Placed, base: int) -> tuple[object, ...]:
    entry = one.entry
    tag = None if entry.dtype is None else SAFETENSORS_TAG.get(entry.dtype)
    shape = entry.shape if tag else (entry.num_bytes,)
    return name_of(entry), tag or "U8", shape, one.begin - base, one.end - base


def _has_bytes(expected: tuple[Any, ...]) -> bool:
    *_, begin, end = expected
    return bool(begin < end)


def _shown(rest: Sequence[object]) -> str:
    dtype, shape, begin, end = rest
    return f"{dtype!s:.20} {shape!s:.200} at [{begin!s:.40}, {end!s:.40})"
