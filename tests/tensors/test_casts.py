"""Which values a cast of a load refuses, against exact numbers of Python and the bit patterns of each dtype."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.errors import StateDictMismatchError
from cloudckpt.tensors.casts import new_cast_check

INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("u", "") for bits in (8, 16, 32, 64)]
SMALL_FLOATS = [getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
SMALL_FLOATS += [torch.float16, torch.bfloat16]
FLOATS = [*SMALL_FLOATS, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


@functools.cache
def patterns_of(dtype: torch.dtype) -> frozenset[float]:
    """All numbers that a float of 8 or 16 bits can be, decoded one by one."""
    num_bits = dtype.itemsize * 8
    bits = torch.arange(2**num_bits, dtype=torch.int32).to(torch.uint8 if num_bits == 8 else torch.uint16)
    return frozenset(one for one in bits.view(dtype).double().tolist() if not math.isnan(one))


@functools.cache
def overflow_of(dtype: torch.dtype) -> Fraction:
    """The number halfway between the largest finite number and the one that would follow."""
    if dtype in SMALL_FLOATS:
        largest, before = (Fraction(one) for one in sorted(filter(math.isfinite, patterns_of(dtype)))[:-3:-1])
        step = largest - before if dtype is not torch.float8_e8m0fnu else 2 * (largest - before)
        return largest + step / 2
    limit = np.float32 if dtype is torch.float32 else np.float64
    largest, before = np.finfo(limit).max, np.nextafter(np.finfo(limit).max, limit(0))
    return Fraction(float(largest)) + (Fraction(float(largest)) - Fraction(float(before))) / 2


def is_held(value: complex, stored: torch.dtype, wanted: torch.dtype) -> bool:
    """True if a number of the dtype `stored` is still that number as `wanted`, apart from the rounding of floats."""
    if stored.is_complex:
        parts = [complex(value).real, complex(value).imag]
        if not wanted.is_complex:
            return parts[1] == 0 and is_held(parts[0], REAL[stored], wanted)
        return all(is_held(part, REAL[stored], REAL[wanted]) for part in parts)
    assert not isinstance(value, complex)
    wanted = REAL.get(wanted, wanted)
    if wanted is torch.bool or wanted in INTEGERS:
        low, high = (0, 1) if wanted is torch.bool else (torch.iinfo(wanted).min, torch.iinfo(wanted).max)
        held = math.isfinite(value) and value == int(value) and low <= value <= high
    elif stored in INTEGERS and wanted in SMALL_FLOATS:
        held = int(value) in patterns_of(wanted)
    elif stored in INTEGERS:
        held = int((np.float32 if wanted is torch.float32 else np.float64)(int(value))) == value
    elif math.isinf(value):
        held = wanted not in SMALL_FLOATS or value in patterns_of(wanted)
    else:
        is_below = wanted is torch.float8_e8m0fnu and value < min(patterns_of(wanted))  # it has no 0
        held = math.isnan(value) or (abs(Fraction(value)) < overflow_of(wanted) and not is_below)
    return held


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of random bits, and of numbers near the bounds of other dtypes."""
    bits = st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)
    if dtype is torch.bool:
        bits = st.sampled_from([b"\0", b"\1"])
    near = st.builds(
        lambda sign, power, off: sign * (2**power + off),
        st.sampled_from([1, -1]),
        st.sampled_from([0, 4, 5, 7, 8, 9, 11, 15, 16, 24, 25, 31, 32, 53, 54, 62, 63]),
        st.integers(-3, 3),
    )

    def encoded(number: float) -> bytes:
        if dtype in INTEGERS:
            info = torch.iinfo(dtype)
            made = torch.tensor(min(max(int(number), info.min), info.max), dtype=dtype)
        else:
            made = torch.tensor(float(number), dtype=torch.float64).to(dtype)
        return bytes(made.reshape(1).view(torch.uint8).tolist())

    bounds = st.sampled_from(
        [
            0.0,
            -0.0,
            2.0**-127,
            2.0**-128,
            0.5,
            2.75,
            448.0,
            463.0,
            465.0,
            65519.0,
            65520.0,
            3.39e38,
            3.4e38,
            3.402823568e38,
            1e300,
        ]
    )
    many = [bits] if dtype is torch.bool else [bits, near.map(encoded)]
    if dtype.is_floating_point or dtype.is_complex:
        many.append(bounds.map(encoded))
    return st.lists(st.one_of(*many), min_size=1, max_size=4).map(
        lambda rows: torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(dtype)
    )


@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_a_cast_is_refused_exactly_where_a_value_is_lost(stored: torch.dtype, data: st.DataObject) -> None:
    """If this fails, a load turns a value into another without an error, or refuses a checkpoint that fits."""
    elements = data.draw(tensors(stored))
    wide = elements.to(torch.complex128) if stored.is_complex else elements
    for wanted in DTYPES:
        cast = None if wanted is stored else new_cast_check("w", stored, torch.empty(0, dtype=wanted), uri="memory://a")
        held = wanted is stored or all(is_held(value, stored, wanted) for value in wide.tolist())
        if held:
            assert cast is None or cast.check(elements).numel() == elements.numel()
        else:
            assert cast is not None, (elements, wanted)
            with pytest.raises(StateDictMismatchError, match=r"'w' of memory://a was saved as .*Options\(allow_lossy"):
                cast.check(elements)


def test_every_element_is_looked_at() -> None:
    """If this fails, a value far back in a large tensor, or in a strided block of one, is changed in silence."""
    elements = torch.zeros(3, 300_001)
    cast = new_cast_check("w", torch.float32, torch.empty(0, dtype=torch.int8), uri="memory://a")
    assert cast is not None
    cast.check(elements[:, ::2])
    elements[2, 300_000] = 0.5
    cast.check(elements[:, :-1])
    with pytest.raises(StateDictMismatchError, match=r"such as 0\.5"):
        cast.check(elements[:, ::2])


@pytest.mark.parametrize("other", [torch.qint8, torch.float4_e2m1fn_x2, torch.bits8, torch.uint4], ids=str)
def test_a_dtype_without_a_known_range_is_refused(other: torch.dtype) -> None:
    """If this fails, a load into a quantized tensor clips values, or fails with torch's error without a name."""
    with pytest.raises(StateDictMismatchError, match="'w'"):
        new_cast_check("w", torch.float32, _Typed(other), uri="memory://a")  # type: ignore[arg-type]
    if other is not torch.qint8:
        with pytest.raises(StateDictMismatchError, match="'w'"):
            new_cast_check("w", other, torch.empty(0), uri="memory://a")


class _Typed:
    """Stands for a tensor: some of these can only be made by functions of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
