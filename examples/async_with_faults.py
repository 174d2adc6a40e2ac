"""A training loop that saves in the background, fails every so often, and loses nothing by it.

    torchrun --nproc-per-node 2 examples/async_with_faults.py s3://bucket/run     (or gs://…, or a path)
    torchrun --nproc-per-node 2 examples/async_with_faults.py PATH --epochs 1000 --save-every 10 --fault-every 25

Run it a second time with the same URI, and it finds that the training has ended already.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import cloudckpt

TIMEOUT_S = 120.0


class InjectedFaultError(RuntimeError):
    """Stands for all that goes wrong in a long run."""


class Faults:
    """Fails after every so many epochs, counting on when epochs are done again."""

    def __init__(self, *, every: int) -> None:
        self._every = every
        self._num_executed = 0

    def tick(self, trainer: Trainer) -> None:
        """Call once per epoch."""
        self._num_executed += 1
        if self._num_executed % self._every == 0:
            raise InjectedFaultError(f"epoch {trainer.epoch} failed")


class Trainer:
    """A sharded model, its optimizer and the number of epochs done: all that a checkpoint has to hold."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """DCP calls this to save, and to learn what to load and where to put it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """DCP calls this with what it loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.epoch = state_dict["epoch"]

    def train_one_epoch(self) -> None:
        """One batch, which follows from the epoch: an epoch that is done again is the same epoch."""
        random = torch.Generator().manual_seed(1000 * self.epoch + dist.get_rank())
        inputs = torch.randn(16, 32, generator=random).to(self.device)
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.epoch += 1


class Run:
    """Trains to the end through all faults, with a checkpoint every few epochs."""

    def __init__(self, root: str, device: torch.device, *, num_epochs: int, save_every: int, fault_every: int) -> None:
        self._root = root
        self._device = device
        self._num_epochs = num_epochs
        self._save_every = save_every
        self._faults = Faults(every=fault_every)
        self._saving: cloudckpt.AsyncSave | None = None
        self._committed: str | None = None
        """The URI of the last save that was reported as committed."""
        self.num_restarts = 0

    def train_through_faults(self) -> Trainer:
        """Start again from the newest checkpoint until the training has come to its end."""
        while True:
            trainer = self.newest()
            try:
                self.train(trainer)
            except InjectedFaultError as fault:
                say(str(fault))
                self.num_restarts += 1
            else:
                return trainer

    def newest(self) -> Trainer:
        """A trainer as the newest checkpoint has it, or a fresh one where there is none."""
        trainer = Trainer(self._device)
        uris: list[str | None] = [None]
        if dist.get_rank() == 0 and (info := cloudckpt.latest(self._root)) is not None:
            uris = [info.uri]
        dist.broadcast_object_list(uris, src=0, device=torch.device("cpu"))
        if self._committed not in (None, uris[0]):
            raise RuntimeError(f"{self._committed} was committed, but the newest checkpoint is {uris[0]}")
        if uris[0] is not None:
            cloudckpt.load({"trainer": trainer}, uris[0])
        say(f"starting at epoch {trainer.epoch}")
        return trainer

    def train(self, trainer: Trainer) -> None:
        """Train to the end, or to a fault."""
        try:
            while trainer.epoch < self._num_epochs:
                trainer.train_one_epoch()
                self._faults.tick(trainer)
                if trainer.epoch % self._save_every == 0:
                    self._end_save()
                    self._saving = cloudckpt.async_save({"trainer": trainer}, f"{self._root}/epoch-{trainer.epoch}")
                    self._saving.staged.result(timeout=TIMEOUT_S)  # from here on the weights may change
        finally:
            # At the end, or when a fault ended the loop: what is under way is worth waiting for.
            self._end_save()

    def _end_save(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result(timeout=TIMEOUT_S)
            self._committed = saving.uri


def say(text: str) -> None:
    """Print once, not once per rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def check_weights(trained: Trainer, *, num_epochs: int) -> None:
    """Raise unless they are, to the bit, what so many epochs without a fault make of them."""
    without = Trainer(trained.device)
    while without.epoch < num_epochs:
        without.train_one_epoch()
    expected = without.model.state_dict()
    for name, weights in trained.model.state_dict().items():
        if not torch.equal(weights.to_local(), expected[name].to_local()):
            raise RuntimeError(f"{name} is not what a run without faults has")


def main() -> None:
    """Train with faults and without, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=3, metavar="EPOCHS")
    parser.add_argument("--fault-every", type=int, default=5, metavar="EPOCHS", help="more than --save-every")
    arguments = parser.parse_args()
    if not 0 < arguments.save_every < arguments.fault_every:
        parser.error("with a fault before the first save, the training would begin again for ever")
    root = f"{arguments.uri.rstrip('/')}/async-with-faults"
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= num_local else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Checkpoints talk over the CPU side, so they do not get between the training's collectives on the GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    run = Run(
        root,
        device,
        num_epochs=arguments.epochs,
        save_every=arguments.save_every,
        fault_every=arguments.fault_every,
    )
    trained = run.train_through_faults()
    check_weights(trained, num_epochs=arguments.epochs)
    names = [info.name for info in cloudckpt.list_checkpoints(root)]
    say(f"checkpoints: {', '.join(names)}")
    say(f"after {arguments.epochs} epochs and {run.num_restarts} faults the weights are those of a run without faults")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # torch 2.13 now and then aborts while the interpreter takes its threads down, after all is done ("terminate called
    # without an active exception"), which torchrun takes for a failure.
    sys.stdout.flush()
    os._exit(0)
