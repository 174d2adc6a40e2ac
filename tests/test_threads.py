"""Conditions, futures and threads that interrupts come to."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import linecache
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from cloudckpt import _threads
from cloudckpt._threads import Condition, Event, Future, Thread

WAIT_S = 60.0
PLACES = {threading.__file__, _threads.__file__, concurrent.futures._base.__file__}


def _interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Whether `call` was, before it came to its end, by an interrupt at that step of it."""
    left, is_interrupted = number, False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, is_interrupted
        if frame.f_code.co_filename not in PLACES or event == "exception" or is_interrupted:
            return trace
        if event == "line" and _is_end_of_with(frame):
            return trace
        left -= 1
        if left < 0:
            is_interrupted = True
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert is_interrupted
    finally:
        sys.settrace(before)
    return is_interrupted


def _is_end_of_with(frame: FrameType) -> bool:
    """Where a block ends there is a line once more, but Python looks for signals no more before it leaves the lock."""
    code, line = frame.f_code, frame.f_lineno
    first = min(begin for begin, _, number in code.co_lines() if number == line)
    return frame.f_lasti > first and linecache.getline(code.co_filename, line).lstrip().startswith("with ")


def test_an_interrupt_at_any_step_keeps_no_lock() -> None:
    """If this fails, Ctrl-C at the wrong instant makes a program that never ends, or lets two threads at one state."""
    for number in itertools.count():
        condition = Condition()

        def use(condition: Condition = condition) -> None:
            with condition:
                condition.wait_for(lambda: False, 0.001)
                condition.notify_all()

        is_interrupted = _interrupted_at(number, use)
        taken: list[bool] = []

        def take(condition: Condition = condition, taken: list[bool] = taken) -> None:
            taken.append(condition.acquire(timeout=WAIT_S))

        other = threading.Thread(target=take)
        other.start()
        other.join(2 * WAIT_S)
        assert taken == [True], f"after an interrupt at step {number}"
        if not is_interrupted:
            break
    assert number > 10  # there are such steps


@pytest.mark.parametrize("ask", ["wait", "result", "exception", "done", "add_done_callback"])
def test_an_interrupt_at_any_step_keeps_no_future(ask: str) -> None:
    """If this fails, Ctrl-C while a handle is waited for makes its save, and the interpreter's exit, hang for ever."""
    for number in itertools.count():
        future: Future[Any] = Future()
        arguments = {"done": [], "add_done_callback": [repr]}.get(ask, [0.001])

        def use(future: Any = future, arguments: list[Any] = arguments) -> None:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                getattr(future, ask)(*arguments)

        is_interrupted = _interrupted_at(number, use)
        other = threading.Thread(target=future.set_result, args=("held",), daemon=True)
        other.start()
        other.join(WAIT_S)
        assert not other.is_alive(), f"after an interrupt at step {number}"
        assert future.wait(WAIT_S)
        assert future.result() == "held"
        if not is_interrupted:
            break
    assert number > 2


def test_an_interrupt_at_any_step_leaves_a_future_that_can_be_waited_for() -> None:
    """If this fails, who was interrupted waits for ever in the next call, though the save has ended."""
    for number in itertools.count():
        future: Future[str] = Future()
        is_interrupted = _interrupted_at(number, lambda future=future: future.set_result("held"))  # type: ignore[misc]
        if future.done():
            assert future.result(WAIT_S) == "held"
        else:
            future.set_result("held")
        assert future.wait(WAIT_S)
        if not is_interrupted:
            break
    assert number > 5


def test_an_interrupt_at_any_step_leaves_a_thread_that_runs_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, Ctrl-C while a save begins leaves a thread that never runs, for which the interpreter waits."""
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start, started = getattr(threading, name), list[bool]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        started.append(True)
        return start(*args, **kwargs)

    monkeypatch.setattr(threading, name, noted)
    for number in itertools.count():
        started.clear()
        has_run = threading.Event()
        thread = Thread(has_run.set, name="begun", daemon=True)
        is_interrupted = _interrupted_at(number, thread.start)
        if started:
            assert has_run.wait(WAIT_S), f"it hangs after an interrupt at step {number}"
            thread.join(WAIT_S)
            assert not thread.is_alive()
        else:
            threading._limbo.pop(thread, None)  # type: ignore[attr-defined]  # Python's own list of all threads
        if not is_interrupted:
            assert started
            break
    assert number > 5


def test_an_interrupt_at_any_step_keeps_no_event() -> None:
    """If this fails, Ctrl-C at the wrong instant makes what is told to stop go on, or hang."""
    for number in itertools.count():
        event = Event()

        def use(event: Event = event) -> None:
            event.wait(0.001)
            event.set()
            event.wait()

        is_interrupted = _interrupted_at(number, use)
        other = threading.Thread(target=event.set, daemon=True)
        other.start()
        other.join(WAIT_S)
        assert not other.is_alive(), f"after an interrupt at step {number}"
        if not is_interrupted:
            break
    assert number > 5


def test_a_condition_is_entered_and_left_without_python() -> None:
    """If this fails, there are steps in between again, at which an interrupt comes."""
    condition = Condition()
    called: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        with condition:
            pass
    finally:
        sys.setprofile(before)
    assert called == []


def test_after_an_interrupted_join_the_next_one_waits() -> None:
    """If this fails, who is interrupted gives memory back that a thread still reads, or takes a save for ended."""
    released, joins, has_come = threading.Event(), threading.Event(), threading.Event()
    thread = Thread(released.wait, WAIT_S, name="joined", daemon=False)
    thread.start()

    def interrupt() -> None:
        assert joins.wait(WAIT_S)
        main = threading.main_thread().ident
        assert main is not None
        while not has_come.is_set():  # one that comes right before the system call does not end that
            signal.pthread_kill(main, signal.SIGUSR1)
            has_come.wait(0.01)

    def come(_number: int, _frame: object) -> None:
        if joins.is_set() and not has_come.is_set():
            has_come.set()
            raise KeyboardInterrupt

    def join() -> None:
        joins.set()
        thread.join()

    interrupter = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGUSR1, come)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            join()
        interrupter.join(WAIT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert thread.is_alive()
    thread.join(0.05)
    assert thread.is_alive(), "what runs still has been taken for ended"
    released.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_child_waits_for_no_thread_of_its_parent() -> None:
    """If this fails, what is forked from a training hangs at its end."""
    script = """
import os, signal, threading
from cloudckpt._threads import Thread
released = threading.Event()
thread = Thread(released.wait, name="parents", daemon=True)
thread.start()
pid = os.fork()
if not pid:
    signal.alarm(60)
    thread.join()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
released.set()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=2 * WAIT_S)


def test_a_child_that_is_forked_in_a_thread_ends_with_it() -> None:
    """If this fails, what a callback forks off aborts with a core dump when it comes to its end (Python 3.11, 3.12)."""
    script = """
import ctypes, os, signal
from cloudckpt._threads import Thread
called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
ctypes.CDLL(None).__cxa_atexit(called, None, None)  # as libraries in C++ do
def fork():
    pid.append(os.fork())
    if not pid[0]:
        signal.alarm(60)
pid = []
thread = Thread(fork, name="forks", daemon=False)
thread.start()
thread.join()
os._exit(os.waitpid(pid[0], 0)[1] != 0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=2 * WAIT_S)
