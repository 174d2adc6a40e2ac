"""Saving and loading with Megatron-core's ``dist_checkpointing`` by URI, on any number of ranks.

torchrun --nproc-per-node 2 examples/megatron_core.py s3://bucket/run              (or gs://…, or file:///…)
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from cloudckpt.integrations import megatron


def state_of(weight: torch.Tensor) -> dict[str, ShardedTensor]:
    """Each rank holds its part of the rows, as with tensor parallelism."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight.chunk(num_ranks)[rank], (0, rank, num_ranks))}


dist.init_process_group("gloo")
megatron.enable()
uri, weight = f"{sys.argv[1].rstrip('/')}/iter_0000100", torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
dist_checkpointing.save(state_of(weight), uri)
loaded = dist_checkpointing.load(state_of(torch.zeros(8, 4)), uri)
if not torch.equal(loaded["weight"], state_of(weight)["weight"].data):
    raise RuntimeError("another weight was loaded")
print(f"rank {dist.get_rank()} has loaded what it saved")
dist.destroy_process_group()
