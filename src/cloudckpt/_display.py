"""Values as people read them: sizes, rates, counts and times."""

from __future__ import annotations

from datetime import datetime, timezone

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024
_MB, _GB = 10**6, 10**9


def size(num_bytes: float) -> str:
    """``1.5 GiB``."""
    if num_bytes < _KIB:
        return f"{num_bytes:.0f} B"
    for unit in _BINARY_UNITS:
        num_bytes /= _KIB
        if round(num_bytes, 1) < _KIB:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes:.1f} {_BINARY_UNITS[-1]}"


def rate(bytes_per_s: float) -> str:
    """``1.23 GB/s``: decimal, as the rates of networks are."""
    if bytes_per_s >= _GB:
        return f"{bytes_per_s / _GB:.2f} GB/s"
    return f"{bytes_per_s / _MB:.1f} MB/s"


def count(number: int, noun: str) -> str:
    """``1 object``, ``2 objects``; ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{number:,} {noun}s"


def date(moment: datetime) -> str:
    """``2026-01-31 12:00:00Z``."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%SZ}"
