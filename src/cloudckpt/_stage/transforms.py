"""torch's experimental stream extensions (`torch.distributed.checkpoint._extension`), such as compression.

What is transformed is stored as it comes out, with the descriptors that undo it; it can only be read whole.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms, _StorageWriterTransforms
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from cloudckpt._manifest.torch_dtypes import dtype_of
from cloudckpt.options import MIB

_PIECE_BYTES = 16 * MIB


class WriteTransforms:
    """The extensions of a save; falsy where there are none."""

    def __init__(self, extensions: Sequence[StreamTransformExtension] | None) -> None:
        self._extensions = tuple(extensions or ())

    def __bool__(self) -> bool:
        return bool(self._extensions)

    def apply(self, item: WriteItem, content: memoryview) -> tuple[memoryview, tuple[str, ...]]:
        """`content` as it is to be stored, and the descriptors that undo it."""
        target = io.BytesIO()
        stream, descriptors = _StorageWriterTransforms(self._extensions).transform_save_stream(item, target)
        stream.write(content)
        stream.close()
        # torch lists them in the order in which they were applied, and undoes them in that same order.
        return target.getbuffer(), tuple(reversed(descriptors))


class ReadTransforms:
    """The registry that a load looks descriptors up in."""

    def __init__(self, registry: ExtensionRegistry | None) -> None:
        self._transforms = _StorageReaderTransforms(registry)

    def undo(self, item: ReadItem, descriptors: Sequence[str], stored: Any, *, max_bytes: int) -> bytearray | None:
        """The original bytes; None where there are more than `max_bytes`, since a few bytes can unpack to any number.

        Raises `ValueError` for a descriptor that the registry lacks.
        """
        stream = self._transforms.transform_load_stream(item, descriptors, io.BytesIO(stored))
        content = bytearray()
        while piece := stream.read(min(max_bytes + 1 - len(content), _PIECE_BYTES)):
            content += piece
            if len(content) > max_bytes:
                return None
        return content


def chunk_of(content: bytes | bytearray, dtype: str, lengths: Sequence[int]) -> torch.Tensor:
    """A stored chunk, of all its bytes as they were before they were transformed."""
    if not content:
        return torch.empty(tuple(lengths), dtype=dtype_of(dtype))
    flat: torch.Tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return flat.view(dtype_of(dtype)).view(tuple(lengths))
