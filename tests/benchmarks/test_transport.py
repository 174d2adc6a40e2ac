"""Ways to move bytes, and Python's lock beside them."""

from __future__ import annotations

import hashlib
import time

import pytest
from benchmarks.lock import held_during

from benchmarks import transport


def test_the_lock_is_seen_while_it_is_held() -> None:
    """If this fails, the bound of a process with many cores is made up."""
    block, holding_s, hashing_s = bytes(256 * 1024), 0.0, 0.0

    def work() -> None:
        nonlocal holding_s, hashing_s
        end_s = time.perf_counter() + 0.5
        while time.perf_counter() < end_s:
            begun_s = time.thread_time()
            for _ in range(3000):
                pass
            held_s = time.thread_time()
            hashlib.sha256(block).digest()  # without the lock
            holding_s += held_s - begun_s
            hashing_s += time.thread_time() - held_s

    found = held_during(work)
    assert found.seconds == pytest.approx(0.5 * holding_s / (holding_s + hashing_s), abs=0.1)
    assert found.num_hand_overs < 100


def test_candidates_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, a change of the transport cannot be measured."""
    sizes = ["--total-mib", "10", "--part-mib", "5", "--repetitions", "1", "--threads", "2"]
    assert transport.main(["--wire", "http", "--candidates", "bare", "cloudckpt", *sizes]) == 0
    rows = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| bare", "| cloudckpt"))
    ]
    assert [row[0] for row in rows] == ["| bare", "| cloudckpt"] * 2
    assert all(float(row[5].split()[0]) >= 0 for row in rows)
