"""Base class of stores that wrap another store to observe its calls, delay them or make them fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from cloudckpt.stores.base import Call, ForwardingStore, Tried, once

__all__ = ["Call", "WrappedStore"]

_T = TypeVar("_T")


class WrappedStore(ForwardingStore):
    """Passes each call to `inner` and has its capabilities and limits; subclasses override `around`.

    A deletion of several keys becomes one call for each key, so that it can fail between two of them. A listing is
    complete before its first entry is returned. A copy by the service is one call, however many requests it takes, and
    is retried as a whole.
    """

    def around_listing(self, call: Call, action: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        yield from self.around(call, lambda: [*action()])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.around(Call(operation="delete", key=key), functools.partial(self.inner.delete, [key]))

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        call = Call(operation="copy_from", key=target_key)
        return tried(lambda: self.around(call, lambda: self.inner.copy_from(source_url, target_key)))
