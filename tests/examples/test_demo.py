"""The parts of the demo, and a short run of the whole. `make demo` runs the long one, on S3."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo.launch import REPOSITORY


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
        "rank 1 resumed from step 2 in the root, because its host lacks a part",
        "rank 1 resumed from step 3 in /",
        "of: killed, resumed)",
        "of: both-killed, disk-lost, host-back)",
        "logits equal: yes  (4 x 64 x 256, of: undisturbed, resumed, host-back, logits-1, logits-4)",
    ):
        assert line in process.stdout, process.stdout
    # The other rank may have begun, finished or not even started its own object when its partner was killed.
    assert re.search(r"no manifest, [12] unfinished uploads?, [01] finished object", process.stdout), process.stdout
    assert list(mine.rglob("*")) == [mine / "precious"]
