"""Ids of attempts, and the keys of the objects that they write."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from datetime import datetime, timezone

ATTEMPT = re.compile(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{12}(?:-r(?P<number>[0-9]{1,18})(?:-c[0-9a-f]{32})?)?")
"""The form of an attempt's id, for ``fullmatch``."""
RECEIPT_SUFFIX = ".receipt"
_ID_VERSION = 7


def new_attempt_id(suffix: str = "") -> str:
    """Draw an id, sortable by time: ``20260131T235959123Z-1f2e3d4c5b6a``, and a `suffix`. No two saves share one."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(6)}{suffix}"


def new_save_id() -> str:
    """Draw an id of a save, which its copies keep: a UUID of version 7, which begins with the time (RFC 9562)."""
    milliseconds, random = time.time_ns() // 10**6, secrets.randbits(74)
    high = milliseconds << 16 | _ID_VERSION << 12 | random >> 62
    return str(uuid.UUID(int=high << 64 | 2 << 62 | random & (1 << 62) - 1))


def save_id_time(save_id: str) -> datetime:
    """Return when `new_save_id` drew an id. Raise `ValueError` for other ids."""
    drawn = uuid.UUID(save_id)
    if drawn.version != _ID_VERSION:
        raise ValueError(f"{save_id} has no time")
    return datetime.fromtimestamp((drawn.int >> 80) / 1000, timezone.utc)


def copy_suffix(number: int, source: str) -> str:
    """Return the suffix of a copy's id. It would commit under `number`, and `source` digests the source's manifest.

    A later copy of the same source that would commit under the same number may use the objects of this copy
    (``docs/design/008-resumable-copies.md``).
    """
    return f"-r{number}-c{source}"


def parse_number(attempt: str) -> int | None:
    """Return the number in the suffix of an attempt's id; None if there is no suffix, or no such id."""
    match = ATTEMPT.fullmatch(attempt)
    return int(match["number"]) if match and match["number"] else None


def data_prefix(attempt: str, rank: int) -> str:
    """Return the prefix of the keys of a rank's data objects. No other key has it."""
    return f"data/{attempt}/{rank}-"


def data_key(attempt: str, rank: int, number: int) -> str:
    """Return the key of a rank's `number`-th data object."""
    return f"{data_prefix(attempt, rank)}{number}.safetensors"


def rank_of_key(key: str) -> int:
    """Return the rank that has written the data object at `key`."""
    return int(key.rpartition("/")[2].partition("-")[0])


def receipt_key(attempt: str, rank: int, number: int) -> str:
    """Return the key of a rank's receipt for its `number`-th file. No manifest names it."""
    return f"{data_prefix(attempt, rank)}{number}{RECEIPT_SUFFIX}"
