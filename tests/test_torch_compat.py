"""The private names of torch that cloudckpt uses, on the installed torch and on one that lacks them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import _torch_compat
from cloudckpt.errors import CloudckptError

PACKAGE = Path(cloudckpt.__file__).parent
CHECKPOINT = "torch.distributed.checkpoint"
USE_OF_PRIVATE_NAME = {
    f"{CHECKPOINT}.utils:_DistWrapper": (
        "run each step of a save or load on all ranks, and collect the failures of all; "
        "without it, cloudckpt cannot be imported"
    ),
    "torch:_neg_view": "keep negated tensors negated in a snapshot; without it, cloudckpt cannot be imported",
    "torch:_C._storage_Use_Count": (
        "see that a snapshot for another process is still in use; without it, cloudckpt cannot be imported"
    ),
    "torch:UntypedStorage._new_shared_fd_cpu": (
        "share snapshots with another process; without it, saves by process fail"
    ),
    f"{CHECKPOINT}._extension:Extension": (
        "torch's stream extensions (Options.extensions); without it, cloudckpt cannot be imported"
    ),
    f"{CHECKPOINT}._extension:ExtensionRegistry": (
        "torch's stream extensions (Options.extensions); without it, cloudckpt cannot be imported"
    ),
    f"{CHECKPOINT}._extension:StreamTransformExtension": (
        "torch's stream extensions (Options.extensions); without it, cloudckpt cannot be imported"
    ),
    f"{CHECKPOINT}._extension:ZStandard": (
        "torch's stream extensions (Options.extensions); without it, cloudckpt cannot be imported"
    ),
    f"{CHECKPOINT}._state_dict_stager:StateDictStager": (
        "copy tensors within Python objects of a background save; without it, cloudckpt cannot be imported"
    ),
    "torch.distributed.tensor:DTensor._local_tensor": (
        "reach a DTensor's shard without recording a gradient; "
        "without it, DTensor.to_local() is called, without gradients"
    ),
    "torch.distributed:ProcessGroup._device_types": (
        "refuse a background save on a group without a CPU backend before it begins; "
        "without it, such a save fails in its first collective"
    ),
    f"{CHECKPOINT}._storage_utils:_storage_setup": (
        "enable() takes over torch's own save and load; without it, enable() raises CloudckptError"
    ),
    f"{CHECKPOINT}.state_dict_saver:_save_state_dict": (
        "enable() plans saves that are given no planner; without it, torch's default planner plans them"
    ),
    f"{CHECKPOINT}.state_dict_loader:_load_state_dict": (
        "enable() plans loads that are given no planner; without it, torch's default planner plans them"
    ),
    f"{CHECKPOINT}._fsspec_filesystem:FsspecReader": (
        "enable() reads checkpoints of cloudckpt with a reader that Lightning makes; without it, such a load fails"
    ),
    f"{CHECKPOINT}._async_process_executor:_ProcessBasedAsyncCheckpointExecutor": (
        "enable() takes over torch's async saves in another process; without it, such a save needs a storage_writer"
    ),
    f"{CHECKPOINT}._async_process_executor:_AsyncCheckpointProcess": (
        "end torch's background process that died, and tell why; without it, saves by process fail"
    ),
    f"{CHECKPOINT}.state_dict:_get_fqns": (
        "name the parameters of a model as get_model_state_dict does; "
        "without it, the names of wrappers are cut out by their text"
    ),
    f"{CHECKPOINT}.planner_helpers:_create_chunk_list": (
        "plan a load from the chunks that a rank needs, not from all of them; "
        "without it, torch's planner visits all chunks of each tensor"
    ),
    f"{CHECKPOINT}.planner_helpers:_init_state_dict": (
        "load into tensors on the meta device; without it, such a load fails"
    ),
    f"{CHECKPOINT}.default_planner:_validate_global_plan": (
        "find overlapping shards before anything is written; "
        "without it, the check of the manifest finds them at the commit"
    ),
    f"{CHECKPOINT}._sharded_tensor_utils:_flatten_sharded_tensors": (
        "save ShardedTensors of FSDP1; without it, there are no ShardedTensors"
    ),
    "torch.distributed._shard.sharded_tensor.api:ShardedTensor": (
        "save and load ShardedTensors of FSDP1; without it, there are none"
    ),
    "torch.distributed._shard.sharded_tensor.shard:Shard": "copy ShardedTensors of FSDP1; without it, there are none",
    "torch.distributed._functional_collectives:AsyncCollectiveTensor": (
        "wait for the result of a functional collective before its bytes are read; without it, there are none"
    ),
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass": (
        "recognise tensors that consist of other tensors; without it, their method __tensor_flatten__ shows it"
    ),
    "torch:_foreach_copy_": "copy many tensors in one call; without it, they are copied one by one",
}
"""The use of each private name, and the consequence where torch lacks it."""


@pytest.mark.parametrize("private", USE_OF_PRIVATE_NAME)
def test_the_installed_torch_has_each_private_name(private: str) -> None:
    """If this fails, torch has dropped a private name: `USE_OF_PRIVATE_NAME` says what no longer works."""
    assert _torch_compat.find(*private.split(":")) is not None, USE_OF_PRIVATE_NAME[private]


def test_no_other_module_imports_a_private_name() -> None:
    """If this fails, a change of torch can break code that nobody finds in the list of its private names."""
    found = [
        f"{path.relative_to(PACKAGE)}: {node.module}.{alias.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_torch_compat.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for alias in node.names
        if "._" in (node.module or "") or alias.name.startswith("_")
    ]
    assert not found


def test_each_fallback_does_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, cloudckpt does something else with a torch that lacks a private name."""
    for name in ("_foreach_copy", "_is_traceable_wrapper", "_create_chunk_list", "_validate_global_plan"):
        monkeypatch.setattr(_torch_compat, name, None)
    monkeypatch.setattr(_torch_compat, "find", lambda *_: None)
    targets = [torch.zeros(2), torch.zeros(3)]
    _torch_compat.copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[1, 1], [2, 2, 2]]
    assert not _torch_compat.is_wrapper_subclass(torch.ones(1))
    assert not _torch_compat.is_wrapper_subclass(torch.nn.Parameter(torch.ones(1)))
    assert _torch_compat.chunks_wanted_by(torch.ones(2)) is None
    assert _torch_compat.validate_global_plan([], dcp.Metadata({})) == []


def test_a_torch_that_cannot_be_extended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, `enable` ends in an AttributeError about a name that no user knows."""
    monkeypatch.setattr(_torch_compat, "find", lambda *_: None)
    with pytest.raises(CloudckptError, match="has changed how it finds a storage"):
        cloudckpt.enable()
