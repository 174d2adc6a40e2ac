"""Measure how fast a place takes and returns bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from cloudckpt._workers import each_done
from cloudckpt.options import MIB
from cloudckpt.stores.probe import CheckFailed, Scratch

_T = TypeVar("_T")

_OBJECT_BYTES = 16 * MIB
_MAX_OBJECTS = 4
"""Objects that each connection writes at most."""
_MAX_S = 3.0
"""No object is begun later."""


def measure(scratch: Scratch, *, connections: int) -> tuple[float, float]:
    """Write at most 64 MiB with each connection, and read them back. The caller removes the objects.

    Raises `CheckFailed` if other bytes are read, and `StoreError`.

    Returns:
        The rates of the writes and of the reads, over all connections, in bytes a second.

    """
    content = os.urandom(_OBJECT_BYTES)

    def write(_: int) -> list[str]:
        ends_at_s = time.monotonic() + _MAX_S
        keys: list[str] = []
        while len(keys) < _MAX_OBJECTS and (not keys or time.monotonic() < ends_at_s):
            keys.append(scratch.new_key())
            scratch.put(keys[-1], content)
        return keys

    def read(number: int) -> None:
        buffer = bytearray(_OBJECT_BYTES)
        for key in keys[number]:
            scratch.store.read_into(key, 0, [memoryview(buffer)])
            if buffer != content:
                raise CheckFailed("returns other bytes than were written", "Use another place, or replace the drive.")

    keys, write_s = _run(write, connections)
    _, read_s = _run(read, connections)
    num_bytes = sum(map(len, keys)) * _OBJECT_BYTES
    return num_bytes / write_s, num_bytes / read_s


def _run(work: Callable[[int], _T], num_threads: int) -> tuple[list[_T], float]:
    """Call `work` with each number in a thread of its own. Return what it returns, and the seconds of all together."""
    found: dict[int, _T] = {}
    begun_s = time.monotonic()
    for _ in each_done(
        range(num_threads),
        lambda number: found.update({number: work(number)}),
        num_threads=num_threads,
        name="cloudckpt-doctor",
        on_failure=lambda: None,
    ):
        pass
    return [found[number] for number in range(num_threads)], time.monotonic() - begun_s
