"""How much two tensors differ."""

from __future__ import annotations

import math
from typing import Any

import torch

_PIECE_ELEMENTS = 1 << 20


class Tally:
    """Of one tensor, added up block by block."""

    def __init__(self) -> None:
        self.num_elements = self.num_different = 0
        self.max_absolute = self.max_relative = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor, *, rtol: float, atol: float) -> None:
        """Two blocks of one shape and dtype, both contiguous. Beyond them it takes memory for a million elements."""
        self.num_elements += before.numel()
        bits = [block.reshape(-1).view(torch.uint8) for block in (before, after)]
        if torch.equal(*bits):
            return
        first, second = before.reshape(-1), after.reshape(-1)
        for begin in range(0, first.numel(), _PIECE_ELEMENTS):
            self._add_piece(
                first[begin : begin + _PIECE_ELEMENTS], second[begin : begin + _PIECE_ELEMENTS], rtol=rtol, atol=atol
            )

    def _add_piece(self, before: torch.Tensor, after: torch.Tensor, *, rtol: float, atol: float) -> None:
        wide = _widened(before), _widened(after)
        if wide[0] is None or wide[1] is None:  # torch cannot calculate with them: of such, only bits are compared
            rows = [block.view(torch.uint8).view(len(before), -1) for block in (before, after)]
            num_different = int((rows[0] != rows[1]).any(dim=1).sum())
            self._note(num_different, math.inf if num_different else 0.0, 0.0)
            return
        is_same = wide[0] == wide[1]
        x, y = (block if block.is_complex() else block.double() for block in wide)
        apart = (y - x).abs()
        is_same |= (x.isnan() & y.isnan()) | ((apart <= atol + rtol * x.abs()) & apart.isfinite() & bool(atol or rtol))
        if bool(is_same.all()):
            return
        is_different = ~is_same
        apart = apart[is_different]
        larger = torch.maximum(x.abs(), y.abs())[is_different]
        self._note(int(is_different.sum()), _largest(apart), _largest(apart / larger, otherwise=2.0))

    def _note(self, num_different: int, absolute: float, relative: float) -> None:
        self.num_different += num_different
        self.max_absolute = max(self.max_absolute, absolute)
        self.max_relative = max(self.max_relative, relative)


def _widened(block: torch.Tensor) -> Any:
    """In a dtype that torch calculates with, and that holds every value; None where there is none."""
    dtype = block.dtype
    try:
        if dtype.is_complex:
            return block.to(torch.complex128)
        if dtype.is_floating_point:
            return block.to(torch.float64)
        if dtype in (torch.uint64, torch.uint32, torch.uint16):
            # As many bits, so that what is equal stays so; how far apart is told by way of floats.
            return _unsigned(block)
        return block.to(torch.int64)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _unsigned(block: torch.Tensor) -> torch.Tensor:
    if block.dtype is torch.uint64:
        return block.view(torch.int64)  # right but for numbers above 2 ** 63, whose distance is then not the true one
    return block.to(torch.int64)


def _largest(numbers: torch.Tensor, *, otherwise: float = math.inf) -> float:
    """`otherwise` where one of them is NaN: it is in one block and not in the other."""
    largest = float(numbers.max())
    return otherwise if math.isnan(largest) else largest
