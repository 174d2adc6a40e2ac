"""A tiny model in bfloat16, its bits, and training that flips few of them."""

from __future__ import annotations

import torch
from torch import nn

Bits = tuple[tuple[str, bytes], ...]


class Policy(nn.Module):
    """Two layers of one shape, a tied weight, a norm in another dtype, and a counter."""

    def __init__(self, seed: int = 0, *, size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(size, size).bfloat16()
        self.up = nn.Linear(size, 2 * size).bfloat16()
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, size, bias=False).bfloat16()
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def train(model: nn.Module, step: int) -> None:
    """Change some elements of each tensor."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in [*model.parameters()]:
            chosen = torch.rand(tensor.shape, generator=generator) < 0.1
            tensor[chosen] += 0.25 + step % 3
        for buffer in model.buffers():
            buffer.fill_(step)


def bits_of(model: nn.Module) -> Bits:
    """The bytes of all tensors."""
    return tuple(
        (name, bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in sorted(model.state_dict().items(), key=lambda item: item[0])
        if isinstance(tensor, torch.Tensor)
    )
