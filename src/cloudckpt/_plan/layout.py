"""The layout of one data object: a safetensors file (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import msgspec

from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES, SAFETENSORS_TAG

_ALIGNMENT_BYTES = 64  # of the first tensor; with elements in falling size, each tensor is aligned to its own element


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor, or one Python object's bytes (`dtype` None), that goes into an object."""

    fqn: str
    dtype: str | None
    shape: tuple[int, ...]
    """Of the chunk."""
    offsets: tuple[int, ...] | None
    """Of the chunk in its tensor; None where the chunk is the whole tensor."""
    num_bytes: int

    @property
    def itemsize_bytes(self) -> int:
        return 1 if self.dtype is None else ITEMSIZE_BYTES[self.dtype]


class _HeaderEntry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything lies in one object."""

    header: bytes
    """The object's first bytes."""
    begins: tuple[int, ...]
    """Of each entry's bytes in the object."""
    size_bytes: int


def storage_order(entries: Sequence[Entry]) -> list[int]:
    """The entries' indices in the order in which they are stored: by falling element size, else as given."""
    return sorted(range(len(entries)), key=lambda index: -entries[index].itemsize_bytes)


def lay_out(entries: Sequence[Entry]) -> Layout:
    """The layout of an object that holds `entries`, which must be in `storage_order`."""
    header: dict[str, _HeaderEntry | dict[str, str]] = {"__metadata__": {"format": "pt"}}
    relative_begins: list[int] = []
    position = 0
    for entry in entries:
        relative_begins.append(position)
        tag = None if entry.dtype is None else SAFETENSORS_TAG.get(entry.dtype)
        name = entry.fqn if entry.offsets is None else name_of(entry)
        end = position + entry.num_bytes
        header[name if name not in header else _unused(name, header)] = _HeaderEntry(
            tag or "U8", entry.shape if tag else (entry.num_bytes,), (position, end)
        )
        position = end
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    prefix = len(text).to_bytes(8, "little") + text
    return Layout(
        header=prefix,
        begins=tuple(len(prefix) + begin for begin in relative_begins),
        size_bytes=len(prefix) + position,
    )


def name_of(entry: Entry) -> str:
    """What the header calls it, unless that name is taken."""
    if entry.offsets is None:
        return entry.fqn
    ranges = (f"{o}:{o + n}" for o, n in zip(entry.offsets, entry.shape, strict=True))
    return f"{entry.fqn}[{','.join(ranges)}]"


def _unused(name: str, header: Container[str]) -> str:
    """`name`, or the first variant of it that is free: names must be unique, and ``__metadata__`` is taken."""
    variant, count = name, 1
    while variant in header:
        count += 1
        variant = f"{name}#{count}"
    return variant
