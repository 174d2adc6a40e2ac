"""Read tensors that consist of others as plain tensors of their values."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.chunks import dtype_name, dtype_of
from cloudckpt.format.model import ITEMSIZE_BYTES, StoredTensor
from cloudckpt.format.wrappers import Registry, SavedWrapper, collapse
from cloudckpt.pipeline.reader import Reader
from cloudckpt.pipeline.wants import TensorBytes


class DequantizingReader:
    """Reads a checkpoint whose wrappers are dequantized. It holds one of them at a time, with its values."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._uri = reader.context.uri
        self._lock = threading.Lock()
        self._last: tuple[str, torch.Tensor] | None = None
        make = functools.partial(SavedWrapper, Registry(uri=self._uri))
        entries, _ = collapse(reader.manifest.wrappers, reader.manifest.tensors, {}, make)
        self._wrappers = {name: entry for name, entry in entries.items() if isinstance(entry, SavedWrapper)}
        self.tensors: dict[str, StoredTensor] = {
            name: self._describe(entry) if isinstance(entry, SavedWrapper) else entry for name, entry in entries.items()
        }
        """The tensors by name, without chunks if they are dequantized."""

    def read_bytes(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers."""
        self._reader.read_bytes([want for want in wanted if want.name not in self._wrappers])
        for want in wanted:
            if want.name in self._wrappers:
                with self._lock:
                    if self._last is None or self._last[0] != want.name:
                        self._last = None
                        self._last = want.name, self._dequantize(want.name)
                    want.buffer.copy_(self._last[1][want.begin : want.end])

    def _describe(self, wrapper: SavedWrapper) -> StoredTensor:
        made = wrapper.rebuild(lambda _, part: torch.empty(part.shape, dtype=dtype_of(part.dtype), device="meta"))
        return StoredTensor(dtype=dtype_name(made.dtype), shape=tuple(made.shape), chunks=[])

    def _dequantize(self, name: str) -> torch.Tensor:
        wanted: list[TensorBytes] = []
        wrapper: Any = self._wrappers[name].rebuild(functools.partial(_add_wanted, wanted))
        self._reader.read_bytes(wanted)
        try:
            values: torch.Tensor = wrapper.dequantize()
        except Exception as error:  # the code of a class can raise anything
            raise UnsupportedValueError(
                f"{name!r} of {self._uri} cannot be dequantized: {type(error).__name__}: {error}. Export its parts "
                "instead",
                uri=self._uri,
            ) from error
        return values.detach().to(wrapper.dtype).contiguous().view(-1).view(torch.uint8)


def _add_wanted(wanted: list[TensorBytes], name: str, stored: StoredTensor) -> torch.Tensor:
    num_bytes = math.prod(stored.shape) * ITEMSIZE_BYTES[stored.dtype]
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    wanted.append(TensorBytes(name=name, begin=0, end=num_bytes, buffer=buffer))
    return buffer.view(dtype_of(stored.dtype)).view(stored.shape)
