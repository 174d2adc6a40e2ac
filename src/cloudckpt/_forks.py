"""What a child of fork has of what its parent was about: nothing of it goes on there, and nobody waits for it there.

A child has one thread, the one that forked. Whatever its parent's other threads were to do is never done in it, and a
lock that one of them held is held in it for ever. This is the one place that hears of forks; who keeps such things
says here what becomes of them. See ``docs/design/022-retention.md`` and ``docs/design/017-background-saves.md``.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol


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
