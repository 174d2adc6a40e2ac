"""A run's results, as its JSON has them. Pure but for `read`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.sweeps import FAR_LATENCY_S

SCHEMA = 1
GB = 1e9
MIB = 1024 * 1024
_MAX_PROBLEMS = 10
SYSTEM_TITLES: Mapping[str, str] = {
    "cloudckpt": "cloudckpt",
    "cloudckpt-process": "cloudckpt, by process",
    "cloudckpt-path": "cloudckpt",
    "s3torchconnector": "s3torchconnector",
    "s3torchconnector-kept": "s3torchconnector, one stager",
    "s3fs": "torch FsspecWriter (s3fs)",
    "s3fs-tuned": "torch FsspecWriter (s3fs, tuned)",
    "filesystem": "torch FileSystemWriter",
    "torch-save": "torch.save, boto3",
    "limit": "limit of the machine",
}
"""The systems as users call them."""


class MalformedResultsError(ValueError):
    """The document is not what a run writes; says where and why, for every problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One operation of all ranks together."""

    repetition: int
    """0 is the warm-up, whose time does not count; its memory does, for a first save must fit as well."""
    wall_s: float
    """Seconds of the slowest rank."""
    cpu_s: float
    """CPU seconds of all ranks together."""
    peak_bytes: int | None
    """Over the tensors, of the rank with the most; None where it could not be measured."""
    num_bytes_read: int | None
    """Bytes that all ranks read, as the server counts or the system reports; None if neither does."""
    blocking_s: float | None
    """Seconds of the rank that waited longest."""
    steps_per_s: float | None = None
    """Pace of a training loop beside the save, on the slowest rank."""
    steps_per_s_alone: float | None = None
    """Pace of the same loop without it."""
    waiting_share: float | None = None
    """Share of the loop's time beside the save in which it waited for Python's lock."""
    copy_s: float | None = None
    """One copy of the same bytes into memory that is in use already, in the same process just before and after."""
    num_requests: int | None = None
    """The requests, as the server counts them; None if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """Place at which systems are compared: all fields of a row but its system."""

    cell: str
    server: str
    wire: str
    num_ranks: int

    def __str__(self) -> str:
        ranks = "1 process" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        wire = "" if self.wire == "none" else f", {self.wire}"
        return f"{self.cell}, {self.server}{wire}, {ranks}"


_LIMITS_ON_A_STORE = {"save": "send", "load": "receive", "async_blocking": "memcpy"}
_LIMITS_ON_A_PATH = {"save": "write_disk", "load": "memcpy", "async_blocking": "memcpy"}


def verb_of(system: str, verb: str, place: Place) -> str:
    """Return the verb of the row of `system` beside `verb`: a limit's has a name of its own."""
    if system != "limit":
        return verb
    return (_LIMITS_ON_A_PATH if place.server == "path" else _LIMITS_ON_A_STORE).get(verb, verb)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One verb of one system at one place."""

    place: Place
    verb: str
    system: str
    num_bytes: int
    samples: tuple[Sample, ...]
    failed: str | None

    @property
    def counted(self) -> tuple[Sample, ...]:
        """Without the warm-up."""
        return tuple(sample for sample in self.samples if sample.repetition > 0)

    @property
    def first(self) -> Sample | None:
        """The warm-up, in which memory is allocated and clients are made."""
        return next((sample for sample in self.samples if sample.repetition == 0), None)

    def by_repetition(self, quantity: Quantity) -> dict[int, float]:
        """Return the quantity in each counted repetition."""
        found = {sample.repetition: quantity(self, sample) for sample in self.counted}
        return {repetition: value for repetition, value in found.items() if value is not None}

    @property
    def peak_mib(self) -> float | None:
        """Over the tensors, at most; of the warm-up too, for a first save must fit as well."""
        peaks = [sample.peak_bytes for sample in self.samples if sample.peak_bytes is not None]
        return max(peaks) / MIB if peaks else None


Quantity: TypeAlias = Callable[[Row, Sample], "float | None"]


def gb_per_s(row: Row, sample: Sample) -> float:
    return row.num_bytes / GB / sample.wall_s


def cpu_s_per_gb(row: Row, sample: Sample) -> float:
    return sample.cpu_s / (row.num_bytes / GB)


def blocking_s(row: Row, sample: Sample) -> float | None:  # noqa: ARG001  # a `Quantity`
    return sample.blocking_s


def pace(row: Row, sample: Sample) -> float | None:  # noqa: ARG001  # a `Quantity`
    """Pace of training beside the save, ÷ its pace without it."""
    if sample.steps_per_s is None or not sample.steps_per_s_alone:
        return None
    return sample.steps_per_s / sample.steps_per_s_alone


def waiting_share(row: Row, sample: Sample) -> float | None:  # noqa: ARG001  # a `Quantity`
    return sample.waiting_share


def blocking_copies(row: Row, sample: Sample) -> float | None:  # noqa: ARG001  # a `Quantity`
    """Return the time that training waits, as a multiple of a plain copy of the same bytes."""
    if sample.blocking_s is None or not sample.copy_s:
        return None
    return sample.blocking_s / sample.copy_s


def num_requests(row: Row, sample: Sample) -> float | None:  # noqa: ARG001  # a `Quantity`
    return sample.num_requests


def round_trips(row: Row, sample: Sample) -> float | None:
    """Return the number of answers in a row that take as long."""
    return sample.wall_s / FAR_LATENCY_S if row.place.wire == "far" else None


def cpu_ms(row: Row, sample: Sample) -> float:  # noqa: ARG001  # a `Quantity`
    return sample.cpu_s * 1e3


def read_mib(row: Row, sample: Sample) -> float | None:  # noqa: ARG001  # a `Quantity`
    return None if sample.num_bytes_read is None else sample.num_bytes_read / MIB


def peak_mib(row: Row, sample: Sample) -> float | None:  # noqa: ARG001  # a `Quantity`
    return None if sample.peak_bytes is None else sample.peak_bytes / MIB


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
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"  # noqa: RUF001  # it is meant


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that a run wrote."""

    sweep: str
    provenance: Mapping[str, Any]
    parameters: Mapping[str, Any]
    rows: tuple[Row, ...]

    def row(self, system: str, verb: str, place: Place) -> Row | None:
        """The row, if it was measured at all; a limit's is asked for by the verb that it is the limit of."""
        called = verb_of(system, verb, place)
        for row in self.rows:
            if (row.system, row.verb, row.place) == (system, called, place) and row.counted:
                return row
        return None

    def places(self) -> list[Place]:
        """In the order of the run."""
        return list(dict.fromkeys(row.place for row in self.rows))


def ratios(row: Row, rival: Row, quantity: Quantity) -> list[float]:
    """`row` to `rival` in each repetition that both have.

    Pairing within a repetition cancels what the machine's other load does from one repetition to the next.
    """
    ours, theirs = row.by_repetition(quantity), rival.by_repetition(quantity)
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys()) if theirs[number]]


def read(path: Path) -> Results:
    """Read the results that a run wrote to `path`. Raises `MalformedResultsError`."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MalformedResultsError(f"{path} cannot be read as JSON: {error}") from error
    try:
        return parsed(document)
    except MalformedResultsError as error:
        raise MalformedResultsError(f"{path}: {error}") from None


def parsed(document: object) -> Results:
    """A document's results. Raises `MalformedResultsError`, which names all that is wrong with it."""
    problems = list(_problems_of(document))
    if problems:
        more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise MalformedResultsError("not the results of a run: " + "; ".join(problems[:_MAX_PROBLEMS]) + more)
    assert isinstance(document, dict)  # noqa: S101  # or it would have been a problem
    rows = tuple(_row(cell) for cell in document["cells"])
    return Results(
        sweep=document["sweep"],
        provenance=document["provenance"],
        parameters=document["parameters"],
        rows=rows,
    )


def _row(cell: Mapping[str, Any]) -> Row:
    return Row(
        place=Place(cell=cell["cell"], server=cell["server"], wire=cell["wire"], num_ranks=cell["num_ranks"]),
        verb=cell["verb"],
        system=cell["system"],
        num_bytes=cell["num_bytes"],
        samples=tuple(
            Sample(**{name: one[name] for name in Sample.__slots__ if name in one}) for one in cell["samples"]
        ),
        failed=cell["failed"],
    )


_Rule: TypeAlias = "tuple[str, Callable[[Any], bool], str]"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")  # type: ignore[operator]  # one of these can


_DOCUMENT: tuple[_Rule, ...] = (
    ("schema", lambda value: value == SCHEMA, f"{SCHEMA}, the only format known"),
    ("sweep", lambda value: isinstance(value, str), "a name"),
    ("provenance", lambda value: isinstance(value, dict), "an object"),
    ("parameters", lambda value: isinstance(value, dict), "an object"),
    ("cells", lambda value: isinstance(value, list), "a list"),
)
_CELL: tuple[_Rule, ...] = (
    *((name, lambda value: isinstance(value, str), "a name") for name in ("cell", "verb", "system", "server", "wire")),
    ("num_ranks", lambda value: _is_count(value) and value > 0, "a positive whole number"),
    ("num_bytes", lambda value: _is_count(value) and value > 0, "a positive whole number"),
    ("samples", lambda value: isinstance(value, list), "a list"),
    ("failed", lambda value: value is None or isinstance(value, str), "null or why"),
)
_SAMPLE: tuple[_Rule, ...] = (
    ("repetition", _is_count, "a whole number"),
    ("wall_s", lambda value: _is_number(value) and value > 0, "positive"),
    ("cpu_s", _is_number, "a number"),
    ("peak_bytes", lambda value: value is None or _is_count(value), "a whole number or null"),
    ("num_bytes_read", lambda value: value is None or _is_count(value), "a whole number or null"),
    ("blocking_s", lambda value: value is None or _is_number(value), "a number or null"),
)
_LATER: tuple[_Rule, ...] = tuple(
    (name, lambda value: value is None or _is_number(value), "a number or null")
    for name in ("steps_per_s", "steps_per_s_alone", "waiting_share", "copy_s", "num_requests")
)
"""Fields of a sample that older runs lack."""


def _problems_of(document: object) -> Iterator[str]:
    yield from _broken(document, _DOCUMENT, "the document")
    cells = document.get("cells") if isinstance(document, dict) else None
    for number, cell in enumerate(cells if isinstance(cells, list) else []):
        where = f"cells[{number}]"
        broken = list(_broken(cell, _CELL, where))
        yield from broken
        if broken:
            continue
        for index, sample in enumerate(cell["samples"]):
            later = [rule for rule in _LATER if isinstance(sample, dict) and rule[0] in sample]
            yield from _broken(sample, (*_SAMPLE, *later), f"{where}.samples[{index}]")


def _broken(value: object, rules: Sequence[_Rule], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is {type(value).__name__}, not an object"
        return
    for name, is_good, what in rules:
        if name not in value:
            yield f"{where} has no {name!r}"
        elif not is_good(value[name]):
            yield f"{where}.{name} must be {what}, not {value[name]!r:.40}"
