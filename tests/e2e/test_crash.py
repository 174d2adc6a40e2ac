"""Ranks are killed at a step of a save: what is there afterwards is one whole checkpoint, or none.

``CLOUDCKPT_KILLS=all`` runs the whole matrix on a path. On other servers: ``tests/integration/test_kills.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.killing import check
from tests.e2e.kills import ALL_KILLS, KILL_AT_EACH_STEP, KILLS_ON_A_STORE, Kill
from tests.kit.places import BucketPlace, LocalPlace

pytestmark = [pytest.mark.faults, pytest.mark.multirank]

KILLS = ALL_KILLS if os.environ.get("CLOUDCKPT_KILLS") == "all" else KILL_AT_EACH_STEP


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_a_save_to_a_path_that_dies_leaves_one_whole_checkpoint_or_none(
    local: LocalPlace, tmp_path: Path, kill: Kill
) -> None:
    """If this fails, a crash mixes two saves, loses both, passes half of one for a whole one, blocks the job that
    starts again, or leaves what gc does not find, or has gc take what is needed.
    """
    check(local, kill, tmp_path / "scratch")


@pytest.mark.parametrize("kill", KILLS_ON_A_STORE, ids=str)
def test_a_save_to_a_bucket_that_dies_leaves_one_whole_checkpoint_or_none(
    on_server: Callable[[str], BucketPlace], tmp_path: Path, kill: Kill
) -> None:
    """If this fails, what holds on a path does not hold on an object store."""
    check(on_server("moto"), kill, tmp_path / "scratch")
