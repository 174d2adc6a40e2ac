"""The parts of the demo, and a short run of the whole. `make demo` runs the long one, on S3."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from examples.demo import place, summary
from examples.demo.data import Sampler, read_text
from examples.demo.launch import REPOSITORY, RunTimedOutError, torchrun
from examples.demo.ranks import Record


def sampler() -> Sampler:
    return Sampler(read_text(), seed=3, context=16, rows_per_batch=8)


def test_sampler_goes_on_from_its_state() -> None:
    """A resumed run would train on other batches than the one it continues."""
    original, resumed = sampler(), sampler()
    for _ in range(3):
        original.draw(rank=0, world_size=1)
    resumed.load_state_dict(original.state_dict())
    fresh = sampler().draw(rank=0, world_size=1)
    expected = original.draw(rank=0, world_size=1)
    assert torch.equal(resumed.draw(rank=0, world_size=1), expected)
    assert not torch.equal(fresh, expected)


def test_ranks_share_out_one_batch() -> None:
    """Ranks would train on the same rows, or on other rows than one rank alone."""
    whole = sampler().draw(rank=0, world_size=1)
    halves = [sampler().draw(rank=rank, world_size=2) for rank in range(2)]
    assert torch.equal(halves[0], whole[0::2])
    assert torch.equal(halves[1], whole[1::2])


def write_losses(records: Path, name: str, losses: dict[int, float]) -> None:
    record = Record(records / f"{name}-0.jsonl")
    for step, loss in losses.items():
        record.write("loss", step=step, loss=loss)


def collecting(problems: list[str]) -> summary.Check:
    return lambda holds, problem: None if holds else problems.append(problem)


LOSSES = {1: 3.0, 2: 0.1 + 0.2, 3: 1.0, 4: 0.5}


@pytest.mark.parametrize(
    ("killed", "resumed", "problem"),
    [
        ({1: 3.0, 2: 0.1 + 0.2, 3: 1.0}, {3: 1.0, 4: 0.5}, None),
        ({1: 3.0, 2: 0.3}, {3: 1.0, 4: 0.5}, "differ at steps [2]"),
        ({1: 3.0, 2: 0.1 + 0.2}, {3: 1.0, 4: 0.5000000000000001}, "differ at steps [4]"),
        ({1: 3.0, 2: 0.1 + 0.2}, {4: 0.5}, "got to steps [3]"),
        ({1: 3.0, 2: 0.1 + 0.2}, {3: 1.0}, "did not get to step 4"),
        ({1: 3.0, 2: 0.1 + 0.2}, {3: 1.0, 4: float("nan")}, "differ at steps [4]"),
    ],
)
def test_losses_are_compared_to_the_last_bit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    killed: dict[int, float],
    resumed: dict[int, float],
    problem: str | None,
) -> None:
    """The demo would say "losses equal: yes" although a step is missing or a loss differs in its last bit."""
    write_losses(tmp_path, "undisturbed", LOSSES)
    write_losses(tmp_path, "killed", killed)
    write_losses(tmp_path, "resumed", resumed)
    problems: list[str] = []
    summary.compare_losses(tmp_path, num_steps=4, check=collecting(problems))
    said_yes = "losses equal: yes" in capsys.readouterr().out
    assert said_yes == (problem is None)
    assert bool(problems) == (problem is not None)
    assert problem is None or problem in " ".join(problems)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_run_that_hangs_is_stopped(tmp_path: Path) -> None:
    """A rank that hangs would hang the demo, or stay behind when it ends."""
    program = tmp_path / "hang.py"
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    program.write_text(
        f"import os, pathlib, signal\npathlib.Path({str(fifo)!r}).write_text(str(os.getpid()))\nsignal.pause()\n"
    )
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(RunTimedOutError, match=r"hang\.py on 1 ranks did not end within 25 s"):
            torchrun([str(program)], num_ranks=1, log=tmp_path / "log", timeout_s=25)
        pid = int(os.read(reader, 100))
    finally:
        os.close(reader)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.faults
@pytest.mark.multirank
@pytest.mark.timeout(600)
def test_the_whole_demo_in_short(tmp_path: Path) -> None:
    """Somebody who tries cloudckpt by its demo on a path of theirs would see it fail, or find the path littered."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("mine")
    process = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--steps", "4", "--uri", str(mine)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    for line in (
        "rank 1 was killed (SIGKILL) after part 2 of step-3/data/",
        "step-3   not a checkpoint: no manifest, ",
        "resumed from step-2, the newest checkpoint",
        "losses equal: yes  (4 steps",
        "logits equal: yes  (4 x 64 x 256, of: undisturbed, resumed, logits-1, logits-4)",
    ):
        assert line in process.stdout, process.stdout
    # The other rank may have begun, finished or not even started its own object when its partner was killed.
    assert re.search(r"no manifest, [12] unfinished uploads?, [01] finished object", process.stdout), process.stdout
    assert list(mine.rglob("*")) == [mine / "precious"]


def test_the_embedded_server_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo would leave a server running, or the caller's AWS configuration changed."""
    monkeypatch.setenv("AWS_PROFILE", "the-user's own")
    before = dict(os.environ)
    with place.place_for(None, keep=False) as uri:
        assert uri.startswith("s3://")
        assert "AWS_PROFILE" not in os.environ
        endpoint_url = os.environ["AWS_ENDPOINT_URL_S3"]
        assert endpoint_url.startswith("http://127.0.0.1:")
        place.clean_up(uri)
    assert dict(os.environ) == before
    parts = urlsplit(endpoint_url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)
