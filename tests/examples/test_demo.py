"""The parts of the demo, and a short run of the whole. `make demo` runs the long one, on S3."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo.launch import REPOSITORY, RunTimedOutError, torchrun


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
