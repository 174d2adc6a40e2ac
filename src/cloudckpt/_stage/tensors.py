"""Tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._manifest.torch_dtypes import dtype_name
from cloudckpt.errors import UnsupportedValueError

# Copies move bit patterns, also of dtypes that torch can hardly compute with: an integer of the same size stands in.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

# What numpy knows, and shows as memory that can be taken for bytes.
_QUICK = {
    **{dtype: dtype for dtype in (torch.float64, torch.float32, torch.float16)},
    **{dtype: dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)},
    torch.bfloat16: torch.int16,
}


def plain(tensor: torch.Tensor, fqn: str, *, uri: str) -> torch.Tensor:
    """`tensor` as the strided tensor of real memory that it stands for, sharing that memory.

    Raises `UnsupportedValueError` for tensors that have no such memory.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if not is_lazy(tensor):
        tensor = tensor.detach()
    what = _obstacle_in(tensor)
    if what is not None:
        raise UnsupportedValueError(f"cannot save {fqn!r} to {uri}: it is {what}", uri=uri)
    return tensor.resolve_conj().resolve_neg()


def _obstacle_in(tensor: torch.Tensor) -> str | None:
    """Return what `tensor` is and what to do, where it stands for no strided tensor of real memory."""
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    what = None
    if is_lazy(tensor):
        what = "a parameter of a lazy module, which has no shape yet: run the module once before the save"
    elif tensor.is_meta:
        what = (
            "a meta tensor, which has no data: materialise it first (to_empty(), or load its weights), or leave it out "
            "where another rank has it, as a stage of a pipeline does"
        )
    elif tensor.is_nested:
        what = f"a nested tensor of layout {tensor.layout}: save its parts (unbind()), or its values() and offsets()"
    elif tensor.layout is not torch.strided:
        what = f"of layout {tensor.layout}: convert it to a dense tensor (to_dense())"
    elif tensor.is_quantized:
        what = f"quantized ({tensor.dtype}): save its int_repr(), scale and zero point instead"
    elif is_wrapper:
        what = f"a {type(tensor).__name__}, which wraps other tensors: save those, or convert it to a plain tensor"
    elif dtype_name(tensor.dtype) not in ITEMSIZE_BYTES:
        what = f"of dtype {tensor.dtype}, which the format does not have"
    elif is_freed(tensor):
        what = "a tensor whose memory was freed, as FSDP does between uses: take the state dict that FSDP gives"
    elif is_short(tensor):
        what = shortage_of(tensor)
    return what


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides, in a dtype that every copy supports bit for bit."""
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy. It keeps the memory alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.shape or tensor.stride(-1) != 1:
        # Not reshape(-1): a dimension of length 1 may have any stride, and then keeps it.
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def quick_view(tensor: torch.Tensor) -> memoryview | None:
    """`bytes_view` of a tensor of no special type, in a third of the time; None where it may not be that simple."""
    carrier = _QUICK.get(tensor.dtype)
    if carrier is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        if not address_of(tensor):
            return None  # numpy would make up memory of its own
        if carrier is not tensor.dtype:
            tensor = tensor.view(carrier)
        # These refuse whatever has other memory, layouts, order or bits than the values have.
        return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]  # numpy's arrays are buffers
    except (RuntimeError, TypeError):
        return None


def address_of(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 where it has none, or too little. Raises `RuntimeError` for layouts without a place.

    Of a part of a storage that was freed, torch gives its offset in that storage, as if it were an address; and of one
    that was made smaller, an address from which it goes beyond the end.
    """
    address = tensor.data_ptr()
    return 0 if is_short(tensor) else address


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor, which wraps no other, has a shape but no memory: its storage was resized to nothing."""
    return tensor.device.type in {"cpu", "cuda"} and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def is_short(tensor: torch.Tensor) -> bool:
    """Whether the storage of a strided tensor, which wraps no other, ends before the tensor does: it was resized."""
    if tensor.numel() == 0 or tensor.device.type not in {"cpu", "cuda"}:
        return False
    held_bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    return held_bytes < (tensor.nbytes if tensor.is_contiguous() else reach_bytes(tensor))


def reach_bytes(tensor: torch.Tensor) -> int:
    """From its first element to the end of its last one, which has some."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def shortage_of(tensor: torch.Tensor) -> str:
    """Of one that `is_short`, for a message."""
    reach = tensor.storage_offset() * tensor.itemsize + reach_bytes(tensor)
    return (
        f"a tensor that needs {reach} bytes of a storage which was resized to {tensor.untyped_storage().nbytes()}: "
        "resize it back, or take a tensor of what is left"
    )


def synchronize(contents: Iterable[object]) -> None:
    """Wait for what the caller's streams still have to do on the CUDA devices of these tensors.

    Other threads copy from and to them on streams of their own. Devices that hold none of them are left alone.
    """
    for device in {item.device for item in contents if isinstance(item, torch.Tensor) and item.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def is_viewable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes can be used where they lie."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and holds_its_values(tensor)


def holds_its_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds its values, and not their conjugates or negatives."""
    return not (tensor.is_conj() or tensor.is_neg())
