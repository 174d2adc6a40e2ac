"""A child of fork ends, touches nothing of its parent's saves, and is refused clearly if it calls cloudckpt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
]

# In a process of its own: pytest holds locks that a child of fork would find held.
SCRIPT = """
import os, signal, sys, threading, torch, cloudckpt
from pathlib import Path

root = Path(sys.argv[1])
reached, opened = threading.Event(), threading.Event()
parent = os.getpid()

def wait(event):
    if event.name == "save.part_uploaded" and os.getpid() == parent:
        reached.set()
        assert opened.wait(150)

torch.set_num_threads(1)  # those of OpenMP do not survive a fork
state = {"w": torch.ones(50_000)}
cloudckpt.save(state, root / "one")
manager = cloudckpt.CheckpointManager(root, options=cloudckpt.Options(on_event=wait))
handle = manager.save(1, state)
assert reached.wait(150)
before = sorted(root.rglob("*"))

if os.fork() == 0:  # it ends as a script does, with what Python does at its exit
    signal.alarm(100)
    for call in (
        lambda: cloudckpt.save(state, root / "child"),
        lambda: cloudckpt.async_save(state, root / "child"),
        lambda: cloudckpt.load(state, root / "one"),
        lambda: cloudckpt.latest(root),
        lambda: cloudckpt.gc(root),
        lambda: cloudckpt.delete(str(root / "one")),
        cloudckpt.close,
        manager.close,
        handle.result,
        handle.cancel,
    ):
        try:
            call()
        except cloudckpt.errors.ForkedProcessError as error:
            assert "spawn" in str(error)
        else:
            raise AssertionError("it was not refused")
    sys.exit(0)

assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert sorted(root.rglob("*")) == before, "the child has touched what its parent is about"
opened.set()
manager.close(150)
handle.result(150)
cloudckpt.verify(manager.uri_of(1))
"""


def test_a_child_of_fork_is_refused_and_ends(tmp_path: Path) -> None:
    """If this fails, what is forked from a training that saves, such as a loader's worker, hangs or ends a save."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
