"""Names of attempts and of the keys they write."""

from __future__ import annotations

import re
import secrets
from datetime import datetime, timezone

ATTEMPT = re.compile(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{12}(?:-r)?")
"""What an attempt's id looks like, those that can be resumed among them; for ``fullmatch``."""
_RESUMABLE = "-r"


def new_attempt_id(*, resumable: bool = False) -> str:
    """A fresh id, sortable by time: ``20260131T235959123Z-1f2e3d4c5b6a``. No two saves ever share one.

    A `resumable` one ends in ``-r``: a later save to the same place may take up what the attempt left.
    """
    now = datetime.now(timezone.utc)
    mark = _RESUMABLE if resumable else ""
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(6)}{mark}"


def is_resumable(attempt: str) -> bool:
    """Whether `attempt` is an id that `new_attempt_id` has made so that it can be taken up again."""
    return attempt.endswith(_RESUMABLE) and ATTEMPT.fullmatch(attempt) is not None


def data_key(attempt: str, rank: int, number: int) -> str:
    """The key of a rank's `number`-th data object."""
    return f"data/{attempt}/{rank}-{number}.safetensors"
