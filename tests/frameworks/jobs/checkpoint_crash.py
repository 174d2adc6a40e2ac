"""A rank that dies in the middle of a save by torch_checkpointing, at each place in turn; torchrun starts all again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from common import end, places, tell
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig

import cloudckpt
from cloudckpt.integrations.torch_checkpointing import CloudStorageConfig
from cloudckpt.testing.faults import Call, Faults, Rule, Tell

NUM_STARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])


def kill(_: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(root: str, *, dies_there: bool) -> None:
    dies = dies_there and RANK == 1
    second_part = Rule(fault=Tell(after=kill), operations={"upload_part"}, skip=1)
    advanced = cloudckpt.AdvancedOptions(part_bytes=5 * 2**20, wrap_store=Faults(second_part) if dies else None)
    config = CloudStorageConfig(root, options=cloudckpt.Options(staging_bytes=2**28, advanced=advanced))
    manager = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=config))
    model = torch.full((4 * 2**20,), float(NUM_STARTS + RANK))
    manager.save("step-1", {"model": model, **({"extra": torch.ones(3)} if dies_there else {})})
    dist.barrier()
    assert torch.equal(manager.load("step-1", into={"model": None})["model"], model)
    manager.close()


dist.init_process_group("gloo")
for number, (place, root) in enumerate(places()):
    if number == NUM_STARTS - 1:
        names = [info.name for info in cloudckpt.list_checkpoints(root)]
        storage = CloudStorageConfig(root).create_storage()
        before = [names, storage.exists(Path("step-1")), storage.isdir(Path())]
        dist.barrier()
        save(root, dies_there=False)
        if RANK == 0:
            garbage = cloudckpt.gc(root, older_than=0, dry_run=False)
            tell(
                place,
                {
                    "before": before,
                    "ls": storage.ls(Path("step-1")),
                    "garbage": garbage.num_objects + garbage.num_uploads,
                    "left": cloudckpt.gc(root, older_than=0, quiet=True).num_objects,
                    "verified": cloudckpt.verify(f"{root}/step-1").num_tensors,
                },
            )
        dist.barrier()
    elif number == NUM_STARTS:
        save(root, dies_there=True)
assert len(json.loads(os.environ["PLACES"])) == NUM_STARTS
end()
