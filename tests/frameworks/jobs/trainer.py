"""transformers' Trainer, with DDP, FSDP1 or FSDP2: whole training, and the same stopped in the middle and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import NUM_RANKS, Noisy, begin_anew, data, end, places, shard_on_cpus, tell
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import cloudckpt
from cloudckpt.integrations.transformers import CloudCheckpoints

SCORES = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.9}


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


class ScoredTrainer(CloudTrainer):
    """Which evaluates to what the test wants."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_score": SCORES[self.state.global_step]}
        self.log(dict(metrics))
        return metrics


def sharding_of(kind: str) -> dict[str, Any]:
    if kind == "ddp":
        return {}
    config = {"version": int(kind[-1]), "auto_wrap_policy": "NO_WRAP", "sync_module_states": "false"}
    return {"fsdp": True, "fsdp_config": config}


def train(
    trainer_class: type[Any],
    root: str,
    kind: str,
    *,
    resume: bool | int | None,
    stop_at: int | None,
    num_samples: int = 64,
    **more: Any,
) -> tuple[Any, Losses]:
    """The trainer that has trained, and the callback that it was given."""
    begin_anew()
    torch.manual_seed(5)
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=4,
        save_steps=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        **sharding_of(kind),
        **more,
    )
    losses = Losses(stop_at)
    dataset = [{"x": x} for x in data(num_samples)]
    trainer = trainer_class(
        Model(), args, train_dataset=dataset, eval_dataset=dataset, callbacks=[losses], cloud_root=root
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, losses


def fit(root: str, kind: str, *, resume: bool | int | None, stop_at: int | None = None, **more: Any) -> dict[str, Any]:
    """Train for three epochs."""
    wanted = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "logging_steps": 1,
        "save_total_limit": 3,
        "restore_callback_states_from_checkpoint": True,
        "seed": 5,
        "accelerator_config": {"use_seedable_sampler": True},
        **more,
    }
    trainer, losses = train(CloudTrainer, root, kind, resume=resume, stop_at=stop_at, **wanted)
    found = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Losses))
    return {
        "losses": losses.losses or found.losses,
        "num_steps": found.num_steps,
        "history": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": bias_of(trainer) or None,
        "model": type(trainer.model_wrapped).__name__,
    }


def bias_of(trainer: Any) -> list[float]:
    weights = get_model_state_dict(trainer.model_wrapped, options=StateDictOptions(full_state_dict=True))
    return weights["inner.last.bias"].tolist() if weights else []


def bias_at(uri: str) -> list[float]:
    """Read without Trainer, as for inference."""
    state = {"accelerator": {"models": {"0": Model().state_dict()}}}
    cloudckpt.load(state, uri)
    return state["accelerator"]["models"]["0"]["inner.last.bias"].tolist()


def best(root: str, kind: str) -> dict[str, Any]:
    """The best model, found before training was interrupted and loaded after it went on."""
    wanted = {
        "max_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
    }
    part, _ = train(ScoredTrainer, root, kind, resume=True, stop_at=6, **wanted)
    refused = ""
    try:
        train(ScoredTrainer, root, kind, resume=True, stop_at=None, num_samples=72, **wanted)
    except cloudckpt.errors.StateDictMismatchError as error:
        refused = str(error)
    resumed, _ = train(ScoredTrainer, root, kind, resume=True, stop_at=None, **wanted)
    saved = cloudckpt.CheckpointManager(root)
    return {
        "refused": refused,
        "part": bias_of(part),
        "resumed": bias_of(resumed),
        "saved": bias_at(saved.uri_of(4)),
        "last": bias_at(saved.uri_of(8)),
        "uri": resumed.state.best_model_checkpoint,
        "kept": steps_under(root),
        "scores": [info.metrics["eval_score"] for info in saved.steps()],
    }


def steps_under(root: str) -> list[int]:
    return [info.step for info in cloudckpt.CheckpointManager(root).steps()]


if NUM_RANKS == 2:
    shard_on_cpus()
for number, (place, root) in enumerate(places()):
    result = {}
    for kind in ("ddp", "fsdp1", "fsdp2"):
        under = f"{root}/{kind}"
        if NUM_RANKS == 1:
            try:
                fit(under, "ddp", resume=True)
            except cloudckpt.errors.StateDictMismatchError as error:
                refused = str(error)
            # The same samples for each step, and an epoch more.
            result[kind] = fit(under, "ddp", resume=True, gradient_accumulation_steps=4, num_train_epochs=4)
            result[kind]["refused"] = refused
            continue
        whole = fit(f"{under}-whole", kind, resume=None)
        fit(under, kind, resume=True, stop_at=6)  # in the middle of an epoch: 12 steps are three of four
        steps = steps_under(under)
        resumed = fit(under, kind, resume=True)
        result[kind] = {"whole": whole, "steps": steps, "resumed": resumed, "kept": steps_under(under)}
    if NUM_RANKS == 2 and number == 0:
        result["best"] = {kind: best(f"{root}/{kind}-best", kind) for kind in ("ddp", "fsdp1", "fsdp2")}
    result["left"] = sorted(path.name for path in Path("out").glob("*"))
    tell(place, result)
end()
