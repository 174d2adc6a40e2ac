"""A small byte-level transformer, and how it is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_BYTE_VALUES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """3.3 million parameters: with AdamW's two moments, 40 MB of state to checkpoint."""

    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    context: int = 64
    """Longest sequence, in bytes."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised first and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        """b: batch, t: time, w: width, h: heads."""
        qkv = self.query_key_value(self.norm_1(x_btw))
        q_bhtw, k_bhtw, v_bhtw = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q_bhtw, k_bhtw, v_bhtw, is_causal=True)
        x_btw = x_btw + self.out(mixed.transpose(1, 2).flatten(2))
        return x_btw + self.down(nn.functional.gelu(self.up(self.norm_2(x_btw))))


class ByteTransformer(nn.Module):
    """Predicts each next byte of a text from those before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTE_VALUES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTE_VALUES, bias=False)

    def forward(self, bytes_bt: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte, of shape (batch, time, 256)."""
        positions_t = torch.arange(bytes_bt.shape[1], device=bytes_bt.device)
        x_btw = self.token(bytes_bt) + self.position(positions_t)
        for block in self.blocks:
            x_btw = block(x_btw)
        return self.head(self.norm(x_btw))


def build_sharded_model(config: ModelConfig, *, seed: int, device: torch.device, world_size: int) -> ByteTransformer:
    """The same weights for the same seed, sharded with FSDP2 over all ranks."""
    torch.manual_seed(seed)
    model = ByteTransformer(config).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
