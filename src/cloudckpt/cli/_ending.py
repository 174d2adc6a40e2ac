"""How a command ends when it is told to: first in order, then at once."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_left_if_killed: list[str] = []


@contextlib.contextmanager
def telling(left: str) -> Iterator[None]:
    """While this lasts, `left` is what an end at once leaves behind, and is said then."""
    _left_if_killed.append(left)
    try:
        yield
    finally:
        _left_if_killed.remove(left)


def listen() -> None:
    """From here on SIGTERM ends the command as Ctrl-C does: what it writes is removed, requests under way are awaited.

    Ctrl-C once more ends it at once, and says so. Does nothing in another thread than the main one, and leaves Ctrl-C
    ignored where whoever started the command has it so (``nohup``, a shell's background job).
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_sigint)
        atexit.register(_ignore_sigint)


def _on_sigint(_number: int, _frame: object) -> NoReturn:
    signal.signal(signal.SIGINT, _at_once)
    raise KeyboardInterrupt


def _ignore_sigint() -> None:
    """After all threads have ended, and before Python takes its handlers back, with which another would kill it."""
    if signal.getsignal(signal.SIGINT) in (_on_sigint, _at_once):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _on_sigterm(_number: int, _frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is _on_sigint:
        signal.signal(signal.SIGINT, _at_once)
    sys.exit(TERMINATED)


def _at_once(_number: int, _frame: object) -> NoReturn:
    """Not by an exception: nobody may wait any more, not for a request and not for a thread."""
    left = "; ".join(_left_if_killed) or "cloudckpt gc removes what may be left"
    # Not by sys.stderr: the signal may have come while that was being written to, and it would refuse.
    with contextlib.suppress(OSError):
        os.write(2, f"Interrupted again: ended without cleaning up; {left}.\n".encode())
    os._exit(INTERRUPTED)
