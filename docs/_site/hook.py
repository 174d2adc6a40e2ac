"""Adds to the site the documents that lie elsewhere in the repository, and turns links and tabs into those of the site.

The documents are written for readers of the repository, and link to sources and tests. Such a link leads to the
repository where `repo_url` says where that is, and is its text alone otherwise. Between the comments ``tabs`` and
``end of tabs``, each paragraph of bold text alone becomes a tab: a code forge shows labels with their text below.
"""

from __future__ import annotations

import html
import itertools
import json
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarking.md",
    "examples/first_hour.ipynb": "first-hour.md",
    "terraform/README.md": "terraform.md",
}
"""Documents outside of docs/, each with its place on the site."""

_SOURCES = {page: source for source, page in OUTSIDE.items()}
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", re.DOTALL | re.MULTILINE)
_LABEL = re.compile(r"^\*\*([^*\n]+)\*\*$", re.MULTILINE)
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD, _CELL = (re.compile(rf"<{name}[^>]*>(.*?)</{name}>", re.DOTALL) for name in ("th", "td"))
_TAG = re.compile(r"<[^>]+>")
_MANY_COLUMNS = 6
_FIGURE = 40
"""Cells of at most so many characters stay side by side, so that figures can be compared."""
_FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*rel=\"?stylesheet[^>]*(?:https?:)//"
)


def on_config(config: Any) -> Any:
    """Put the design documents into the navigation, in order."""
    names = sorted(path.name for path in (ROOT / "docs" / "design").glob("[0-9]*.md"))
    for section in config["nav"]:
        for pages in section.values():
            if isinstance(pages, list) and "design/README.md" in pages:
                pages += [{"Design": [f"design/{name}" for name in names]}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the documents that lie outside of docs/."""
    for source, page in OUTSIDE.items():
        if source.endswith(".ipynb"):
            files.append(File.generated(config, page, content=_notebook_as_markdown(ROOT / source)))
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def _notebook_as_markdown(path: Path) -> str:
    """Return the cells of a notebook with its outputs, of which tables stay HTML."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "text/html" in data:
                tables = "".join(data["text/html"]).replace("<table>", '<table class="output">')
                parts.append(f'<div class="output">{tables}</div>')
            else:
                parts.append(f"```text\n{''.join(data['text/plain'])}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead each link to where its target is on the site, or in the repository; make the tabs."""
    here = page.file.src_uri
    if here.startswith("design/"):
        page.meta["search"] = {"exclude": True}  # users look for the present behaviour, not for its history
    if here in ("quickstart.md", "recipes.md"):
        page.meta["search"] = {"boost": 2}
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    source = _SOURCES.get(here, f"docs/{here}")

    def led(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        if re.match(r"[a-z]+:", link) or link.startswith("#"):
            return match[0]
        target, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is not None and files.get_file_from_path(place) is not None:
            if text == posixpath.basename(path) and path.endswith(
                ".md"
            ):  # on a site, a title says more than a file's name
                text = (ROOT / path).read_text().partition("\n")[0].lstrip("# ")
            relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
            return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{source} links to {link}, which is not there")
        repository = config.get("repo_url")
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path})" if repository else text

    # The site has a switch of its own for the dark; a forge's page follows the browser's.
    parts = _FENCE.split(_PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown))
    return _TABS.sub(_tabs, "".join(part if part.startswith("```") else _LINK.sub(led, part) for part in parts))


def _tabs(match: re.Match[str]) -> str:
    _, *parts = _LABEL.split(match[1])
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join(f'=== "{label}"\n{textwrap.indent(text, "    ")}' for label, text in pairs)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001  # as below
    """End with one colon the lines before the examples of docstrings, which end with two for Sphinx. Fold the lists of
    tests, whose links lead nowhere on the site, and label cells.
    """
    folded = r"<details><summary>Tests</summary><p>\1</p></details>"
    content = re.sub(r"<p>Shown by\s(.*?)</p>", folded, content.replace("::</p>", ":</p>"), flags=re.DOTALL)
    return _TABLE.sub(_label_cells, content)


def _label_cells(match: re.Match[str]) -> str:
    """Give each cell of a table of prose the head of its column: a narrow screen shows the cells below each other.

    So it does with many columns of figures, unless a row goes on the one above it.
    """
    cells, titles = _CELL.findall(match[0]), _HEAD.findall(match[0])
    is_narrow = len(titles) < _MANY_COLUMNS or "" in cells
    if is_narrow and max(len(_TAG.sub("", cell)) for cell in cells) <= _FIGURE:
        return match[0]
    heads = itertools.cycle(html.escape(_TAG.sub("", head)) for head in titles)
    return re.sub("<td", lambda _: f'<td data-head="{next(heads)}"', match[0]).replace(
        "<table", "<table data-stacked", 1
    )


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001  # mkdocs passes them by name
    """See that a reader's browser fetches nothing from elsewhere; show the heads of examples as prose."""
    found = _FETCHED.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri} makes browsers fetch something from elsewhere: {found[0]}")
    # IDEs know two colons as the begin of code; Markdown shows both.
    return output.replace("<p>Example::</p>", "<p>Example:</p>")
