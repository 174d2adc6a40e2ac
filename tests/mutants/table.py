"""Deliberate defects of the package, and the tests that must catch each of them.

``table.txt`` holds them, one below another, with an empty line between. The lines of a defect are its name; the promise
that it breaks; its file under ``src/cloudckpt``; files or node ids of pytest, one of which must fail; each line of the
old text behind ``- ``; each line of the new one behind ``+ ``. The old text occurs exactly once in the file.

When code moves, move its defect along: what counts is the promise (``docs/guarantees.md``), not where the line stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One deliberate defect."""

    breaks: str
    """The promise that the defect breaks, as ``G1: …``."""
    file: str
    """Under ``src/cloudckpt``."""
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutants(text: str) -> dict[str, Mutant]:
    """Parse the table. Raises ValueError for a name that occurs twice, and for a defect without its parts."""
    mutants = {}
    for block in text.strip("\n").split("\n\n"):
        name, breaks, file, *rest = block.split("\n")
        texts = {mark: [line for line in rest if line[0] == mark] for mark in "-+"}
        tests = tuple(line for line in rest if line[0] not in texts)
        if name in mutants or not tests or not texts["-"]:
            raise ValueError(f"{name}: it occurs twice, or lacks its tests or its old text")
        old, new = ("\n".join(line[2:] for line in lines) for lines in texts.values())
        mutants[name] = Mutant(breaks=breaks, file=file, old=old, new=new, tests=tests)
    return mutants


MUTANTS = read_mutants(Path(__file__).with_name("table.txt").read_text(encoding="utf-8"))
