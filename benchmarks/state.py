"""The state dict of one rank, with contents that can be checked to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.payloads import Payload

Layout: TypeAlias = Literal["sharded", "part"]
"""`sharded`: by rows over the ranks. `part`: what one rank of a larger job has."""

_BLOCK_ITEMS = 8 << 20
_BLOCKS_PER_TENSOR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """Part of one tensor on this rank."""

    name: str
    index: int
    tensor: torch.Tensor
    first_item: int
    """The offset in the whole tensor at which it begins."""


class State:
    """A state dict in which each tensor has a storage of its own, and values of its own that no rank count changes."""

    def __init__(self, payload: Payload, mesh: DeviceMesh | None) -> None:
        """`mesh` is the one over whose only dimension tensors are sharded; None where there is one rank."""
        self._noise = _noise()
        self._scratch = torch.empty_like(self._noise)
        self._locals: list[_Local] = []
        self.state_dict: dict[str, Any] = {}
        num_parts = 1 if mesh is None else mesh.size()
        part = mesh.get_local_rank() if mesh is not None and num_parts > 1 else 0
        for group in payload.tensors:
            is_sharded = num_parts > 1 and bool(group.shape)
            shape = group.shape
            if is_sharded:
                if shape[0] % num_parts:
                    raise ValueError(f"{group.name}: {shape[0]} rows cannot be dealt out to {num_parts} ranks evenly")
                shape = (shape[0] // num_parts, *shape[1:])
            for number in range(group.count):
                local = _Local(
                    name=f"{group.name}.{number}",
                    index=len(self._locals),
                    tensor=torch.empty(shape, dtype=torch.float32),
                    first_item=part * math.prod(shape) if is_sharded else 0,
                )
                self._locals.append(local)
                self.state_dict[local.name] = (
                    DTensor.from_local(local.tensor, mesh, [Shard(0)], run_check=False) if is_sharded else local.tensor
                )

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(local.tensor.nbytes for local in self._locals)

    def fill(self) -> None:
        """Put in what belongs there."""
        for local in self._locals:
            for piece, noise, pattern in self._pieces(local):
                torch.bitwise_xor(noise, pattern, out=piece)

    def zero(self) -> None:
        for local in self._locals:
            local.tensor.zero_()

    def verify(self) -> None:
        """Raise ValueError unless each tensor holds what `fill` puts there, to the bit."""
        wrong = [local.name for local in self._locals if not self._is_right(local)]
        if wrong:
            raise ValueError(f"{len(wrong)} tensors hold other values than were saved, the first is {wrong[0]}")

    def _is_right(self, local: _Local) -> bool:
        return all(
            torch.equal(torch.bitwise_xor(noise, pattern, out=self._scratch[: noise.numel()]), piece)
            for piece, noise, pattern in self._pieces(local)
        )

    def _pieces(self, local: _Local) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """The tensor's bits in pieces, each with the noise and the pattern whose exclusive or it holds."""
        flat = local.tensor.reshape(-1).view(torch.int32)
        position = 0
        while position < flat.numel():
            block, offset = divmod(local.first_item + position, _BLOCK_ITEMS)
            size = min(_BLOCK_ITEMS - offset, flat.numel() - position)
            # Random mantissas, another pattern in each block: compressing or deduplicating would gain nothing.
            pattern = (local.index * _BLOCKS_PER_TENSOR + block + 1) * 40503 & 0x7FFFFF
            yield flat[position : position + size], self._noise[offset : offset + size], pattern
            position += size


def _noise() -> torch.Tensor:
    """The bits of float32 values in [1, 2), the same in every process; shape [_BLOCK_ITEMS]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 23, (_BLOCK_ITEMS,), dtype=torch.int32, generator=generator) | 0x3F800000
