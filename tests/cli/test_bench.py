"""``cloudckpt bench``."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Run, save
from tests.e2e.places import Place, S3Place
from tests.e2e.servers import FlakyS3

from cloudckpt.cli import _measurement
from cloudckpt.pipeline import save as save_pipeline

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
    assert run("bench", str(tmp_path / "new" / "and" / "deeper"), *_FEW).code == 0
    assert list(tmp_path.iterdir()) == []


def _wait_until_it_measures(running: subprocess.Popen[str], root: Path, *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not any(root.glob("cloudckpt-bench-*/round-*")):
        assert time.monotonic() < deadline
        with contextlib.suppress(subprocess.TimeoutExpired):  # and leaves it the processors meanwhile
            pytest.fail(f"it ended by itself, with {running.wait(timeout=0.05)}")


def test_sigterm_cleans_up_too(tmp_path: Path) -> None:
    """If this fails, SIGTERM leaves gigabytes, hangs, or ends in a traceback."""
    command = [sys.executable, "-m", "cloudckpt", "bench", str(tmp_path), "--size", "1MiB", "--rounds", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, restore_signals=True) as running:
        try:
            _wait_until_it_measures(running, tmp_path, within_s=120)
            running.send_signal(signal.SIGTERM)
            _, told = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 143, told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interruption_of_a_commit_is_one(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException, code: int
) -> None:
    """If this fails, who presses Ctrl-C at the wrong moment is told that data was kept, which was removed."""

    def interrupted(*_: object, **__: object) -> None:
        raise interrupt

    monkeypatch.setattr(save_pipeline, "publish", interrupted)
    ended = run("bench", str(tmp_path), *_FEW)
    assert ended.code == code, ended.err
    assert "kept" not in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["local", "s3"])
@pytest.mark.slow
def test_ranks_measure_together_and_leave_nothing(request: pytest.FixtureRequest, run: Run, where: str) -> None:
    """If this fails, it cannot be measured what the ranks of a machine get together; or what they wrote stays."""
    at: Place = request.getfixturevalue(where)
    ended = run("bench", at.root, *_FEW, "--ranks", "2", "--json")
    assert ended.code == 0, ended.err
    document = ended.document
    assert document["num_ranks"] == len(document["ranks"]) == 2
    for what, together in document["checkpoints"].items():
        assert together["number"] == 2
        assert all(0 < one[what]["p50_s"] <= together["p99_s"] for one in document["ranks"])
    assert at.contents() == {}
    assert at.num_unfinished_uploads() == 0


def test_the_table_has_each_rank(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, who measures ranks together does not see which one was slow."""
    one = {what: _measurement.summarize([1.0]) for what in ("save", "load")}
    measured = _measurement.CheckpointTimings(together=one, by_rank=[one, one])
    monkeypatch.setattr(_measurement, "measure_checkpoints", lambda *_: measured)
    told = run("bench", str(tmp_path), *_FEW, "--ranks", "2").out
    assert [line.split("  ")[0] for line in told.splitlines()[2:8]] == [
        "save",
        "load",
        *(f"{what} of rank {rank}" for rank in range(2) for what in ("save", "load")),
    ]
    for scheme in ("memory", "MEMORY"):
        assert run("bench", f"{scheme}://somewhere", *_FEW, "--ranks", "2").code == 2


@pytest.mark.slow
def test_what_a_rank_meets_is_told_with_its_number(s3: S3Place, s3_application: FlakyS3, run: Run) -> None:
    """If this fails, who measures with eight ranks does not know which one was denied, or it hangs."""
    with s3_application.troubled(lambda method, url: "deny" if method == "PUT" and "/data/" in url else None):
        ended = run("bench", s3.root, *_FEW, "--ranks", "2")
    assert (ended.code, ended.out) == (4, ""), ended.err
    assert re.search(r"rank [01]: ", ended.err)
    assert s3.contents() == {}


def test_a_rank_that_dies_is_named(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a machine without the memory for so many ranks hangs, or says nothing that helps."""
    monkeypatch.setattr(_measurement, "_run_rank_process", _dies)
    ended = run("bench", str(tmp_path), *_FEW, "--ranks", "2")
    assert ended.code == 70
    assert re.search(r"rank [01] ended with exit code 3", ended.err)
    assert list(tmp_path.iterdir()) == []


def _dies(*_: object) -> None:
    os._exit(3)


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


def test_what_cannot_be_measured_says_why(tmp_path: Path, run: Run) -> None:
    """If this fails, a typing error writes to a place that was not meant."""
    for arguments in (
        ["--size", "much"],
        ["--rounds", "0"],
        ["--size", "-1"],
        ["--size", "0"],
        ["--size", "31"],
        ["--ranks", "0"],
    ):
        assert run("bench", str(tmp_path), *arguments).code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("denied", ["uploads", "delete"])
def test_who_may_not_clean_up_measures_nothing(s3: S3Place, s3_application: FlakyS3, run: Run, denied: str) -> None:
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
