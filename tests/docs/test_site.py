"""The site's pages: every public name, every error, a quickstart that can be walked, and a navigation with all of it.

That its links lead somewhere, `make docs` sees.
"""

from __future__ import annotations

import re

from tests.docs.tables import ROOT

import cloudckpt
from cloudckpt import errors, types

DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name() -> None:
    """If this fails, a public name can be used, and is documented nowhere."""
    named = re.findall(r"^::: cloudckpt\.(?:types\.)?(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {*cloudckpt.__all__, *types.__all__, "errors"} - {*errors.__all__, "__version__", "types"}


def test_every_error_has_its_paragraph() -> None:
    """If this fails, whoever meets an error looks in vain for what to do about it."""
    text = (DOCS / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### `(\w+)`\n\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    assert sections.keys() == set(errors.__all__)
    bases = {"CloudckptError", "StoreError", "CheckpointError"}
    for name, section in sections.items():
        assert name in bases or ("**Cause:**" in section and "**Remedy:**" in section), name


def test_the_navigation_has_every_document() -> None:
    """If this fails, a document is on the site, and nobody finds it there."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    documents = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = set(re.findall(r"- (?:\w+: )?(\S+\.md)$", navigation, re.MULTILINE))
    assert {name for name in documents if not re.match(r"design/\d", name)} <= listed
