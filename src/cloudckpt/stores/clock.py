"""Compare this machine's clock with the times that stores and other machines write."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

_log = logging.getLogger("cloudckpt")

_MOST_APART_S = 3600.0
_lock = threading.Lock()
_warned: set[str] = set()
_ahead_s = 0.0
"""Seconds by which this machine's clock is ahead of that of a store, if it is more than an hour."""


def compare_with_store(date: str | None, host: str) -> None:
    """Compare this machine's clock with the header ``Date`` of an answer of `host`, and warn if it is off."""
    global _ahead_s  # noqa: PLW0603  # the clock of this machine
    try:
        ahead_s = _own_s() - parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return
    if ahead_s > _MOST_APART_S:
        _ahead_s = max(_ahead_s, ahead_s)
    warn_of_clock(ahead_s, f"that of {host}", whose="store")


def warn_of_clock(ahead_s: float, of: str, *, whose: str) -> None:
    """Warn, once per process and kind of clock, if this machine's clock is over an hour off.

    Args:
        ahead_s: Seconds by which this machine's clock is ahead; negative if it is behind.
        of: The time that it was compared with, in words.
        whose: The kind of the other clock. One warning for each.

    """
    if abs(ahead_s) <= _MOST_APART_S:
        return
    with _lock:
        if whose in _warned:
            return
        _warned.add(whose)
    _log.warning(
        "this machine's clock is %.1f hours %s %s. One of the two is wrong: set it (NTP). Checkpoints keep the order "
        "of their commits, but show wrong times, and gc can take a running save for dead",
        abs(ahead_s) / 3600,
        "ahead of" if ahead_s > 0 else "behind",
        of,
    )


def now() -> datetime:
    """Return the time by this machine's clock; by the store's, if this one is over an hour ahead of it.

    For ages of what a store holds: a clock that is ahead makes running saves look dead.
    """
    return datetime.fromtimestamp(_own_s() - _ahead_s, timezone.utc)


def _own_s() -> float:
    return time.time()
