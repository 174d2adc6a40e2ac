"""Read this machine's clock beside those of stores, and draw the times of commits, which order checkpoints.

The coordinator draws the time of a commit, and the manifest keeps it. A store's own times give no order, since those of
Amazon S3 are whole seconds. But they bound the time that is drawn, and show a clock that is wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime

from cloudckpt._this_process import is_first_warning

_log = logging.getLogger("cloudckpt")

_MAX_APART_S = 3600.0
_TICK_NS = 1000  # the resolution of `datetime`, which shows the order to users
LATEST_COMMIT_TIME_NS = (2**63 - 1) // _TICK_NS * _TICK_NS
"""The latest time that a manifest can hold, in the year 2262. After it, the names of checkpoints decide."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EARLIEST = datetime(2020, 1, 1, tzinfo=timezone.utc)
"""Objects have earlier times only on a store that knows no times."""
_RESOLUTION_S = 1.0
"""The coarsest resolution of a store's times."""


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


def draw_commit_time_ns(written_at: datetime | None, *, longest_since_s: float) -> int:
    """Return the time of a commit that begins now, later than every time that this process has drawn or seen.

    This is a hybrid logical clock (Kulkarni et al., 2014): it follows every later time that it has seen, even a wrong
    one, since this machine's clock may be the wrong one. The store's clock, which all writers share, bounds this
    machine's clock: `written_at` is the store's time of the newest object of this save, at most `longest_since_s` ago.
    """
    machine = MACHINE
    now_ns = machine.time_ns()
    if written_at is not None and written_at > _EARLIEST:
        begin_ns = ns_of(written_at)
        now_ns = max(begin_ns, now_ns)
        now_ns = min(now_ns, begin_ns + int((longest_since_s + _RESOLUTION_S) * 1e9))
    with machine.lock:
        machine.newest_ns = min(max(now_ns, machine.newest_ns + _TICK_NS), LATEST_COMMIT_TIME_NS) // _TICK_NS * _TICK_NS
        return machine.newest_ns


def note_commit_time_ns(seen_ns: int | None, *, url: str = "") -> None:
    """Let every later `draw_commit_time_ns` return more than `seen_ns`, which the manifest at `url` holds."""
    if seen_ns is None:
        return
    machine = MACHINE
    with machine.lock:
        machine.newest_ns = max(machine.newest_ns, seen_ns)
    if url:
        ahead_s = min(0.0, (machine.time_ns() - seen_ns) / 1e9)
        warn_of_clock(ahead_s, f"the time of commit that {url} has", kind="machine")


def newest_commit_time_ns() -> int:
    """Return the latest time that this process has drawn or seen, to hand it on to another process."""
    return MACHINE.newest_ns


def datetime_of(committed_at_ns: int) -> datetime:
    """Return the time as a `datetime` in UTC, cut to microseconds."""
    return _EPOCH + timedelta(microseconds=committed_at_ns // 1000)


def ns_of(moment: datetime) -> int:
    """Return the nanoseconds since 1970 of `moment`, cut to microseconds."""
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
