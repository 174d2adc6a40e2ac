"""The private names of torch that cloudckpt imports. No other module imports one.

Private attributes of objects that torch hands over are used where those objects are handled.

torch may move or drop each one in any release. ``tests/test_torch_compat.py`` says what each is for, what is done
without it, and which of them the installed torch has.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.checkpoint._extension import (
        Extension,
        ExtensionRegistry,
        StreamTransformExtension,
        ZStandard,
    )
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
    from torch.distributed.checkpoint.utils import _DistWrapper as DistWrapper

__all__ = [
    "AsyncCollectiveTensor",
    "DistWrapper",
    "Extension",
    "ExtensionRegistry",
    "Shard",
    "ShardedTensor",
    "StateDictStager",
    "StreamTransformExtension",
    "ZStandard",
    "chunks_wanted_by",
    "copy_each",
    "find",
    "flatten_sharded_tensors",
    "forget_checkpoint_process",
    "fqns_of",
    "get_checkpoint_process",
    "has_cpu_backend",
    "has_other_users",
    "is_wrapper_subclass",
    "local_tensor_of",
    "materialize_meta_tensors",
    "negated_view",
    "new_shared_storage",
    "problems_in",
    "validate_global_plan",
]

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor"


def find(module: str, name: str) -> Any:
    """Return the object called `name` in `module`, or None where torch has none."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _require(module: str, name: str) -> Any:
    attribute = find(module, name)
    if attribute is None:
        raise ImportError(
            f"torch {torch.__version__} has no {module}.{name}, which cloudckpt needs. Install a version of torch that "
            "this cloudckpt knows, or a newer cloudckpt"
        )
    return attribute


class _AbsentType:
    """Stands for a type that torch lacks: nothing is an instance of it."""


def _type_or_absent(module: str, name: str) -> Any:
    return find(module, name) or type(name, (_AbsentType,), {})


if not TYPE_CHECKING:
    DistWrapper = _require(f"{_CHECKPOINT}.utils", "_DistWrapper")
    Extension = _require(f"{_CHECKPOINT}._extension", "Extension")
    ExtensionRegistry = _require(f"{_CHECKPOINT}._extension", "ExtensionRegistry")
    StreamTransformExtension = _require(f"{_CHECKPOINT}._extension", "StreamTransformExtension")
    ZStandard = _require(f"{_CHECKPOINT}._extension", "ZStandard")
    StateDictStager = _require(f"{_CHECKPOINT}._state_dict_stager", "StateDictStager")
    ShardedTensor = _type_or_absent(f"{_SHARDED}.api", "ShardedTensor")
    Shard = _type_or_absent(f"{_SHARDED}.shard", "Shard")
    AsyncCollectiveTensor = _type_or_absent("torch.distributed._functional_collectives", "AsyncCollectiveTensor")

negated_view: Callable[[torch.Tensor], torch.Tensor] = _require("torch", "_neg_view")
"""Returns a tensor of the same memory whose values are the negatives."""
_count_storage_users: Any = _require("torch", "_C._storage_Use_Count")
_new_shared_storage: Any = find("torch", "UntypedStorage._new_shared_fd_cpu")
_create_chunk_list: Any = find(f"{_CHECKPOINT}.planner_helpers", "_create_chunk_list")
_get_fqns: Any = find(f"{_CHECKPOINT}.state_dict", "_get_fqns")
_init_state_dict: Any = find(f"{_CHECKPOINT}.planner_helpers", "_init_state_dict")
_validate_global_plan: Any = find(f"{_CHECKPOINT}.default_planner", "_validate_global_plan")
_flatten_sharded_tensors: Any = find(f"{_CHECKPOINT}._sharded_tensor_utils", "_flatten_sharded_tensors")
_foreach_copy: Any = find("torch", "_foreach_copy_")
_is_traceable_wrapper: Any = find("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")


def has_other_users(storage: torch.UntypedStorage) -> bool:
    """Return True if another tensor or storage uses the memory of `storage`."""
    return int(_count_storage_users(storage._cdata)) > 1


def new_shared_storage(descriptor: int, num_bytes: int) -> torch.UntypedStorage:
    """Return a storage of the memory of a file, which torch shares with other processes. It copies the descriptor."""
    storage: torch.UntypedStorage = _new_shared_storage(descriptor, num_bytes)
    return storage


def chunks_wanted_by(value: Any) -> list[Any] | None:
    """Return the boxes of a stored tensor that `value` holds on this rank; None where torch cannot tell."""
    if _create_chunk_list is None:
        return None
    try:
        chunks: list[Any] = _create_chunk_list(value)
    except ValueError:
        return None  # the planner raises it with more words
    return chunks


def fqns_of(module: Any, name: str) -> set[str]:
    """Return the names of a parameter without names of wrappers: several for a flat parameter of torch's first FSDP."""
    if _get_fqns is None:
        return {re.sub(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.", "", name)}
    return set(_get_fqns(module, name))


def materialize_meta_tensors(entries: dict[str, Any]) -> None:
    """Replace tensors on the meta device by empty ones, on the device of the process group; without one, of the CPU."""
    if not (dist.is_available() and dist.is_initialized()):
        entries.update({name: torch.empty_like(value, device="cpu") for name, value in entries.items()})
    elif _init_state_dict is not None:
        _init_state_dict(entries)


def validate_global_plan(plans: Sequence[Any], metadata: Any) -> list[str]:
    """Return the problems of the plans of all ranks together, such as shards that overlap."""
    return [] if _validate_global_plan is None else problems_in(_validate_global_plan(plans, metadata))


def problems_in(verdict: Any) -> list[str]:
    """Return the problems that the check of a plan by torch has found: it returns a list of them, or a bool."""
    if isinstance(verdict, bool):  # torch 2.11 logs what is wrong
        return [] if verdict else ["see torch's log"]
    return list(verdict or ())


def flatten_sharded_tensors(entries: dict[str, Any]) -> dict[str, Any]:
    """Replace each ShardedTensor by its one shard on this rank; by nothing where the rank has none."""
    return entries if _flatten_sharded_tensors is None else dict(_flatten_sharded_tensors(entries))


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of `sources` into the target at its position."""
    if _foreach_copy is not None:
        _foreach_copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def is_wrapper_subclass(value: object) -> bool:
    """Return True if a tensor consists of other tensors."""
    if _is_traceable_wrapper is not None:
        return bool(_is_traceable_wrapper(value))
    return type(value) is not torch.Tensor and hasattr(value, "__tensor_flatten__")


def local_tensor_of(value: Any) -> torch.Tensor:
    """Return a DTensor's shard on this rank, without recording a gradient."""
    local: torch.Tensor | None = getattr(value, "_local_tensor", None)
    if local is not None:
        return local
    with torch.no_grad():
        tensor: torch.Tensor = value.to_local()
        return tensor


def get_checkpoint_process() -> Any:
    """Return torch's background process for saves, a `multiprocessing` process, or None."""
    current = importlib.import_module(f"{_CHECKPOINT}._async_process_executor")._CHECKPOINT_PROCESS
    return None if current is None else current._save_process


def forget_checkpoint_process() -> None:
    """Let torch start a new background process for the next save."""
    module: Any = importlib.import_module(f"{_CHECKPOINT}._async_process_executor")
    module._CHECKPOINT_PROCESS = None


def has_cpu_backend(group: Any) -> bool:
    """Return True if a process group carries CPU tensors, or torch does not say."""
    device_types = getattr(group, "_device_types", None)
    return device_types is None or torch.device("cpu") in device_types
