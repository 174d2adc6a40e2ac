"""What commands print for people: on terminals of all kinds, into pipes, and into shells that complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import save

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
