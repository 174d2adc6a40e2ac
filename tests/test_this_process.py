"""State of the whole process: thresholds of the garbage collector beside training, and children of fork."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt._this_process import rare_collections
from cloudckpt.options import Options

STATE = {f"t{number}": torch.ones(4) for number in range(100)}


@pytest.fixture(autouse=True)
def before() -> Iterator[tuple[int, int, int]]:
    """The thresholds that the program has set, which it has again afterwards."""
    thresholds = gc.get_threshold()
    gc.set_threshold(701, *thresholds[1:])
    yield gc.get_threshold()
    gc.set_threshold(*thresholds)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread of each change of the thresholds."""
    threads: list[threading.Thread] = []
    set_threshold = gc.set_threshold

    def record(*thresholds: int) -> None:
        threads.append(threading.current_thread())
        set_threshold(*thresholds)

    monkeypatch.setattr(gc, "set_threshold", record)
    return threads


def test_a_save_restores_the_thresholds_of_the_collector(before: tuple[int, int, int]) -> None:
    """If this fails, a save changes for good how often Python looks for garbage, also one that fails."""
    with contextlib.suppress(KeyError), rare_collections():
        assert gc.get_threshold() == (1_000_000, *before[1:])
        with rare_collections():
            pass
        assert gc.get_threshold() == (1_000_000, *before[1:])
        raise KeyError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("overlap", [False, True])
def test_a_background_save_leaves_the_collector_alone(
    changes: list[threading.Thread], before: tuple[int, ...], *, overlap: bool
) -> None:
    """If this fails, a background save changes how the training loop beside it is collected."""
    may_begin = threading.Event()
    thresholds: list[tuple[int, ...]] = []

    def watch(_event: cloudckpt.Event) -> None:
        if threading.current_thread() is threading.main_thread():  # at the snapshot, which blocks it
            return
        assert may_begin.wait(60)
        thresholds.append(gc.get_threshold())

    options = Options(on_event=watch, async_overlap=overlap)
    saving = cloudckpt.async_save(STATE, f"memory://collecting/{overlap}", options=options)
    changed_by, on_return = set(changes), gc.get_threshold()
    changes.clear()
    may_begin.set()
    saving.result(60)
    assert changed_by <= {threading.main_thread()}  # while the snapshot was planned
    assert on_return == before
    assert not changes
    assert set(thresholds) == {before}


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


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_of_fork_is_refused_and_ends(tmp_path: Path) -> None:
    """If this fails, what is forked from a training that saves, such as a loader's worker, hangs or ends a save."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def objects_of_this_process(uri: str) -> Iterator[object]:
    manager = cloudckpt.CheckpointManager(uri)
    handle = manager.save(1, STATE)
    assert isinstance(handle, cloudckpt.AsyncSave)
    yield from (manager, handle, handle.staged, handle.committed, handle._cancellation, cloudckpt.PinnedStager())
    manager.close()
    with cloudckpt.on_sigterm() as preemption:
        yield preemption


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy, copy.copy])
def test_copy_of_a_process_bound_object_is_refused(tmp_path: Path, how: Callable[[object], object]) -> None:
    """If this fails, an EMA of a wrapper or a spawned worker fails with an error about a lock that nobody knows."""
    for value in objects_of_this_process(os.fspath(tmp_path)):
        with pytest.raises(TypeError, match=f"^{type(value).__name__} cannot be pickled or copied") as caught:
            how({"trainer": [value]} if how is not copy.copy else value)
        assert "Make one in each process" in str(caught.value)


@pytest.mark.parametrize("how", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_writers_and_readers_can_be_copied(tmp_path: Path, how: Callable[[Any], Any]) -> None:
    """If this fails, a trainer that hands its writer to a spawned process no longer starts."""
    writer = how(cloudckpt.ObjectStoreWriter(tmp_path / "c"))
    cloudckpt.save({"w": torch.ones(2)}, storage_writer=writer)
    cloudckpt.save({"w": torch.ones(2)}, tmp_path / "d", storage_writer=how(writer))
    state = {"w": torch.zeros(2)}
    cloudckpt.load(state, storage_reader=how(cloudckpt.ObjectStoreReader(tmp_path / "d")))
    assert bool((state["w"] == 1).all())
