"""What commands print for people: on terminals of all kinds, into pipes, and into shells that complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.cells import cell_len
from tests.cli.conftest import Run, save

from cloudckpt.cli._app import app

_COMMAND = [sys.executable, "-m", "cloudckpt"]


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return kept | {"TERM": "xterm-256color"} | more


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two checkpoints with names of which not all terminals have the characters."""
    save(f"{tmp_path}/run/schritt 1 ☃")
    save(f"{tmp_path}/run/步骤-2")
    return f"{tmp_path}/run"


def test_columns_stand_under_each_other(folder: str, run: Run) -> None:
    """If this fails, columns stand askew beside names of wide characters."""
    titles, *rows = run("ls", folder).out.splitlines()
    assert len(rows) == 2
    assert {cell_len(row.partition("committed")[0]) for row in rows} == {cell_len(titles.partition("STATE")[0])}


def test_a_character_that_an_encoding_lacks_is_no_error(folder: str) -> None:
    """If this fails, who works in another locale cannot list a run in which one name has a strange character."""
    for arguments, lines in (
        (["ls", folder], (b"schritt 1 \\u2603", b"\\u6b65\\u9aa4-2")),
        (["doctor", folder], (b"\n\\u2713  create-if-absent ",)),
    ):
        done = subprocess.run(
            [*_COMMAND, *arguments],
            capture_output=True,
            timeout=200,
            env=_environment(PYTHONIOENCODING="latin-1"),
            check=True,
        )
        assert all(line in done.stdout for line in lines)


def test_who_stops_reading_is_not_told_of_it(folder: str) -> None:
    """If this fails, ``ls | head`` ends in a traceback, or in the exit code of an answer."""
    ours, its = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            [*_COMMAND, "ls", folder], stdout=its, stderr=subprocess.PIPE, timeout=200, env=_environment(), check=False
        )
    finally:
        os.close(its)
    assert (done.returncode, done.stderr) == (141, b"")


def _completed(line: str) -> list[str]:
    """Return the candidates of fish, which takes each line of an explanation for one."""
    environment = _environment(
        _CLOUDCKPT_COMPLETE="complete_fish", _TYPER_COMPLETE_ARGS=line, _TYPER_COMPLETE_FISH_ACTION="get-args"
    )
    done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=200, env=environment, check=True)
    return [candidate.partition("\t")[0] for candidate in done.stdout.splitlines()]


def test_a_shell_completes() -> None:
    """If this fails, completion offers nothing, what is not there, or the second line of an explanation."""
    assert _completed("cloudckpt ver") == ["verify"]
    command: Any = typer.main.get_command(app)
    assert set(_completed("cloudckpt rm --")) == {
        name for parameter in command.commands["rm"].params for name in parameter.opts if name.startswith("--")
    } | {"--help"}
