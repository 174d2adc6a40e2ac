"""Jobs that save in the background for a long time: they lose nothing, and hold no more at the end than at first.

`make faults` runs all of it, the rest of the tests a shorter piece.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.e2e.harness import RankError, run_ranks
from tests.e2e.long_runs import CYCLE, NUM_WARM_CYCLES, Leak, check_flat, long_training, repeated_saves
from tests.resources import MIB

TIMEOUT_S = 600.0

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(TIMEOUT_S + 60)]

MOST_RSS_BYTES = 16 * MIB


def saves(root: Path, num_saves: int) -> None:
    (found,) = run_ranks(repeated_saves, str(root / "run"), num_saves, world_size=1, timeout_s=TIMEOUT_S)
    check_flat(found, most_rss_bytes=MOST_RSS_BYTES)


@pytest.mark.slow
def test_background_saves_leave_nothing(tmp_path: Path) -> None:
    """A long job would run out of memory, descriptors, threads or processes for its checkpoints' sake."""
    saves(tmp_path, 4 * CYCLE)


@pytest.mark.faults
def test_two_hundred_background_saves_leave_nothing(tmp_path: Path) -> None:
    """It would so after a day: what one save leaves is too little to be seen in forty."""
    saves(tmp_path, 20 * CYCLE)


@pytest.mark.faults
@pytest.mark.parametrize("leak", ["memory", "descriptor", "thread", "mapping", "child"])
def test_a_leak_is_seen(tmp_path: Path, leak: Leak) -> None:
    """The tests above would pass whatever a save leaves behind."""
    num_saves = (NUM_WARM_CYCLES + 1) * CYCLE
    try:
        (found,) = run_ranks(repeated_saves, str(tmp_path / "run"), num_saves, leak, world_size=1)
    except RankError as error:
        pytest.fail(str(error))
    with pytest.raises(AssertionError):
        check_flat(found, most_rss_bytes=MOST_RSS_BYTES)


def trains(root: Path, *, num_epochs: int, save_every: int, fault_every: int) -> None:
    outcomes = run_ranks(
        long_training, str(root / "run"), num_epochs, save_every, fault_every, world_size=2, timeout_s=TIMEOUT_S
    )
    for rank, (found, num_restarts, seconds) in enumerate(outcomes):
        print(f"rank {rank}: {num_epochs} epochs, {num_restarts} restarts, {seconds:.1f} s")
        assert num_restarts > NUM_WARM_CYCLES
        check_flat(found, most_rss_bytes=2 * MOST_RSS_BYTES)


@pytest.mark.slow
def test_training_through_faults(tmp_path: Path) -> None:
    """A job that restarts after each fault would lose a checkpoint, end with other weights, or hold ever more."""
    trains(tmp_path, num_epochs=60, save_every=10, fault_every=15)


@pytest.mark.faults
def test_a_thousand_epochs_with_a_fault_every_25(tmp_path: Path) -> None:
    """It would so in the long run."""
    num_epochs = int(os.environ.get("CLOUDCKPT_EPOCHS", "1000"))
    trains(tmp_path, num_epochs=num_epochs, save_every=10, fault_every=25)
