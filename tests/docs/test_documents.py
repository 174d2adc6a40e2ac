"""README and documents: every snippet runs, every link leads somewhere, every table is that of the code."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.docs.markdown import Snippet, anchors_of, links_of, snippets_of
from tests.docs.tables import ROOT, TABLES, marked

import cloudckpt
from cloudckpt.cli._app import app
from cloudckpt.stores.fsspec_backends import _BACKENDS, Create
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.gcs.config import PARSERS as GCS_PARSERS
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3.config import ALIASES, PARSERS
from cloudckpt.testing.servers import S3Server

DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "terraform/**/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern)
)
SNIPPETS = [snippet for path in DOCUMENTS for snippet in snippets_of(path)]
_NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
_WITH_PYTHON = [
    path
    for path in DOCUMENTS
    if any(snippet.language == "python" for snippet in snippets_of(path))
    and path.name != "frameworks.md"  # whose snippets `make frameworks` runs
]

_RUN = """
import sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
for path in sys.argv[1:]:
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), globals())
"""


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_there_is_something_to_test() -> None:
    """If this fails, the tests below look for documents where there are none, and pass."""
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/format.md", "docs/guarantees.md"} <= set(_NAMES)
    assert sum(snippet.language == "python" for snippet in SNIPPETS) >= 6


@pytest.mark.parametrize("path", _WITH_PYTHON, ids=lambda path: path.name)
def test_python_snippets_run(path: Path, tmp_path: Path, s3_bucket: S3Server) -> None:
    """If this fails, what a user copies from the document does not work."""
    assert s3_bucket.endpoint_url
    files = []
    for number, snippet in enumerate(snippets_of(path)):
        if snippet.language == "python":
            files.append(tmp_path / f"snippet-{number}-line-{snippet.line}.py")
            files[-1].write_text(snippet.text)
    command = [sys.executable, "-c", _RUN, *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_readmes_comments_are_what_is_printed(tmp_path: Path, s3_bucket: S3Server) -> None:
    """If this fails, the README shows messages that the user will not see."""
    assert s3_bucket.endpoint_url
    path = tmp_path / "readme.py"
    path.write_text("\n".join(snippet.text for snippet in SNIPPETS_OF_README if snippet.language == "python"))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True
    )
    shown = re.findall(r"print\(error\)  # (.*)", path.read_text())
    assert len(shown) == 2
    for line in shown:
        assert line.strip("… ") in done.stdout


SNIPPETS_OF_README = [
    snippet for snippet in SNIPPETS if snippet.path.name == "README.md" and snippet.path.parent == ROOT
]


@pytest.mark.parametrize(
    "snippet", [snippet for snippet in SNIPPETS if snippet.language == "json"], ids=lambda snippet: snippet.path.name
)
def test_json_snippets_are_json(snippet: Snippet) -> None:
    """If this fails, an example document cannot be parsed."""
    json.loads(snippet.text)


def problem_of(command: str) -> str | None:
    """Why a line of shell cannot work in a checkout."""
    words = command.split("#", maxsplit=1)[0].split()
    if words[0] == "make":
        missing = [
            word
            for word in words[1:]
            if "=" not in word and not re.search(rf"^{word}:", read("Makefile"), re.MULTILINE)
        ]
        return f"no targets {missing}" if missing else None
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[([\w,]+)\]", command)
        known = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", read("pyproject.toml"), re.DOTALL)
        assert known is not None
        names = set(re.findall(r"^(\w+) = ", known[1], re.MULTILINE))
        missing = [extra for group in extras for extra in group.split(",") if extra not in names]
        return f"no extras {missing}" if missing else None
    if words[:2] == ["python", "-m"]:
        modules = [folder / words[2].replace(".", "/") for folder in (ROOT, ROOT / "src")]
        there = any(path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() for path in modules)
        return None if there else f"no module {words[2]}"
    if words[0] in ("python", "torchrun"):
        files = [word for word in words if word.endswith(".py")]
        return None if files and all((ROOT / name).is_file() for name in files) else f"no files {files}"
    return problem_of_ours(words[1:]) if words[0] == "cloudckpt" else "a command that this test does not know"


def problem_of_ours(words: list[str]) -> str | None:
    """Why `cloudckpt` does not take these arguments."""
    command: Any = typer.main.get_command(app)
    if words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.commands[words[0]]
    known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    missing = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    return f"no options {missing}" if missing else None


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (snippet.path.name, line)
        for snippet in SNIPPETS
        if snippet.language == "sh"
        for line in snippet.text.splitlines()
        if line.strip()
    ],
)
def test_shell_snippets_name_what_there_is(name: str, line: str) -> None:
    """If this fails, the first command that a user tries does not exist."""
    assert problem_of(line) is None, f"{name}: {line}"


def test_no_snippet_goes_untested() -> None:
    """If this fails, a snippet has a language that no test runs."""
    assert {snippet.language for snippet in SNIPPETS} <= {"python", "sh", "json", "text", "hexdump", "hcl"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    """If this fails, a reader of the documents ends at a page that is not there."""
    broken = []
    for link in links_of(path):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            broken.append(link)
    assert broken == []


def test_guarantees_name_tests_that_exist() -> None:
    """If this fails, a guarantee is said to be shown by a test that was renamed or removed."""
    path = ROOT / "docs" / "guarantees.md"
    named = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", path.read_text())
    assert len(named) >= 9
    missing = []
    for name, link in named:
        tree = ast.parse((path.parent / link).read_text())
        if name not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{link}::{name}")
    assert missing == []


def test_readme_and_guarantees_promise_the_same() -> None:
    """If this fails, the README promises something else than the document that it refers to."""
    pages = re.findall(r"^## (G\d [^\n]*)\n\n\*\*(.*?)\*\*", read("docs/guarantees.md"), re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^- \*\*(G\d .*?)\.\*\* (.*?)(?=\n- |\n\n)", read("README.md"), re.DOTALL | re.MULTILINE)
    assert [name.split()[0] for name, _ in pages] == [f"G{number}" for number in range(1, 10)]
    assert [(name, " ".join(text.split())) for name, text in lines] == [
        (name, " ".join(text.split())) for name, text in pages
    ]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_code(name: str) -> None:
    """If this fails, a table tells of dtypes or options that are not there: run tests/docs/tables.py."""
    document, render = TABLES[name]
    assert marked(read(document), name) == render()


def test_every_s3_option_is_documented() -> None:
    """If this fails, a storage option can only be found by reading the code, or is documented and gone."""
    text = read("docs/stores.md")
    assert re.findall(r"^\| `(\w+)`", marked(text, "s3"), re.MULTILINE) == sorted(PARSERS)
    after = text.partition("boto3's own names work too:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", after)) == set(ALIASES)


def test_every_gcs_option_is_documented() -> None:
    """If this fails, a storage option can only be found by reading the code, or is documented and gone."""
    assert re.findall(r"^\| `(\w+)`", marked(read("docs/stores.md"), "gcs"), re.MULTILINE) == sorted(GCS_PARSERS)


def test_the_fsspec_table_is_true() -> None:
    """If this fails, a protocol is trusted with more, or with less, than its users are told."""
    section = read("docs/stores.md").partition("\n## fsspec\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    said = {name: row[1:3] for row in rows for name in re.findall(r"(\w+)(?:://|`)", row[0])}
    assert {name for name, (creates, _) in said.items() if creates != "no"} == set(_BACKENDS)
    assert all(said[name][1] == "yes" for name in _BACKENDS)
    assert {name for name, backend in _BACKENDS.items() if backend.create is Create.LOCK} == {"memory"}
    assert said["memory"][0] == "within one process"


def test_the_stores_table_is_true(tmp_path: Path) -> None:
    """If this fails, a user relies on something that a store does not do."""
    rows = {
        cells[0]: cells[1:]
        for line in read("docs/stores.md").splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
    }
    stores = (S3Store, GCSStore, LocalStore(tmp_path), MemoryStore("capabilities"))
    creates = rows["create-if-absent, and so no accidental overwrite"]
    honoured = "yes, where the endpoint honours it"
    assert creates == [honoured, honoured, "where hard links work", "yes", "[some](#fsspec)"]
    assert all(store.capabilities.conditional_create for store in stores)
    assert rows["parallel parts of one object"] == ["yes", "yes", "yes", "yes", "no"]
    assert all(store.capabilities.multipart for store in stores)
    assert all(store.capabilities.verifies_crc32c for store in stores)
    assert rows["`storage_options`"][2:4] == ["none", "none"]
    for uri in (tmp_path / "c", "memory://capabilities/c"):
        with pytest.raises(cloudckpt.errors.InvalidOptionError):
            cloudckpt.latest(uri, options=cloudckpt.Options(storage_options={"region": "x"}))


def test_the_picture_of_the_architecture_is_that_of_the_linter() -> None:
    """If this fails, docs/architecture.md draws an architecture that nothing enforces, or leaves out a part."""
    picture = read("docs/architecture.md").split("```")[1].removeprefix("text")
    left = "\n".join(line[:28] if "/  " in line else line for line in picture.splitlines())
    drawn = {
        name.removesuffix("/").removesuffix(".py"): at for at, name in enumerate(re.findall(r"\w+(?:/|\.py)", left))
    }
    parts = {path.stem for path in (ROOT / "src" / "cloudckpt").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert drawn.keys() == parts - {"__init__", "__main__", "__pycache__", "_version", "testing"}
    contract = re.search(r"layers = \[(.*?)\]", read("pyproject.toml"), re.DOTALL)
    assert contract is not None
    layers = [re.findall(r"cloudckpt\.(\w+)", line) for line in contract[1].splitlines() if line.strip()]
    assert {name for layer in layers for name in layer} <= drawn.keys()
    for upper, lower in itertools.pairwise(layers):
        assert max(drawn[name] for name in upper) < min(drawn[name] for name in lower), (upper, lower)
