"""A training loop that saves in the background, fails every so often, and loses nothing by it.

    torchrun --nproc-per-node 2 examples/async_with_faults.py s3://bucket/run     (or gs://…, or a path)

Run it a second time with the same URI, and it finds that the training has ended already.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import cloudckpt

NUM_STEPS = 24
SAVE_EVERY = 3
FAULT_EVERY = 5
TIMEOUT_S = 120.0


class InjectedFaultError(RuntimeError):
    """Stands for all that goes wrong in a long run."""


class Faults:
    """Fails after every so many steps, counting on when the steps are done again."""

    def __init__(self, *, every: int) -> None:
        self._every = every
        self._num_executed = 0

    def tick(self, trainer: Trainer) -> None:
        """Call once per step."""
        self._num_executed += 1
        if self._num_executed % self._every == 0:
            raise InjectedFaultError(f"step {trainer.step} failed")


class Trainer:
    """A sharded model, its optimizer and the number of steps done: all that a checkpoint has to hold."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """DCP calls this to save, and to learn what to load and where to put it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """DCP calls this with what it loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]

    def train_one_step(self) -> None:
        """The batch follows from the step, so a step that is done again is the same step."""
        random = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        inputs = torch.randn(16, 32, generator=random).to(self.device)
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


def newest(root: str, device: torch.device) -> Trainer:
    """A trainer as the newest checkpoint under `root` has it, or a fresh one where there is none."""
    trainer = Trainer(device)
    uris: list[str | None] = [None]
    if dist.get_rank() == 0 and (info := cloudckpt.latest(root)) is not None:
        uris = [info.uri]
    dist.broadcast_object_list(uris, src=0, device=torch.device("cpu"))
    if uris[0] is not None:
        cloudckpt.load({"trainer": trainer}, uris[0])
    say(f"starting at step {trainer.step}")
    return trainer


def train(trainer: Trainer, root: str, faults: Faults) -> None:
    """Train to the end, or to a fault, with a checkpoint every few steps."""
    saving: cloudckpt.AsyncSave | None = None
    try:
        while trainer.step < NUM_STEPS:
            trainer.train_one_step()
            faults.tick(trainer)
            if trainer.step % SAVE_EVERY == 0:
                if saving is not None:
                    saving.result(timeout=TIMEOUT_S)
                saving = cloudckpt.async_save({"trainer": trainer}, f"{root}/step-{trainer.step}")
                saving.staged.result(timeout=TIMEOUT_S)  # from here on the weights may change
    finally:
        # At the end, or when a fault ended the loop: what is under way is worth waiting for.
        if saving is not None:
            saving.result(timeout=TIMEOUT_S)


def train_through_faults(root: str, device: torch.device) -> Trainer:
    """Start again from the newest checkpoint until the training has come to its end."""
    faults = Faults(every=FAULT_EVERY)
    while True:
        trainer = newest(root, device)
        try:
            train(trainer, root, faults)
        except InjectedFaultError as fault:
            say(str(fault))
        else:
            return trainer


def say(text: str) -> None:
    """Print once, not once per rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(uri: str) -> None:
    """Train with faults and without, and compare."""
    root = f"{uri}/async-with-faults"
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= num_local else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Checkpoints talk over the CPU side, so they do not get between the training's collectives on the GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    with_faults = train_through_faults(root, device)
    without = Trainer(device)
    while without.step < NUM_STEPS:
        without.train_one_step()

    expected = without.model.state_dict()
    for name, weights in with_faults.model.state_dict().items():
        if not torch.equal(weights.to_local(), expected[name].to_local()):
            raise RuntimeError(f"{name} is not what a run without faults has")
    names = [info.name for info in cloudckpt.list_checkpoints(root)]
    say(f"checkpoints: {', '.join(names)}")
    say(f"after {NUM_STEPS} steps the weights are those of a run without faults")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
    # torch 2.13 now and then aborts while the interpreter takes its threads down, after all is done ("terminate called
    # without an active exception"), which torchrun takes for a failure.
    sys.stdout.flush()
    os._exit(0)
