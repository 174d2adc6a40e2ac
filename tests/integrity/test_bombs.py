"""Small checkpoints that ask for much memory: refused by type, before it is taken."""

from __future__ import annotations

import pytest
from tests.integrity.bombs import ROOM_BYTES
from tests.integrity.tiny import told_by_module

pytestmark = pytest.mark.faults

CORRUPT = "CorruptCheckpointError"
INVALID = "InvalidManifestError"
OUTCOMES = {
    "huge_value": (CORRUPT, CORRUPT),
    "huge_values_that_overlap": (CORRUPT, CORRUPT),
    "huge_tile": (CORRUPT, CORRUPT),
    "huge_header": (CORRUPT, CORRUPT),
    "huge_shape": (INVALID, INVALID),
    "huge_size_without_tiles": (INVALID, INVALID),
}
"""The outcome of a load, and that of `verify`."""


def test_decompression_bombs_are_refused_before_they_take_memory() -> None:
    """If this fails, a few kilobytes in a bucket end every process that opens it."""
    found = told_by_module("bombs")
    assert {name: tuple(classes) for name, classes in found["outcomes"].items()} == OUTCOMES
    assert found["taken_bytes"] < ROOM_BYTES
    print(f"bombs: {len(OUTCOMES)}, at most {found['taken_bytes'] / 2**20:.0f} MiB taken")
