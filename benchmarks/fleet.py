"""The worker processes of one system, driven in step from the parent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from benchmarks.measure import Usage
from benchmarks.outcomes import Outcome, Settings
from benchmarks.payloads import Payload

if TYPE_CHECKING:
    from benchmarks.state import Layout
    from benchmarks.sweeps import Verb
    from benchmarks.worker import WorkerSpec

PACKAGE_PARENT = Path(__file__).resolve().parent.parent
LOG_TAIL_BYTES = 4000


class WorkerFailedError(RuntimeError):
    """A worker answered with an error, died or kept silent."""


class NotInstalledError(RuntimeError):
    """The system's library is not in the worker's interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Cost of an operation on one rank, and the outcome that the system reported."""

    usage: Usage
    outcome: Outcome


class Fleet:
    """All ranks of one system. Close it when done (`contextlib.closing`)."""

    def __init__(
        self,
        python: str,
        specs: Sequence[WorkerSpec],
        *,
        environment: Mapping[str, str],
        log_directory: Path,
    ) -> None:
        self._timeout_s = specs[0].timeout_s
        self._ranks = [
            _RankProcess(python, spec, environment=environment, log_directory=log_directory) for spec in specs
        ]

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.end()

    def versions(self) -> dict[str, str]:
        """Versions of the workers' packages, once they have started. Raises `NotInstalledError`."""
        versions: dict[str, str] = self._collect()[0]
        return versions

    def do(self, command: str, **arguments: Any) -> list[Any]:
        """Send one command to all ranks and return their answers in order of rank."""
        for rank in self._ranks:
            rank.send({"do": command, **arguments})
        return self._collect()

    def configure(self, settings: Settings) -> None:
        """Use these settings from here on."""
        self.do("configure", settings=dataclasses.asdict(settings))

    def prepare(self, payload: Payload, layout: Layout) -> None:
        """Make the tensors, and fill them."""
        self.do("prepare", payload=dataclasses.asdict(payload), layout=layout)

    def measure(self, verb: Verb, uri: str) -> list[Measured]:
        """Do it once; what each rank took and said, in order of rank."""
        return [
            Measured(usage=Usage(**answer["usage"]), outcome=Outcome(**answer["outcome"]))
            for answer in self.do("measure", verb=verb, uri=uri)
        ]

    def _collect(self) -> list[Any]:
        return [rank.answer(self._timeout_s) for rank in self._ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """Comes after the last line of a process that has closed its output."""


class _RankProcess:
    def __init__(self, python: str, spec: WorkerSpec, *, environment: Mapping[str, str], log_directory: Path) -> None:
        self._name = f"{spec.system} rank {spec.rank}"
        self._log_path = log_directory / f"{spec.system}-{spec.num_ranks}-{spec.rank}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.worker", spec.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, "PYTHONPATH": str(PACKAGE_PARENT), "LOCAL_WORLD_SIZE": str(spec.num_ranks)},
                # An interrupt is for the parent alone, which writes what was measured.
                start_new_session=True,
            )
        self._stdin = cast("IO[str]", self._process.stdin)
        self._stdout = cast("IO[str]", self._process.stdout)
        self._answers: queue.Queue[str | _Ended] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            self._answers.put(line)
        self._answers.put(_Ended())

    def send(self, request: Mapping[str, Any]) -> None:
        try:
            print(json.dumps(request), file=self._stdin, flush=True)
        except BrokenPipeError as error:
            raise self._failure("has died") from error

    def answer(self, timeout_s: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"gave no answer for {timeout_s:g} s") from None
        if isinstance(line, _Ended):
            raise self._failure("has died")
        reply = json.loads(line)
        if "ok" in reply:
            return reply["ok"]
        if reply["kind"] in ("ModuleNotFoundError", "PackageNotFoundError"):
            raise NotInstalledError(reply["error"])
        raise self._failure(f"failed: {reply['error']}")

    def _failure(self, what: str) -> WorkerFailedError:
        tail = self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return WorkerFailedError(f"{self._name} {what}\n--- end of its log ---\n{tail}")

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._stdout.close()
