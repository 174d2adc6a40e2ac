"""Megatron-core with its real package: what some ranks save to a URI, any other number of ranks loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloudckpt
from cloudckpt.testing.servers import clean_environment, moto_server

JOB = Path(__file__).parent / "jobs" / "megatron_core.py"
JOB_S = 100.0


@pytest.fixture(scope="module", params=["path", "s3"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder of a bucket or of this machine."""
    if request.param == "path":
        yield f"file://{tmp_path_factory.mktemp('megatron')}"
        return
    with moto_server() as server, pytest.MonkeyPatch.context() as patch:
        server.create_bucket("megatron")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield "s3://megatron/run"
        cloudckpt.close()


def run(verb: str, root: str, *, num_ranks: int) -> subprocess.CompletedProcess[str]:
    torchrun = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.run(
        [sys.executable, *torchrun, str(JOB), verb, root],
        env=clean_environment()
        | {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )


def told_by(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    found: list[dict[str, object]] = json.loads(lines[0].removeprefix("TOLD "))
    return found


def test_megatrons_saves_load_on_other_ranks(root: str) -> None:
    """If this fails, one, two or four ranks cannot load a save of two tensor-parallel ranks of Megatron (at once, in
    the background or with its parallel wrapper), the save replaces another one, or Megatron does not find the newest.
    """
    for answer in told_by(run("save", root, num_ranks=2)):
        assert "already exists" in str(answer.pop("exists"))
        assert answer == {
            "content": {"form": "test"},
            "exitcode": 0,
            "loaded": [True, True, True],
            "tracker": "11",
            "absent": False,
        }
    for answer in told_by(run("load", root, num_ranks=1 if root.startswith("file:") else 4)):
        assert answer == {"loaded": [True, True, True], "tracker": "11", "absent": False}
    assert [info.name for info in cloudckpt.list_checkpoints(root)] == [
        "iter_0000007",
        "iter_0000009",
        "iter_0000011",
    ]
    described = cloudckpt.describe(f"{root}/iter_0000007")
    assert described.metadata == {"megatron-core": {"sharded_backend": "torch_dist", "sharded_backend_version": 1}}
    assert {value.name for value in described.values} == {"common_state/shard_0_1", "optimizer.step/shard_0_1"}
    assert cloudckpt.verify(f"{root}/iter_0000011").num_tensors == 4


def test_a_rank_that_dies_in_megatrons_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    """A rank that dies in the middle of Megatron's save would leave something that looks like a checkpoint."""
    assert run("crash", f"file://{tmp_path}/run", num_ranks=2).returncode != 0
    assert list((tmp_path / "run").rglob("*.safetensors*")), "rank 1 died too early"
    assert cloudckpt.list_checkpoints(str(tmp_path / "run")) == []
