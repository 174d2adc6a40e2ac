"""Compare this machine's clock with the times that stores and other machines report."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from cloudckpt._this_process import is_first_warning

_log = logging.getLogger("cloudckpt")

_MAX_APART_S = 3600.0


class MachineClock:
    """The clock of this machine, and the times of other clocks that this process has seen. Tests replace `MACHINE`.

    Attributes:
        newest_ns: The latest time of a commit that this process has drawn or seen.
        ahead_s: Seconds by which this clock is ahead of the clock of each host, from the host's last answer.

    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.newest_ns = 0
        self.ahead_s: dict[str, float] = {}

    def time_ns(self) -> int:
        """Return the time of this machine since 1970."""
        return time.time_ns()


MACHINE = MachineClock()


def compare_with_store(date: str | None, age: str | None, host: str) -> None:
    """Compare this machine's clock with the time of an answer of `host`, and warn if it is off.

    `date` and `age` are headers. A cache on the way keeps the date, and gives the age of its answer.
    """
    try:
        ahead_s = MACHINE.time_ns() / 1e9 - parsedate_to_datetime(date or "").timestamp() - int(age or 0)
    except (ValueError, TypeError):
        return
    MACHINE.ahead_s[host] = ahead_s
    warn_of_clock(ahead_s, f"that of {host}", kind="store")


def warn_of_clock(ahead_s: float, other: str, *, kind: str) -> None:
    """Warn, once per process and kind of clock, if this machine's clock is over an hour off.

    `ahead_s` is negative if this machine's clock is behind `other`, which names the other clock or time in words.
    """
    if abs(ahead_s) <= _MAX_APART_S or not is_first_warning("clock", kind):
        return
    _log.warning(
        "this machine's clock is %.1f hours %s %s. One of the two is wrong: set it (NTP). Checkpoints keep the order "
        "of their commits, but show wrong times, and gc can take a running save for dead",
        abs(ahead_s) / 3600,
        "ahead of" if ahead_s > 0 else "behind",
        other,
    )


def now() -> datetime:
    """Return the time by this machine's clock, or by a store's clock if this machine is over an hour ahead of it.

    Ages of objects are computed from this time: by a clock that is ahead, running saves would look dead. If stores
    differ, the earliest time is returned, by which gc removes the least.
    """
    ahead_s = max(list(MACHINE.ahead_s.values()), default=0.0)
    return datetime.fromtimestamp(MACHINE.time_ns() / 1e9 - (ahead_s if ahead_s > _MAX_APART_S else 0.0), timezone.utc)
