"""Names and sizes of element types, against torch and the safetensors library."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES, SAFETENSORS_TAG
from cloudckpt.format.torch_metadata import dtype_name, dtype_of

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
def test_what_is_no_dtype_is_refused(name: str) -> None:
    """If this fails, a manifest can name any attribute of torch as a dtype."""
    with pytest.raises(UnsupportedValueError, match="upgrade torch"):
        dtype_of(name)


@pytest.mark.parametrize("name", SAFETENSORS_TAG)
def test_tags_mean_the_same_to_the_safetensors_library(name: str) -> None:
    """If this fails, other tools read a tensor of ours as another type."""
    tensor = torch.zeros(2, dtype=getattr(torch, name))
    header = safetensors.torch.save({"t": tensor})
    assert f'"dtype":"{SAFETENSORS_TAG[name]}"'.encode() in header
