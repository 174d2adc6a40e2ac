"""What a child of fork does with what it has of its parent: it hangs in nothing, and touches nothing of its saves."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tests import forking

from cloudckpt._forks import in_child
from cloudckpt._stage import staging

ROOT = Path(__file__).parents[1]
ALONE = {"removes", "unwinds", "reuses"}
"""Cases of a save by the calling thread, which is the same in both modes."""

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(forking.os, "fork"), reason="there is no fork"),
]


@pytest.mark.parametrize(
    ("case", "mode"),
    [(case, mode) for case in forking.CASES for mode in ("thread", "process") if mode == "thread" or case not in ALONE],
)
def test_forks(case: str, mode: str, tmp_path: Path) -> None:
    """If this fails, what is forked from a training that saves (a loader's worker, mostly) never ends, or ends a save.

    Each case says more about itself.
    """
    command = [sys.executable, "-m", "tests.forking", case, str(tmp_path), mode]
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


def test_a_child_frees_no_tensor_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a fork while a model on a GPU is copied calls CUDA in the child, where that crashes."""
    monkeypatch.setattr(staging, "_not_freed", [])
    copy = staging.Staging(state_dict={}, num_bytes=0, blocks=[])
    source = torch.ones(3)
    copy.expect(staging.Expected.of([], [], num_tasks=0), sources=[source])
    is_there = weakref.ref(source)
    copy.after_fork()  # as in a child
    del copy, source
    gc.collect()
    assert is_there() is not None


def test_one_place_hears_of_forks() -> None:
    """If this fails, what a child does depends on the order in which modules were imported, and nobody sees it all."""
    package = ROOT / "src" / "cloudckpt"
    found = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "register_at_fork" in path.read_text(encoding="utf-8")
    ]
    assert found == [Path(in_child.__code__.co_filename).name]
