"""More ranks than a machine has processors, in one job; ``tests/soak`` has more still."""

from __future__ import annotations

import pytest
from tests.e2e.many_ranks import check_many_ranks
from tests.e2e.places import Place

pytestmark = pytest.mark.faults

NUM_RANKS = 16


@pytest.mark.multirank
def test_sixteen_ranks(place: Place) -> None:
    """If this fails, a job of many ranks hangs, blames the wrong rank, or leaves what it replaced."""
    check_many_ranks(place, num_ranks=NUM_RANKS, timeout_s=120.0)
