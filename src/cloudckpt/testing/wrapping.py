"""Base class of stores that wrap another store to observe its calls, delay them or make them fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cloudckpt.stores._body import num_bytes
from cloudckpt.stores.base import (
    Capabilities,
    FoundPart,
    ObjectInfo,
    Part,
    Store,
    Tried,
    UploadedPart,
    UploadInfo,
    Views,
    once,
)

__all__ = ["Call", "WrappedStore"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call to a store."""

    operation: str
    """The name of the method of `Store`."""
    key: str
    """The key; for a listing its prefix, for a copy its target; empty for calls about the whole store."""
    num_bytes: int = 0
    """Size of the body that the call sends or fills; 0 if there is none."""


class WrappedStore(Store):
    """Passes each call to `inner` and has its capabilities and limits; subclasses override `around`.

    A deletion of several keys becomes one call for each key, so that it can fail between two of them. A listing is
    complete before its first entry is returned. A copy by the service is one call, however many requests it takes, and
    is retried as a whole.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.limits = inner.limits

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        """Run `action`, which makes `call` on `inner`, and return its result."""
        return action()

    def probe(self) -> Capabilities:
        return self.around(Call(operation="probe", key=""), self.inner.probe)

    @property
    def uri(self) -> str:
        return self.inner.uri

    def url(self, key: str) -> str:
        return self.inner.url(key)

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        call = Call(operation="put", key=key, num_bytes=num_bytes(views))
        self.around(call, lambda: self.inner.put(key, views, crc32c=crc32c, if_absent=if_absent))

    def create_multipart(self, key: str) -> str:
        return self.around(Call(operation="create_multipart", key=key), lambda: self.inner.create_multipart(key))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        call = Call(operation="upload_part", key=key, num_bytes=num_bytes(views))
        return self.around(call, lambda: self.inner.upload_part(key, upload_id, part, views, crc32c=crc32c))

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        call = Call(operation="complete_multipart", key=key)
        self.around(call, lambda: self.inner.complete_multipart(key, upload_id, parts))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        call = Call(operation="abort_multipart", key=key)
        self.around(call, lambda: self.inner.abort_multipart(key, upload_id))

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        call = Call(operation="read_into", key=key, num_bytes=num_bytes(views))
        self.around(call, lambda: self.inner.read_into(key, offset_bytes, views))

    def read(self, key: str, *, max_bytes: int) -> bytes:
        return self.around(Call(operation="read", key=key), lambda: self.inner.read(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo:
        return self.around(Call(operation="head", key=key), lambda: self.inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from self.around(Call(operation="list", key=prefix), lambda: [*self.inner.list(prefix)])

    def list_directories(self) -> Iterator[str]:
        yield from self.around(Call(operation="list_directories", key=""), lambda: [*self.inner.list_directories()])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.around(Call(operation="delete", key=key), functools.partial(self.inner.delete, [key]))

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        yield from self.around(Call(operation="list_uploads", key=prefix), lambda: [*self.inner.list_uploads(prefix)])

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        call = Call(operation="list_parts", key=key)
        yield from self.around(call, lambda: [*self.inner.list_parts(key, upload_id)])

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        call = Call(operation="copy_from", key=target_key)
        return tried(lambda: self.around(call, lambda: self.inner.copy_from(source_url, target_key)))
