"""The layout of one data object: a safetensors file (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import msgspec

from cloudckpt._messages import quote_names
from cloudckpt.format.codec import UNDECODABLE
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG, Manifest

_ALIGNMENT_BYTES = 64  # of the first tensor; with elements in falling size, each tensor is aligned to its own element
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
"""The names of Hugging Face's for a model's only file, and for the index of its files."""
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
"""The ends of the names of files, and of Hugging Face's indices of files."""
_METADATA_KEY = "__metadata__"
_VARIANT = re.compile(r"#[0-9]+\Z")


class HeaderEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor, or one Python object's bytes (`dtype` None), of an object."""

    fqn: str
    dtype: str | None
    shape: tuple[int, ...]
    """The chunk's shape."""
    offsets: tuple[int, ...] | None
    """The chunk's offsets in its tensor; None if it is the whole tensor."""
    num_bytes: int

    @property
    def itemsize_bytes(self) -> int:
        return 1 if self.dtype is None else ITEMSIZE_BYTES[self.dtype]


class HeaderMember(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a header, as safetensors writes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


# Made on import, by one thread: two that have msgspec look into one type for the first time can crash the process.
_MEMBER_DECODER = msgspec.json.Decoder(HeaderMember)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The places of all entries in one object."""

    header: bytes
    """The object's first bytes."""
    order: Sequence[int]
    """The indices of the entries in the order in which they are stored, without those whose bytes another one has."""
    begins: Sequence[int]
    """The offset of each entry's bytes in the object, as the entries were given."""
    size_bytes: int


def lay_out(
    entries: Sequence[HeaderEntry],
    *,
    same_as: Mapping[int, int] = MappingProxyType({}),
    header_bytes: int = 0,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Lay out an object that holds `entries`: by falling element size, so that all are aligned, else as given.

    `same_as` has the index of the entry that has the same bytes, by the index of each one that is not stored itself.
    The header has `metadata`, and is padded to `header_bytes`, a multiple of 64, if it is shorter.
    """
    order = sorted(range(len(entries)), key=lambda index: -entries[index].itemsize_bytes)
    order = [index for index in order if index not in same_as]
    header: dict[str, HeaderMember | dict[str, str]] = {_METADATA_KEY: {"format": "pt", **metadata}}
    begins = [0] * len(entries)
    position = 0
    for index in order:
        entry, begins[index] = entries[index], position
        tag = None if entry.dtype is None else SAFETENSORS_TAG.get(entry.dtype)
        name = name_entry(entry.fqn, entry.offsets, entry.shape)
        end = position + entry.num_bytes
        header[name if name not in header else _make_unique_name(name, header)] = HeaderMember(
            tag or "U8", entry.shape if tag else (entry.num_bytes,), (position, end)
        )
        position = end
    text = msgspec.json.encode(header)
    text += b" " * max(-(8 + len(text)) % _ALIGNMENT_BYTES, header_bytes - 8 - len(text))
    prefix = len(text).to_bytes(8, "little") + text
    return Layout(
        header=prefix,
        order=order,
        begins=[len(prefix) + begins[same_as.get(index, index)] for index in range(len(entries))],
        size_bytes=len(prefix) + position,
    )


def name_entry(fqn: str, offsets: Sequence[int] | None, shape: Sequence[int]) -> str:
    """Return the name of a tensor, or of the box of it that begins at `offsets`, in a header."""
    if offsets is None:
        return fqn
    ranges = (f"{o}:{o + n}" for o, n in zip(offsets, shape, strict=True))
    return f"{fqn}[{','.join(ranges)}]"


def _make_unique_name(name: str, header: Container[str]) -> str:
    """Return `name`, or its first free variant: names must be unique, and ``__metadata__`` is taken."""
    variant, count = name, 1
    while variant in header:
        count += 1
        variant = f"{name}#{count}"
    return variant


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEntry:
    """An entry of an object, and its bytes ``[begin, end)`` in the object."""

    entry: HeaderEntry
    begin: int
    end: int


class ObjectContents:
    """The entries that a manifest has for one object."""

    def __init__(self, placed: Sequence[PlacedEntry]) -> None:
        self.placed = sorted(placed, key=lambda placed_entry: (placed_entry.begin, placed_entry.end))
        self._begins = [placed_entry.begin for placed_entry in self.placed]
        # Entries may overlap in a forged manifest. This list rises even then.
        self._reached = list(accumulate((placed_entry.end for placed_entry in self.placed), max))

    def names(self, begin: int, end: int) -> str:
        """Return the names of the tensors and values in bytes ``[begin, end)``, for a message."""
        first, last = bisect_right(self._reached, begin), bisect_left(self._begins, end)
        fqns = {placed_entry.entry.fqn: None for placed_entry in self.placed[first:last] if placed_entry.end > begin}
        names = [quote_names(list(fqns))] if fqns else []
        if not self._begins or begin < self._begins[0]:
            names.insert(0, "the object's header")
        return ", ".join(names) or "nothing that the manifest names"


def list_contents(manifest: Manifest) -> list[ObjectContents]:
    """Return the contents of each object, in the manifest's order."""
    placed: list[list[PlacedEntry]] = [[] for _ in manifest.objects]
    for fqn, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            num_bytes = chunk.end - chunk.begin
            entry = HeaderEntry(
                fqn=fqn,
                dtype=None if tensor.transforms else tensor.dtype,
                shape=() if tensor.transforms else chunk.lengths,
                offsets=None if tensor.transforms or chunk.lengths == tensor.shape else chunk.offsets,
                num_bytes=num_bytes,
            )
            placed[chunk.object_index].append(PlacedEntry(entry=entry, begin=chunk.begin, end=chunk.end))
    for fqn, value in manifest.values.items():
        entry = HeaderEntry(fqn=fqn, dtype=None, shape=(), offsets=None, num_bytes=value.end - value.begin)
        placed[value.object_index].append(PlacedEntry(entry=entry, begin=value.begin, end=value.end))
    return [ObjectContents(members) for members in placed]


def find_header_end(prefix: bytes, *, size_bytes: int) -> int:
    """Return the end of the header, from the object's first eight bytes. Raises `ValueError` if it is impossible."""
    if len(prefix) < LENGTH_BYTES:
        raise ValueError(f"the object has {size_bytes} bytes, too few for a header")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes, more than the {MAX_HEADER_BYTES} that are allowed")
    if LENGTH_BYTES + length > size_bytes:
        raise ValueError(f"its header would have {length} bytes, but the object has only {size_bytes}")
    return LENGTH_BYTES + length


def decode_header(header: bytes) -> tuple[dict[str, HeaderMember], dict[str, str]]:
    """Return the tensors and the metadata of an object, from its bytes up to the header's end. Raises `ValueError`."""
    try:
        members = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(members.pop(_METADATA_KEY, msgspec.Raw(b"{}")), type=dict[str, str])
        return {name: _MEMBER_DECODER.decode(raw) for name, raw in members.items()}, metadata
    except UNDECODABLE as error:
        raise ValueError(f"its header is not that of a safetensors file: {error}") from error


def find_header_problems(header: bytes, contents: ObjectContents, *, size_bytes: int) -> Iterator[str]:
    """Yield why an object's header is no safetensors header, and each entry of the manifest that it lacks.

    `header` is the object's bytes up to the header's end. Any entry, even an empty one, may have ``#2``, ``#3``, … at
    the end of its name. Of several names that the manifest has for the same bytes, the header has one. It may have more
    entries, since the object can belong to another checkpoint (``docs/design/037-references.md``).
    """
    base = len(header)
    try:
        entries, _ = decode_header(header)
    except ValueError as error:
        yield str(error)
        return
    wanted: Counter[tuple[object, ...]] = Counter(
        _expected_member(placed_entry, base) for placed_entry in contents.placed
    )
    for name, entry in entries.items():
        rest: tuple[object, ...] = (entry.dtype, entry.shape, *entry.data_offsets)
        for key in ((name, *rest), (_VARIANT.sub("", name), *rest)):
            if wanted[key] > 0:
                wanted[key] -= 1
                break
    named = {(entry.dtype, entry.shape, *entry.data_offsets) for entry in entries.values()}
    for missing, count in wanted.items():
        if count > 0 and not (missing[1:] in named and _has_bytes(missing)):
            yield f"its header lacks {missing[0]!r:.200} as {_format_member(missing[1:])}, which the manifest says"
    ranges = sorted(entry.data_offsets for entry in entries.values())
    bounds = [(0, 0), *ranges, (size_bytes - base, size_bytes - base)]
    if any(low[1] != high[0] for low, high in pairwise(bounds)):
        yield "the entries of its header are not back to back, from the header's end to the object's"


def _expected_member(placed: PlacedEntry, base: int) -> tuple[object, ...]:
    entry = placed.entry
    tag = None if entry.dtype is None else SAFETENSORS_TAG.get(entry.dtype)
    shape = entry.shape if tag else (entry.num_bytes,)
    return name_entry(entry.fqn, entry.offsets, entry.shape), tag or "U8", shape, placed.begin - base, placed.end - base


def _has_bytes(expected: tuple[Any, ...]) -> bool:
    *_, begin, end = expected
    return bool(begin < end)


def _format_member(rest: Sequence[object]) -> str:
    dtype, shape, begin, end = rest
    return f"{dtype!s:.20} {shape!s:.200} at [{begin!s:.40}, {end!s:.40})"
