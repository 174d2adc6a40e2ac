"""Loads the model alone from a checkpoint, on however many ranks torchrun starts, and computes its logits."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import cloudckpt

from .data import fixed_batch, read_text
from .model import ModelConfig, build_sharded_model
from .ranks import Record, distributed


def compute_logits(args: argparse.Namespace, device: torch.device) -> None:
    """Shard a model of other weights over these ranks, load into it, run it on the fixed batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = ModelConfig()
    model = build_sharded_model(config, seed=args.seed, device=device, world_size=world_size)

    # Part of what was saved: neither the optimizer nor anything else is read.
    model_state = get_model_state_dict(model)
    report = cloudckpt.load({"training": {"model": model_state}}, args.uri)
    set_model_state_dict(model, model_state)
    Record(args.records / f"{args.name}-{rank}.jsonl").write_report("loaded", report)

    batch = fixed_batch(read_text(), num_rows=4, context=config.context).to(device)
    with torch.no_grad():
        logits = model(batch).cpu()
    if rank == 0:
        torch.save(logits, args.records / f"{args.name}.logits.pt")


def main() -> None:
    """Read the command line that the driver wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of this run, for its record")
    parser.add_argument("--uri", required=True, help="the checkpoint")
    parser.add_argument("--records", type=Path, required=True, help="directory for what happened")
    parser.add_argument("--seed", type=int, required=True, help="of the weights to be replaced")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    args = parser.parse_args()
    with distributed(args.device) as device:
        compute_logits(args, device)


if __name__ == "__main__":
    main()
    # torch 2.13 now and then aborts while the interpreter takes its threads down, after all is done ("terminate called
    # without an active exception"), which torchrun takes for a failure.
    sys.stdout.flush()
    os._exit(0)
