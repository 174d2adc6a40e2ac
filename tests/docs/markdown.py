"""Markdown, as far as the tests of the documents need it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One fenced block."""

    path: Path
    line: int
    language: str
    text: str


def snippets_of(path: Path) -> list[Snippet]:
    """The fenced blocks, in their order."""
    text = path.read_text()
    return [
        Snippet(path=path, line=text.count("\n", 0, match.start(2)) + 1, language=match[1], text=match[2])
        for match in _FENCE.finditer(text)
    ]


def links_of(path: Path) -> list[str]:
    """The targets of all links."""
    return _LINK.findall(_FENCE.sub("", path.read_text()))


def anchors_of(path: Path) -> set[str]:
    """Return what a link's ``#…`` may name, as GitHub makes it of the headings."""
    headings = _HEADING.findall(_FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
