"""Saving and loading objects that have a `state_dict` of their own, without taking them apart.

    torchrun --nproc-per-node 2 examples/stateful.py s3://bucket/run              (or gs://…, or a path)

Shows two ways: one object that knows all of the application's state, which is the one to prefer; and the model
and the optimizer put into the state dict as they are.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import cloudckpt


@dataclass(frozen=True)
class AppState:
    """What DCP calls a `Stateful`: anything with these two methods."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Parameters by name, in the model's state and in the optimizer's: loads on any number of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called with what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def build(device: torch.device, *, seed: int) -> AppState:
    """A small sharded model with its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    fully_shard(model)
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(app: AppState, device: torch.device, *, seed: int) -> list[float]:
    """A few steps; the losses."""
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    losses = []
    for _ in range(5):
        loss = app.model(torch.randn(16, 32, generator=random).to(device)).square().mean()
        loss.backward()
        app.optimizer.step()
        app.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(uri: str) -> None:
    """Train, save in both ways, train on; load in both ways, train on as well, and compare."""
    root = f"{uri}/stateful"
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= num_local else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    original = build(device, seed=0)
    train(original, device, seed=1)
    # Without overwrite=True, a second run of this program would be told that the checkpoints exist already.
    cloudckpt.save({"app": original}, f"{root}/app", overwrite=True)
    as_they_are = {"model": original.model, "optimizer": original.optimizer}
    cloudckpt.save(as_they_are, f"{root}/as-they-are", overwrite=True)
    expected = train(original, device, seed=2)

    restored = build(device, seed=3)
    cloudckpt.load({"app": restored}, f"{root}/app")
    if train(restored, device, seed=2) != expected:
        raise RuntimeError("AppState: trained on differently")

    restored = build(device, seed=4)
    # Only what the state dict names is loaded, and a fresh AdamW has no moments to name yet; this makes them.
    get_optimizer_state_dict(restored.model, restored.optimizer)
    cloudckpt.load({"model": restored.model, "optimizer": restored.optimizer}, f"{root}/as-they-are")
    if train(restored, device, seed=2) != expected:
        raise RuntimeError("as they are: trained on differently")

    if dist.get_rank() == 0:
        print("saved as one AppState, and as model and optimizer: both train on as the original did")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
    # torch 2.13 now and then aborts while the interpreter takes its threads down, after all is done ("terminate called
    # without an active exception"), which torchrun takes for a failure.
    sys.stdout.flush()
    os._exit(0)
