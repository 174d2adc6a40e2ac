"""Stores that fail, lie or watch as a test asks. All other calls reach the real store."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from cloudckpt.errors import ObjectNotFoundError, StoreError, TransientStoreError
from cloudckpt.stores.base import Capabilities, ObjectInfo, Store
from cloudckpt.testing.faults import Call, Faults, Rule, Tell, WrappedStore

__all__ = ["Call", "FaultyStore", "Lies", "WrappedStore", "die", "permanent", "transient", "watching"]

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class _Fault:
    operation: str
    key_part: str
    error: Callable[[], BaseException]
    skip: int
    times: int
    after: bool


class FaultyStore(WrappedStore):
    """Fails as told, and remembers every call. `find_error` may return an error, which is raised instead of a call."""

    def __init__(self, inner: Store, *, find_error: Callable[[Call], BaseException | None] = lambda _: None) -> None:
        super().__init__(inner)
        self._find_error = find_error
        self.calls: list[Call] = []
        self._faults: list[_Fault] = []
        self._hooks: list[tuple[str, str, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def probe(self) -> Capabilities:
        return self.capabilities  # tests set them

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
        """Return the number of calls of the operation."""
        return sum(call.operation == operation for call in self.calls)

    def num_bytes(self, operation: str) -> int:
        """Return the number of bytes of all calls of the operation."""
        return sum(call.num_bytes for call in self.calls if call.operation == operation)

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        with self._lock:
            self.calls.append(call)
            fault = self._due(call)
            hooks = [hook for hook in self._hooks if hook[0] == call.operation and hook[1] in call.key]
            self._hooks = [hook for hook in self._hooks if hook not in hooks]
        for _, _, hook in hooks:
            hook()
        if (error := self._find_error(call)) is not None:
            raise error
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


class Lies:
    """Wraps stores that lie about what matches `pattern`: the `nth` answer that could show it lacks it.

    `operations` are those that lie: a listing leaves it out, a HEAD says that there is none, or, with `more_bytes`,
    says another size. `times` answers from there on lie, of all stores together.
    """

    def __init__(self, pattern: str, *operations: str, nth: int = 1, times: int = 1, more_bytes: int = 0) -> None:
        self._pattern, self._operations, self.more_bytes = pattern, operations, more_bytes
        self._due = range(nth, nth + times)
        self._num_asked = self.num_told = 0

    def __call__(self, inner: Store) -> Store:
        return _Lying(inner, self)

    def begin(self) -> None:
        """Lie in every answer from now on."""
        self._due = range(self._num_asked + 1, 1_000_000)

    def is_told(self, operation: str, *urls: str) -> bool:
        """Return True for an answer that is to lie: there is something to lie about, and it is its turn."""
        if operation not in self._operations or not any(map(self.hides, urls)):
            return False
        self._num_asked += 1
        self.num_told += self._num_asked in self._due
        return self._num_asked in self._due

    def hides(self, url: str) -> bool:
        """Return True for what a lying answer lacks."""
        return re.search(self._pattern, url) is not None


class _Lying(WrappedStore):
    def __init__(self, inner: Store, lies: Lies) -> None:
        super().__init__(inner)
        self._lies = lies

    def _shown(self, operation: str, names: list[str]) -> list[str]:
        urls = [self.url(name) for name in names]
        is_lie = self._lies.is_told(operation, *urls)
        return [name for name, url in zip(names, urls, strict=True) if not (is_lie and self._lies.hides(url))]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = {info.key: info for info in super().list(prefix)}
        yield from map(found.__getitem__, self._shown("list", [*found]))

    def list_directories(self) -> Iterator[str]:
        yield from self._shown("list_directories", [*super().list_directories()])

    def head(self, key: str) -> ObjectInfo:
        found = super().head(key)
        if not self._lies.is_told("head", self.url(key)):
            return found
        if not self._lies.more_bytes:
            raise ObjectNotFoundError("not found", key=self.url(key), operation="head")
        return dataclasses.replace(found, size_bytes=found.size_bytes + self._lies.more_bytes)


def watching(
    *operations: str,
    before: Callable[[Call], object] | None = None,
    after: Callable[[Call], object] | None = None,
    key: str = "",
) -> Faults:
    """Wrap stores that call `before` each such call, or `after` it was carried out. Without operations, all of them."""
    return Faults(Rule(fault=Tell(before=before, after=after), operations=operations or None, key=key, times=None))


def die(_: Call) -> None:
    """Kill the process, for `watching`."""
    os.kill(os.getpid(), signal.SIGKILL)


def transient(operation: str) -> TransientStoreError:
    """A failure that may pass."""
    return TransientStoreError("the connection broke", key="memory://tests/key", operation=operation)


def permanent(operation: str) -> StoreError:
    """A failure that will not."""
    return StoreError("no", key="memory://tests/key", operation=operation)
