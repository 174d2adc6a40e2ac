"""Values as people read them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from cloudckpt.errors import printable

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024
_MB, _GB = 10**6, 10**9


def plain_line(text: str) -> str:
    """`printable`, in one line: a name cannot show what is not there in lines of its own."""
    return printable(text).replace("\n", "\\n")


def size(num_bytes: float) -> str:
    """``1.5 GiB``."""
    if num_bytes < _KIB:
        return f"{num_bytes:.0f} B"
    for unit in _UNITS:
        num_bytes /= _KIB
        if round(num_bytes, 1) < _KIB:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def rate(bytes_per_s: float) -> str:
    """``1.23 GB/s``: rates are decimal, as networks are sold."""
    if bytes_per_s >= _GB:
        return f"{bytes_per_s / _GB:.2f} GB/s"
    return f"{bytes_per_s / _MB:.1f} MB/s"


def count(number: int, noun: str) -> str:
    """``1 object``, ``2 objects``; ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{number:,} {noun}s"


def age(moment: datetime, *, now: datetime | None = None) -> str:
    """How long ago, in its largest unit: ``3 h``."""
    return duration((now or datetime.now(timezone.utc)) - moment)


def duration(delta: timedelta) -> str:
    """In its largest unit: ``3 h``."""
    seconds = max(delta.total_seconds(), 0.0)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)} {unit}"
    return f"{int(seconds)} s"


def milliseconds(seconds: float) -> str:
    """``12.3 ms``."""
    return f"{seconds * 1000:.1f} ms"
