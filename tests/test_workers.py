"""Threads for store calls."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from cloudckpt._workers import Workers, each_done

_TIMEOUT_S = 60


WAIT_S = 60.0


def test_every_item_is_done_and_given_back_once():
    """A lost item would leave a tensor unfilled; a second one would finish it twice."""
    done = each_done(range(100), lambda _: None, num_threads=4, name="t", on_failure=lambda: None)
    assert sorted(done) == list(range(100))


def test_tasks_run_in_no_more_threads_than_allowed_and_carry_the_name():
    """More threads than connections would only wait for each other; unnamed ones cannot be told apart in a profile."""
    names = set()
    with Workers(3, name="cloudckpt-test") as workers:
        for _ in range(50):
            workers.submit(lambda: names.add(threading.current_thread().name))
    assert names <= {"cloudckpt-test-0", "cloudckpt-test-1", "cloudckpt-test-2"}


def test_the_first_failure_stops_what_has_not_begun_and_unblocks_what_waits():
    """A failed read must end a load at once, not after every other range was fetched or has timed out."""
    released = threading.Event()
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise ValueError("broken")
        assert released.wait(_TIMEOUT_S)  # as a call that waits for its next try

    with pytest.raises(ValueError, match="broken"):
        list(each_done(range(50), work, num_threads=2, name="t", on_failure=released.set))
    assert len(begun) < 50


def test_closing_the_iterator_early_ends_the_threads():
    """A planner that raises while items are finished must not leave threads writing into tensors."""
    before = set(threading.enumerate())
    done = each_done(range(100), lambda _: None, num_threads=4, name="t", on_failure=lambda: None)
    with contextlib.closing(done):
        next(done)
    assert set(threading.enumerate()) <= before


class Gate:
    """Tasks that say when they run, and wait to be let through."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_let_through = 0
        self.num_begun = 0

    def task(self) -> None:
        with self._changed:
            self.num_begun += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._num_let_through > 0, _TIMEOUT_S)
            self._num_let_through -= 1

    def let_through(self, number: int) -> None:
        with self._changed:
            self._num_let_through += number
            self._changed.notify_all()

    def wait_for(self, num_begun: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_begun >= num_begun, _TIMEOUT_S)


def test_a_width_that_grows_is_followed_when_a_task_ends():
    """A transfer that finds that more connections pay would go on with as few as it began with."""
    gate, width = Gate(), [1]
    with Workers(lambda: width[0], name="t") as workers:
        for _ in range(10):
            workers.submit(gate.task)
        gate.wait_for(1)
        width[0] = 4
        gate.let_through(1)
        gate.wait_for(5)  # the one that ended, and four at once
        gate.let_through(9)
    assert gate.num_begun == 10


def test_a_width_that_shrinks_is_followed_and_everything_is_still_done():
    """A store that asks to slow down would be asked by as many connections as before, or a task would be lost."""
    gate, width = Gate(), [4]
    with Workers(lambda: width[0], name="t") as workers:
        for _ in range(10):
            workers.submit(gate.task)
        gate.wait_for(4)
        width[0] = 1
        for number in range(1, 10):
            gate.let_through(1)
            gate.wait_for(max(4, number + 1))
            assert gate.num_begun == max(4, number + 1)
        gate.let_through(1)
    assert gate.num_begun == 10


def test_submitting_waits_until_there_is_room():
    """What is prepared for the network would pile up in memory while the network is slow."""
    gate, submitted = Gate(), []
    with Workers(2, name="t") as workers:

        def submit() -> None:
            for number in range(8):
                workers.submit(gate.task, most_for_each=2)
                submitted.append(number)

        thread = threading.Thread(target=submit)
        thread.start()
        gate.wait_for(2)
        for number in range(1, 5):
            assert len(submitted) <= 3 + number
            gate.let_through(1)
            gate.wait_for(2 + number)
        gate.let_through(4)
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive()
    assert submitted == list(range(8))


def test_somebody_watches_while_there_is_work_and_nobody_afterwards():
    """Requests that stall would not be noticed, or a thread would be left for each save."""
    gate, watched = Gate(), threading.Event()
    with Workers(2, name="t", watch=watched.set) as workers:
        workers.submit(gate.task)
        workers.submit(gate.task)
        assert watched.wait(_TIMEOUT_S)
        gate.let_through(2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("t-")]


@pytest.mark.parametrize("how", ["cloudckpt.async_save(sd, uri)", "dcp.async_save(sd, storage_writer=W(uri))"])
@pytest.mark.slow
def test_a_background_save_outlives_the_end_of_the_script(tmp_path, how):
    """A thread pool of the standard library refuses work at exit, so the last checkpoint of a script would be lost."""
    script = f"""
import torch, warnings, cloudckpt, torch.distributed.checkpoint as dcp
from cloudckpt import ObjectStoreWriter as W
warnings.filterwarnings("ignore")
uri = {str(tmp_path / "c")!r}
sd = {{f"w{{i}}": torch.full((1 << 20,), float(i)) for i in range(8)}}
{how}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=_TIMEOUT_S)
    assert (tmp_path / "c" / "manifest.json").exists()


def test_an_interrupted_join_leaves_no_watcher(monkeypatch):
    """If this fails, a program that was interrupted twice never ends."""
    released = threading.Event()
    workers = Workers(2, name="interrupted", watch=lambda: None)
    for _ in range(2):
        workers.submit(lambda: released.wait(WAIT_S))

    def interrupted(_is_true, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers._has_left, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.join()
    released.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("interrupted-")]:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def _waits_until(released, workers):
    """That a join returns once `released` is set, and no sooner."""
    joining = threading.Thread(target=workers.join)
    joining.start()
    joining.join(0.2)
    assert joining.is_alive(), "what runs still has not been waited for"
    released.set()
    joining.join(WAIT_S)
    assert not joining.is_alive()


def test_after_an_interrupted_join_the_next_one_waits(monkeypatch):
    """If this fails, who is interrupted removes what a thread still writes, and gives memory back that it still reads:
    `Thread.join` forgets a thread when a signal comes.
    """
    released, joins = threading.Event(), threading.Event()
    workers = Workers(1, name="interrupted")
    workers.submit(lambda: released.wait(WAIT_S))
    wait_for = workers._has_left.wait_for

    def watched(is_true, timeout=None):
        joins.set()
        return wait_for(is_true, timeout)

    monkeypatch.setattr(workers._has_left, "wait_for", watched)

    def interrupt():
        assert joins.wait(WAIT_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # which this wakes

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        workers.join()
    interrupter.join(WAIT_S)
    _waits_until(released, workers)


def test_a_thread_whose_start_was_interrupted_is_waited_for(monkeypatch):
    """If this fails, an object is written after an interrupted save has removed what it wrote."""
    released, done = threading.Event(), []
    workers = Workers(1, name="starting")
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name.startswith("starting-"):
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.submit(lambda: done.append(released.wait(WAIT_S)))
    _waits_until(released, workers)
    assert done == [True]


def test_a_thread_that_never_began_is_not_waited_for(monkeypatch):
    """If this fails, an interrupt at the wrong instant makes a program that never ends."""
    monkeypatch.setattr("cloudckpt._workers._START_S", 0.05)
    workers = Workers(1, name="never")

    def interrupted(_thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.submit(lambda: None)
    joining = threading.Thread(target=workers.join, daemon=True)
    joining.start()
    joining.join(WAIT_S)
    assert not joining.is_alive()
