"""verl's checkpoint manager of FSDP workers: saved, resumed, retained; on one rank, loaded."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from common import NUM_RANKS, end, places, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.workers.engine.fsdp import transformer_impl

import cloudckpt
from cloudckpt.integrations.verl import CloudCheckpointManager

transformer_impl.FSDPCheckpointManager = CloudCheckpointManager  # as docs/frameworks.md does


class Worker:
    def __init__(self, seed: int, **more: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.manager = transformer_impl.FSDPCheckpointManager(self.model, self.optimizer, self.scheduler, **more)

    def step(self) -> dict[str, Any]:
        self.model(torch.full((2, 8), random.random())).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return {name: weight.full_tensor().tolist() for name, weight in self.model.named_parameters()}


dist.init_process_group("gloo")
for place, root in places():
    result: dict[str, Any] = {}
    if NUM_RANKS == 2:
        worker = Worker(1)
        for step in (1, 2, 3):
            worker.step()
            worker.manager.save_checkpoint(f"{root}/global_step_{step}/actor", global_step=step, max_ckpt_to_keep=2)
        result["whole"] = worker.step()
    resumed = Worker(2)
    resumed.manager.load_checkpoint(f"{root}/global_step_3/actor")
    result["lr"] = resumed.scheduler.get_last_lr()
    result["resumed"] = resumed.step()
    result["kept"] = [len(cloudckpt.list_checkpoints(f"{root}/global_step_{step}")) for step in (1, 2, 3)]
    try:
        Worker(3, checkpoint_config={"save_contents": ["model", "hf_model"]})
    except cloudckpt.errors.InvalidOptionError as error:
        result["refused"] = str(error)
    tell(place, result)
end()
