"""Bodies: the bytes of an object that is uploaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from cloudckpt.stores.base import Part, Views


class Body(Protocol):
    """The bytes of one object, in memory or on a store."""

    @property
    def size_bytes(self) -> int: ...

    def open(self, begin: int, end: int) -> AbstractContextManager[Views]:
        """Yield views of bytes ``[begin, end)``, valid while the context is open."""


@runtime_checkable
class KnownBody(Body, Protocol):
    """A body whose checksums an earlier save recorded, so that parts whose CRC32C a store lists are compared unopened.

    An equal CRC32C proves equal bytes only if both were written from the same source.
    """

    @property
    def known_crc32cs(self) -> Sequence[int]:
        """The CRC32C of each tile."""


def compute_md5(body: Body, part: Part, *, read_bytes: int) -> str:
    """Return the MD5 of a part of `body`, in hexadecimal. Opens at most `read_bytes` at a time."""
    digest = hashlib.md5(usedforsecurity=False)
    end = part.offset_bytes + part.size_bytes
    for begin in range(part.offset_bytes, end, read_bytes):
        with body.open(begin, min(begin + read_bytes, end)) as views:
            for view in views:
                digest.update(view)
    return digest.hexdigest()
