"""State of the whole process: refuse a fork, warn once, and make garbage collection rare during a call.

A process that was forked from one that has used cloudckpt lacks the parent's threads, shares the sockets of the
parent's clients, and may find locks that those threads hold. Functions that wait for the parent's work, or free the
parent's resources, do nothing if `is_forked`.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, SupportsIndex

from cloudckpt.errors import ForkedProcessError

_GC_THRESHOLD = 1_000_000
_LIBRARY_PACKAGES = frozenset({"cloudckpt", "torch", "concurrent", "contextlib", "functools", "threading"})
"""Packages and modules to whose lines no warning points."""
_users_line: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("users_line", default=None)

_user_processes: set[int] = set()
given_warnings: dict[tuple[str, str], object] = {}
"""By topic and key, each warning that this process has given. Tests replace it."""


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
    """Return True in a process that was forked from one that has used cloudckpt."""
    return bool(_user_processes) and os.getpid() not in _user_processes


def is_first_warning(topic: str, key: str) -> bool:
    """Return True at the first call in this process with this topic and key. Thread-safe."""
    mark = object()
    return given_warnings.setdefault((topic, key), mark) is mark


def note_users_line() -> None:
    """Keep the user's line that led to this call for `warn_user` in threads that run in copies of this context."""
    _users_line.set(_find_users_line())


def warn_user(text: str) -> None:
    """Give a `UserWarning` that points at the line of the user's code that led to it."""
    warnings.warn_explicit(text, UserWarning, **_find_users_line())


def _find_users_line() -> dict[str, Any]:
    frame = sys._getframe()  # noqa: SLF001  # as `warnings` does
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARY_PACKAGES:
        frame = frame.f_back
    if frame.f_back is None and (noted_line := _users_line.get()) is not None:  # the first frame of a thread
        return noted_line
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "registry": registry}


class OfThisProcess:
    """Base of objects that hold threads, locks or futures, so that no copy of them could work."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Raise ``TypeError``: pickling and copying come here."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because it holds threads and locks of this process. "
            "Make one in each process that needs it, and leave it out of what is pickled or deep-copied (such as a "
            "data set, a module, or arguments of spawned workers)"
        )


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect cyclic garbage only after a million new containers, if the main thread calls; else change nothing.

    Planning makes some twenty containers for each tensor, none of them garbage. At Python's own threshold of 700 new
    containers, a save of 20,000 small tensors takes twice the processor time, and so does a load
    (``docs/design/013-save-balance.md``). Python collects as the context ends, and traverses all containers that
    variables still hold. So use it as a decorator where a function's own variables hold many.

    The thresholds belong to the whole process. The main thread that calls this waits for a save, a load or a snapshot,
    so no training loop runs beside it. The work of a background save runs in other threads, and leaves the thresholds
    alone. Garbage of other threads stays bounded.
    """
    thresholds = gc.get_threshold()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not 0 < thresholds[0] < _GC_THRESHOLD:
        yield
        return
    gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        if gc.get_threshold()[0] == _GC_THRESHOLD:  # otherwise the user's program has set it meanwhile
            gc.set_threshold(*thresholds)
