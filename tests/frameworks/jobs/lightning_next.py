"""Lightning's sharded strategies as its main branch has them, after 2.6.6, under `cloudckpt.enable()`.

Since Lightning-AI/pytorch-lightning#21775 and #21821 they give URIs to `dcp.save` and `dcp.load`, write the rest of the
checkpoint to ``meta.pt`` through fsspec, and read the optimizer of FSDP1 with an `FsspecReader`. These classes make the
same calls in the same order, on top of the release.
"""

from __future__ import annotations

from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


class _Saves:
    model_key = "state_dict"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str, storage_options: Any = None) -> None:
        path = self.broadcast(filepath)
        states = enumerate(checkpoint.pop("optimizer_states", []))
        state = {self.model_key: checkpoint.pop("state_dict")} | {f"optimizer_{index}": each for index, each in states}
        fs, at = fsspec.url_to_fs(path)
        fs.makedirs(at, exist_ok=True)
        dcp.save(state, checkpoint_id=path)
        if self.global_rank == 0:
            with fs.open(f"{at}/meta.pt", "wb") as file:
                torch.save(checkpoint, file)

    def load_rest(self, path: str) -> dict[str, Any]:
        with fsspec.open(f"{path}/meta.pt", "rb") as file:
            return torch.load(file, weights_only=False)


class NextFSDPStrategy(_Saves, FSDPStrategy):
    model_key = "model"

    def load_checkpoint(self, checkpoint_path: str, weights_only: Any = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": self.model.state_dict()}
            dcp.load(state, checkpoint_id=path)
            self.model.load_state_dict(state["model"])
            reader = FsspecReader(path=path) if "://" in path else FileSystemReader(path=path)
            for index, optimizer in enumerate(self.optimizers):
                key = f"optimizer_{index}"
                found = load_sharded_optimizer_state_dict(state["model"], key, reader)
                flat = FullyShardedDataParallel.optim_state_dict_to_load(self.model, optimizer, found[key])
                optimizer.load_state_dict(flat)
        return self.load_rest(path)


class NextModelParallelStrategy(_Saves, ModelParallelStrategy):
    def load_checkpoint(self, checkpoint_path: str, weights_only: Any = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        state = {"state_dict": get_model_state_dict(self.model)}
        dcp.load(state, checkpoint_id=path)
        self.model.load_state_dict(state["state_dict"])
        for index, optimizer in enumerate(self.optimizers):
            found = {f"optimizer_{index}": get_optimizer_state_dict(self.model, optimizer)}
            dcp.load(found, checkpoint_id=path)
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=found[f"optimizer_{index}"])
        return self.load_rest(path)
