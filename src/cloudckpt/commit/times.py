"""The time of a commit, by which checkpoints are ordered.

The coordinator draws the time of a commit, and the manifest keeps it. A store's own times give no order, since those of
Amazon S3 are whole seconds. But they bound the time that is drawn.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from cloudckpt import _clock

# The order of these members is that of `Manifest`.
_HEAD = re.compile(
    rb'\{"format":"cloudckpt","version":\[[12],[0-9]+\],"attempt":"[^"\\]*","created_at":"[^"\\]*",'
    rb'"committed_at_ns":([0-9]{1,19}),'
)
_TICK_NS = 1000  # the resolution of `datetime`, which shows the order to users
_LATEST_NS = (2**63 - 1) // _TICK_NS * _TICK_NS
"""The latest time that a manifest can hold, in the year 2262. After it, the names of checkpoints decide."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EARLIEST = datetime(2020, 1, 1, tzinfo=timezone.utc)
"""Objects have earlier times only on a store that knows no times."""
_RESOLUTION_S = 1.0
"""The coarsest resolution of a store's times."""
_DIGITS = re.compile(r"([0-9]+)")


def draw_commit_time_ns(written_at: datetime | None, *, longest_since_s: float) -> int:
    """Return the time of a commit that begins now, later than every time that this process has drawn or seen.

    This is a hybrid logical clock (Kulkarni et al., 2014): it follows every later time that it has seen, even a wrong
    one, since this machine's clock may be the wrong one. The store's clock, which all writers share, bounds this
    machine's clock: `written_at` is the store's time of the newest object of this save, at most `longest_since_s` ago.
    """
    machine = _clock.MACHINE
    now_ns = machine.time_ns()
    if written_at is not None and written_at > _EARLIEST:
        begin_ns = ns_of(written_at)
        now_ns = max(begin_ns, now_ns)
        now_ns = min(now_ns, begin_ns + int((longest_since_s + _RESOLUTION_S) * 1e9))
    with machine.lock:
        machine.newest_ns = min(max(now_ns, machine.newest_ns + _TICK_NS), _LATEST_NS) // _TICK_NS * _TICK_NS
        return machine.newest_ns


def note_commit_time_ns(seen_ns: int | None, *, url: str = "") -> None:
    """Let every later `draw_commit_time_ns` return more than `seen_ns`, which the manifest at `url` holds."""
    if seen_ns is None:
        return
    machine = _clock.MACHINE
    with machine.lock:
        machine.newest_ns = max(machine.newest_ns, seen_ns)
    if url:
        ahead_s = min(0.0, (machine.time_ns() - seen_ns) / 1e9)
        _clock.warn_of_clock(ahead_s, f"the time of commit that {url} has", kind="machine")


def newest_commit_time_ns() -> int:
    """Return the latest time that this process has drawn or seen, to hand it on to another process."""
    return _clock.MACHINE.newest_ns


def parse_commit_time_ns(head: bytes) -> int | None:
    """Return the time in the first bytes of a manifest; None if there is none, or it exceeds the latest time."""
    match = _HEAD.match(head)
    return int(match[1]) if match is not None and int(match[1]) <= _LATEST_NS else None


def datetime_of(committed_at_ns: int) -> datetime:
    """Return the time as a `datetime` in UTC, cut to microseconds."""
    return _EPOCH + timedelta(microseconds=committed_at_ns // 1000)


def ns_of(moment: datetime) -> int:
    """Return the nanoseconds since 1970 of `moment`, cut to microseconds."""
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def commit_order(committed_at: datetime, name: str) -> tuple[datetime, list[tuple[int, str]]]:
    """Return the sort key of a checkpoint, oldest first. At equal times names decide, and numbers in them by value."""
    texts = _DIGITS.split(name)
    return committed_at, [(int(text), "") if _DIGITS.fullmatch(text) else (-1, text) for text in texts]
