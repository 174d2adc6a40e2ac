"""A thousand rounds of what ``tests/e2e/test_leaks.py`` has some dozens for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.harness import run_ranks
from tests.e2e.leaks import check_growth, growth_of_rounds
from tests.resources import MIB

from cloudckpt.testing.servers import Server

NUM_ROUNDS = int(os.environ.get("CLOUDCKPT_SOAK_ROUNDS", "1000"))
TIMEOUT_S = 60.0 + 3.0 * NUM_ROUNDS

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(TIMEOUT_S + 60.0)]


def test_a_thousand_rounds_leave_nothing_on_a_path(tmp_path: Path) -> None:
    """If this fails, a long job runs out of memory, threads or descriptors for its checkpoints' sake."""
    (growth,) = run_ranks(growth_of_rounds, str(tmp_path / "run"), NUM_ROUNDS, world_size=1, timeout_s=TIMEOUT_S)
    check_growth(growth, most_rss_bytes=32 * MIB)


def test_a_thousand_rounds_leave_nothing_on_ceph(rgw: Server, use: Callable[[Server], str]) -> None:
    """If this fails, it does so where connections are kept."""
    (growth,) = run_ranks(growth_of_rounds, f"{use(rgw)}/run", NUM_ROUNDS, world_size=1, timeout_s=TIMEOUT_S)
    check_growth(growth, most_rss_bytes=32 * MIB)
