"""Names of attempts and of the keys they write."""

from __future__ import annotations

import re
import secrets
from datetime import datetime, timezone

ATTEMPT = re.compile(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{12}(?:-r(?P<number>[0-9]{1,18})(?:-c(?P<copied>[0-9a-f]{32}))?)?")
"""What an attempt's id looks like, those that can be resumed among them; for ``fullmatch``."""


def new_attempt_id(*, resumable_as: int | None = None, copy_of: str | None = None) -> str:
    """A fresh id, sortable by time: ``20260131T235959123Z-1f2e3d4c5b6a``. No two saves ever share one.

    With `resumable_as`, the number of its commit, it ends in ``-r`` and that number: a later save that would commit
    under the same number may take up what the attempt left (``docs/design/008-resumable-saves.md``). With `copy_of`,
    too, 32 hexadecimal digits that stand for what is copied, it ends in ``-c`` and these: copies of it take it up.
    """
    now = datetime.now(timezone.utc)
    mark = "" if resumable_as is None else f"-r{resumable_as}" + ("" if copy_of is None else f"-c{copy_of}")
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(6)}{mark}"


def resumable_as(attempt: str) -> int | None:
    """The number with which `new_attempt_id` marked the id; None where there is none, or it is no such id."""
    match = ATTEMPT.fullmatch(attempt)
    return int(match["number"]) if match and match["number"] else None


def copy_of(attempt: str) -> str | None:
    """What `new_attempt_id` was told of a copy's source; None where that is not one's id."""
    match = ATTEMPT.fullmatch(attempt)
    return match["copied"] if match else None


def data_prefix(attempt: str, rank: int) -> str:
    """What all keys of a rank's data objects begin with, and no others."""
    return f"data/{attempt}/{rank}-"


def data_key(attempt: str, rank: int, number: int) -> str:
    """The key of a rank's `number`-th data object."""
    return f"{data_prefix(attempt, rank)}{number}.safetensors"
