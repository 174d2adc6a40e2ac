"""Jobs that save in the background for a long time: they lose nothing, and hold no more at the end than at first.

`make faults` runs all of it, the rest of the tests a shorter piece.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.harness import run_ranks
from tests.e2e.long_runs import CYCLE, check_flat, repeated_saves
from tests.resources import MIB

TIMEOUT_S = 600.0

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(TIMEOUT_S + 60)]

MOST_RSS_BYTES = 16 * MIB


def saves(root: Path, num_saves: int) -> None:
    (found,) = run_ranks(repeated_saves, str(root / "run"), num_saves, world_size=1, timeout_s=TIMEOUT_S)
    check_flat(found, most_rss_bytes=MOST_RSS_BYTES)


@pytest.mark.faults
def test_two_hundred_background_saves_leave_nothing(tmp_path: Path) -> None:
    """It would so after a day: what one save leaves is too little to be seen in forty."""
    saves(tmp_path, 20 * CYCLE)
