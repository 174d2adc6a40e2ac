"""Stores in front of other stores: they add faults and keep count. What they pass on is done for real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cloudckpt.errors import StoreError, TransientStoreError
from cloudckpt.stores.base import ObjectInfo, Part, Store, UploadedPart, UploadInfo, Views

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that reached the store behind."""

    operation: str
    key: str
    num_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Fault:
    operation: str
    key_part: str
    error: Callable[[], BaseException]
    skip: int
    times: int
    after: bool


class WrappedStore(Store):
    """Passes every call on to `inner`; subclasses override `around`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.limits = inner.limits

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        """What a call becomes."""
        return action()

    @property
    def uri(self) -> str:
        return self.inner.uri

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        call = Call(operation="put", key=key, num_bytes=sum(len(view) for view in views))
        self.around(call, lambda: self.inner.put(key, views, crc32c=crc32c, if_absent=if_absent))

    def create_multipart(self, key: str) -> str:
        return self.around(Call(operation="create_multipart", key=key), lambda: self.inner.create_multipart(key))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        call = Call(operation="upload_part", key=key, num_bytes=sum(len(view) for view in views))
        return self.around(call, lambda: self.inner.upload_part(key, upload_id, part, views, crc32c=crc32c))

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        call = Call(operation="complete_multipart", key=key)
        self.around(call, lambda: self.inner.complete_multipart(key, upload_id, parts))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        call = Call(operation="abort_multipart", key=key)
        self.around(call, lambda: self.inner.abort_multipart(key, upload_id))

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        call = Call(operation="read_into", key=key, num_bytes=sum(len(view) for view in views))
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
            self.around(Call(operation="delete", key=key), lambda key=key: self.inner.delete([key]))

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        yield from self.around(Call(operation="list_uploads", key=prefix), lambda: [*self.inner.list_uploads(prefix)])

    def copy(self, source_key: str, target_key: str) -> None:
        self.around(Call(operation="copy", key=target_key), lambda: self.inner.copy(source_key, target_key))


class FaultyStore(WrappedStore):
    """Fails as told, and remembers every call."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        self._faults: list[_Fault] = []
        self._hooks: list[tuple[str, str, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def fail(
        self,
        operation: str,
        *,
        error: Callable[[], BaseException] | None = None,
        key_part: str = "",
        skip: int = 0,
        times: int = 1,
        after: bool = False,
    ) -> None:
        """Make `times` calls of `operation` fail, after `skip` good ones; `after` the call was carried out, if so."""
        self._faults.append(
            _Fault(
                operation=operation,
                key_part=key_part,
                error=error or (lambda: transient(operation)),
                skip=skip,
                times=times,
                after=after,
            )
        )

    def once_before(self, operation: str, key_part: str, hook: Callable[[], None]) -> None:
        """Run `hook` before the next such call."""
        self._hooks.append((operation, key_part, hook))

    def count(self, operation: str) -> int:
        """How often the operation was called."""
        return sum(call.operation == operation for call in self.calls)

    def num_bytes(self, operation: str) -> int:
        """How many bytes all calls of the operation were about."""
        return sum(call.num_bytes for call in self.calls if call.operation == operation)

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        with self._lock:
            self.calls.append(call)
            fault = self._due(call)
            hooks = [hook for hook in self._hooks if hook[0] == call.operation and hook[1] in call.key]
            self._hooks = [hook for hook in self._hooks if hook not in hooks]
        for _, _, hook in hooks:
            hook()
        if fault is not None and not fault.after:
            raise fault.error()
        result = action()
        if fault is not None:
            raise fault.error()
        return result

    def _due(self, call: Call) -> _Fault | None:
        for fault in self._faults:
            if fault.operation != call.operation or fault.key_part not in call.key or not fault.times:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            return fault
        return None


def transient(operation: str) -> TransientStoreError:
    """A failure that may pass."""
    return TransientStoreError("the connection broke", key="memory://tests/key", operation=operation)


def permanent(operation: str) -> StoreError:
    """A failure that will not."""
    return StoreError("no", key="memory://tests/key", operation=operation)
