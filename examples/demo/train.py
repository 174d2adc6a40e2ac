"""The training job, as torchrun runs it on each rank. It resumes from the newest checkpoint there is."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import cloudckpt
from cloudckpt.events import Event
from cloudckpt.options import MIB

from .data import Sampler, fixed_batch, read_text
from .model import NUM_BYTE_VALUES, ModelConfig, build_sharded_model
from .ranks import Record, distributed

ROWS_PER_BATCH = 8
WARM_UP_STEPS = 5
PEAK_LEARNING_RATE = 2e-3
WAIT_TIMEOUT_S = 120.0
# The smallest that S3 takes: a real model would keep the default and have as many parts in more bytes.
PART_BYTES = 5 * MIB


class Training:
    """All that a run consists of, as one `Stateful`.

    DCP calls `state_dict` to save; to load, it fills what `state_dict` returns and calls `load_state_dict`.
    """

    def __init__(self, *, seed: int, device: torch.device) -> None:
        config = ModelConfig()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.model = build_sharded_model(config, seed=seed, device=device, world_size=self.world_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
        )
        self.sampler = Sampler(read_text(), seed=seed, context=config.context, rows_per_batch=ROWS_PER_BATCH)
        self.num_steps_done = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "sampler": self.sampler.state_dict(),
            "num_steps_done": self.num_steps_done,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.schedule.load_state_dict(state_dict["schedule"])
        self.sampler.load_state_dict(state_dict["sampler"])
        self.num_steps_done = state_dict["num_steps_done"]

    def step(self) -> float:
        """Train on one batch and return the loss, averaged over the ranks."""
        rows = self.sampler.draw(rank=self.rank, world_size=self.world_size).to(self.device)
        logits = self.model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, NUM_BYTE_VALUES), rows[:, 1:].reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.num_steps_done += 1
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        return mean_loss.item() / self.world_size


class Checkpoints:
    """Saves in the background, one checkpoint at a time, and finds the newest."""

    def __init__(self, root: str, *, options: cloudckpt.Options, record: Record) -> None:
        self._root = root
        self._options = options
        self._record = record
        self._saving: cloudckpt.AsyncSave | None = None
        self._saving_to = ""

    def resume(self, training: Training) -> None:
        """Load the newest checkpoint that was committed; stay at the start where there is none."""
        # One rank asks and tells the others, so that all go on from the same.
        uris: list[str | None] = [None]
        if training.rank == 0 and (newest := cloudckpt.latest(self._root)) is not None:
            uris = [newest.uri]
        dist.broadcast_object_list(uris, src=0, device=torch.device("cpu"))
        if (uri := uris[0]) is not None:
            report = cloudckpt.load({"training": training}, uri, options=self._options)
            self._record.write_report("loaded", report, num_steps_done=training.num_steps_done)
            if training.rank == 0:
                print(f"resumed from {_name(uri)}, the newest checkpoint", flush=True)

    def save(self, training: Training) -> None:
        """Return as soon as the state is copied; the upload goes on while the training does."""
        self.finish()
        began_s = time.perf_counter()
        self._saving_to = f"{self._root}/step-{training.num_steps_done}"
        self._saving = cloudckpt.async_save({"training": training}, self._saving_to, options=self._options)
        self._saving.staged.result(timeout=WAIT_TIMEOUT_S)
        self._record.write("staged", step=training.num_steps_done, seconds=time.perf_counter() - began_s)

    def finish_if_done(self) -> None:
        """Take note of a save that has ended meanwhile; raises what went wrong in it."""
        if self._saving is not None and self._saving.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way; raises what went wrong in it."""
        if self._saving is None:
            return
        self._saving.result(timeout=WAIT_TIMEOUT_S)
        self._record.write_report("saved", self._saving.report)
        self._saving = None
        if dist.get_rank() == 0:
            print(f"{_name(self._saving_to)} is committed", flush=True)


class FastCheckpoints:
    """Saves to a directory of this rank's host, and every second time the manager copies the checkpoint to the root."""

    def __init__(
        self, root: str, fast: Path, *, fast_every: int, die_after_save: int, options: cloudckpt.Options, record: Record
    ) -> None:
        self._manager = cloudckpt.CheckpointManager(
            root, save_every=2 * fast_every, fast=fast, fast_every=fast_every, options=options
        )
        self._die_after_save = die_after_save
        self._record = record

    def resume(self, training: Training) -> None:
        """Load the newest checkpoint of both places; stay at the start where there is none."""
        restored = self._manager.restore({"training": training})
        if restored is not None:
            num_of_root = restored.report.num_objects_of_copy
            self._record.write("restored", step=restored.step, num_of_root=num_of_root)
            place = "the root, because its host lacks a part" if num_of_root else restored.uri
            print(f"rank {training.rank} resumed from step {restored.step} in {place}", flush=True)

    def save(self, training: Training) -> None:
        """Save in the background; at the fatal step, kill this process as soon as all is committed and copied."""
        step = training.num_steps_done
        self._manager.save(step, {"training": training})
        if step == self._die_after_save:
            self._manager.wait(WAIT_TIMEOUT_S)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def finish_if_done(self) -> None:
        """Do nothing: the manager raises what went wrong at the next save."""

    def finish(self) -> None:
        """Wait for the save and the copy that are under way; raises what went wrong in them."""
        self._manager.close(WAIT_TIMEOUT_S)


@dataclass(slots=True, kw_only=True)
class DieDuringUpload:
    """Kills this process without warning once so many parts of one checkpoint have been sent."""

    name: str
    after_parts: int
    record: Record
    _num_parts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, event: Event) -> None:
        """Count the parts of that checkpoint; `Options.on_event` calls this from the uploading threads."""
        if event.name != "save.part_uploaded" or _name(event.uri) != self.name:
            return
        with self._lock:
            self._num_parts += 1
            if self._num_parts == self.after_parts:
                self.record.write("killed", key=event.key)
                os.kill(os.getpid(), signal.SIGKILL)


def _name(uri: str) -> str:
    return uri.rpartition("/")[2]


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Resume, train, checkpoint."""
    training = Training(seed=args.seed, device=device)
    rank = training.rank
    record = Record(args.records / f"{args.name}-{rank}.jsonl")
    on_event = None
    if rank == args.die_on_rank:
        on_event = DieDuringUpload(name=f"step-{args.die_at_step}", after_parts=args.die_after_parts, record=record)
    options = cloudckpt.Options(advanced=cloudckpt.AdvancedOptions(part_bytes=PART_BYTES), on_event=on_event)
    checkpoints: Checkpoints | FastCheckpoints = Checkpoints(args.uri, options=options, record=record)
    if args.fast is not None:
        checkpoints = FastCheckpoints(
            args.uri,
            args.fast / f"host-{rank}",
            fast_every=args.save_every,
            die_after_save=args.die_after_save,
            options=options,
            record=record,
        )
    if args.save_every:
        checkpoints.resume(training)
    while training.num_steps_done < args.steps:
        loss = training.step()
        step = training.num_steps_done
        record.write("loss", step=step, loss=loss)
        if rank == 0 and (step == 1 or step % 5 == 0 or step == args.steps):
            print(f"step {step:3}   loss {loss:.4f}", flush=True)
        checkpoints.finish_if_done()
        if args.save_every and step % args.save_every == 0:
            checkpoints.save(training)
    checkpoints.finish()

    batch = fixed_batch(read_text(), num_rows=4, context=ModelConfig().context).to(device)
    with torch.no_grad():
        logits = training.model(batch).cpu()
    if rank == 0:
        torch.save(logits, args.records / f"{args.name}.logits.pt")


def main() -> None:
    """Read the command line that the driver wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of this run, for its record")
    parser.add_argument("--uri", required=True, help="where the checkpoints go")
    parser.add_argument("--records", type=Path, required=True, help="directory for what happened")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--fast", type=Path, help="folder of the hosts' fast places")
    parser.add_argument("--die-after-save", type=int, default=0, help="step at which all ranks die, with a fast place")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--die-on-rank", type=int, default=-1)
    parser.add_argument("--die-at-step", type=int, default=0)
    parser.add_argument("--die-after-parts", type=int, default=2)
    args = parser.parse_args()
    with distributed(args.device) as device:
        train(args, device)


if __name__ == "__main__":
    main()
    # torch 2.13 now and then aborts while the interpreter takes its threads down, after all is done ("terminate called
    # without an active exception"), which torchrun takes for a failure.
    sys.stdout.flush()
    os._exit(0)
