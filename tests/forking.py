"""Forks while a save is in flight: one of the cases of `tests.test_forks`, in a process of its own.

Not in pytest's, which holds locks of its own while other threads log, and which a child of fork would find held.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import cloudckpt
from cloudckpt import AsyncSave, CheckpointManager, Options

# On a machine that may be busy. What hangs here hangs for ever.
WAIT_S = 150
CHILD_S = 100

warnings.simplefilter("ignore")
torch.set_num_threads(1)  # those of OpenMP do not survive a fork


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50_000,), value), "step": int(value)}


class Gate:
    """The save stops at an event until it is let go on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reached, self.opened = threading.Event(), threading.Event()
        self._pid = os.getpid()

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.name == self._name and os.getpid() == self._pid:
            self.reached.set()
            assert self.opened.wait(WAIT_S)


def child(body: Callable[[], None]) -> None:
    """Run `body` in a child, which has to end well; `SystemExit` leaves it as it would leave a program."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        try:
            body()
        except SystemExit:
            raise
        except BaseException:  # noqa: BLE001  # it ends here
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"the child ended with {code}"


@contextlib.contextmanager
def in_flight(root: Path, *, at: str = "save.part_uploaded") -> Iterator[tuple[CheckpointManager, AsyncSave]]:
    """A save that has come to an event. At the end it goes on, and must be what it would have been."""
    gate = Gate(at)
    options = Options(on_event=gate, timeout_s=60)
    manager = CheckpointManager(root, keep_last=1, options=options)
    handle = manager.save(1, state(1.0))
    assert isinstance(handle, AsyncSave)
    assert gate.reached.wait(WAIT_S)
    try:
        yield manager, handle
    finally:
        gate.opened.set()
    manager.close(WAIT_S)
    handle.result(WAIT_S)
    cloudckpt.verify(manager.uri_of(1))
    loaded = state(0.0)
    cloudckpt.load(loaded, manager.uri_of(1))
    assert torch.equal(loaded["w"], state(1.0)["w"])
    cloudckpt.close(WAIT_S)


def exits(root: Path) -> None:
    """A child that ends as a script does, with what Python does at its exit."""
    with in_flight(root):
        child(lambda: sys.exit(0))


def loaders(root: Path) -> None:
    """Workers of a loader, forked while a save is in flight, that only end."""
    with in_flight(root) as (_, handle):
        loader = DataLoader(list(range(32)), batch_size=4, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type, var-annotated]
        iterator = iter(loader)
        workers = list(iterator._workers)  # type: ignore[attr-defined]
        assert sum(len(batch) for batch in iterator) == 32
        del iterator
        for worker in workers:
            worker.join(CHILD_S)
            assert worker.exitcode == 0, worker.exitcode
        assert not handle.done()


def calls(root: Path) -> None:
    """A child that calls cloudckpt, with objects of its parent and with its own."""
    writer, reader = cloudckpt.ObjectStoreWriter(root / "one"), cloudckpt.ObjectStoreReader(root / "one")
    cloudckpt.save(state(1.0), storage_writer=writer)
    cloudckpt.load(state(0.0), storage_reader=reader)
    one = str(root / "one")
    with in_flight(root) as (manager, handle):
        before = sorted(root.rglob("*"))
        refused: tuple[Callable[[], object], ...] = (
            lambda: cloudckpt.save(state(2.0), root / "child"),
            lambda: cloudckpt.save(state(2.0), root / "child", no_dist=True),
            lambda: cloudckpt.save(state(2.0), root / "child", storage_writer=writer),
            lambda: cloudckpt.async_save(state(2.0), root / "child"),
            lambda: cloudckpt.load(state(0.0), one),
            lambda: cloudckpt.load(state(0.0), storage_reader=reader),
            lambda: cloudckpt.latest(root),
            lambda: cloudckpt.list_checkpoints(root),
            lambda: cloudckpt.verify(one),
            lambda: cloudckpt.gc(root),
            lambda: cloudckpt.delete(one),
            lambda: cloudckpt.copy(one, root / "copy"),
            cloudckpt.close,
            lambda: manager.save(2, state(2.0)),
            lambda: manager.restore(state(0.0)),
            manager.latest,
            manager.wait,
            manager.close,
            handle.result,
            handle.exception,
            handle.cancel,
            lambda: CheckpointManager(root / "own").save(1, state(1.0)),
        )

        def body() -> None:
            for call in refused:
                with pytest.raises(cloudckpt.errors.ForkedProcessError, match="spawn"):
                    call()

        child(body)
        assert sorted(root.rglob("*")) == before, "the child has touched what its parent is about"


CASES: dict[str, Callable[[Path, str], None]] = {case.__name__: case for case in (exits, loaders, calls)}

if __name__ == "__main__":
    # Says where it hangs, also in a child, which a thread that watches would not be in.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(WAIT_S + 30)
    CASES[sys.argv[1]](Path(sys.argv[2]))
    print("ended", os.getpid())
