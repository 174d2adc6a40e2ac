"""State dicts to copy and convert, how they are compared, bit for bit, and copies that die."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import torch
from tests.kit.options import make_options

import cloudckpt
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store
from cloudckpt.testing.faults import Call, WrappedStore


def small() -> dict[str, Any]:
    """Tensors of several kinds, and values, nested."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(300, 40, generator=generator)
    weight[3, 4] = float("nan")
    return {
        "model": {
            "weight": weight,
            "half": torch.randn(33, generator=generator).to(torch.bfloat16),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 5),
            "flags": torch.tensor([True, False, True]),
        },
        "optim": {"state": [torch.arange(9), {"step": 4}], "lr": 0.5},
        "step": 12,
    }


def save(state_dict: dict[str, Any], uri: str, **options: Any) -> None:
    """From this process alone."""
    overwrite = options.pop("overwrite", False)
    cloudckpt.save(state_dict, uri, no_dist=True, overwrite=overwrite, options=make_options(**options))


def loaded(like: dict[str, Any], uri: str) -> dict[str, Any]:
    """Return what lies at `uri`, in the shape of `like`, of which nothing is left."""
    state_dict = blank(like)
    cloudckpt.load(state_dict, uri, no_dist=True)
    return state_dict


def blank(value: Any) -> Any:
    """The same structure with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.ones(value.shape).to(value.dtype)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return None


def bits(value: Any) -> Any:
    """Return what can be compared with ``==``: of tensors their dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return str(tensor.dtype), tuple(tensor.shape), raw
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return value


def contents(uri: str, **options: Any) -> dict[str, bytes]:
    """Every object under `uri`."""
    store = store_at(uri, **options)
    return {info.key: store.read(info.key, max_bytes=1 << 40) for info in store.list()}


def store_at(uri: str, **options: Any) -> Store:
    """The bare store."""
    return open_store(uri, make_options(**options))


def torch_saved(state_dict: dict[str, Any]) -> bytes:
    """Return the bytes that ``torch.save`` writes."""
    target = io.BytesIO()
    torch.save(state_dict, target)
    return target.getvalue()


class DiedError(BaseException):
    """The process is gone, and makes no call any more."""


class Mortal(WrappedStore):
    """Dies at the `at`-th call, or the `at`-th of `writes` at a data key: before, or `after` it was carried out."""

    def __init__(self, inner: Any, at: int, *, after: bool, writes: set[str] | None = None) -> None:
        super().__init__(inner)
        self._writes = writes
        self._at, self._after, self._num_calls = at, after, 0
        self._lock = threading.Lock()

    def around(self, call: Call, action: Callable[[], Any]) -> Any:
        with self._lock:
            is_counted = self._writes is None or (call.operation in self._writes and call.key.startswith("data/"))
            self._num_calls += is_counted
            is_due = is_counted and self._num_calls == self._at
            is_dead = self._num_calls > self._at or (is_due and not self._after)
        if is_dead:
            raise DiedError
        result = action()
        if is_due:
            self._num_calls += 1
            raise DiedError
        return result
