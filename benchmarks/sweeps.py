"""The declared sweeps: which payload, on how many ranks, on which server, over which wire, with which systems. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from benchmarks.payloads import KIB, MIB, Payload, transformer, uniform

Verb: TypeAlias = Literal["save", "load", "async_blocking", "async_training", "resharded_load"]
ServerName: TypeAlias = Literal["fasts3", "rgw", "moto", "path", "given"]
WireName: TypeAlias = Literal["http", "tls", "slow", "far", "capped", "none"]

IN_BACKGROUND: tuple[Verb, ...] = ("async_blocking", "async_training")
"""Saves that training goes on beside."""

S3_SYSTEMS = ("cloudckpt", "s3torchconnector", "s3fs", "s3fs-tuned")
IN_THE_BACKGROUND = ("cloudckpt", "cloudckpt-process", "s3torchconnector", "s3torchconnector-kept")
PATH_SYSTEMS = ("cloudckpt-path", "filesystem")
SLOW_LATENCY_S = 0.060
SLOW_BYTES_PER_S = 80e6
"""To the first byte, and of one connection: about what a real object store gives."""
FAR_LATENCY_S = 0.030
"""To the first byte, of a line that is fast otherwise."""
CAPPED_BYTES_PER_S = 200e6
"""Rate of all connections together, for sent bytes."""
NUM_PARTS_OF_A_SHARD = 8
"""A resharded load wants one of so many equal parts of each shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Work that the systems of a row do in turn.

    ``save`` and ``load`` are of all the tensors. ``async_blocking`` is an asynchronous save, of which also counts how
    long training waits; ``async_training`` is one beside a training loop, which counts how fast that goes.
    ``resharded_load`` wants a part of each shard that was saved, in one process.
    """

    payload: Payload
    verbs: tuple[Verb, ...] = ("save", "load")
    num_ranks: int = 1
    server: ServerName = "fasts3"
    wire: WireName = "http"
    systems: tuple[str, ...] = S3_SYSTEMS
    connections: int | None = None
    """The connections that cloudckpt and the limit may use; None for their own defaults."""

    def __post_init__(self) -> None:
        if "resharded_load" in self.verbs and self.num_ranks > 1:
            raise ValueError("a resharded load pretends to be one rank of a job, and so runs in one process")

    @property
    def path(self) -> str:
        """Its name among the cells of a sweep."""
        return "/".join((self.payload.name, "+".join(self.verbs), self.server, self.wire, str(self.num_ranks)))

    def matches(self, patterns: Iterable[str]) -> bool:
        """True if its path contains one of them; ``*`` stands for any text."""
        return any(fnmatch.fnmatchcase(self.path, f"*{pattern}*") for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Cells that are measured one after the other."""

    name: str
    about: str
    cells: tuple[Cell, ...]
    repetitions: int = 5
    """Counted ones, after one that warms up."""

    def chosen(
        self,
        *,
        cells: Collection[str] = (),
        verbs: Collection[Verb] = (),
        systems: Collection[str] = (),
    ) -> Sweep:
        """Return the selected part of the sweep, without empty cells; an empty collection selects all."""
        kept = []
        for cell in self.cells:
            if cells and not cell.matches(cells):
                continue
            of_cell = replace(
                cell,
                verbs=tuple(verb for verb in cell.verbs if not verbs or verb in verbs),
                systems=tuple(system for system in cell.systems if not systems or system in systems),
            )
            if of_cell.verbs and of_cell.systems:
                kept.append(of_cell)
        return replace(self, cells=tuple(kept))

    def on_given(self) -> Sweep:
        """The same on a store that is the user's, over its own wire; each cell once."""
        moved = [
            replace(
                cell,
                server="given",
                wire="http",
                connections=None,
                systems=tuple(one for one in cell.systems if one != "limit"),
            )
            for cell in self.cells
            if cell.server != "path"
        ]
        return replace(self, cells=_without_repetition(moved))


def _without_repetition(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Each verb of a payload and a number of ranks once, with all systems that any of the cells has."""
    merged: dict[tuple[Payload, tuple[Verb, ...], int], Cell] = {}
    for cell in cells:
        if not cell.systems:
            continue
        key = (cell.payload, cell.verbs, cell.num_ranks)
        systems = dict.fromkeys((*(merged[key].systems if key in merged else ()), *cell.systems))
        merged[key] = replace(cell, systems=tuple(systems))
    return tuple(merged.values())


FEW_LARGE = uniform(8, 512 * MIB)
SIXTY_FOUR = uniform(64, 32 * MIB)
SIXTEEN = uniform(16, 32 * MIB)
ONE_TWENTY_EIGHT = uniform(128, 32 * MIB)
MANY_SMALL = uniform(20_000, 64 * KIB)
MANY_SMALLER = uniform(20_000, 28 * KIB)
MIDDLING = uniform(2_000, 512 * KIB)
TRANSFORMER = transformer()
TINY = uniform(16, 1 * MIB)
TEN = uniform(10, 1 * MIB)
TINY_SHARDS = uniform(2, 16 * MIB)

_HEADLINE = Sweep(
    name="headline",
    about="Saves and loads beside the rivals', which the README shows.",
    cells=(Cell(payload=SIXTY_FOUR, systems=S3_SYSTEMS[:3]),),
)
_SHORT = Sweep(
    name="short",
    about="A look at everything, in a minute or two, on a server that is always at hand and slow.",
    repetitions=3,
    cells=(
        Cell(payload=TINY, verbs=("save", "load", "async_blocking"), server="moto", systems=S3_SYSTEMS[:3]),
        Cell(payload=TINY_SHARDS, verbs=("resharded_load",), server="moto", systems=("cloudckpt",)),
        Cell(payload=TINY, num_ranks=2, server="moto", systems=("cloudckpt",)),
        Cell(payload=TINY, server="path", wire="none", systems=PATH_SYSTEMS),
    ),
)
_BARS = Sweep(
    name="bars",
    about="The rows with targets, beside their rivals and limits.",
    cells=(
        Cell(payload=SIXTY_FOUR, systems=(*S3_SYSTEMS, "limit")),
        Cell(payload=SIXTY_FOUR, wire="tls", systems=("cloudckpt", "s3torchconnector", "limit")),
        Cell(payload=MANY_SMALL, systems=("cloudckpt",)),
        Cell(payload=SIXTY_FOUR, wire="slow", systems=("cloudckpt", "limit"), connections=8),
        Cell(payload=FEW_LARGE, systems=("cloudckpt",)),
        Cell(payload=SIXTY_FOUR, verbs=("resharded_load",), systems=("cloudckpt", "s3torchconnector")),
        Cell(payload=SIXTY_FOUR, server="path", wire="none", systems=(*PATH_SYSTEMS, "limit")),
    ),
)
_MEASURED: tuple[Verb, ...] = ("save", "load", "async_blocking")
_FULL = Sweep(
    name="full",
    about="Every payload, verb, wire and server, on one, two and four ranks; takes hours.",
    cells=(
        *(cell for cell in _BARS.cells if cell.wire == "slow" or "resharded_load" in cell.verbs),
        *(
            Cell(payload=payload, verbs=_MEASURED, num_ranks=num_ranks, systems=(*S3_SYSTEMS, "limit"))
            for payload in (SIXTY_FOUR, MANY_SMALL, MIDDLING, FEW_LARGE, TRANSFORMER)
            for num_ranks in (1, 2, 4)
        ),
        *(
            Cell(payload=payload, num_ranks=num_ranks, wire="tls", systems=(*S3_SYSTEMS, "limit"))
            for payload in (SIXTY_FOUR, TRANSFORMER)
            for num_ranks in (1, 2, 4)
        ),
        *(
            Cell(payload=payload, num_ranks=num_ranks, wire="slow", systems=(*S3_SYSTEMS, "limit"))
            for payload in (SIXTEEN, MIDDLING)
            for num_ranks in (1, 2)
        ),
        *(Cell(payload=SIXTEEN, num_ranks=num_ranks, server="rgw") for num_ranks in (1, 2)),
        Cell(payload=SIXTEEN, server="rgw", wire="tls"),
        *(
            Cell(
                payload=payload,
                verbs=_MEASURED,
                num_ranks=num_ranks,
                server="path",
                wire="none",
                systems=(*PATH_SYSTEMS, "limit"),
            )
            for payload in (SIXTY_FOUR, MANY_SMALL, TRANSFORMER)
            for num_ranks in (1, 2, 4)
        ),
    ),
)
_BACKGROUND = Sweep(
    name="background",
    about="Background saves beside training: the time that it waits, and its pace meanwhile.",
    repetitions=3,
    cells=(
        Cell(payload=MANY_SMALL, verbs=("async_blocking",), systems=IN_THE_BACKGROUND),
        Cell(payload=MANY_SMALLER, verbs=("async_blocking",), systems=IN_THE_BACKGROUND),
        Cell(payload=SIXTY_FOUR, verbs=("async_blocking",), systems=IN_THE_BACKGROUND),
        Cell(payload=SIXTY_FOUR, verbs=("async_training",), wire="capped", systems=(*IN_THE_BACKGROUND, "limit")),
    ),
)
_CORES = Sweep(
    name="cores",
    about="One process on all cores of a machine, over HTTP and TLS.",
    repetitions=2,
    cells=tuple(
        Cell(payload=payload, wire=wire, systems=("cloudckpt", "s3torchconnector", "limit"))
        for payload in (ONE_TWENTY_EIGHT, MANY_SMALL)
        for wire in ("http", "tls")
    ),
)
_RANKS = Sweep(
    name="ranks",
    about="Several ranks on one machine, over HTTP and TLS: the sum of their rates, and seconds of processors per GB.",
    repetitions=2,
    cells=tuple(
        Cell(payload=ONE_TWENTY_EIGHT, wire=wire, num_ranks=num_ranks, systems=("cloudckpt", "s3torchconnector"))
        for num_ranks in (8, 4, 2, 1)
        for wire in ("tls", "http")
    ),
)
_SMALL = Sweep(
    name="small",
    about="A small checkpoint on a line with 30 ms to the first byte: round trips, requests and processor time.",
    cells=(Cell(payload=TEN, wire="far", systems=("cloudckpt", "s3torchconnector", "torch-save")),),
)
SWEEPS: Mapping[str, Sweep] = {
    sweep.name: sweep for sweep in (_HEADLINE, _SHORT, _BARS, _BACKGROUND, _SMALL, _CORES, _RANKS, _FULL)
}
