"""A store that fails as a test tells it step by step, and remembers every call. What it passes on is done for real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cloudckpt.errors import StoreError, TransientStoreError
from cloudckpt.stores.base import Capabilities, Store
from cloudckpt.testing.faults import Call, WrappedStore

__all__ = ["Call", "FaultyStore", "WrappedStore", "permanent", "transient"]

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
    """Fails as told, and remembers every call."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
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
