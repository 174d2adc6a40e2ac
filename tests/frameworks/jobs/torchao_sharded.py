"""torchao on two ranks or one: the states of low-bit optimizers under FSDP2, and shards of quantized weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from common import NUM_RANKS, end, places, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import Float8Tensor, PerRow, PerTensor

import cloudckpt

OPTIMIZERS = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8, "float8 training": torch.optim.AdamW}


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 16))
    if kind == "float8 training":
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    if NUM_RANKS > 1:
        fully_shard(model)
    return model, OPTIMIZERS[kind](model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    random, losses = torch.Generator().manual_seed(seed), []
    for _ in range(3):
        loss = model(torch.randn(16, 128, generator=random)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights() -> dict[str, Any]:
    """This rank's rows of weights in several formats; the whole weights on one rank."""
    torch.manual_seed(5)
    plain = torch.randn(64, 128, dtype=torch.bfloat16)
    made = {
        "by row": Float8Tensor.from_hp(plain, granularity=PerRow()),
        "by tensor": Float8Tensor.from_hp(plain, granularity=PerTensor()),
        "mx": MXTensor.to_mx(plain, torch.float8_e4m3fn, 32),
        "nvfp4": NVFP4Tensor.to_nvfp4(plain),
    }
    if NUM_RANKS == 1:
        return made
    mesh, num_rows = init_device_mesh("cpu", (NUM_RANKS,)), 64 // NUM_RANKS
    return {
        name: DTensor.from_local(
            whole.narrow(0, dist.get_rank() * num_rows, num_rows), mesh, [Shard(0)], shape=whole.shape, stride=(128, 1)
        )
        for name, whole in made.items()
    }


def bits(value: Any) -> dict[str, bytes]:
    local = value.to_local() if isinstance(value, DTensor) else value
    parts = {name: getattr(local, name) for name in local.__tensor_flatten__()[0]}
    return {name: part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, part in parts.items()}


def blank(value: Any) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    for name in local.__tensor_flatten__()[0]:
        part = getattr(local, name)
        part.copy_(torch.zeros(part.shape).to(part.dtype))


dist.init_process_group("gloo")
torch.compiler.set_stance("force_eager")  # torchao compiles the steps of its optimizers
for place, root in places():
    result: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        uri = f"{root}/{kind}"
        if NUM_RANKS > 1:
            model, optimizer = build(kind, seed=0)
            train(model, optimizer, 0)
            handle = cloudckpt.async_save(uri, model=model, optimizer=optimizer)
            handle.staged.result()
            whole = train(model, optimizer, 1)
            handle.result()
            model, optimizer = build(kind, seed=1)
            cloudckpt.load(uri, model=model, optimizer=optimizer)
            result[kind] = [whole, train(model, optimizer, 1)]
        else:
            model, optimizer = build(kind, seed=1)
            cloudckpt.load(uri, model=model, optimizer=optimizer)
            again = f"{root}/{kind}-on-one"
            cloudckpt.save(again, model=model, optimizer=optimizer, random_state=False)
            result[kind] = [
                each.kind for each in cloudckpt.compare(uri, again).differences if "random" not in each.name
            ]
    uri, state = f"{root}/weights", weights()
    if NUM_RANKS > 1:
        cloudckpt.save(state, uri)
    expected = {name: bits(value) for name, value in state.items()}
    for value in state.values():
        blank(value)
    cloudckpt.load(state, uri)
    result["weights"] = {name: bits(value) == expected[name] for name, value in state.items()}
    tell(place, result)
dist.destroy_process_group()
sys.stderr.flush()
end()
