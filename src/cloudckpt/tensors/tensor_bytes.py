"""Find the dtypes and bytes of tensors: their address, if they can be read in place, and which tensors have none."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from cloudckpt._torch_compat import AsyncCollectiveTensor, is_wrapper_subclass, local_tensor_of
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES
from cloudckpt.format.nesting import PLAIN_TENSORS, has_planner_hooks

# Copies move bit patterns, also of dtypes that torch can hardly compute with: an integer of the same size stands in.
ALIGNMENT_BYTES = 16
"""The size of the largest element."""
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a dtype, without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a manifest calls `name`. Raise `UnsupportedValueError` if this torch lacks it."""
    dtype = getattr(torch, name, None) if name in ITEMSIZE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValueError(
            f"this torch ({torch.__version__}) has no dtype {name!r}: upgrade torch to load it", uri=""
        )
    return dtype


def plain_tensor(tensor: torch.Tensor, fqn: str, *, uri: str) -> torch.Tensor:
    """Return the strided tensor of real memory that `tensor` stands for, sharing that memory.

    Raises `UnsupportedValueError` for tensors that have no such memory.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if not is_lazy(tensor):
        tensor = tensor.detach()
    obstacle = find_obstacle(tensor)
    if obstacle is not None:
        raise UnsupportedValueError(f"cannot save {fqn!r} to {uri}: it is {obstacle}", uri=uri)
    return tensor.resolve_conj().resolve_neg()


def refuse_target(tensor: torch.Tensor, fqn: str, *, uri: str) -> None:
    """Raise `UnsupportedValueError` if a load cannot fill `tensor`, because it has no strided memory."""
    is_strided = not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized
    if is_lazy(tensor) or not is_strided:
        kind = str(find_obstacle(tensor)).partition(". ")[0]
        remedy = "Run the module once before the load" if is_lazy(tensor) else "Load into a plain tensor"
        raise UnsupportedValueError(f"cannot load {fqn!r} of {uri}: it is {kind}. {remedy}", uri=uri)


def find_obstacle(tensor: torch.Tensor) -> str | None:
    """Return the kind of `tensor` and advice, if it stands for no strided tensor of real memory; otherwise None."""
    obstacle = None
    if is_lazy(tensor):
        obstacle = "a parameter of a lazy module, which has no shape yet. Run the module once before the save"
    elif tensor.is_meta:
        obstacle = (
            "a meta tensor, which has no data. Load its weights first (to_empty() gives it memory), or leave it out "
            "if another rank has it, as a stage of a pipeline does"
        )
    elif tensor.is_nested:
        obstacle = f"a nested tensor of layout {tensor.layout}. Save its parts (unbind()), or values() and offsets()"
    elif tensor.layout is not torch.strided:
        obstacle = f"of layout {tensor.layout}. Convert it to a dense tensor (to_dense())"
    elif tensor.is_quantized:
        obstacle = f"quantized ({tensor.dtype}). Save its int_repr(), scale and zero point instead"
    elif is_wrapper_subclass(tensor):
        obstacle = f"a {type(tensor).__name__}, which wraps other tensors. Save those, or convert it to a plain tensor"
    elif dtype_name(tensor.dtype) not in ITEMSIZE_BYTES:
        obstacle = f"of dtype {tensor.dtype}, which the format does not have"
    elif is_short(tensor):
        obstacle = describe_shortage(tensor)
    elif type(tensor) not in PLAIN_TENSORS and tensor.is_cpu and tensor.numel() and not memory_address(tensor):
        obstacle = f"a {type(tensor).__name__}, which has no memory of its own. Convert it to a plain tensor"
    return obstacle


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, shape and strides in a dtype that every copy supports bit for bit."""
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable, without a copy. The view keeps the memory alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.shape or tensor.stride(-1) != 1:
        # Not reshape(-1): a dimension of length 1 may have any stride, and then keeps it.
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def view_memory(address: int, num_bytes: int, owner: object) -> memoryview:
    """Return the memory at an address, writable, in a tenth of the time of `bytes_view`. The view holds `owner`."""
    memory = _bytes_type(num_bytes.bit_length()).from_address(address)
    memory.kept_alive = owner
    return memoryview(memory).cast("B")[:num_bytes]


@functools.cache
def _bytes_type(num_bits: int) -> Any:
    """Return a type of ``2**num_bits`` bytes. Making a type for each number would take longer than filling memory."""
    return ctypes.c_ubyte * (1 << num_bits)


def viewable_address(tensor: torch.Tensor) -> int:
    """Return `memory_address` if the bytes of `tensor` can be used in place; otherwise 0."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return 0
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():  # `is_viewable`, sooner
        return 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # such as a fake tensor's
        return 0
    available_bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    return address if available_bytes >= tensor.nbytes else 0


class Source(NamedTuple):
    """A value of a state dict, and the facts about it that a save needs (`classify`)."""

    value: Any
    tensor: torch.Tensor | None = None
    """The value if it is a plain tensor, or its local shard."""
    address: int = 0
    """The address of the tensor's first element; 0 if it has none."""
    is_whole: bool = False
    """True if the value is the tensor itself, without hooks for planners."""
    is_in_place: bool = False
    """True if the tensor's bytes can be used in place."""


def classify(value: Any) -> Source:
    """Find out, once for a save, how to plan, compare and send `value`."""
    tensor = local_tensor_of(value) if type(value) is DTensor else value
    if type(tensor) not in PLAIN_TENSORS:
        return Source(value)
    is_whole = tensor is value and not has_planner_hooks(tensor)
    if address := viewable_address(tensor):
        return Source(value, tensor, address, is_whole, is_in_place=True)
    try:
        return Source(value, tensor, tensor.data_ptr(), is_whole)
    except RuntimeError:  # some layouts have no address
        return Source(value, tensor, 0, is_whole)


def memory_address(tensor: torch.Tensor) -> int:
    """Return where the memory of `tensor` begins; 0 if it is empty, or not strided memory of a CPU or a CUDA device.

    A tensor that is larger than its storage has address 0 too: torch would return the address of memory beyond it.
    """
    if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        return 0
    if tensor.is_quantized or tensor.is_nested:
        return 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # such as a fake tensor's
        return 0
    return 0 if not address or is_short(tensor) else address


def writable(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context in which torch can write to `tensors`, also to tensors of inference mode."""
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else nullcontext()


@contextmanager
def training_mode() -> Iterator[None]:
    """Make tensors that can be trained, even if the caller is in ``torch.inference_mode``."""
    # Outside of it, torch.inference_mode(False) would turn gradients on.
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext():
        yield


def layout_of(tensor: torch.Tensor) -> Hashable:
    """Return a key: tensors at the same address with the same key have the same values."""
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device


def is_short(tensor: torch.Tensor) -> bool:
    """Return True if the storage ends before `tensor` does, because it was resized or freed, as by FSDP.

    `tensor` is strided, and wraps no other tensor.
    """
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.numel() == 0:
        return False
    available_bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    return available_bytes < (tensor.nbytes if tensor.is_contiguous() else extent_bytes(tensor))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last one. `tensor` has elements."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def describe_shortage(tensor: torch.Tensor) -> str:
    """Describe a tensor that `is_short`, for a message."""
    end = tensor.storage_offset() * tensor.itemsize + extent_bytes(tensor)
    storage_bytes = tensor.untyped_storage().nbytes()
    if not storage_bytes:
        return "a tensor whose memory was freed, as FSDP does between uses. Take the state dict that FSDP gives"
    return (
        f"a tensor that needs {end} bytes of a storage which was resized to {storage_bytes}. Resize it back, or take a "
        "tensor of what is left"
    )


def address_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the addresses ``[begin, end)`` of `tensor`; None if they are not memory of this process."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if type(tensor) not in PLAIN_TENSORS and is_wrapper_subclass(tensor):
        return None
    begin = tensor.data_ptr()
    return begin, begin + extent_bytes(tensor)


def synchronize_streams(contents: Iterable[object]) -> None:
    """Wait for the work that is queued on the caller's streams on the CUDA devices of these tensors.

    Afterwards, other threads can copy from and to the tensors on their own streams.
    """
    for device in {item.device for item in contents if isinstance(item, torch.Tensor) and item.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def is_viewable(tensor: torch.Tensor) -> bool:
    """Return True if the bytes of `tensor` can be used in place."""
    return tensor.is_cpu and tensor.is_contiguous() and holds_its_values(tensor)


def holds_its_values(tensor: torch.Tensor) -> bool:
    """Return True if the memory of `tensor` holds its values, and not their conjugates or negatives."""
    return not (tensor.is_conj() or tensor.is_neg())
