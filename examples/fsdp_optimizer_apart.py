"""FSDP1 with sharded state dicts: the model is loaded first, and the optimizer's state apart from it.

    torchrun --nproc-per-node 2 examples/fsdp_optimizer_apart.py s3://bucket/run  (or gs://…, or a path)

For code that has not moved to FSDP2 yet. New code is shorter: see examples/stateful.py.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - as all the world calls it
from torch.distributed.fsdp import StateDictType

import cloudckpt


def build(device: torch.device, *, seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    """A small model under FSDP1, whose state dicts hold this rank's shards alone."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    model = FSDP(layers, device_id=device)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: FSDP, optimizer: torch.optim.Optimizer, device: torch.device, *, seed: int) -> list[float]:
    """A few steps; the losses."""
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    losses = []
    for _ in range(5):
        loss = model(torch.randn(16, 32, generator=random).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load(model: FSDP, optimizer: torch.optim.Optimizer, uri: str) -> None:
    """Fill a fresh model and a fresh optimizer from the checkpoint at `uri`."""
    state_dict = {"model": model.state_dict()}
    cloudckpt.load(state_dict, uri)
    model.load_state_dict(state_dict["model"])

    # A fresh optimizer has no state to load into: the checkpoint says what there is, the model how it is sharded.
    optimizer_state = load_sharded_optimizer_state_dict(
        model_state_dict=state_dict["model"],
        optimizer_key="optimizer",
        storage_reader=cloudckpt.ObjectStoreReader(uri),
    )
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optimizer_state["optimizer"]))


def main(root_uri: str) -> None:
    """Train, save, train on; load, train on as well, and compare."""
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= num_local else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    uri = f"{root_uri}/fsdp-optimizer-apart"
    model, optimizer = build(device, seed=0)
    train(model, optimizer, device, seed=1)
    state_dict = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    # Without overwrite=True, a second run of this program would be told that the checkpoint exists already.
    cloudckpt.save(state_dict, uri, overwrite=True)
    expected = train(model, optimizer, device, seed=2)

    model, optimizer = build(device, seed=3)
    load(model, optimizer, uri)
    if train(model, optimizer, device, seed=2) != expected:
        raise RuntimeError("trained on differently")

    if dist.get_rank() == 0:
        print("model and optimizer, loaded one after the other, train on as the original did")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
    # torch 2.13 now and then aborts while the interpreter takes its threads down, after all is done ("terminate called
    # without an active exception"), which torchrun takes for a failure.
    sys.stdout.flush()
    os._exit(0)
