"""Targets of a run: each bar as data, and its verdict. Pure."""

# ruff: noqa: RUF001  # the signs are meant

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from benchmarks.results.model import (
    MIB,
    Place,
    Quantity,
    Results,
    Row,
    Spread,
    blocking_copies,
    cpu_s_per_gb,
    gb_per_s,
    pace,
    ratios,
)

Formula: TypeAlias = Callable[[Results], "Finding | None"]
"""Measure of a bar in a run; None where the run lacks it."""

LARGE = Place(cell="64x32MiB", server="fasts3", wire="http", num_ranks=1)
TLS = Place(cell="64x32MiB", server="fasts3", wire="tls", num_ranks=1)
SLOW = Place(cell="64x32MiB", server="fasts3", wire="slow", num_ranks=1)
SMALL = Place(cell="20000x64KiB", server="fasts3", wire="http", num_ranks=1)
LOCAL = Place(cell="64x32MiB", server="path", wire="none", num_ranks=1)
CAPPED = Place(cell="64x32MiB", server="fasts3", wire="capped", num_ranks=1)
_DEFAULT_TILE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Value of a formula."""

    value: float
    low: float
    high: float
    of: str = ""
    """Which row decided, where several were looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing that is asked of a run."""

    name: str
    formula: str
    """In words."""
    sense: Literal["≥", "≤"]
    bar: float | None
    """None where only the stretch is asked for."""
    stretch: float | None
    measure: Formula
    digits: int = 2
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The relation of a run to a bar."""

    bar: Bar
    found: Finding | None

    @property
    def is_met(self) -> bool | None:
        """None where it was not measured, or there is no bar but a stretch."""
        return self._stands(self.bar.bar)

    @property
    def is_stretched(self) -> bool | None:
        """True if it reaches the stretch."""
        return self._stands(self.bar.stretch)

    def _stands(self, limit: float | None) -> bool | None:
        if self.found is None or limit is None:
            return None
        return self.found.value >= limit if self.bar.sense == "≥" else self.found.value <= limit

    @property
    def text(self) -> str:
        """Met or by how much not, in words."""
        if self.found is None:
            return "not measured"
        words = []
        if self.is_met is not None:
            words.append("met" if self.is_met else f"MISSED by {self._gap(self.bar.bar)}")
        if self.is_stretched is not None:
            words.append("stretch met" if self.is_stretched else f"stretch missed by {self._gap(self.bar.stretch)}")
        return ", ".join(words)

    def _gap(self, limit: float | None) -> str:
        assert self.found is not None  # noqa: S101  # its callers have looked
        assert limit is not None  # noqa: S101
        gap = abs(self.found.value - limit)
        return f"{gap:.{self.bar.digits}f}{self.bar.unit} ({gap / limit:.0%})"


def verdicts(results: Results) -> list[Verdict]:
    """Every bar of the run's sweep, in the order of the list; none of a sweep that is not about bars."""
    return [Verdict(bar=bar, found=bar.measure(results)) for bar in BARS_OF.get(results.sweep, ())]


def _to_rival(verb: str, rival: str, place: Place, quantity: Quantity = gb_per_s, system: str = "cloudckpt") -> Formula:
    """The ratio to a rival's, within a repetition."""

    def measure(results: Results) -> Finding | None:
        ours, theirs = results.row(system, verb, place), results.row(rival, verb, place)
        return None if ours is None or theirs is None else _finding(ratios(ours, theirs, quantity))

    return measure


def _itself(verb: str, place: Place, quantity: Quantity, system: str = "cloudckpt") -> Formula:
    def measure(results: Results) -> Finding | None:
        row = results.row(system, verb, place)
        return None if row is None else _finding(list(row.by_repetition(quantity).values()))

    return measure


def _to_another_place(verb: str, place: Place, other: Place) -> Formula:
    """The ratio of two medians: cells follow one another, so that repetitions have nothing in common."""

    def measure(results: Results) -> Finding | None:
        row, base = results.row("cloudckpt", verb, place), results.row("cloudckpt", verb, other)
        if row is None or base is None:
            return None
        ours, theirs = (Spread.of(list(one.by_repetition(gb_per_s).values())) for one in (row, base))
        return Finding(value=ours.median / theirs.median, low=ours.low / theirs.high, high=ours.high / theirs.low)

    return measure


def _peak(verb: str) -> Formula:
    def measure(results: Results) -> Finding | None:
        rows = [row for row in results.rows if row.verb == verb and row.system in ("cloudckpt", "cloudckpt-path")]
        peaks = [(peak, f"{row.system}, {row.place}") for row in rows if (peak := row.peak_mib) is not None]
        if not peaks:
            return None
        value, of = max(peaks)
        return Finding(value=value, low=min(peaks)[0], high=value, of=of)

    return measure


def _read_of_parts(results: Results) -> Finding | None:
    """Bytes read, relative to the maximum: 1.1 of the wanted bytes, and a tile at either end of each run."""
    row = results.row("cloudckpt", "resharded_load", LARGE)
    if row is None:
        return None
    allowed_bytes = 1.1 * row.num_bytes + 2 * _tile_bytes(results.parameters) * _num_tensors(row)
    return _finding([read / allowed_bytes for read in _read_bytes(row)])


def _read_bytes(row: Row) -> list[int]:
    return [sample.num_bytes_read for sample in row.counted if sample.num_bytes_read is not None]


def _num_tensors(row: Row) -> int:
    """A run is wanted of each of them; cells of one size are named for their number."""
    match = re.match(r"(\d+)x", row.place.cell)
    return int(match[1]) if match else 0


def _tile_bytes(parameters: Any) -> int:
    options = dict(parameters.get("option") or [])
    return int(options.get("tile_bytes", _DEFAULT_TILE_BYTES))


def _finding(values: Sequence[float]) -> Finding | None:
    if not values:
        return None
    spread = Spread.of(values)
    return Finding(value=spread.median, low=spread.low, high=spread.high)


def _speed(verb: str, *, connector: float, s3fs: float, cpu: float) -> tuple[Bar, ...]:
    """The bars over HTTP."""
    socket = "GB/s ÷ bare sockets'"
    return (
        Bar(name=f"{verb}, HTTP", formula="GB/s ÷ s3torchconnector's", sense="≥", bar=connector, stretch=None,
            measure=_to_rival(verb, "s3torchconnector", LARGE), unit="×"),
        Bar(name=f"{verb}, HTTP", formula="GB/s ÷ fsspec + s3fs's", sense="≥", bar=s3fs, stretch=None,
            measure=_to_rival(verb, "s3fs", LARGE), unit="×"),
        Bar(name=f"{verb}, HTTP", formula="CPU s/GB", sense="≤", bar=cpu, stretch=None,
            measure=_itself(verb, LARGE, cpu_s_per_gb), unit=" s/GB"),
        Bar(name=f"{verb}, HTTP", formula=socket, sense="≥", bar=None, stretch=0.8,
            measure=_to_rival(verb, "limit", LARGE)),
    )  # fmt: skip


def _tls(verb: str, *, connector: float, cpu: float) -> tuple[Bar, ...]:
    return (
        Bar(name=f"{verb}, TLS", formula="CPU s/GB ÷ s3torchconnector's", sense="≤", bar=connector, stretch=None,
            measure=_to_rival(verb, "s3torchconnector", TLS, cpu_s_per_gb)),
        Bar(name=f"{verb}, TLS", formula="CPU s/GB", sense="≤", bar=None, stretch=cpu,
            measure=_itself(verb, TLS, cpu_s_per_gb), unit=" s/GB"),
    )  # fmt: skip


def _of_both(verb: str) -> tuple[Bar, ...]:
    """The other bars that a save and a load have alike."""
    bound = {"save": "one write to the file system's", "load": "one memcpy's"}[verb]
    return (
        Bar(name=f"{verb}, 20,000 × 64 KiB", formula="GB/s ÷ that of 64 tensors", sense="≥", bar=0.5, stretch=0.7,
            measure=_to_another_place(verb, SMALL, LARGE)),
        Bar(name=f"{verb}, 60 ms, 80 MB/s", formula="GB/s ÷ bare sockets' over such connections", sense="≥", bar=0.9,
            stretch=None, measure=_to_rival(verb, "limit", SLOW)),
        Bar(name=f"{verb}, memory", formula="most MiB over the tensors, of all cells", sense="≤", bar=256, stretch=128,
            measure=_peak(verb), digits=0, unit=" MiB"),
        Bar(name=f"{verb}, local path", formula="GB/s ÷ torch FileSystemWriter's or Reader's", sense="≥", bar=1.5,
            stretch=None, measure=_to_rival(verb, "filesystem", LOCAL, system="cloudckpt-path"), unit="×"),
        Bar(name=f"{verb}, local path", formula=f"GB/s ÷ {bound} (0.8 counts as memcpy-bound)", sense="≥", bar=None,
            stretch=0.8, measure=_to_rival(verb, "limit", LOCAL, system="cloudckpt-path")),
    )  # fmt: skip


BARS: tuple[Bar, ...] = (
    *_speed("save", connector=3, s3fs=8, cpu=0.30),
    *_speed("load", connector=5, s3fs=12, cpu=0.25),
    *_tls("save", connector=0.5, cpu=0.25),
    *_tls("load", connector=0.6, cpu=0.45),
    *_of_both("save"),
    *_of_both("load"),
    Bar(
        name="resharded load, 1/8 of each shard",
        formula="bytes read ÷ (1.1 × wanted + 2 tiles a run)",
        sense="≤",
        bar=1.0,
        stretch=None,
        measure=_read_of_parts,
    ),
)


def _of_background(system: str, mode: str, *, pace_bar: float) -> tuple[Bar, ...]:
    """Bars for the cost of a background save to training."""
    return (
        Bar(name=f"async save, {mode}", formula="seconds that it blocks ÷ one copy in memory", sense="≤", bar=1.15,
            stretch=None, measure=_itself("async_blocking", LARGE, blocking_copies, system)),
        Bar(name=f"async save, {mode}", formula="training steps a second beside 200 MB/s ÷ alone", sense="≥",
            bar=pace_bar, stretch=None, measure=_itself("async_training", CAPPED, pace, system), digits=3),
    )  # fmt: skip


BACKGROUND_BARS: tuple[Bar, ...] = (
    *_of_background("cloudckpt", "thread", pace_bar=0.95),
    *_of_background("cloudckpt-process", "process", pace_bar=0.98),
)
BARS_OF: Mapping[str, tuple[Bar, ...]] = {"bars": BARS, "background": BACKGROUND_BARS}
"""By the sweep that they are about."""
