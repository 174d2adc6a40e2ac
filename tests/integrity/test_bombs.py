"""Small checkpoints that ask for much memory: refused by type, before it is taken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.e2e.harness import ROOT
from tests.integrity.bombs import ROOM_BYTES

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
"""Of a load and of `verify`."""


def test_bombs_are_refused_before_they_take_memory() -> None:
    """If this fails, a few kilobytes in a bucket end every process that opens it."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.integrity.bombs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert {name: tuple(classes) for name, classes in found["outcomes"].items()} == OUTCOMES
    assert found["taken_bytes"] < ROOM_BYTES
    print(f"bombs: {len(OUTCOMES)}, at most {found['taken_bytes'] / 2**20:.0f} MiB taken")
