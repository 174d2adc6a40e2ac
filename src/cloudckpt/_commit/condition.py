"""What a store has to be able to do before anything is committed, fenced off or deleted there."""

from __future__ import annotations

from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import NoConditionalCommitError
from cloudckpt.stores.base import Store


def check_condition(store: Store, retrier: Retrier) -> None:
    """Raises `NoConditionalCommitError` unless the store can create an object only if it is absent."""
    found = retrier.call(store.probe)
    if not found.conditional_create:
        saw = found.observed or "this store cannot create an object only if it is absent"
        raise NoConditionalCommitError(
            f"{store.uri}: {saw}. So nothing would keep two saves from overwriting each other, and nothing was "
            "written. Use another store, or a newer version of this one's server; or accept that with "
            "Options(commit='unconditional')",
            uri=store.uri,
        )
