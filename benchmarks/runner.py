"""A sweep's cells, one after the other; in each, its systems in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet import Fleet, NotInstalledError, WorkerFailedError
from benchmarks.outcomes import Settings
from benchmarks.places import Place, Places, UnavailableError
from benchmarks.progress import Progress
from benchmarks.results.model import Sample
from benchmarks.sweeps import Cell, Sweep, Verb
from benchmarks.systems import system_named
from benchmarks.turns import num_bytes_of, rotated, turn
from benchmarks.worker import WorkerSpec

GB = 1e9
NOT_INSTALLED = "not installed"
INTERRUPTED = "interrupted"
_MAX_WORDS = 2000
_LIMITS: Mapping[tuple[Verb, bool], str] = {
    ("save", True): "send",
    ("load", True): "receive",
    ("save", False): "write_disk",
    ("load", False): "memcpy",
    ("async_blocking", True): "memcpy",
    ("async_blocking", False): "memcpy",
}
"""Names of the limits of each verb, on an object store and elsewhere."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One verb of one system in one cell: what was measured so far."""

    cell: Cell
    verb: Verb
    system: str
    samples: list[Sample] = field(default_factory=list)
    failed: str | None = INTERRUPTED
    """Why it is not complete; None once it is."""

    @property
    def called(self) -> str:
        """The verb's name in results."""
        if self.system != "limit":
            return self.verb
        return _LIMITS.get((self.verb, self.cell.server != "path"), self.verb)

    def to_json(self) -> dict[str, Any]:
        return {
            "cell": self.cell.payload.name,
            "verb": self.called,
            "system": self.system,
            "server": self.cell.server,
            "wire": self.cell.wire,
            "num_ranks": self.cell.num_ranks,
            "connections": self.cell.connections,
            "num_bytes": num_bytes_of(self.verb, self.cell.payload),
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
            "failed": self.failed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Settings that all cells of a run share."""

    places: Places
    environment: Mapping[str, str]
    """Environment of the workers."""
    pythons: Mapping[str, str]
    """Interpreters of the systems that do not run in this environment."""
    options: Mapping[str, Any]
    """Fields of `cloudckpt.Options`."""
    timeout_s: float
    logs: Path
    progress: Progress
    rows: list[Row] = field(default_factory=list)
    """All that was begun; an interrupted run has what it got so far."""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def measure(self, sweep: Sweep) -> None:
        """Every cell; what fails is said in its rows, and the others go on."""
        for cell in sweep.cells:
            self.progress.say(f"{cell.path}: {', '.join(cell.systems)}")
            rows = {
                system: [Row(cell=cell, verb=verb, system=system) for verb in cell.verbs] for system in cell.systems
            }
            self.rows.extend(row for of_system in rows.values() for row in of_system)
            try:
                place = self.places.place_of(cell)
            except UnavailableError as error:
                self.progress.say(f"  left out: {error}")
                for of_system in rows.values():
                    _fail(of_system, str(error))
            else:
                with contextlib.ExitStack() as stack:
                    fleets = dict(self._fleets(cell, place, rows, stack))
                    self._take_turns(cell, place, fleets, rows, repetitions=sweep.repetitions)
            self.progress.end_cell(cell)

    def _take_turns(
        self,
        cell: Cell,
        place: Place,
        fleets: dict[str, Fleet],
        rows: Mapping[str, list[Row]],
        *,
        repetitions: int,
    ) -> None:
        for repetition in range(repetitions + 1):
            for system in rotated(list(fleets), repetition):
                by_verb = {row.verb: row for row in rows[system]}
                self.progress.begin_turn(cell, system, repetition)
                texts = []
                try:
                    for verb, sample in turn(cell, fleets[system], place, system=system, repetition=repetition):
                        by_verb[verb].samples.append(sample)
                        gb_per_s = num_bytes_of(verb, cell.payload) / GB / sample.wall_s
                        texts.append(f"{by_verb[verb].called} {gb_per_s:.2f} GB/s, CPU {sample.cpu_s:.2f} s")
                except WorkerFailedError as error:
                    self.progress.say(f"  {system} failed: {error}")
                    _fail(rows[system], str(error))
                    fleets.pop(system).close()
                    place.clear()
                    continue
                counter = f"{repetition}/{repetitions}" if repetition else "warm-up"
                self.progress.end_turn(cell, system)
                self.progress.say(f"  {counter} {system}: {'; '.join(texts)}")
        for system in fleets:
            for row in rows[system]:
                row.failed = None

    def _fleets(
        self, cell: Cell, place: Place, rows: Mapping[str, list[Row]], stack: contextlib.ExitStack
    ) -> Iterator[tuple[str, Fleet]]:
        """One for each system that can do what the cell asks; all others' rows say why they cannot."""
        settings = Settings(
            endpoint_url=place.endpoint_url,
            region=place.region,
            ca_bundle=place.ca_bundle,
            no_dist=cell.num_ranks == 1,
            options=self.options,
            connections=cell.connections,
        )
        for number, system in enumerate(cell.systems):
            scheme = place.root.partition("://")[0] if "://" in place.root else ""
            if scheme not in system_named(system).schemes:
                _fail(rows[system], f"{system} does not know {scheme or 'a path'}")
                continue
            if system == "limit" and place.checks_signatures and set(cell.verbs) != {"async_blocking"}:
                _fail(rows[system], "bare sockets sign nothing, and this server wants signatures")
                continue
            specs = [
                WorkerSpec(
                    system=system,
                    rank=rank,
                    num_ranks=cell.num_ranks,
                    rendezvous_path=str(self.logs / f"rendezvous-{len(self.rows)}-{number}"),
                    timeout_s=self.timeout_s,
                )
                for rank in range(cell.num_ranks)
            ]
            python = self.pythons.get(system, sys.executable)
            fleet = Fleet(python, specs, environment=self.environment, log_directory=self.logs)
            stack.callback(fleet.close)
            try:
                self.versions[system] = fleet.versions()
                fleet.configure(settings)
            except NotInstalledError as error:
                self.progress.say(f"  {system} is left out: {error}")
                _fail(rows[system], f"{NOT_INSTALLED}: {error}")
                fleet.close()
            except WorkerFailedError as error:
                self.progress.say(f"  {system} failed: {error}")
                _fail(rows[system], str(error))
                fleet.close()
            else:
                yield system, fleet


def _fail(rows: list[Row], why: str) -> None:
    for row in rows:
        row.failed = why if len(why) <= _MAX_WORDS else f"{why[:_MAX_WORDS]} …"
