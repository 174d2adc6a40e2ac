"""The oracle: an oracle that allows everything finds nothing."""

from __future__ import annotations

import pytest
from tests.simulated.oracle import Operation, can_have_happened

SAVE = Operation("save", 1, 0, 10)

POSSIBLE = {
    "nothing": [],
    "read after save": [SAVE, Operation("read", 1, 11, 12)],
    "read in the middle": [SAVE, Operation("read", 1, 5, 6), Operation("read", 1, 7, 8)],
    "not yet": [SAVE, Operation("read", None, 5, 6), Operation("read", 1, 7, 8)],
    "crashed, and there": [SAVE._replace(is_certain=False), Operation("read", 1, 11, 12)],
    "crashed, and not": [SAVE._replace(is_certain=False), Operation("read", None, 11, 12)],
    "overwritten": [
        SAVE,
        Operation("overwrite", 2, 11, 20),
        Operation("read", 1, 12, 13),
        Operation("read", 2, 14, 15),
    ],
    "deleted and saved": [SAVE, Operation("delete", None, 11, 20), Operation("save", 2, 12, 19)],
    "refused": [SAVE, Operation("refused", 2, 5, 6)],
    "late": [Operation("overwrite", 1, 0, is_certain=False), Operation("read", None, 1, 2), Operation("read", 1, 8, 9)],
}
IMPOSSIBLE = {
    "lost": [SAVE, Operation("read", None, 11, 12)],
    "too early": [SAVE, Operation("read", 1, 5, 6), Operation("read", None, 7, 8)],
    "out of nowhere": [Operation("read", 1, 0, 1)],
    "two winners": [SAVE, Operation("save", 2, 5, 20)],
    "old again": [SAVE, Operation("overwrite", 2, 11, 20), Operation("read", 1, 21, 22)],
    "back and forth": [
        SAVE,
        Operation("overwrite", 2, 11, 20),
        Operation("read", 2, 12, 13),
        Operation("read", 1, 14, 15),
    ],
    "deleted": [SAVE, Operation("delete", None, 11, 20), Operation("read", 1, 21, 22)],
    "refused by nobody": [Operation("refused", 2, 5, 6)],
    "crashed, gone and back": [
        SAVE._replace(is_certain=False),
        Operation("read", None, 11, 12),
        Operation("read", 1, 13, 14),
    ],
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_what_can_happen_is_allowed(name: str) -> None:
    """If this fails, the simulation cries wolf."""
    assert can_have_happened(POSSIBLE[name])


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_happen_is_found(name: str) -> None:
    """If this fails, the simulation sees a lost checkpoint and says nothing."""
    assert not can_have_happened(IMPOSSIBLE[name])
