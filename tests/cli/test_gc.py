"""``cloudckpt gc``."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Run, leave_unfinished, save
from tests.e2e.places import LocalPlace, Place

_OLD = "20200101T000000000Z-0123456789ab"


def test_it_shows_and_then_removes(place: Place, run: Run) -> None:
    """If this fails, garbage is removed unasked, or stays although it was asked for."""
    save(place.uri("step-1"))
    leave_unfinished(place, "step-1", attempt=_OLD)
    before = place.contents()
    shown = run("gc", place.root, "--older-than", "0s")
    assert shown.code == 0
    assert "2 data objects of 1 save" in shown.out
    assert "--yes" in shown.err
    assert place.contents() == before
    removed = run("gc", place.root, "--older-than", "0s", "--yes", "--json")
    assert removed.code == 0
    assert (removed.document["num_objects"], removed.document["dry_run"]) == (2, False)
    assert not any(_OLD in key for key in place.contents())
    assert run("verify", place.uri("step-1")).code == 0


def test_what_is_young_stays(place: Place, run: Run) -> None:
    """If this fails, a save that is under way loses its data."""
    leave_unfinished(place, "step-1", attempt=_OLD)
    before = place.contents()
    assert run("gc", place.root, "--yes").code == 0
    assert place.contents() == before


def test_a_dry_run_wins(place: Place, run: Run) -> None:
    """If this fails, who asks for both loses what he only wanted to look at."""
    leave_unfinished(place, "step-1", attempt=_OLD)
    before = place.contents()
    ended = run("gc", place.root, "--older-than", "0s", "--yes", "--dry-run")
    assert ended.code == 0
    assert "would be removed" in ended.out
    assert place.contents() == before


@pytest.mark.parametrize(("answer", "num_left"), [("y\n", 0), ("n\n", 2)])
def test_on_a_terminal_it_asks(tmp_path: Path, answer: str, num_left: int) -> None:
    """If this fails, garbage goes although the user said no, or stays although he said yes."""
    leave_unfinished(LocalPlace(tmp_path), "step-1", attempt=_OLD)
    ours, its = pty.openpty()
    try:
        os.write(ours, answer.encode())
        done = subprocess.run(
            [sys.executable, "-m", "cloudckpt", "gc", str(tmp_path), "--older-than", "0s"],
            stdin=its,
            stderr=its,
            stdout=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    finally:
        os.close(its)
        os.close(ours)
    assert done.returncode == 0
    assert b"2 data objects" in done.stdout
    assert len(list(tmp_path.rglob("*.safetensors"))) == num_left
