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

import torch
import torch.distributed as dist
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
def in_flight(
    root: Path, mode: str, *, at: str = "save.part_uploaded"
) -> Iterator[tuple[CheckpointManager, AsyncSave]]:
    """A save that has come to an event. At the end it goes on, and must be what it would have been."""
    gate = Gate(at)
    options = Options(on_event=gate, async_mode=mode, timeout_s=60)  # type: ignore[arg-type]
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


def waits(root: Path, mode: str) -> None:
    """Whatever a child asks about its parent's save is answered at once."""
    with in_flight(root, mode) as (manager, handle):
        before = sorted(root.rglob("*"))

        def body() -> None:
            assert manager.in_flight is None
            manager.wait()
            manager.close()
            assert handle.done()
            assert not handle.cancel()
            assert not handle.cancelled()
            assert isinstance(handle.exception(), cloudckpt.errors.SaveInFlightError)
            assert str(os.getppid()) in str(handle.exception())
            assert handle.progress.phase
            handle.staged.exception()
            assert handle.report is None
            assert manager.latest() is None
            cloudckpt.close()

        child(body)
        assert sorted(root.rglob("*")) == before, "the child has touched what its parent is about"


def commits(root: Path, mode: str) -> None:
    """A child that is forked while the commit is made."""
    with in_flight(root, mode, at="save.committing") as (_, handle):

        def body() -> None:
            _refused(cloudckpt.errors.SaveInFlightError, handle.result)

        child(body)


def _refused(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it did not raise")


def exits(root: Path, mode: str) -> None:
    """A child that ends as a script does: through its `with`, and with what Python does at its exit."""
    with in_flight(root, mode) as (manager, _):

        def body() -> None:
            with manager:
                sys.exit(0)

        child(body)


def saves(root: Path, mode: str) -> None:
    """A child that saves itself, with its parent's manager and with one of its own, and loads."""
    with in_flight(root, mode) as (manager, _):

        def body() -> None:
            manager.save(2, state(2.0))
            manager.close()
            other = CheckpointManager(root / "other", keep_last=1, options=Options(async_mode=mode))  # type: ignore[arg-type]
            for step in (3, 4):
                other.save(step, state(float(step)))
            other.close()
            assert [info.step for info in other.steps()] == [4]
            loaded = state(0.0)
            found = other.restore(loaded)
            assert found is not None
            assert found.step == loaded["step"] == 4
            sys.exit(0)

        child(body)
        cloudckpt.verify(manager.uri_of(2))


def loaders(root: Path, mode: str) -> None:
    """What training really does: workers of a loader, forked while a save is in flight, that only end."""
    with in_flight(root, mode) as (_, handle):
        loader = DataLoader(list(range(32)), batch_size=4, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type, var-annotated]
        iterator = iter(loader)
        workers = list(iterator._workers)  # type: ignore[attr-defined]
        assert sum(len(batch) for batch in iterator) == 32
        del iterator
        for worker in workers:
            worker.join(CHILD_S)
            assert worker.exitcode == 0, worker.exitcode
        assert not handle.done()


def retains(root: Path, mode: str) -> None:
    """A child that is forked while an old checkpoint is being removed."""
    gate = Gate("retention.removed")
    manager = CheckpointManager(root, keep_last=1, options=Options(on_event=gate, async_mode=mode))  # type: ignore[arg-type]
    for step in (1, 2):
        made = manager.save(step, state(float(step)))
        assert isinstance(made, AsyncSave)
        made.result(WAIT_S)
    assert gate.reached.wait(WAIT_S)

    def body() -> None:
        manager.wait()
        loaded = state(0.0)
        found = manager.restore(loaded)
        assert found is not None
        assert found.step == 2
        manager.close()
        sys.exit(0)

    child(body)
    gate.opened.set()
    manager.close(WAIT_S)
    assert [info.step for info in manager.steps()] == [2]


def removes(root: Path, mode: str) -> None:
    """A child that is forked by a callback in the midst of removal: it leaves the rest to its parent."""
    parent, forked, removed = os.getpid(), list[int](), root.with_name("removed")

    def fork(event: cloudckpt.Event) -> None:
        if event.name == "retention.removed":
            with removed.open("a") as file:
                print(os.getpid() == parent, event.uri, file=file)
            if not forked:
                forked.append(os.fork())
                signal.alarm(0 if forked[0] else CHILD_S)

    for step in range(5):
        CheckpointManager(root, async_=False).save(step, state(float(step)))
    manager = CheckpointManager(root, keep_last=1, async_=False, options=Options(on_event=fork))
    manager.save(5, state(5.0))
    manager.close(WAIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 0
    assert [info.step for info in manager.steps()] == [5]
    assert "False" not in removed.read_text(), "the child has removed, too"


def unwinds(root: Path, mode: str) -> None:
    """A child that is forked by a callback in the middle of a save, and leaves that save by an exception."""
    forked: list[int] = []

    def fork(event: cloudckpt.Event) -> None:
        if event.name == "save.committing" and not forked:
            forked.append(os.fork())
            if not forked[0]:
                signal.alarm(CHILD_S)
                sys.exit(7)

    manager = CheckpointManager(root, async_=False, options=Options(on_event=fork))
    manager.save(1, state(1.0))
    assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 7
    cloudckpt.verify(manager.uri_of(1))


def ranks(root: Path, mode: str) -> None:
    """A child of a rank is no rank: it is told so, and saves alone if it says that it does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with in_flight(root, mode):

        def body() -> None:
            for call in (
                lambda: cloudckpt.save(state(2.0), root / "child"),
                lambda: cloudckpt.async_save(state(2.0), root / "child").result(),
                lambda: cloudckpt.load(state(2.0), root / "child"),
                lambda: CheckpointManager(root).restore(state(0.0)),
            ):
                assert "no_dist=True" in _refused(cloudckpt.errors.RankLostError, call)
            cloudckpt.save(state(3.0), root / "child", no_dist=True)
            cloudckpt.async_save(state(4.0), root / "other", no_dist=True).result()
            cloudckpt.load(state(0.0), root / "child", no_dist=True)

        child(body)
    dist.destroy_process_group()


def reuses(root: Path, mode: str) -> None:
    """A child that goes on to use its parent's writer, reader, stager and manager."""
    writer, reader = cloudckpt.ObjectStoreWriter(root / "one"), cloudckpt.ObjectStoreReader(root / "one")
    cloudckpt.save(state(1.0), storage_writer=writer)
    cloudckpt.load(state(0.0), storage_reader=reader)
    stager = cloudckpt.PinnedStager(shared=True)
    stager.begin(state(1.0)).completed.result(WAIT_S)

    def body() -> None:
        cloudckpt.load(state(0.0), storage_reader=reader)
        cloudckpt.save(state(2.0), root / "two", storage_writer=writer)
        stager.synchronize_staging()
        assert stager.stage(state(2.0))["step"] == 2  # type: ignore[index]
        stager.close()
        cloudckpt.verify(str(root / "two"))

    child(body)
    stager.close()


def destroys(root: Path, mode: str) -> None:
    """A child whose parent has destroyed the process group that it saved with, which cloudckpt may have held last."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cloudckpt.async_save(state(1.0), root / "one", options=Options(async_mode=mode)).result(WAIT_S)  # type: ignore[arg-type]
    dist.destroy_process_group()

    def body() -> None:
        child(lambda: None)  # a grandchild frees no more than a child

    child(body)


CASES: dict[str, Callable[[Path, str], None]] = {
    case.__name__: case
    for case in (waits, commits, exits, saves, loaders, retains, removes, unwinds, ranks, reuses, destroys)
}

if __name__ == "__main__":
    # Says where it hangs, also in a child, which a thread that watches would not be in.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(WAIT_S + 30)
    CASES[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
    print("ended", os.getpid())
