"""Refuse to work in a process that was forked from one that has used cloudckpt.

Such a process has none of its parent's threads, shares the sockets of its clients, and may find locks held by threads
that it lacks. Code that only waits for work of the parent, or frees what belongs to it, asks `is_forked` and does
nothing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from cloudckpt.errors import ForkedProcessError

_user_processes: set[int] = set()


def refuse_in_fork() -> None:
    """Raise `ForkedProcessError` if `is_forked`; otherwise note that this process uses cloudckpt.

    Everything that opens a store, makes a request, waits for a background save or waits for other ranks calls this.
    """
    if is_forked():
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from a process that has used cloudckpt, so it cannot use cloudckpt "
            'itself. Start it with the "spawn" or "forkserver" method of multiprocessing (in a DataLoader: '
            'multiprocessing_context="forkserver"), or fork before the first call of cloudckpt'
        )
    _user_processes.add(os.getpid())


def is_forked() -> bool:
    """True in a process that was forked from one that has used cloudckpt."""
    return bool(_user_processes) and os.getpid() not in _user_processes


class Inherited(Protocol):
    """What a child gets a copy of."""

    def after_fork(self) -> None:
        """In the child, before anything else runs there. It must take no lock, and touch nothing outside."""


_never_freed: list[object] = []
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def in_child(call: Callable[[], None]) -> Callable[[], None]:
    """Have `call` called in every child, before anything else runs there: for what belongs to the process."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
        os.register_at_fork(after_in_child=call)
    return call


def watch(one: Inherited) -> None:
    """Have `one` told in every child that is forked while it lives: for what belongs to an object."""
    _inherited.add(one)


def never_free(one: object) -> None:
    """Keep `one` as long as a child runs: the destructor of a gloo group waits for threads that a child lacks."""
    _never_freed.append(one)


@in_child
def _tell_all() -> None:
    with contextlib.ExitStack() as stack:  # what one of them raises keeps none from being told
        for one in list(_inherited):
            stack.callback(one.after_fork)


def leave(future: Future[Any], why: Callable[[], BaseException]) -> None:
    """In a child: what `future` holds if it is done, or else an error; nobody is told of it who waited in the parent.

    None of its own methods can be asked before, for its lock may be held by a thread that is not here.
    """
    is_done = future._state == "FINISHED"  # noqa: SLF001  # as it says; the names are those of all Pythons since 3.2
    result, error = future._result, future._exception  # noqa: SLF001  # as above
    type(future).__init__(future)  # with the lock of its own kind
    future.set_running_or_notify_cancel()
    if not is_done:
        error = why()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
