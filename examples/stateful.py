"""Saving and loading a sharded model, its optimizer, and an object of your own that has a `state_dict`.

    torchrun --nproc-per-node 2 examples/stateful.py s3://bucket/run              (or gs://…, or a path)

Trains, saves and trains on. Then it loads into fresh objects, trains on as well, and compares the losses.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import cloudckpt


class Batches:
    """Random batches. DCP calls an object with the two methods of its state a `Stateful`."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        """Return the next batch of this rank."""
        self.position += 1
        return torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * self.position + dist.get_rank()))

    def state_dict(self) -> dict[str, Any]:
        """Return what a save stores."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a load read."""
        self.position = state_dict["position"]


def build(device: torch.device, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a small sharded model with its optimizer and its data."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), Batches()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, device: torch.device) -> list[float]:
    """Train a few steps and return the losses."""
    losses = []
    for _ in range(5):
        loss = model(batches.next().to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(root: str) -> None:
    """Compare training that went on with training from the checkpoint."""
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= num_local else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    uri = f"{root}/stateful/live"

    model, optimizer, batches = build(device, seed=0)
    train(model, optimizer, batches, device)
    # Without overwrite=True, a second run of this program would be told that the checkpoint exists already.
    cloudckpt.save(uri, model=model, optimizer=optimizer, extra={"batches": batches}, overwrite=True)
    expected = train(model, optimizer, batches, device)

    model, optimizer, batches = build(device, seed=3)
    cloudckpt.load(uri, model=model, optimizer=optimizer, extra={"batches": batches})
    if train(model, optimizer, batches, device) != expected:
        raise RuntimeError("trained on differently")

    if dist.get_rank() == 0:
        print("saved, and loaded into fresh objects: they train on as the original did")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
    # torch 2.13 now and then aborts while the interpreter takes its threads down, after all is done ("terminate called
    # without an active exception"), which torchrun takes for a failure.
    sys.stdout.flush()
    os._exit(0)
