"""Check the casts of a load into a tensor of another dtype: none may change a value in silence."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

from cloudckpt.errors import Hint, StateDictMismatchError

_log = logging.getLogger("cloudckpt")

_INTEGERS = frozenset(
    {torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64}
)
_FLOATS = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)
_COMPLEX = frozenset({torch.complex128, torch.complex64, torch.complex32})
_CHECKED_DTYPES = _INTEGERS | _FLOATS | _COMPLEX | {torch.bool}
_SLICE_ELEMENTS = 1 << 18  # so that the memory of a check stays in the cache of a core

Casts: TypeAlias = dict[tuple[torch.dtype, torch.dtype], dict[str, None]]
"""Names of tensors by their stored and wanted dtypes, in their order."""
_ROUND_HINT = Hint(advice="To round them, {option}.", option="Options.allow_lossy_casts", value="'rounding'")
ALLOW_LOSSY_CASTS_HINT = Hint(
    advice="To cast as torch's copy_() does, {option}.", option="Options.allow_lossy_casts", value="True"
)


class CastCheck:
    """The check of a cast: refuses values that the dtype of the target cannot hold. Floats may be rounded."""

    __slots__ = ("_fqn", "_remedy", "_stored", "_uri", "_wanted")

    def __init__(self, fqn: str, stored: torch.dtype, wanted: torch.dtype, *, uri: str, remedy: str) -> None:
        self._fqn, self._stored, self._wanted, self._uri, self._remedy = fqn, stored, wanted, uri, remedy

    def check(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the elements that the target copies. Raise `StateDictMismatchError` if it would change a value.

        `elements` are in memory of the CPU.
        """
        for piece in elements.reshape(-1).split(_SLICE_ELEMENTS):
            lost = _find_lost(piece, self._wanted)
            if lost is not None and bool(lost.any()):
                value = piece[lost][0]
                raise self.make_error(f", such as {value.item()}")
        # torch warns of each copy of complex numbers to real ones.
        return elements.real if elements.is_complex() and not self._wanted.is_complex else elements

    def make_error(self, example: str = "") -> StateDictMismatchError:
        """Return the error for a tensor that does not fit."""
        return StateDictMismatchError(
            f"{self._fqn!r} of {self._uri} was saved as {self._stored}, and a tensor of {self._wanted} is to take it, "
            f"which cannot hold its values{example}. {self._remedy}",
            uri=self._uri,
            hint=ALLOW_LOSSY_CASTS_HINT,
        )


def new_cast_check(
    fqn: str,
    stored: torch.dtype,
    tensor: torch.Tensor,
    *,
    uri: str,
    remedy: str = "Load it into a tensor of the dtype that was saved",
) -> CastCheck | None:
    """Return the check of a cast to the dtype of `tensor`; None if that holds every value of the stored dtype.

    Raises `StateDictMismatchError` for a dtype whose range of values is unknown. `remedy` is its advice.
    """
    wanted = tensor.dtype
    if wanted is stored:
        return None
    cast = CastCheck(fqn, stored, wanted, uri=uri, remedy=remedy)
    if not {stored, wanted} <= _CHECKED_DTYPES:
        raise cast.make_error()
    return cast if _can_lose(stored, wanted) else None


def group_casts(casts: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> Casts:
    """Return the names of the tensors to cast, from names, stored dtypes and wanted dtypes."""
    names: Casts = {}
    for fqn, stored, wanted in casts:
        names.setdefault((stored, wanted), {})[fqn] = None
    return names


def log_casts(casts: Casts, *, uri: str) -> None:
    """Log in one line that tensors are loaded in other dtypes. It is a warning if floats are rounded."""
    if casts:
        level = logging.WARNING if any(_can_round(*pair) for pair in casts) else logging.INFO
        text = "tensors of %s are to be loaded in another dtype than they were saved in: %s"
        _log.log(level, text, uri, _describe(casts))


def refuse_rounding(casts: Casts, *, uri: str) -> None:
    """Raise `StateDictMismatchError` if floats would be rounded, with names of their tensors."""
    if rounded := {pair: names for pair, names in casts.items() if _can_round(*pair)}:
        raise StateDictMismatchError(
            f"tensors of {uri} would be rounded: {_describe(rounded)}. Load them into tensors of their dtype",
            uri=uri,
            hint=_ROUND_HINT,
        )


def _describe(casts: Casts) -> str:
    return ", ".join(
        f"{stored} → {wanted} ({len(names)} of them, such as {next(iter(names))!r})".replace("torch.", "")
        for (stored, wanted), names in casts.items()
    )


@functools.cache
def _can_round(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return True if a float loses digits, or a small one becomes 0."""
    if not {stored, wanted} <= _FLOATS | _COMPLEX:
        return False
    return _max_exact_integer(wanted) < _max_exact_integer(stored) or _smallest(wanted) > _smallest(stored)


@functools.cache
def _can_lose(stored: torch.dtype, wanted: torch.dtype) -> bool:
    if stored is torch.bool:
        return _min_of(wanted) > 0
    if stored in _INTEGERS:
        info = torch.iinfo(stored)
        if wanted in _INTEGERS or wanted is torch.bool:
            low, high = _bounds(wanted)
            return info.min < low or info.max > high
        return info.max > _max_exact_integer(wanted) or _min_of(wanted) > 0
    if wanted in _INTEGERS or wanted is torch.bool or (stored.is_complex and not wanted.is_complex):
        return True
    stored, wanted = stored.to_real(), wanted.to_real()
    if torch.finfo(wanted).max < torch.finfo(stored).max or _min_of(wanted) > 0:
        return True
    return _has_infinity(stored) and not _has_infinity(wanted)


def _find_lost(values: torch.Tensor, wanted: torch.dtype) -> torch.Tensor | None:
    """Return a mask of the values that are lost; None if no value is lost."""
    if values.is_complex():
        parts = torch.view_as_real(values.resolve_conj())
        if wanted.is_complex:
            lost = _find_lost(parts.reshape(-1), wanted.to_real())
            return None if lost is None else lost.view(-1, 2).any(dim=1)
        lost = _find_lost(parts[:, 0], wanted)
        has_imaginary = parts[:, 1] != 0
        return has_imaginary if lost is None else lost | has_imaginary
    is_float = values.dtype.is_floating_point
    if wanted in _INTEGERS or wanted is torch.bool:
        return _find_lost_fractions(values, wanted) if is_float else _find_out_of_range(values, wanted)
    wanted = wanted.to_real() if wanted.is_complex else wanted
    return _find_overflows(values, wanted) if is_float else _find_rounded(values, wanted)


def _find_lost_fractions(values: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    low, high = _bounds(wanted)
    wide = values.double()
    return ~((wide == wide.trunc()) & (wide >= float(low)) & (wide < float(high + 1)))


def _find_out_of_range(values: torch.Tensor, wanted: torch.dtype) -> torch.Tensor | None:
    info, (low, high) = torch.iinfo(values.dtype), _bounds(wanted)
    array = values.numpy()
    if low <= int(array.min()) and int(array.max()) <= high:
        return None
    return torch.from_numpy((array < max(low, info.min)) | (array > min(high, info.max)))


def _find_overflows(values: torch.Tensor, wanted: torch.dtype) -> torch.Tensor | None:
    bound, minimum = _overflow_of(wanted), _min_of(wanted)
    wide = values.float() if values.dtype.itemsize == 1 else values  # torch calculates with few types of 8 bits
    if minimum > 0:
        wide = wide.double()  # float16 would round the smallest number to 0
    smallest, largest = map(float, torch.aminmax(wide))
    if (smallest >= minimum if minimum > 0 else smallest > -bound) and largest < bound:
        return None
    is_kept = (wide.abs() < bound) | wide.isnan()
    if _has_infinity(wanted):
        is_kept |= wide.isinf()
    return ~is_kept | (wide < minimum) if minimum > 0 else ~is_kept


def _find_rounded(values: torch.Tensor, wanted: torch.dtype) -> torch.Tensor | None:
    """Return a mask of the integers that have more binary digits, without final zeros, than the float has."""
    max_exact, array = _max_exact_integer(wanted), values.numpy()
    has_zero = _min_of(wanted) < 0
    if (-max_exact if has_zero else 1) <= int(array.min()) and int(array.max()) <= max_exact:
        return None
    absolute = array.astype(np.uint64)
    absolute = np.where(array < 0, ~absolute + np.uint64(1), absolute)
    odd = absolute // np.maximum(absolute & (~absolute + np.uint64(1)), np.uint64(1))
    lost: Any = (odd >= np.uint64(max_exact)) & (odd > np.uint64(1))
    lost |= absolute > np.uint64(min(int(torch.finfo(wanted).max), 2**64 - 1))
    return torch.from_numpy(lost if has_zero else lost | (array < 1))


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


@functools.cache
def _max_exact_integer(dtype: torch.dtype) -> int:
    """Return the power of two up to which a float holds every integer."""
    dtype = dtype.to_real()
    number = 2  # not from finfo, whose eps is wrong for float8_e5m2fnuz
    while torch.tensor(number + 1, dtype=torch.float64).to(dtype).double().item() == number + 1:
        number *= 2
    return number


@functools.cache
def _smallest(dtype: torch.dtype) -> float:
    """Return the number of the lowest bit alone, the smallest above 0 but for float8_e8m0fnu."""
    lowest_bit = [1] + [0] * (dtype.to_real().itemsize - 1)
    return torch.tensor(lowest_bit, dtype=torch.uint8).view(dtype.to_real()).double().item()


def _min_of(dtype: torch.dtype) -> float:
    """Return the smallest float: above 0 for float8_e8m0fnu, which has only powers of two. -1 for any other kind."""
    return torch.finfo(dtype).min if dtype.is_floating_point else -1


@functools.cache
def _overflow_of(dtype: torch.dtype) -> float:
    """Return the smallest number that the type does not round to a finite number."""
    largest = torch.finfo(dtype).max
    return float(largest + math.ldexp(1.0, math.frexp(largest)[1] - 1) / _max_exact_integer(dtype))


@functools.cache
def _has_infinity(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(math.inf).to(dtype).float().isinf().item())
