"""torchrun starts a job again after a rank died in the middle of a save, and on another number of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cloudckpt

pytestmark = [pytest.mark.faults, pytest.mark.multirank, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
JOB_S = 240.0


def train(root: str, *args: str, num_ranks: int) -> str:
    """Everything that the job said, in all of its lives."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
    process = subprocess.Popen(
        [*torchrun, f"--nproc-per-node={num_ranks}", str(REPOSITORY / "examples" / "elastic.py"), root, *args],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=JOB_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the job did not end within {JOB_S} s:\n{output[-6000:]}")
    assert process.returncode == 0, output[-6000:]
    return output


def losses_in(output: str) -> dict[int, float]:
    """Return the loss of each step; the second one of a step that was done twice."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)}


def lives_in(output: str) -> list[tuple[int, int, int]]:
    """Number, ranks and first step of each."""
    found = re.findall(r"^life (\d+), (\d+) ranks: from step (\d+)$", output, re.MULTILINE)
    return [(int(life), int(num_ranks), int(first)) for life, num_ranks, first in found]


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_a_job_goes_on_after_a_rank_died(uri: str) -> None:
    """A life that follows a death would begin anew, or with half a save, or not be able to go on with fewer ranks."""
    whole = losses_in(train(f"{uri}/whole", num_ranks=2))
    output = train(f"{uri}/killed", "--die-at", "7", num_ranks=2)
    lives = lives_in(output)
    assert lives[0] == (0, 2, 1)
    assert len(lives) == 2
    assert lives[1][1:] in {(2, 7), (2, 8)}, "step 6 was committed, and 7 is whole or not there"
    assert losses_in(output) == whole
    alone = train(f"{uri}/killed", "--steps", "12", num_ranks=1)
    assert lives_in(alone) == [(0, 1, 11)]
    assert sorted(losses_in(alone)) == [11, 12]
    names = [info.name for info in cloudckpt.list_checkpoints(f"{uri}/killed")]
    assert names == ["step-10", "step-11", "step-12"]
