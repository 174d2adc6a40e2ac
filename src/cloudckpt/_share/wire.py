"""What ranks on different machines say to each other, over a connection from the one that wants to the one that has.

The one that wants shows the key of the other's door, says which machine it is, and names all that it wants. The other
answers with what its door said it would, and then sends that in the order in which it has it, each behind its place in
the list and its length; a length of 0 says that it will not come. Then either closes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cloudckpt._share.door import TOKEN_BYTES, Door
from cloudckpt._share.plan import Segment

_GREETING = struct.Struct("<II")
_WANT = struct.Struct("<QQ")
_HEADER = struct.Struct("<IQ")
GREETING_BYTES = TOKEN_BYTES + _GREETING.size
WANT_BYTES = _WANT.size
HEADER_BYTES = _HEADER.size


def greeting(door: Door, *, machine: int, wanted: Sequence[Segment]) -> bytes:
    """All that the one that wants ever says."""
    wants = b"".join(_WANT.pack(segment.object_index, segment.begin) for segment in wanted)
    return door.key + _GREETING.pack(machine, len(wanted)) + wants


def greeting_of(text: bytes | bytearray) -> tuple[bytes, int, int]:
    """The key, the machine and the number of wants."""
    machine, num_wants = _GREETING.unpack_from(text, TOKEN_BYTES)
    return bytes(text[:TOKEN_BYTES]), machine, num_wants


def wants_of(text: bytes | bytearray) -> list[tuple[int, int]]:
    """Where the wanted segments begin: (object_index, begin)."""
    return list(_WANT.iter_unpack(text[GREETING_BYTES:]))


def header(index: int, num_bytes: int) -> bytes:
    return _HEADER.pack(index, num_bytes)


def header_of(text: bytes | bytearray | memoryview) -> tuple[int, int]:
    """The place in the list, and the length."""
    index, num_bytes = _HEADER.unpack(text)
    return index, num_bytes
