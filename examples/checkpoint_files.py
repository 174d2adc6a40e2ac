"""Saving and loading with the manager of the package torch_checkpointing, over cloudckpt's storage.

torchrun --nproc-per-node 2 examples/checkpoint_files.py s3://bucket/run              (or gs://…, or a path)
"""

import sys

import torch
import torch.distributed as dist
from torch_checkpointing import CheckpointManager

import cloudckpt
from cloudckpt.integrations.torch_checkpointing import CloudStorageConfig

if __name__ == "__main__":  # the package spawns a process that saves
    root = sys.argv[1].rstrip("/")
    dist.init_process_group("gloo")
    manager = CheckpointManager(CheckpointManager.Config(storage_config=CloudStorageConfig(root)))
    weight = torch.full((1000,), float(dist.get_rank()))
    manager.save("step-1", {"model": {"weight": weight}, "step": 1}).result()
    dist.barrier()  # the others are ready before rank 0 has committed
    loaded = manager.load("step-1", into={"model": {"weight": torch.zeros(1000)}, "step": 0}, strict=True)
    manager.close()
    if not torch.equal(loaded["model"]["weight"], weight):
        raise RuntimeError("another weight was loaded")
    if dist.get_rank() == 0:
        print(f"saved and loaded; {cloudckpt.verify(f'{root}/step-1').num_tensors} files are whole")
    dist.destroy_process_group()
