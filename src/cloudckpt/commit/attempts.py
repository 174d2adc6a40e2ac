"""Names of attempts and of the keys they write."""

from __future__ import annotations

import logging
import re
import secrets
from datetime import datetime, timezone

from cloudckpt.errors import StoreError
from cloudckpt.io.retry import Retrier
from cloudckpt.stores.base import Store

ATTEMPT = re.compile(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{12}(?:-r(?P<number>[0-9]{1,18})(?:-c(?P<copied>[0-9a-f]{32}))?)?")
"""The form of an attempt's id, for ``fullmatch``."""


def new_attempt_id(*, resumable_as: int | None = None, copy_of: str | None = None) -> str:
    """A fresh id, sortable by time: ``20260131T235959123Z-1f2e3d4c5b6a``. No two saves ever share one.

    With `resumable_as`, the number of its commit, it ends in ``-r`` and that number: a later save that would commit
    under the same number may take up what the attempt left (``docs/design/008-resumable-saves.md``). With `copy_of`,
    too, 32 hexadecimal digits that stand for what is copied, it ends in ``-c`` and these: copies of it take it up.
    """
    now = datetime.now(timezone.utc)
    mark = "" if resumable_as is None else f"-r{resumable_as}" + ("" if copy_of is None else f"-c{copy_of}")
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(6)}{mark}"


def parse_number(attempt: str) -> int | None:
    """The number with which `new_attempt_id` marked the id; None where there is none, or it is no such id."""
    match = ATTEMPT.fullmatch(attempt)
    return int(match["number"]) if match and match["number"] else None


def parse_source(attempt: str) -> str | None:
    """Return the source with which `new_attempt_id` marked the id of a copy; None if it is no such id."""
    match = ATTEMPT.fullmatch(attempt)
    return match["copied"] if match else None


def data_prefix(attempt: str, rank: int) -> str:
    """Return the prefix that all keys of a rank's data objects have, and no others."""
    return f"data/{attempt}/{rank}-"


def data_key(attempt: str, rank: int, number: int) -> str:
    """The key of a rank's `number`-th data object."""
    return f"{data_prefix(attempt, rank)}{number}.safetensors"


RECEIPT_SUFFIX = ".receipt"


def receipt_key(attempt: str, rank: int, number: int) -> str:
    """Return the key of what a rank says of its `number`-th file. No manifest names it."""
    return f"{data_prefix(attempt, rank)}{number}{RECEIPT_SUFFIX}"


_log = logging.getLogger("cloudckpt")

_MAX_SAVES = 16
"""Each rank looks into every one of them. Of copies, which one process makes, the oldest may have left the most."""


def find_resumable_attempts(
    store: Store, number: int, retrier: Retrier, *, copy_of: str | None = None
) -> tuple[str, ...]:
    """The attempts that would have committed under `number`, newest first; none where the store cannot be asked.

    With `copy_of`, copies of that source alone; without, saves alone.

    At most one attempt ever commits under a number. So while it is free, none of these has, no overwrite has replaced
    one of them, and no deletion or collection that put its fence under it has begun: nobody removes what they wrote.
    """
    try:
        keys = retrier.call(lambda: {info.key for info in store.list("data/")})
        keys |= retrier.call(lambda: {upload.key for upload in store.list_uploads("data/")})
    except StoreError as error:
        _log.warning("could not look for what an earlier save left at %s, so all is sent: %s", store.uri, error)
        return ()
    names = {key.split("/")[1] for key in keys if key.count("/") > 1}
    mine = (name for name in names if parse_number(name) == number and parse_source(name) == copy_of)
    return tuple(sorted(mine, reverse=True)[: _MAX_SAVES if copy_of is None else None])
