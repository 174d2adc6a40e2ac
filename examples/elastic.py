"""Training that torchrun starts again, from the newest step that is whole, when a rank dies.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py s3://bucket/run --die-at 7   (or gs://…, or a path)

With ``--die-at`` a rank kills itself in the middle of the save of that step, in the job's first life. Start it again
with another ``--nproc-per-node``: the shards are cut anew.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt


def main() -> None:
    """One life of the job, as one rank sees it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--die-at", type=int, help="a step")
    args = parser.parse_args()
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with cloudckpt.CheckpointManager(args.root, keep_last=3, options=cloudckpt.Options(timeout_s=30)) as manager:
        restored = manager.restore(model=model, optimizer=optimizer)
        first = 1 if restored is None else restored.step + 1
        if dist.get_rank() == 0:
            print(f"life {life}, {dist.get_world_size()} ranks: from step {first}", flush=True)
        for step in range(first, args.steps + 1):
            batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item()!r}", flush=True)
            # A step that a rank's death kept from being committed is not there; one that was is not done again.
            manager.save(step, model=model, optimizer=optimizer)
            if step == args.die_at and life == 0 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {dist.get_rank()} done", flush=True)
    cloudckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
