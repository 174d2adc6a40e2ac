"""transformers' Trainer: whole training, and the same stopped in the middle and resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from common import Noisy, data, tell
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import cloudckpt
from cloudckpt.integrations.transformers import CloudCheckpoints


class CloudTrainer(CloudCheckpoints, Trainer):
    pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Noisy()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.inner(x)
        return {"loss": torch.nn.functional.mse_loss(out, x), "out": out}


class Losses(TrainerCallback, ExportableState):
    """Which ends training after some steps, and whose state is part of Trainer's."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.num_steps = 0
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"num_steps": self.num_steps}}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.num_steps += 1
        if state.global_step == self.stop_at:
            control.should_training_stop = True


def fit(
    root: str, *, resume: bool | int | None, stop_at: int | None = None, scratch: str = "out", **more: Any
) -> dict[str, Any]:
    torch.manual_seed(5)
    args = TrainingArguments(
        output_dir=scratch,
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        logging_steps=1,
        save_steps=2,
        save_total_limit=3,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        restore_callback_states_from_checkpoint=True,
        seed=5,
        **more,
    )
    losses = Losses(stop_at)
    dataset = [{"x": x} for x in data()]
    trainer = CloudTrainer(Model(), args, train_dataset=dataset, callbacks=[losses], cloud_root=root)
    trainer.train(resume_from_checkpoint=resume)
    found = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Losses))
    return {
        "losses": losses.losses or found.losses,
        "num_steps": found.num_steps,
        "history": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": trainer.accelerator.unwrap_model(trainer.model).inner.last.bias.tolist()
        if hasattr(trainer.model, "inner")
        else None,
    }


root = sys.argv[1]
more = {"accelerator_config": {"use_seedable_sampler": True}}
whole = fit(f"{root}/whole", resume=None, **more)
# In the middle of an epoch: 12 steps are three of four.
fit(f"{root}/run", resume=True, stop_at=6, **more)
steps = [info.step for info in cloudckpt.CheckpointManager(f"{root}/run").steps()]
resumed = fit(f"{root}/run", resume=True, **more)
kept = [info.step for info in cloudckpt.CheckpointManager(f"{root}/run").steps()]
tell(
    {
        "whole": whole,
        "steps": steps,
        "resumed": resumed,
        "kept": kept,
        "left": sorted(path.name for path in Path("out").glob("*")),
    }
)
