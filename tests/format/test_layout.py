"""The layout of a data object, against the safetensors library."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG
from cloudckpt.format.safetensors import HeaderEntry, lay_out
from cloudckpt.tensors.tensor_bytes import dtype_name, dtype_of

NAMES = ["w", "w#2", "__metadata__", "a.b.weight", "w[0:2]", "ünïcode ✓", 'quo"te\\', "new\nline", ""]

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def entries(draw: st.DrawFn) -> list[HeaderEntry]:
    made = []
    for _ in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from([None, *ITEMSIZE_BYTES]))
        shape = draw(shapes) if dtype else ()
        is_whole = dtype is None or draw(st.booleans())
        num_bytes = ITEMSIZE_BYTES[dtype] * _prod(shape) if dtype else draw(st.integers(0, 40))
        made.append(
            HeaderEntry(
                fqn=draw(st.sampled_from(NAMES)),
                dtype=dtype,
                shape=shape,
                offsets=None if is_whole else tuple(draw(st.integers(0, 9)) for _ in shape),
                num_bytes=num_bytes,
            )
        )
    return made


def _prod(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def content_of(index: int, entry: HeaderEntry) -> bytes:
    # Zeros and ones are the only bytes that are good bools too.
    return bytes((index + position) % 2 for position in range(entry.num_bytes))


@given(entries())
def test_every_object_opens_with_the_safetensors_library(unordered: list[HeaderEntry]) -> None:
    """If this fails, data objects are no safetensors files, and nobody else's tools can open them."""
    layout = lay_out(unordered)
    ordered = [unordered[index] for index in layout.order]
    document = bytearray(layout.header.ljust(layout.size_bytes, b"\xee"))
    for index, entry in enumerate(ordered):
        begin = layout.begins[layout.order[index]]
        assert begin % entry.itemsize_bytes == 0
        document[begin : begin + entry.num_bytes] = content_of(index, entry)
    assert len(document) == layout.size_bytes
    loaded = safetensors.torch.load(bytes(document))
    assert len(loaded) == len(ordered)
    for index, (entry, tensor) in enumerate(zip(ordered, in_stored_order(layout.header, loaded), strict=True)):
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        assert bytes(flat.tolist()) == content_of(index, entry)
        if entry.dtype in SAFETENSORS_TAG:
            assert tensor.dtype == getattr(torch, entry.dtype)
            assert tuple(tensor.shape) == entry.shape
        else:
            assert tensor.dtype == torch.uint8


def in_stored_order(header: bytes, loaded: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors by the order of their names in the header, read by Python's own JSON."""
    names = [name for name in json.loads(header[8:]) if name != "__metadata__"]
    return [loaded[name] for name in names]


def names_of(*given_entries: HeaderEntry) -> list[str]:
    names: dict[str, Any] = json.loads(lay_out(given_entries).header[8:])
    return [name for name in names if name != "__metadata__"]


def test_names_say_what_is_stored_and_are_unique() -> None:
    """If this fails, two chunks share a name, and one of them is lost to every other reader."""
    whole = HeaderEntry(fqn="w", dtype="uint8", shape=(4,), offsets=None, num_bytes=4)
    chunk = HeaderEntry(fqn="w", dtype="uint8", shape=(2, 2), offsets=(4, 0), num_bytes=4)
    scalar = HeaderEntry(fqn="s", dtype="uint8", shape=(), offsets=(), num_bytes=1)
    reserved = HeaderEntry(fqn="__metadata__", dtype=None, shape=(), offsets=None, num_bytes=3)
    assert names_of(whole, chunk, scalar, reserved) == ["w", "w[4:6,0:2]", "s[]", "__metadata__#2"]
    assert names_of(whole, whole, whole) == ["w", "w#2", "w#3"]


TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_that_has_plain_bytes_can_be_stored(dtype: torch.dtype) -> None:
    """If this fails, models of some dtype cannot be saved, or are read back with elements of another size."""
    name = dtype_name(dtype)
    assert (name in ITEMSIZE_BYTES) == (dtype not in QUANTIZED)
    if name in ITEMSIZE_BYTES:
        assert ITEMSIZE_BYTES[name] == dtype.itemsize
        assert dtype_of(name) is dtype


@pytest.mark.parametrize("name", ["float7", "qint8", "", "Tensor", "__name__", "nn", "load"])
def test_unknown_dtype_is_refused(name: str) -> None:
    """If this fails, a manifest can name any attribute of torch as a dtype."""
    with pytest.raises(UnsupportedValueError, match="upgrade torch"):
        dtype_of(name)


@pytest.mark.parametrize("name", SAFETENSORS_TAG)
def test_tags_mean_the_same_to_the_safetensors_library(name: str) -> None:
    """If this fails, other tools read a tensor of ours as another type."""
    tensor = torch.zeros(2, dtype=getattr(torch, name))
    header = safetensors.torch.save({"t": tensor})
    assert f'"dtype":"{SAFETENSORS_TAG[name]}"'.encode() in header
