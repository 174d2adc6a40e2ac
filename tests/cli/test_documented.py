"""``docs/command-line.md`` says what the commands do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.cli.conftest import Run, save
from tests.docs.tables import marked

from cloudckpt.cli import _console
from cloudckpt.cli._app import app

TEXT = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
COMMON = TEXT.partition("## Options of all commands")[2].partition("\n## ")[0]
OF_THIS_PAGE = ("ls", "latest", "du", "plot", "report", "show", "cat", "diff", "verify", "rm", "gc", "doctor")
"""Others have pages of their own."""


def section_of(name: str) -> str:
    return TEXT.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def _names_of(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


@pytest.mark.parametrize("name", [*OF_THIS_PAGE, "timeline", "cp", "export", "import"])
def test_documented_options_exist(name: str) -> None:
    """If this fails, an option that the page tells of does not exist."""
    command: Any = typer.main.get_command(app)
    options = {text for parameter in command.commands[name].params for text in _names_of(parameter)}
    assert section_of(name)
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section_of(name)))
    assert shown <= options
    common = set(re.findall(r"^\| `(--[a-z-]+)", COMMON, re.MULTILINE))
    assert name == "timeline" or common <= options  # which reads local files alone


def test_the_exit_codes_are_those_of_the_code() -> None:
    """If this fails, a script goes by codes that do not come."""
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", marked(TEXT, "exit codes"), re.MULTILINE)}
    constants = ((name, value) for name, value in vars(_console).items() if isinstance(value, int))
    assert codes == {value for name, value in constants if re.fullmatch("[A-Z][A-Z_]*", name)}


def members_of(name: str) -> list[str]:
    (row,) = (line for line in marked(TEXT, "json").splitlines() if line.startswith(f"| `{name}`"))
    return re.findall(r"`(\w+)`", row)[1:]


@pytest.mark.parametrize("name", OF_THIS_PAGE)
def test_the_documents_are_as_documented(name: str, tmp_path: Path, run: Run) -> None:
    """If this fails, a script asks for a member that is not there, or that may go unannounced."""
    uri = str(tmp_path / "step-1")
    save(uri)
    arguments = {
        "ls": [str(tmp_path)],
        "diff": [uri, uri],
        "gc": [str(tmp_path)],
        "du": [str(tmp_path)],
        "latest": [str(tmp_path)],
        "plot": [str(tmp_path)],
        "report": [str(tmp_path), "-o", str(tmp_path / "report.html")],
        "cat": [uri, "model.b"],
        "rm": [uri, "--dry-run"],
    }.get(name, [uri])
    document = run(name, *arguments, "--json").document
    assert list(document[0] if isinstance(document, list) else document) == members_of(name)
