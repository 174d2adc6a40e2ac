"""Saves and loads with ``megatron.core.dist_checkpointing`` as one rank of several: ``megatron_core.py VERB ROOT``."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.msc_utils import maybe_msc
from torch import multiprocessing

import cloudckpt
from cloudckpt.integrations import megatron
from cloudckpt.testing.faults import Call, Faults, Rule, Tell

VERB, ROOT = sys.argv[1:]
ROWS = 16
FULL = torch.arange(ROWS * 4.0).reshape(ROWS, 4)


def state_of(scale: float) -> dict[str, Any]:
    """One model that is split by rows (tensor parallelism), with its optimizer; all values are multiples of `scale`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = FULL.chunk(world)[rank] * scale
    return {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("weight", rows.clone(), (0, rank, world)),
            "bias": ShardedTensor.from_rank_offsets("bias", torch.full((3,), scale), replica_id=rank),
            "layers": ShardedTensor.from_rank_offsets(
                "layers", rows.flatten().clone(), (0, 0, 2), (1, rank, world), prepend_axis_num=1, replica_id=0
            ),
            "last": ShardedTensor.from_rank_offsets(
                "layers", rows.flatten() + 1, (0, 1, 2), (1, rank, world), prepend_axis_num=1, replica_id=0
            ),
        },
        "optimizer": {
            "exp_avg": ShardedTensor.from_rank_offsets("optimizer.exp_avg.weight", rows / 2, (0, rank, world)),
            "step": ShardedObject("optimizer.step", {"step": int(scale)}, (1,), (0,), replica_id=rank),
        },
        "nothing": LocalNonpersistentObject(f"of rank {rank}"),
        "iteration": int(scale),
        "args": {"lr": 0.5, "betas": (0.9, 0.99)},
    }


def is_loaded(uri: str, scale: float) -> bool:
    """True if everything at `uri` loads as it was saved with `scale`, whatever number of ranks that was."""
    found, missing, unexpected = dist_checkpointing.load(state_of(0), uri, strict=StrictHandling.RETURN_ALL)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = FULL.chunk(world)[rank] * scale
    model, optimizer = found["model"], found["optimizer"]
    return bool(
        not missing
        and not unexpected
        and torch.equal(model["weight"], rows)
        and torch.equal(model["bias"], torch.full((3,), scale))
        and torch.equal(model["layers"], rows.flatten())
        and torch.equal(model["last"], rows.flatten() + 1)
        and torch.equal(optimizer["exp_avg"], rows / 2)
        and optimizer["step"] == {"step": int(scale)}
        and found["nothing"] == f"of rank {rank}"
        and found["iteration"] == int(scale)
        and found["args"] == {"lr": 0.5, "betas": (0.9, 0.99)}
    )


def kill(_: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DEADLY = Faults(Rule(fault=Tell(after=kill), operations={"put", "upload_part"}))


def save_all() -> dict[str, Any]:
    reported: dict[str, Any] = {}
    dist_checkpointing.save(state_of(7), f"{ROOT}/iter_0000007", content_metadata={"form": "test"})
    try:
        dist_checkpointing.save(state_of(8), f"{ROOT}/iter_0000007")
    except cloudckpt.CheckpointExistsError as error:
        reported["exists"] = str(error)
    reported["content"] = dist_checkpointing.load_content_metadata(f"{ROOT}/iter_0000007")

    state = state_of(9)
    request = dist_checkpointing.save(state, f"{ROOT}/iter_0000009", async_sharded_save=True)
    state["model"]["weight"].data.zero_()  # training goes on
    function, arguments = pickle.loads(pickle.dumps((request.async_fn, request.async_fn_args)))  # ours
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)  # as Megatron's queue does
    process.start()
    process.join()
    reported["exitcode"] = process.exitcode
    for finalize in request.finalize_fns:
        finalize()

    parallel = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    dist_checkpointing.save(state_of(11), f"{ROOT}/iter_0000011", parallel)
    with maybe_msc.open(f"{ROOT}/latest_checkpointed_iteration.txt", "w") as file:
        file.write("11")
    return reported


dist.init_process_group("gloo")
if VERB == "crash":
    dies = dist.get_rank() == 1
    advanced = cloudckpt.AdvancedOptions(wrap_store=DEADLY if dies else None)
    megatron.enable(options=cloudckpt.Options(timeout_s=20, advanced=advanced))
    dist_checkpointing.save(state_of(7), f"{ROOT}/iter_0000007")
megatron.enable()
told = save_all() if VERB == "save" else {}
told["loaded"] = [is_loaded(f"{ROOT}/iter_{number:07}", number) for number in (7, 9, 11)]
told["tracker"] = maybe_msc.open(f"{ROOT}/latest_checkpointed_iteration.txt").read()
told["absent"] = dist_checkpointing.check_is_distributed_checkpoint(f"{ROOT}/iter_0000008")
of_ranks: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(of_ranks, told)
if dist.get_rank() == 0:
    print("TOLD", json.dumps(of_ranks), flush=True)
cloudckpt.close()
megatron.disable()
dist.destroy_process_group()
