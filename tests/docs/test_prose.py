"""Documents, docstrings and messages are plain: short sentences, and few words that put off the subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.tables import ROOT
from tests.house import indirect_docstrings, modules

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "benchmarks/README.md"]
PAGES += [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("design/*.md"))]

_NO_PROSE = re.compile(r"^```.*?^```$|^\|.*?$|^#.*?$|<!--.*?-->|(?<=\])\([^)]*\)", re.DOTALL | re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|^\s*[-*] |^\s*\d+\. ", re.MULTILINE)
_INDIRECT = {"what", "whether", "whoever"}
_LATE_SUBJECT = re.compile(r"(?:What|Whether|Whoever|Of)\b")
_LOGS = {"debug", "info", "warning", "error", "exception"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sentences_are_short_and_direct(path: Path) -> None:
    """If this fails, a page has become hard to read: shorten its sentences, and make the actor their subject."""
    text = re.sub(r"`[^`]*`", "code", _NO_PROSE.sub("", path.read_text()))
    paragraphs = [" ".join(paragraph.split()) for paragraph in _PARAGRAPH.split(text)]
    sentences = [one for part in paragraphs for one in re.split(r"(?<=[.!?:])\s+", part) if re.search(r"\w", one)]
    words = [word.lower() for sentence in sentences for word in re.findall(r"[\w'\u2019-]+", sentence)]
    assert len(words) <= 18 * len(sentences), "too long sentences"
    assert sum(word in _INDIRECT for word in words) <= max(1, 0.012 * len(words)), "too many of what, whether, whoever"


def test_the_readme_is_short() -> None:
    """If this fails, the README has become more than one page."""
    assert len((ROOT / "README.md").read_text().split()) <= 600


def test_docstrings_and_messages_begin_with_their_subject() -> None:
    """If this fails, an error, a log record or a docstring has to be read twice."""
    assert [text for text in [*indirect_docstrings(), *messages()] if _LATE_SUBJECT.match(text.strip())] == []


def messages() -> Iterator[str]:
    """Yield the constant beginnings of raised errors and of log records."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            first = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else call.args[0]
            is_message = isinstance(node, ast.Raise) or getattr(call.func, "attr", "") in _LOGS
            if is_message and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value
