"""``cloudckpt bench``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Run, save
from tests.e2e.places import Place

_FEW = ("--size", "1MiB", "--rounds", "2", "--requests", "3", "--tensors", "4")


def test_it_measures_and_leaves_nothing(place: Place, run: Run) -> None:
    """If this fails, measuring a bucket costs storage for ever, or touches what lay there; or there are no figures."""
    save(place.uri())
    before = place.contents()
    ended = run("bench", place.root, *_FEW, "--json")
    assert ended.code == 0
    document = ended.document
    assert {name: one["number"] for name, one in document["checkpoints"].items()} == {"save": 2, "load": 2}
    assert {one["number"] for one in document["requests"].values()} == {3}
    assert all(0 < one["p50_s"] <= one["p99_s"] for one in document["checkpoints"].values())
    assert place.contents() == before
    assert place.num_unfinished_uploads() == 0
    table = run("bench", place.root, *_FEW)
    assert table.code == 0
    assert "P99" in table.out
    assert "B/s" in table.out


def test_a_place_that_was_not_there_is_not_there_afterwards(tmp_path: Path, run: Run) -> None:
    """If this fails, each measurement leaves an empty directory."""
    assert run("bench", str(tmp_path / "new"), *_FEW).code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_cleans_up_too(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """If this fails, Ctrl-C leaves gigabytes, hangs, or ends in a traceback."""
    command = [sys.executable, "-m", "cloudckpt", "bench", str(tmp_path), "--size", "1MiB", "--rounds", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, restore_signals=True) as running:
        try:
            deadline = time.monotonic() + 120
            while not any(tmp_path.glob("cloudckpt-bench-*/round-*")):  # it measures by now
                assert running.poll() is None
                assert time.monotonic() < deadline
                os.sched_yield()
            running.send_signal(number)
            _, told = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == code
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_says_why(tmp_path: Path, run: Run) -> None:
    """If this fails, a typing error writes to a place that was not meant."""
    for arguments in (["--size", "much"], ["--rounds", "0"], ["--size", "-1"]):
        assert run("bench", str(tmp_path), *arguments).code == 2
    assert list(tmp_path.iterdir()) == []
