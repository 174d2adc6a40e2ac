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
PAGES = sorted(
    path for folder in ("", "docs/**/", "terraform/**/", "benchmarks/**/") for path in ROOT.glob(f"{folder}*.md")
)

_NO_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|(?<=\])\([^)]*\)", re.DOTALL | re.MULTILINE)
_NO_SENTENCE = re.compile(r"^[|#].*?$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|^\s*[-*] |^\s*\d+\. ", re.MULTILINE)
_WORD = re.compile(r"[\w'\u2019-]+")
_INDIRECT = {"what", "whether", "whoever"}
_LATE_SUBJECT = re.compile(r"(?:What|Whether|Whoever|Of)\b")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sentences_are_short_and_direct(path: Path) -> None:
    """If this fails, a page has become hard to read: shorten its sentences, and make the actor their subject."""
    text = re.sub(r"`[^`]*`", "code", _NO_PROSE.sub("", path.read_text()))
    paragraphs = [" ".join(paragraph.split()) for paragraph in _PARAGRAPH.split(_NO_SENTENCE.sub("", text))]
    sentences = [one for part in paragraphs for one in re.split(r"(?<=[.!?])[\s)*_]+", part) if re.search(r"\w", one)]
    assert len(_WORD.findall(" ".join(sentences))) < 18 * len(sentences), "too long sentences"
    assert [one for one in sentences if _LATE_SUBJECT.match(one.lstrip('*_("'))] == []
    words = _WORD.findall(text.lower())
    assert sum(word in _INDIRECT for word in words) <= max(1, 0.012 * len(words)), "too many of what, whether, whoever"


def test_the_readme_is_short() -> None:
    """If this fails, the README has become more than one page."""
    assert len((ROOT / "README.md").read_text().split()) <= 600


def test_docstrings_and_messages_begin_with_their_subject() -> None:
    """If this fails, an error, a log record, a help text or a docstring has to be read twice."""
    assert [text for text in texts() if _LATE_SUBJECT.match(text.strip())] == list(indirect_docstrings()) == []


def texts() -> Iterator[str]:
    """Yield every constant text of the package, benchmarks and examples: docstrings, messages, their parts, help."""
    for path in (*modules(), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
