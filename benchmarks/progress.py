"""Estimate the duration of a sweep, and report its progress."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column
from typing_extensions import Self

from benchmarks.results.model import SYSTEM_TITLES
from benchmarks.sweeps import Cell, Sweep
from benchmarks.turns import num_bytes_of

_MEASURED_GB_PER_S = {"s3fs": 0.17, "s3fs-tuned": 0.3, "s3torchconnector": 0.7, "s3torchconnector-kept": 0.7}
"""On two cores, of saves and loads together: docs/benchmarks has the figures of each."""
_OTHERS_GB_PER_S = 1.5
_MAX_GB_PER_S = {"moto": 0.05, "rgw": 0.1, "given": 0.3, "tls": 0.5, "slow": 0.5, "capped": 0.2}
"""The highest rate that a server or a wire gives."""
_START_S = 10.0
"""Start of the processes of a cell: each imports torch."""
_TURN_S = 1.0
_FILLED_GB_PER_S = 1.0
"""Each turn makes its tensors anew."""
_GB = 1e9
_WINDOW_S = 3600.0


def plan_text(sweep: Sweep) -> str:
    """Return the plan of a sweep: its cells, the repetitions, and the time that it takes."""
    width = max(len(cell.path) for cell in sweep.cells)
    cells = [
        f"  {cell.path:{width}}  {', '.join(map(SYSTEM_TITLES.__getitem__, cell.systems))}" for cell in sweep.cells
    ]
    minutes = sum(_cell_s(sweep, cell) for cell in sweep.cells) / 60 + 0.5
    about = f"{sweep.repetitions} repetitions after a warm-up; about {minutes:.0f} min on two cores."
    return "\n".join([f"{sweep.name}: {sweep.about}", "", *cells, "", about])


class Progress:
    """Shows on a terminal how far a sweep is, and prints what it is told."""

    def __init__(self, sweep: Sweep) -> None:
        console = Console(stderr=True)
        self._sweep = sweep
        self._bar = Bar(
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            expand=True,
            speed_estimate_period=_WINDOW_S,  # turns of one system are all slow, those of another all fast
        )
        self._ended_s = 0.0
        self._task = self._bar.add_task("", total=sum(_cell_s(sweep, cell) for cell in sweep.cells))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line on standard error, above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin_turn(self, cell: Cell, system: str, repetition: int) -> None:
        counter = f"{repetition}/{self._sweep.repetitions}" if repetition else "warm-up"
        self._bar.update(self._task, description=f"{cell.path}  {SYSTEM_TITLES[system]}, {counter}")

    def end_turn(self, cell: Cell, system: str) -> None:
        self._bar.advance(self._task, _turn_s(cell, system))

    def end_cell(self, cell: Cell) -> None:
        """Count all turns of the cell, those of systems that failed too."""
        self._ended_s += _cell_s(self._sweep, cell)
        self._bar.update(self._task, completed=self._ended_s)


def _cell_s(sweep: Sweep, cell: Cell) -> float:
    return _START_S + (sweep.repetitions + 1) * sum(_turn_s(cell, system) for system in cell.systems)


def _turn_s(cell: Cell, system: str) -> float:
    most = [_MAX_GB_PER_S[name] for name in (cell.server, cell.wire) if name in _MAX_GB_PER_S]
    gb_per_s = min(_MEASURED_GB_PER_S.get(system, _OTHERS_GB_PER_S), *most, _OTHERS_GB_PER_S)
    moved_s = sum(num_bytes_of(verb, cell.payload) / _GB / gb_per_s for verb in cell.verbs)
    return _TURN_S + cell.payload.num_bytes / _GB / _FILLED_GB_PER_S + moved_s
