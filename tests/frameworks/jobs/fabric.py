"""Lightning's Fabric, with DDP or FSDP2: whole training, and the same stopped in the middle and resumed."""

from __future__ import annotations

import lightning
import torch
from common import NUM_RANKS, Noisy, data, end, places, tell
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt.integrations.lightning import CloudCheckpointIO


def fit(uri: str | None, kind: str, *, until: int, resume: bool = False) -> list[float]:
    is_sharded = kind == "fsdp2"
    strategy = (
        ModelParallelStrategy(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]) and model)
        if is_sharded
        else "ddp"
    )
    fabric = lightning.Fabric(
        accelerator="cpu", devices=NUM_RANKS, strategy=strategy, plugins=None if is_sharded else [CloudCheckpointIO()]
    )
    fabric.launch()
    torch.manual_seed(3)
    model = fabric.setup(Noisy())
    model.drop.p = 0.0
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}

    def sharded() -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(model.module, optimizer.optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "step": state["step"]}

    if resume and is_sharded:
        found = sharded()
        cloudckpt.load(found, uri)
        set_state_dict(
            model.module,
            optimizer.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        state["step"] = found["step"]
    elif resume:
        assert fabric.load(uri, state) == {}
    losses, batches = [], data().split(8)
    for step in range(state["step"], until):
        batch = batches[step % len(batches)]
        loss = torch.nn.functional.mse_loss(model(batch), batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state["step"] = until
    if uri is not None and is_sharded:
        cloudckpt.save(sharded(), uri, overwrite=True)
    elif uri is not None:
        fabric.save(uri, state)
    return losses


for place, root in places():
    result = {}
    for kind in ("ddp", "fsdp2"):
        uri = f"{root}/{kind}"
        whole = fit(None, kind, until=6)
        result[kind] = {
            "whole": whole,
            "part": fit(uri, kind, until=3),
            "resumed": fit(uri, kind, until=6, resume=True),
        }
    tell(place, result)
end()
