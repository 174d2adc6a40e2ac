"""Threads for store calls."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest

from cloudckpt._workers import WorkQueue, run_as_completed

WAIT_S = 60.0


def test_the_first_failure_stops_what_has_not_begun_and_unblocks_what_waits():
    """A failed read must end a load at once, not after every other range was fetched or has timed out."""
    released = threading.Event()
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise ValueError("broken")
        assert released.wait(WAIT_S)  # as a call that waits for its next try

    with pytest.raises(ValueError, match="broken"):
        list(run_as_completed(range(50), work, num_threads=2, name="t", on_failure=released.set))
    assert len(begun) < 50


def test_closing_the_iterator_early_ends_the_threads():
    """A planner that raises while items are finished must not leave threads writing into tensors."""
    before = set(threading.enumerate())
    done = run_as_completed(range(100), lambda _: None, num_threads=4, name="t", on_failure=lambda: None)
    with contextlib.closing(done):
        next(done)
    assert set(threading.enumerate()) <= before


class Gate:
    """Tasks that count themselves when they run, and wait to be let through."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_let_through = 0
        self.num_begun = 0

    def task(self) -> None:
        with self._changed:
            self.num_begun += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._num_let_through > 0, WAIT_S)
            self._num_let_through -= 1

    def let_through(self, number: int) -> None:
        with self._changed:
            self._num_let_through += number
            self._changed.notify_all()

    def wait_for(self, num_begun: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_begun >= num_begun, WAIT_S)


def test_a_width_that_shrinks_and_grows_is_followed_and_everything_is_done():
    """A store that asks to slow down would be asked by as many connections as before, or a task would be lost."""
    gate, width = Gate(), [4]
    with WorkQueue(lambda: width[0], name="t") as tasks:
        for _ in range(20):
            tasks.submit(gate.task)
        gate.wait_for(4)
        width[0] = 1
        for number in range(1, 10):
            gate.let_through(1)
            gate.wait_for(max(4, number + 1))
            assert gate.num_begun == max(4, number + 1)
        width[0] = 3
        gate.let_through(1)
        gate.wait_for(13)  # ten have ended, and three run at once
        gate.let_through(10)
    assert gate.num_begun == 20


def test_submitting_waits_until_there_is_room():
    """If this fails, prepared work piles up in memory while the network is slow."""
    gate, submitted = Gate(), []
    with WorkQueue(lambda: 2, name="t", max_waiting=2) as tasks:

        def submit() -> None:
            for number in range(8):
                tasks.submit(gate.task)
                submitted.append(number)

        thread = threading.Thread(target=submit)
        thread.start()
        gate.wait_for(2)
        for number in range(1, 5):
            assert len(submitted) <= 3 + number
            gate.let_through(1)
            gate.wait_for(2 + number)
        gate.let_through(4)
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert submitted == list(range(8))


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit("x"), KeyboardInterrupt("x")])
def test_a_task_that_raises_ends_no_thread_and_is_heard_of(error: BaseException):
    """If this fails, later tasks wait for a thread that is gone, and nobody learns why."""
    done = []

    def fail() -> None:
        raise error

    tasks = WorkQueue(lambda: 1, name="t")
    with pytest.raises(type(error), match="x"), tasks:  # noqa: PT012  # the end of the context raises
        tasks.submit(fail)
        tasks.submit(lambda: done.append(1))
    assert done == [1]


def test_a_task_knows_that_the_interpreter_waits_for_it():
    """A copy beside training must not stay slow after the program has ended, whose last thread it is."""
    program = """
import threading
from cloudckpt._workers import RepeatedTask

def run():
    print(task.is_awaited, flush=True)
    has_looked.set()
    threading.main_thread().join()
    print(task.is_awaited, flush=True)

has_looked = threading.Event()
task = RepeatedTask(run, name="t")
task.request()
has_looked.wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert ended.stdout.split() == ["False", "True"], ended.stderr
