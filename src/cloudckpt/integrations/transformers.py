"""transformers: a `Trainer` that saves to URIs and resumes from them."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from cloudckpt.dcp.live.loaders import find_differences, length_of, make_position_error
from cloudckpt.dcp.live.objects import RandomState
from cloudckpt.errors import InvalidOptionError
from cloudckpt.integrations._nested_state import deserialize, serialize
from cloudckpt.integrations._requirements import require
from cloudckpt.integrations.accelerate import AcceleratorState
from cloudckpt.manager.checkpoint_manager import CheckpointManager
from cloudckpt.manager.steps import find_steps_on_all_ranks, parse_step_uri, refuse_existing_steps
from cloudckpt.options import Options

with require("transformers"):
    from transformers.trainer_callback import ExportableState, TrainerState

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the mixin works with any subclass of Trainer

_log = logging.getLogger("cloudckpt")

_STATE_FILE = "trainer_state.json"
_BEST = "trainer_best"
"""Metric of each step that was the best when it was saved. Later steps have higher values."""
_TIMING_SUFFIXES = ("_runtime", "_per_second", "_time")
_POSITION = "position_in_data"
"""Key, beside Trainer's own state, of the settings that decide which samples a number of steps stands for."""
_HINT = (
    "Continue from the newest step (resume_from_checkpoint=True), use another cloud_root, or replace the steps "
    "(cloud_overwrite=True)"
)


class CloudCheckpoints(_Trainer):
    """Mixin for ``Trainer`` that saves to ``<cloud_root>/step-<n>`` instead of ``output_dir``.

    When Trainer would save (``save_strategy``, ``save_steps``), all ranks save their shards of the model and optimizer,
    and everything else that an exact continuation needs: scheduler, scaler, random generators, Trainer's own state. The
    newest ``save_total_limit`` steps are kept, and the best by ``metric_for_best_model``, which
    ``load_best_model_at_end`` loads. ``resume_from_checkpoint=True`` resumes from the newest committed step, or starts
    from scratch if there is none; with a number, a missing step is an error. The last save is committed when ``train``
    returns.

    Args:
        *args: See ``Trainer``.
        cloud_root: Folder of all steps.
        cloud_async: Save in the background.
        cloud_overwrite: Replace existing steps. Without it, ``train`` raises `CheckpointExistsError` before its first
            step if existing steps would collide with it or its limit would delete them.
        cloud_options: Options of all saves and loads.
        **kwargs: See ``Trainer``.

    Example::

        class CloudTrainer(CloudCheckpoints, Trainer):
            pass

        trainer = CloudTrainer(model, args, train_dataset=dataset, cloud_root="s3://bucket/run")
        trainer.train(resume_from_checkpoint=True)

    """

    def __init__(
        self,
        *args: Any,
        cloud_root: str | os.PathLike[str],
        cloud_async: bool = True,
        cloud_overwrite: bool = False,
        cloud_options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        limit = self.args.save_total_limit or 0
        keeps_best = limit > 0 and self.args.metric_for_best_model is not None
        self._cloud_overwrite = cloud_overwrite
        self._cloud_options = cloud_options or Options()
        self._cloud = CheckpointManager(
            cloud_root,
            keep_last=limit if limit > 0 else None,  # Trainer takes zero and negative values for "no limit"
            keep_best=(_BEST, "max", 1) if keeps_best else None,
            async_=cloud_async,
            options=self._cloud_options,
        )
        self._cloud_step: int | None = None
        self._cloud_random: RandomState | None = None
        self._cloud_best: int | None = None
        self._num_cloud_best = 0
        self._cloud_saved: dict[int, TrainerState] = {}
        """The saved steps of this training. The state object distinguishes the tries of ``auto_find_batch_size``."""

    def train(self, resume_from_checkpoint: bool | int | None = None, **kwargs: Any) -> Any:
        """Train as Trainer does.

        Raises the errors of `CheckpointManager.restore` and `close`, and `StateDictMismatchError` for a resume with
        another data set length, seed, or number of samples per step, unless ``ignore_data_skip`` is set.
        """
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            raise InvalidOptionError(
                f"{type(self).__name__} resumes only from steps under {self._cloud.root}, not from "
                f"{resume_from_checkpoint!s}. Give the number of a step, or True for the newest"
            )
        if kwargs.get("trial") is not None:
            raise InvalidOptionError(
                f"{type(self).__name__}: all trials of a hyperparameter search would save to {self._cloud.root}. "
                "Create a trainer with its own cloud_root for each trial"
            )
        if self.args.save_strategy == "no" and self.is_world_process_zero():
            _log.warning(
                'save_strategy="no": nothing is saved under %s. Pass save_strategy="steps" and save_steps',
                self._cloud.root,
            )
        with self._cloud, tempfile.TemporaryDirectory(prefix="cloudckpt-") as directory:
            is_resumed = self._fetch_trainer_state(resume_from_checkpoint, Path(directory))
            # Trainer finds only its state file there. The methods below replace the reading of its other files.
            output = super().train(resume_from_checkpoint=directory if is_resumed else None, **kwargs)
        self.state.best_model_checkpoint = self._get_best_uri()
        return output

    def _fetch_trainer_state(self, step: bool | int | None, directory: Path) -> bool:
        """Write Trainer's state file of a saved step, or of the newest for True. Returns False if there is none."""
        self._cloud_step = self._cloud_random = self._cloud_best = None
        self._cloud_saved = {}
        state, damaged = {"trainer": ""}, set()
        if step is not None and step is not False:
            restored = self._cloud.restore(state, None if step is True else step)
            if restored is not None:
                self._cloud_step = restored.step
                if self.is_world_process_zero():
                    # Trainer prints its progress so; no log below a warning is seen by default.
                    print(f"Resuming from {restored.uri}")  # noqa: T201
                damaged = {parse_step_uri(skipped.uri) for skipped in restored.skipped}  # saving them again is allowed
        steps = find_steps_on_all_ranks(self._cloud.root, self._cloud_options)
        if not self._cloud_overwrite and self.args.save_strategy != "no":
            refuse_existing_steps(self._cloud.root, set(steps) - damaged, after=self._cloud_step, hint=_HINT)
        if self.args.metric_for_best_model is not None and self.is_world_process_zero():  # only its metrics are saved
            self._num_cloud_best = max((int(info.metrics.get(_BEST, 0)) for info in self._cloud.steps()), default=0)
        if self._cloud_step is None:
            return False
        trainer = json.loads(state["trainer"])
        if self.args.auto_find_batch_size:
            self._train_batch_size: int = trainer["train_batch_size"]  # as Trainer itself does
        self._refuse_other_samples(trainer.pop(_POSITION, {}))
        best = trainer.pop("best_model_checkpoint", None)  # Trainer would look for a folder
        if best is not None and parse_step_uri(best) in steps:
            self._cloud_best = parse_step_uri(best)
        elif best is not None:
            _log.warning("the best model %s no longer exists; training determines the best model again", best)
        (directory / _STATE_FILE).write_text(json.dumps(trainer), encoding="utf-8")
        return True

    def _describe_position(self) -> dict[str, int | None]:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return {
            "samples": length_of(self.train_dataset),
            "samples_per_step": self.get_total_train_batch_size(self.args),
            "seed": seed,
        }

    def _refuse_other_samples(self, saved: dict[str, int | None]) -> None:
        """Raise `StateDictMismatchError` if the skipped steps would have other samples than those of the saved run."""
        differing = find_differences(saved, self._describe_position())
        if differing and not self.args.ignore_data_skip:
            raise make_position_error(
                "the step",
                *differing,
                advice="Keep the settings: on another number of ranks, change gradient_accumulation_steps to keep "
                "samples_per_step. Or pass ignore_data_skip=True, which begins the epoch of that step anew",
                uri=self._cloud.uri_of(self._cloud_step or 0),
            )

    def _get_best_uri(self) -> str | None:
        return None if self._cloud_best is None else self._cloud.uri_of(self._cloud_best)

    def _cloud_state_dict(self) -> dict[str, Any]:
        trainer = dataclasses.asdict(self.state) | {
            "best_model_checkpoint": self._get_best_uri(),
            _POSITION: self._describe_position(),
        }
        return {
            "accelerator": AcceleratorState(self.accelerator, restores_random=False),
            "scheduler": serialize(self.lr_scheduler.state_dict()),
            "trainer": json.dumps(trainer),
        }

    # The following methods replace those of Trainer that write and read the files of a checkpoint.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        states: dict[str, Any] = {}
        for exportable in [*self.callback_handler.callbacks, self.control]:
            if isinstance(exportable, ExportableState):
                states.setdefault(type(exportable).__name__, []).append(exportable.state())
        self.state.stateful_callbacks = {
            name: values[0] if len(values) == 1 else values for name, values in states.items()
        }
        step = self.state.global_step
        metrics = self._metrics_at(step)
        if self.state.best_global_step == step:
            self._num_cloud_best += 1
            self._cloud_best, metrics[_BEST] = step, self._num_cloud_best
        is_redone = self._cloud_saved.get(step, self.state) is not self.state
        self._cloud_saved[step] = self.state
        overwrite = self._cloud_overwrite or is_redone
        self._cloud.save(step, self._cloud_state_dict(), metrics=metrics, force=True, overwrite=overwrite)
        if self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = self._get_best_uri()

    def _metrics_at(self, step: int) -> dict[str, float]:
        """Return the metrics that Trainer logged at `step`."""
        logged = [entry for entry in self.state.log_history if entry.get("step") == step]
        return {
            name: value
            for entry in logged
            for name, value in entry.items()
            if (name == "loss" or (name.startswith("eval_") and not name.endswith(_TIMING_SUFFIXES)))
            and isinstance(value, (int, float))
        }

    def _load_best_model(self) -> None:
        self._cloud.wait()  # the best step may still be saving
        _log.info("loading the best model from %s", self._get_best_uri())
        self._cloud.restore({"accelerator": AcceleratorState(self.accelerator, only_models=True)}, self._cloud_best)
        self.state.best_model_checkpoint = None  # otherwise Trainer would delete folders in output_dir

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: the scaler and the model are restored together with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._cloud_state_dict()
        self._cloud.restore(state, self._cloud_step)
        self.lr_scheduler.load_state_dict(deserialize(state["scheduler"]))
        self._cloud_random = state["accelerator"].random
        if self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = self._get_best_uri()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the scaler and the model are restored together with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._cloud_random is not None:  # None if another number of ranks saved the state
            self._cloud_random.restore()
