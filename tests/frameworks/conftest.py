"""Fixtures of the frameworks' tests, which run in an environment of their own: ``make frameworks``.

Each test starts a job of several ranks, as torchrun starts it, at each of three places: a path, S3 and GCS.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cloudckpt.testing.servers import Server, clean_environment, fake_gcs_server, moto_server

JOBS = Path(__file__).parent / "jobs"
JOB_S = 240.0
_numbers = itertools.count()
_RESULT = "RESULT "

Launch = Callable[..., Any]


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, Server]]:
    """One of each kind."""
    with ExitStack() as stack:
        yield {"s3": stack.enter_context(moto_server()), "gcs": stack.enter_context(fake_gcs_server())}


@pytest.fixture(params=["path", "s3", "gcs"])
def root(
    request: pytest.FixtureRequest, servers: dict[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """An empty place; the environment leads there."""
    server = servers.get(request.param)
    environment = clean_environment() | (server.environment if server else {})
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if server is None:
        return str(tmp_path / "run")
    bucket = f"frameworks-{os.getpid()}-{next(_numbers)}"
    server.create_bucket(bucket)
    return f"{server.scheme}://{bucket}/run"


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run a job on so many ranks, and return what its rank 0 has to tell."""

    def run(job: str, *args: str, num_ranks: int = 2, max_restarts: int = 0, timeout_s: float = JOB_S) -> Any:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
        command = [
            *torchrun,
            f"--nproc-per-node={num_ranks}",
            f"--max-restarts={max_restarts}",
            str(JOBS / f"{job}.py"),
            *args,
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{job} did not end within {timeout_s} s:\n{output[-6000:]}")
        results = [line for line in output.splitlines() if line.startswith(_RESULT)]
        assert process.returncode == 0, output[-6000:]
        assert len(results) == 1, output[-6000:]
        return json.loads(results[0].removeprefix(_RESULT))

    return run
