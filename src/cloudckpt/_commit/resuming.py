"""Which earlier attempts a save may take up (``docs/design/008-resumable-saves.md``)."""

from __future__ import annotations

import logging

from cloudckpt._commit.attempt import copy_of as source_of
from cloudckpt._commit.attempt import resumable_as
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import StoreError
from cloudckpt.stores.base import Store

_log = logging.getLogger("cloudckpt")

_MAX_SAVES = 16
"""Each rank looks into every one of them. Of copies, which one process makes, the oldest may have left the most."""


def attempts_to_resume(store: Store, number: int, retrier: Retrier, *, copy_of: str | None = None) -> tuple[str, ...]:
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
    mine = (name for name in names if resumable_as(name) == number and source_of(name) == copy_of)
    return tuple(sorted(mine, reverse=True)[: _MAX_SAVES if copy_of is None else None])
