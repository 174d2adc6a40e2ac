"""Accelerate, with FSDP2 or DDP: whole training, and the same resumed in the middle; on one rank, only resumed."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import Noisy, data, tell
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cloudckpt
from cloudckpt.integrations.accelerate import AcceleratorState

NUM_RANKS = int(os.environ["WORLD_SIZE"])


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, "nothing": {}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["nothing"] == {}
        self.seen = state["seen"]


def fit(root: str, *, until: int, kind: str, drop: float) -> tuple[list[float], int]:
    accelerator = Accelerator(cpu=True)
    set_seed(3 + accelerator.process_index)
    torch.manual_seed(3)
    model = Noisy()
    model.drop.p = drop
    if kind == "fsdp2" and NUM_RANKS > 1:  # Accelerate itself shards on accelerators alone
        fully_shard(model)
        model = accelerator.prepare_model(model, evaluation_mode=True)  # without DDP around it
        assert all(isinstance(one, DTensor) for one in model.parameters())
    else:
        model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.95**step)
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    scheduler, loader = accelerator.prepare(scheduler, loader)
    batches = list(loader)  # draws a random number, as each pass through a loader does
    torch.manual_seed(11 + accelerator.process_index)
    state = {"accelerator": AcceleratorState(accelerator), "step": 0}
    losses = []
    with cloudckpt.CheckpointManager(root) as manager:
        restored = manager.restore(state)
        first = 0 if restored is None else state["step"]
        for step in range(first, until):
            batch = batches[step % len(batches)]
            loss = torch.nn.functional.mse_loss(model(batch), batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.seen[step] = step * step
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        state["step"] = until
        manager.save(until, state, overwrite=True)
    assert counter.seen == {step: step * step for step in range(until)}
    return [*losses, *scheduler.get_last_lr()], first


root, kind = sys.argv[1:]
if NUM_RANKS == 2:
    whole, _ = fit(f"{root}/whole", until=6, kind=kind, drop=0.5)
    part, first = fit(f"{root}/run", until=3, kind=kind, drop=0.5)
    assert first == 0
    resumed, first = fit(f"{root}/run", until=6, kind=kind, drop=0.5)
else:
    whole, part = [], []
    resumed, first = fit(f"{root}/run", until=8, kind=kind, drop=0.0)
tell({"whole": whole, "part": part, "resumed": resumed, "first": first})
