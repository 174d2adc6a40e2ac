"""Refuse to work in a process that was forked from one that has used cloudckpt.

Such a process has none of its parent's threads, shares the sockets of its clients, and may find locks held by threads
that it lacks. Code that only waits for work of the parent, or frees what belongs to it, asks `is_forked` and does
nothing.
"""

from __future__ import annotations

import os

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
