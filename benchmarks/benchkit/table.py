"""From samples to medians, ratios, bars and text. Pure."""

# ruff: noqa: RUF001  # the signs are meant

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Operation = Literal["save", "load"]

OPERATIONS: tuple[Operation, ...] = ("save", "load")
MIB = 1024 * 1024
SAVE_MEMORY_BAR_MIB = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One save or load of all ranks together."""

    system: str
    num_ranks: int
    operation: Operation
    repetition: int
    """0 is the warm-up, whose time does not count; its memory does, for a first save must fit as well."""
    num_bytes: int
    wall_s: float
    """Of the slowest rank."""
    cpu_s: float
    """Of all ranks together."""
    extra_peak_bytes: int | None
    """Of the rank with the most; None where it could not be measured."""

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.num_bytes / 1e9)

    @property
    def extra_peak_mib(self) -> float | None:
        return None if self.extra_peak_bytes is None else self.extra_peak_bytes / MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How many times as fast as a rival a system must at least be."""

    system: str
    rival: str
    operation: Operation
    at_least: float


BARS: tuple[Bar, ...] = (
    Bar(system="cloudckpt", rival="s3torchconnector", operation="save", at_least=2),
    Bar(system="cloudckpt", rival="s3torchconnector", operation="load", at_least=4),
    Bar(system="cloudckpt", rival="s3fs", operation="save", at_least=6),
    Bar(system="cloudckpt", rival="s3fs", operation="load", at_least=10),
)

COMPARISONS: tuple[tuple[str, str], ...] = (
    ("cloudckpt", "s3torchconnector"),
    ("cloudckpt", "s3fs"),
    ("cloudckpt-path", "filesystem"),
)
"""Pairs on the same store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One bar and how the run stands to it."""

    text: str
    met: bool


def ratio(samples: Iterable[Sample], system: str, rival: str, operation: Operation, num_ranks: int) -> Spread | None:
    """How many times as fast as `rival` `system` was, in each repetition; None where either was not measured.

    Pairing within a repetition cancels what the machine's other load does from one repetition to the next.
    """
    of: dict[str, dict[int, float]] = {system: {}, rival: {}}
    for sample in samples:
        if (sample.operation, sample.num_ranks) != (operation, num_ranks) or sample.repetition == 0:
            continue
        if sample.system in of:
            of[sample.system][sample.repetition] = sample.gb_per_s
    common = sorted(of[system].keys() & of[rival].keys())
    if not common:
        return None
    return Spread.of([of[system][repetition] / of[rival][repetition] for repetition in common])


def verdicts(samples: Sequence[Sample]) -> list[Verdict]:
    """The bars that this run can judge."""
    found = []
    for num_ranks in _world_sizes(samples):
        where = _where(num_ranks)
        for bar in BARS:
            spread = ratio(samples, bar.system, bar.rival, bar.operation, num_ranks)
            if spread is not None:
                text = f"{where}: {bar.operation} {spread.median:.1f}× {bar.rival} (bar: {bar.at_least:g}×)"
                found.append(Verdict(text=text, met=spread.median >= bar.at_least))
        for system in ("cloudckpt", "cloudckpt-path"):
            peaks = [
                sample.extra_peak_mib
                for sample in _select(samples, system, "save", num_ranks)
                if sample.extra_peak_mib is not None
            ]
            if peaks:
                text = f"{where}: {system} save, {max(peaks):.0f} MiB extra (bar: {SAVE_MEMORY_BAR_MIB:g})"
                found.append(Verdict(text=text, met=max(peaks) < SAVE_MEMORY_BAR_MIB))
    return found


def results_table(samples: Sequence[Sample], labels: Mapping[str, str]) -> str:
    """A Markdown table: one row for each system and world size; medians, ranges in brackets."""
    header = ["ranks", "system"]
    for operation in OPERATIONS:
        header += [f"{operation} GB/s", "CPU s/GB", "peak over tensors, MiB"]
    rows = []
    for num_ranks in _world_sizes(samples):
        for system, label in labels.items():
            if not _select(samples, system, "save", num_ranks):
                continue
            row = [str(num_ranks), label]
            for operation in OPERATIONS:
                of_system = _select(samples, system, operation, num_ranks)
                warm = [sample for sample in of_system if sample.repetition > 0]
                row += [
                    _cell(warm, lambda sample: sample.gb_per_s, digits=2),
                    _cell(warm, lambda sample: sample.cpu_s_per_gb, digits=2),
                    _cell(of_system, lambda sample: sample.extra_peak_mib, digits=0),
                ]
            rows.append(row)
    return markdown(header, rows)


def ratios_table(samples: Sequence[Sample], labels: Mapping[str, str]) -> str:
    """A Markdown table of how many times as fast as a rival cloudckpt was; empty where there is no pair."""
    rows = []
    for num_ranks in _world_sizes(samples):
        for system, rival in COMPARISONS:
            spreads = [ratio(samples, system, rival, operation, num_ranks) for operation in OPERATIONS]
            if any(spreads):
                cells = ["–" if spread is None else spread.text(1) for spread in spreads]
                rows.append([str(num_ranks), f"{labels[system]} ÷ {labels[rival]}", *cells])
    return markdown(["ranks", "times as fast", "save", "load"], rows) if rows else ""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up in plain text too."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, rule, *rows)
    )


def _cell(samples: Sequence[Sample], value: Callable[[Sample], float | None], *, digits: int) -> str:
    values = [number for sample in samples if (number := value(sample)) is not None]
    return Spread.of(values).text(digits) if values else "–"


def _select(samples: Iterable[Sample], system: str, operation: Operation, num_ranks: int) -> list[Sample]:
    return [
        sample
        for sample in samples
        if (sample.system, sample.operation, sample.num_ranks) == (system, operation, num_ranks)
    ]


def _world_sizes(samples: Iterable[Sample]) -> list[int]:
    return sorted({sample.num_ranks for sample in samples})


def _where(num_ranks: int) -> str:
    return "1 process" if num_ranks == 1 else f"{num_ranks} ranks"
