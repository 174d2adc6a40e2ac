"""A user's program. Every line must pass `mypy --strict` and pyright against the wheel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as torchs_load
from torch.distributed.checkpoint.state_dict_saver import save as torchs_save

import cloudckpt


def train(root: str, state_dict: dict[str, Any], num_steps: int) -> cloudckpt.types.SavedMetadata | None:
    """Save beside training, and resume."""
    options = cloudckpt.Options(connections=16, timeout_s=30.0)
    newest = cloudckpt.latest(root)
    first_step = 0
    if newest is not None:
        report: cloudckpt.LoadReport = cloudckpt.load(state_dict, newest.uri, options=options)
        first_step = report.num_bytes_read and 1
    handle: cloudckpt.AsyncSave | None = None
    for step in range(first_step, num_steps):
        handle = cloudckpt.async_save(state_dict, f"{root}/step-{step}", options=options)
        progress: cloudckpt.types.SaveProgress = handle.progress
        print(progress)
        handle.staged.result()
    cloudckpt.close()
    return None if handle is None else handle.result(timeout=60)


def save(state_dict: dict[str, Any], path: Path) -> int:
    """Failures are classes with fields."""
    try:
        saved: cloudckpt.types.SavedMetadata = cloudckpt.save(state_dict, path, overwrite=True)
    except cloudckpt.CheckpointExistsError as error:
        failures: Mapping[int, BaseException] = {rank: cause for rank, (cause, _) in error.failures.items()}
        print(failures)
        raise
    except cloudckpt.RankLostError as error:
        ranks: tuple[int, ...] = error.ranks
        print(ranks)
        raise
    return saved.report.num_bytes if saved.report else 0  # a writer of another kind makes none


def housekeeping(root: str) -> list[str]:
    """Return what lies under a root."""
    garbage: cloudckpt.types.GarbageReport = cloudckpt.gc(root, dry_run=True)
    verified: cloudckpt.types.VerifyReport = cloudckpt.verify(f"{root}/step-1")
    print(garbage.num_bytes, verified)
    return [checkpoint.name for checkpoint in cloudckpt.list_checkpoints(root)]


def with_torchs_own_calls(state_dict: dict[str, torch.Tensor], uri: str) -> None:
    """The writer and the reader go where torch takes one."""
    cloudckpt.enable()
    torchs_save(state_dict, storage_writer=cloudckpt.ObjectStoreWriter(uri))
    torchs_load(state_dict, storage_reader=cloudckpt.ObjectStoreReader(uri))
    cloudckpt.disable()
