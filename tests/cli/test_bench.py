"""``cloudckpt bench``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.e2e.places import S3Place
from tests.e2e.servers import FlakyS3

_FEW = ("--size", "1MiB", "--rounds", "2", "--requests", "3", "--tensors", "4")


def _wait_until_it_measures(running: subprocess.Popen[str], root: Path, *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not any(root.glob("cloudckpt-bench-*/round-*")):
        assert time.monotonic() < deadline
        with contextlib.suppress(subprocess.TimeoutExpired):  # and leaves it the processors meanwhile
            pytest.fail(f"it ended by itself, with {running.wait(timeout=0.05)}")


@pytest.mark.slow
def test_ranks_measure_together_and_leave_nothing(s3: S3Place, run: Run) -> None:
    """If this fails, it cannot be measured what the ranks of a machine get together; or what they wrote stays."""
    ended = run("bench", s3.root, *_FEW, "--ranks", "2", "--json")
    assert ended.code == 0, ended.err
    document = ended.document
    assert document["num_ranks"] == len(document["ranks"]) == 2
    for what, together in document["checkpoints"].items():
        assert together["number"] == 2
        assert all(0 < one[what]["p50_s"] <= together["p99_s"] for one in document["ranks"])
    assert s3.contents() == {}
    assert s3.num_unfinished_uploads() == 0


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    """If this fails, Ctrl-C leaves processes that go on writing, or gigabytes, or tracebacks of each rank."""
    command = [sys.executable, "-m", "cloudckpt", "bench", str(tmp_path), "--size", "1MiB", "--rounds", "1000000"]
    with subprocess.Popen(
        [*command, "--ranks", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            _wait_until_it_measures(running, tmp_path, within_s=240)
            os.killpg(running.pid, signal.SIGINT)
            _, told = running.communicate(timeout=120)  # all who could write there have ended
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130, told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("denied", ["uploads", "delete"])
def test_bench_without_the_right_to_delete_measures_nothing(
    s3: S3Place, s3_application: FlakyS3, run: Run, denied: str
) -> None:
    """If this fails, who may write and not remove learns of it when gigabytes lie there."""
    puts: list[str] = []

    def interfere(method: str, url: str) -> str | None:
        if method == "PUT":
            puts.append(url)
        asked = {one.partition("=")[0] for one in url.partition("?")[2].split("&")}
        return "deny" if denied in asked or method == denied.upper() else None

    with s3_application.troubled(interfere):
        ended = run("bench", s3.root, *_FEW)
    assert (ended.code, puts) == (4, []), ended.err
    assert "s3:" in ended.err
    assert "by hand" not in ended.err
    assert s3.contents() == {}
