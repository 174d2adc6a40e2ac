"""The harness itself: what it returns, and how it ends when a rank does not."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import GRACE_S, RankError, run_ranks

pytestmark = pytest.mark.multirank


def sum_over_ranks(start: int) -> int:
    total = torch.tensor([dist.get_rank() + start])
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_runs_and_reports(num_ranks: int) -> None:
    """If this fails, tests pass that ran on fewer ranks than they say."""
    expected = sum(range(10, 10 + num_ranks))
    assert run_ranks(sum_over_ranks, 10, world_size=num_ranks) == [expected] * num_ranks


def name_of_rank() -> tuple[int, str]:
    return dist.get_rank(), os.environ["SOME_VARIABLE"]


def test_results_come_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a rank's result is taken for another's, or ranks miss the environment of their test."""
    monkeypatch.setenv("SOME_VARIABLE", "seen")
    assert run_ranks(name_of_rank, world_size=4) == [(rank, "seen") for rank in range(4)]


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyboardInterrupt("injected")
    dist.barrier()


def test_a_rank_that_raises_fails_the_test() -> None:
    """If this fails, assertions inside ranks assert nothing."""
    with pytest.raises(RankError, match=r"(?s)rank 1 raised:.*in raise_on_rank_1.*KeyboardInterrupt: injected"):
        run_ranks(raise_on_rank_1, world_size=2)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_dies_fails_the_test() -> None:
    """If this fails, a crash hangs the test run or passes unseen."""
    with pytest.raises(RankError, match=r"rank 1 did not report \(exit code 3\)"):
        run_ranks(die_on_rank_1, world_size=2)


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def test_a_rank_that_hangs_is_ended_with_its_stacks() -> None:
    """If this fails, one deadlock stops the whole test run, and nobody learns where."""
    run_ranks(sum_over_ranks, 0, world_size=2)  # the first may start the server of processes, too
    begun_s = time.monotonic()
    run_ranks(sum_over_ranks, 0, world_size=2)
    calm_s = time.monotonic() - begun_s
    timeout_s = max(2.0, 4 * calm_s)  # so that rank 1 has come so far
    begun_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 did not report.*in hang_on_rank_1"):
        run_ranks(hang_on_rank_1, world_size=2, timeout_s=timeout_s)
    assert time.monotonic() - begun_s < timeout_s + calm_s + 2 * GRACE_S


def test_ranks_see_changes_to_the_environment_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, one test's settings leak into the ranks of the next."""
    monkeypatch.setenv("LEAKY", "1")
    assert run_ranks(os.getenv, "LEAKY", world_size=1) == ["1"]
    monkeypatch.delenv("LEAKY")
    assert run_ranks(os.getenv, "LEAKY", world_size=1) == [None]
