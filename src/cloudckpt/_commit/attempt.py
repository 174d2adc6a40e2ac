"""Names of attempts and of the keys they write."""

from __future__ import annotations

import secrets
from datetime import datetime, timezone


def new_attempt_id() -> str:
    """A fresh id, sortable by time: ``20260131T235959123Z-1f2e3d4c5b6a``. No two saves ever share one."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(6)}"


def data_key(attempt: str, rank: int, number: int) -> str:
    """The key of a rank's `number`-th data object."""
    return f"data/{attempt}/{rank}-{number}.safetensors"
