"""Fixtures of the frameworks' tests, which run in an environment of their own: ``make frameworks``.

A job is one program on several ranks, as torchrun starts them, and goes to every place in turn: what takes long is to
import the frameworks. Each test looks at what it told of one place.

Stores are told apart by the store contract and the end-to-end tests. Here a path and one bucket are enough, except for
the jobs of `EVERYWHERE`; and one place is enough for another number of ranks than two.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integration.servers.ceph import ceph_rgw
from tests.kit.leftovers import Leftovers

from cloudckpt.testing.servers import Server, clean_environment, fake_gcs_server, moto_server

JOBS = Path(__file__).parent / "jobs"
JOB_S = 800.0
_END_S = 20.0
EVERYWHERE = frozenset({"lightning_ddp", "lightning_sharded", "checkpoint_files", "checkpoint_crash"})
"""Lightning opens URIs by fsspec too, and torch_checkpointing lists and removes what a save left."""
_SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {
    "s3": moto_server,
    "rgw": ceph_rgw,
    "gcs": fake_gcs_server,
}


def pytest_configure(config: pytest.Config) -> None:
    """Nothing and nobody is left in the end."""
    config.pluginmanager.register(Leftovers(), "leftovers")


def pytest_addoption(parser: pytest.Parser) -> None:
    """So that a machine without Ceph can run the rest."""
    parser.addoption(
        "--places",
        default="path,rgw,gcs",
        help="where the frameworks save, by commas: path, s3 (moto), rgw (Ceph's gateway), gcs (an emulator). "
        "Default: %(default)s",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on the places that its argument names."""
    places = metafunc.config.getoption("--places").split(",")
    some = {"every_place": places, "place": places[:2], "one_place": places[:1], "one_bucket": places[:2][-1:]}
    for name, chosen in some.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder or a bucket, and the environment that leads there."""

    uri: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """By a job: of each place that it came to its result, all that it printed, and what it left running."""

    results: Mapping[str, Any]
    output: str
    survivors: tuple[str, ...]


@pytest.fixture(scope="session")
def all_places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    """Start the server of each place that was asked for. A server that does not start fails the tests."""
    found: dict[str, Place] = {}
    with ExitStack() as stack:
        for name in request.config.getoption("--places").split(","):
            if name == "path":
                found[name] = Place(uri=str(tmp_path_factory.mktemp("path")), environment={})
                continue
            server = stack.enter_context(_SERVERS[name]())
            bucket = f"frameworks-{os.getpid()}"
            server.create_bucket(bucket)
            found[name] = Place(uri=f"{server.scheme}://{bucket}", environment=server.environment)
        yield found


@dataclass(slots=True, kw_only=True)
class Jobs:
    """Runs each once, whatever number of tests ask for it."""

    places: Mapping[str, Place]
    directory: Path
    _told: dict[tuple[Any, ...], Told] = field(default_factory=dict)

    def at(
        self,
        place: str,
        job: str,
        *args: str,
        num_ranks: int = 2,
        is_torchrun: bool = True,
        max_restarts: int = 0,
    ) -> Any:
        """Return what rank 0 of that job told of this place. On other ranks than two, it finds what two have saved."""
        wanted = (place,) if num_ranks != 2 else tuple(self.places)[: None if job in EVERYWHERE else 2]
        key = (job, args, num_ranks, is_torchrun, wanted)
        if key not in self._told:
            self._told[key] = self._run(job, args, num_ranks if is_torchrun else None, wanted, max_restarts)
        reported = self._told[key]
        if place not in reported.results:
            pytest.fail(f"{job} did not come to the end of {place}:\n{reported.output[-6000:]}")
        if is_torchrun:  # Ray's own processes may take longer to end than anybody should wait: they have been killed
            assert not reported.survivors, f"they outlived {job}, and were killed"
        return reported.results[place]

    def root_of(self, place: str, job: str, *args: str) -> str:
        """Under which the job saves."""
        return "/".join([self.places[place].uri, job, *args])

    def _run(
        self, job: str, args: tuple[str, ...], num_ranks: int | None, wanted: tuple[str, ...], max_restarts: int
    ) -> Told:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={num_ranks}"]
        torchrun += [f"--max-restarts={max_restarts}"]
        places = [
            {"name": name, "root": self.root_of(name, job, *args), "environment": dict(self.places[name].environment)}
            for name in wanted
        ]
        results = self.directory / f"{len(self._told)}.jsonl"
        results.touch()
        environment = clean_environment() | {
            "PLACES": json.dumps(places),
            "RESULTS": str(results),
            "OMP_NUM_THREADS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "disabled",  # or it writes a token into the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see docs/frameworks.md, of torchrun
        }
        process = subprocess.Popen(
            [sys.executable, *([] if num_ranks is None else torchrun), str(JOBS / f"{job}.py"), *args],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=JOB_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
            _end_session(process.pid, end_s=_END_S)
            output, _ = process.communicate()
            output += f"\n{job} did not end within {JOB_S} s"
        survivors = _end_session(process.pid, end_s=_END_S)
        reported = [json.loads(line) for line in results.read_text().splitlines()]
        return Told(results={each["place"]: each["result"] for each in reported}, output=output, survivors=survivors)


@pytest.fixture(scope="session")
def jobs(all_places: dict[str, Place], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """For all tests."""
    return Jobs(places=all_places, directory=tmp_path_factory.mktemp("jobs"))


def _end_session(session: int, *, end_s: float) -> tuple[str, ...]:
    """Wait for its processes to end, and kill those that do not: these are returned."""
    deadline = time.monotonic() + end_s
    while found := _in_session(session):
        if time.monotonic() > deadline:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return tuple(sorted(found.values()))
        time.sleep(0.05)
    return ()


def _in_session(session: int) -> dict[int, str]:
    """By number, the names of those that still run."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (process / "stat").read_text().rpartition(")")
            state, _, _, of_session = rest.split()[:4]
            if int(of_session) == session and state not in "ZX":
                found[int(process.name)] = name.partition("(")[2]
    return found
