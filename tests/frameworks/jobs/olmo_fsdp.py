"""OLMo-core's functions for model and optimizer, with the lines of docs/frameworks.md before them."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from common import DOCUMENT, end, places, tell
from olmo_core.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt

SNIPPET = next(text for text in re.findall(r"```py\n(.+?)```", DOCUMENT.read_text(), re.DOTALL) if "olmo_core" in text)


def train(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


dist.init_process_group("gloo")
exec(SNIPPET, {})  # noqa: S102  # it is the document's own
for place, root in places():
    saved, loaded = train(1), train(2)
    checkpoint.save_model_and_optim_state(f"{root}/step1/model_and_optim", *saved)
    checkpoint.load_model_and_optim_state(f"{root}/step1/model_and_optim", *loaded)
    weights = [model.weight.full_tensor().tolist() for model, _ in (saved, loaded)]
    moments = [optimizer.state[model.weight]["exp_avg"].full_tensor().tolist() for model, optimizer in (saved, loaded)]
    cloudckpt.verify(f"{root}/step1/model_and_optim")
    tell(place, {"weights": weights, "moments": moments})
end()
