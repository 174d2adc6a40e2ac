"""Conditions, futures and threads that are still what they were after an interrupt: Python's own are not.

An interrupt (Ctrl-C, or a signal's handler that raises) comes between any two steps of what the main thread does in
Python. These are for what the main thread waits for, or takes: the shared state of a save or load, and its threads.
"""

from __future__ import annotations

import concurrent.futures
import operator
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Condition(threading.Condition):
    """Whoever is interrupted while entering, leaving or waiting holds its lock in the ``with`` block alone.

    Python's own ``__enter__`` and ``__exit__`` are functions in Python: after an interrupt in one of them, nobody ever
    releases the lock. Here, ``with`` calls those of the lock itself, as it does for a lock. Its lock is an ``RLock``,
    which nobody can release for another.
    """

    __enter__ = property(operator.attrgetter("_lock.__enter__"))  # looked up before it is called
    __exit__ = property(operator.attrgetter("_lock.__exit__"))  # as above

    def wait(self, timeout: float | None = None) -> bool:
        """As Python's."""
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]  # else the block would release what it does not hold
                self.acquire()
            raise


class Event(threading.Event):
    """Whose lock nobody keeps who is interrupted while setting it, or waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class Future(concurrent.futures.Future[_T]):
    """Whose lock nobody keeps who is interrupted while asking it, setting it, or waiting for it by its own methods.

    ``concurrent.futures.wait`` takes the locks of its futures in Python, one after the other: who is interrupted there
    keeps them, and nobody can ever set the futures. Use `wait`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is done, and no longer than `timeout` seconds. Whether it is."""
        with self._condition:
            return self._condition.wait_for(self.done, timeout)


class Thread(threading.Thread):
    """One that runs, and can be waited for, after an interrupt, too.

    An interrupted ``start`` can keep the lock without which the thread never begins, and the interpreter waits for it
    at its exit. Before Python 3.13, an interrupted ``join`` takes the thread for ended: the next one returns at once,
    and not even the interpreter waits for it.
    """

    def __init__(self, run: Callable[..., object], *args: Any, name: str, daemon: bool) -> None:
        super().__init__(target=run, args=args, name=name, daemon=daemon)
        self._started = Event()
        self._changed = Condition()
        self._has_run = False

    def run(self) -> None:
        """As Python's; but a child that was forked in here ends at its end, where it has no other thread."""
        process = os.getpid()
        try:
            super().run()
        finally:
            with self._changed:
                self._has_run = True
                self._changed.notify_all()
        if os.getpid() != process and threading.active_count() == 1:
            os._exit(
                0
            )  # it would end so anyway, but Python 3.11 and 3.12 abort where a library then asks for their lock

    def join(self, timeout: float | None = None) -> None:
        """As Python's."""
        if self.is_alive():  # it is not in a child of fork
            with self._changed:
                if not self._changed.wait_for(lambda: self._has_run, timeout):
                    return
        super().join(timeout)
