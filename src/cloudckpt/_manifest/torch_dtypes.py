"""Between torch's dtypes and their names."""

from __future__ import annotations

import torch

from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt.errors import UnsupportedValueError


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own name of a dtype, without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a manifest calls `name`; `UnsupportedValueError` where this torch lacks it."""
    dtype = getattr(torch, name, None) if name in ITEMSIZE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValueError(
            f"this torch ({torch.__version__}) has no dtype {name!r}: upgrade torch to load it", uri=""
        )
    return dtype
