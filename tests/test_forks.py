"""A child of fork ends, touches nothing of its parent's saves, and is refused clearly if it calls cloudckpt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests import forking

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(forking.os, "fork"), reason="there is no fork"),
]


@pytest.mark.parametrize("case", forking.CASES)
def test_forks(case: str, tmp_path: Path) -> None:
    """If this fails, what is forked from a training that saves (a loader's worker, mostly) never ends, or ends a save.

    Each case says more about itself.
    """
    command = [sys.executable, "-m", "tests.forking", case, str(tmp_path)]
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * forking.WAIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ended" in done.stdout
