"""Whether two values that are no tensors are the same."""

from __future__ import annotations

import math
import reprlib
from collections import deque
from typing import Any

import numpy as np
import torch

from cloudckpt._stage.unpickling import load_safely

_MAX_SHOWN = 100


def is_same_value(before: bytes, after: bytes) -> tuple[bool, tuple[str, str]]:
    """Whether two values are the same, by the bytes that ``torch.save`` made of them, and what they are, in words."""
    if before == after:
        return True, ("", "")
    try:
        values = [load_safely(content, map_location="cpu") for content in (before, after)]
    except Exception:  # noqa: BLE001  # whatever is in a bucket
        return False, (f"{len(before)} bytes", f"{len(after)} other bytes, which cannot be compared safely")
    first, second = (_shown(value) for value in values)
    return _is_equal(*values), (first, second)


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, (np.ndarray, np.generic)):
        one, other = ((each.dtype, each.shape, each.tobytes()) for each in (one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(_is_equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _shown(value: object) -> str:
    shown = reprlib.Repr()
    shown.maxother = shown.maxstring = _MAX_SHOWN
    return shown.repr(value)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
