"""What commands print for people: on terminals of all kinds, into pipes, and into shells that complete."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.cells import cell_len
from tests.cli.conftest import save

from cloudckpt.cli._app import app

_COMMAND = [sys.executable, "-m", "cloudckpt"]


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return kept | {"TERM": "xterm-256color"} | more


def _on_terminal(*arguments: str, columns: int, **environment: str) -> str:
    """What a terminal of that width is sent."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        subprocess.Popen(
            [*_COMMAND, *arguments], stdin=its, stdout=its, stderr=its, env=_environment(**environment)
        ) as running,
    ):
        os.close(its)
        sent = b""
        try:
            while piece := screen.read(65536):
                sent += piece
        except OSError:  # Linux's way to say that nobody has the other end any more
            pass
        assert running.wait(timeout=200) == 0, sent
    return sent.decode()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two checkpoints with names of which not all terminals have the characters."""
    save(f"{tmp_path}/run/schritt 1 ☃")
    save(f"{tmp_path}/run/步骤-2")
    return f"{tmp_path}/run"


def test_a_wide_terminal_gets_lines_and_a_narrow_one_folded_cells(folder: str) -> None:
    """If this fails, a table is torn on narrow terminals, or columns stand askew beside names of wide characters."""
    wide = _on_terminal("ls", folder, columns=100)
    titles, *rows = wide.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert "\x1b[1m" in wide
    assert {cell_len(row.partition("committed")[0]) for row in rows} == {cell_len(titles.partition("STATE")[0])}
    assert "\x1b" not in _on_terminal("ls", folder, columns=100, NO_COLOR="1")
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", _on_terminal("show", f"{folder}/步骤-2", "--name", "model.w", columns=40))
    table = narrow.partition("\r\n\r\n")[2].splitlines()
    assert table
    assert all(cell_len(line) <= 40 for line in table)
    assert "model.w" in "".join(line.partition(" ")[0] for line in table)


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
