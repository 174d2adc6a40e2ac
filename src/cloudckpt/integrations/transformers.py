"""transformers: a `Trainer` that saves to and resumes from URIs."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from cloudckpt._manager.steps import step_at
from cloudckpt.errors import InvalidOptionError
from cloudckpt.integrations._needs import needed
from cloudckpt.integrations._opaque import RandomState, packed, unpacked
from cloudckpt.integrations._taken import refuse_taken, steps_under
from cloudckpt.integrations.accelerate import AcceleratorState
from cloudckpt.manager import CheckpointManager
from cloudckpt.options import Options

with needed("transformers"):
    from transformers.trainer_callback import ExportableState, TrainerState

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the class is to be put before whichever Trainer there is

_log = logging.getLogger("cloudckpt")

_STATE_FILE = "trainer_state.json"
_BEST = "trainer_best"
"""A metric of the steps that were the best when they were saved: the higher, the later, and so the better."""
_OF_THE_CLOCK = ("_runtime", "_per_second", "_time")
_TO_DO = (
    "Go on from the newest (resume_from_checkpoint=True), give another cloud_root, or replace them "
    "(cloud_overwrite=True)"
)


class CloudCheckpoints(_Trainer):  # type: ignore[misc]  # transformers is not there where types are checked
    """Lets the ``Trainer`` before which it is put save to ``<cloud_root>/step-<n>``, and nowhere else.

    ::

        class CloudTrainer(CloudCheckpoints, Trainer):
            pass

        trainer = CloudTrainer(model, args, train_dataset=dataset, cloud_root="s3://bucket/run")
        trainer.train(resume_from_checkpoint=True)

    When Trainer would save (``save_strategy``, ``save_steps``), all ranks save their shards of model and optimizer with
    all else that is needed to go on exactly: scheduler, scaler, random generators, Trainer's own state. Of them
    ``save_total_limit`` are kept, and besides the best by ``metric_for_best_model``, which ``load_best_model_at_end``
    loads. ``resume_from_checkpoint=True`` takes the one that was committed last, or begins anew where there is none; a
    number that step, or it is an error. Saves are in the background, unless ``cloud_async=False``; the last one is
    committed when ``train`` returns. Where steps lie already that training would meet, or its limit remove, it does not
    begin (`CheckpointExistsError`), unless ``cloud_overwrite``: then each is replaced when its turn comes.
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
            keep_last=limit if limit > 0 else None,  # as Trainer takes what is not positive
            keep_best=(_BEST, "max", 1) if keeps_best else None,
            async_=cloud_async,
            options=self._cloud_options,
        )
        self._cloud_step: int | None = None
        self._cloud_random: RandomState | None = None
        self._cloud_best: int | None = None
        self._num_cloud_best = 0
        self._cloud_saved: dict[int, TrainerState] = {}
        """The steps of this training, each with what tells the tries of ``auto_find_batch_size`` apart."""

    def train(self, resume_from_checkpoint: bool | int | None = None, **kwargs: Any) -> Any:  # noqa: FBT001  # Trainer's
        """As Trainer's; see above for what it resumes from. Raises what `CheckpointManager.restore` and `close` do."""
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            raise InvalidOptionError(
                f"{type(self).__name__}: checkpoints are looked for under {self._cloud.root}; resume from a step of "
                f"it, or from True, the newest, and not from {resume_from_checkpoint!s}"
            )
        if kwargs.get("trial") is not None:
            raise InvalidOptionError(
                f"{type(self).__name__}: the trials of a hyperparameter search would all save to {self._cloud.root}; "
                "make a trainer for each, with a cloud_root of its own"
            )
        with self._cloud, tempfile.TemporaryDirectory(prefix="cloudckpt-") as directory:
            is_resumed = self._fetch_trainer_state(resume_from_checkpoint, Path(directory))
            # Of Trainer's own files it finds only this one, and the methods below stand for the others.
            output = super().train(resume_from_checkpoint=directory if is_resumed else None, **kwargs)
        self.state.best_model_checkpoint = self._uri_of_best()
        return output

    def _fetch_trainer_state(self, wanted: bool | int | None, directory: Path) -> bool:  # noqa: FBT001  # as above
        self._cloud_step = self._cloud_random = self._cloud_best = None
        self._cloud_saved = {}
        state, damaged = {"trainer": ""}, set()
        if wanted is not None and wanted is not False:
            restored = self._cloud.restore(state, None if wanted is True else wanted)
            if restored is not None:
                self._cloud_step = restored.step
                damaged = {step_at(each.uri) for each in restored.skipped}  # beside which their steps are saved
        steps = steps_under(self._cloud.root, self._cloud_options)
        if not self._cloud_overwrite and self.args.save_strategy != "no":
            refuse_taken(self._cloud.root, set(steps) - damaged, after=self._cloud_step, to_do=_TO_DO)
        if self.args.metric_for_best_model is not None and self.is_world_process_zero():  # whose metrics count
            self._num_cloud_best = max((int(info.metrics.get(_BEST, 0)) for info in self._cloud.steps()), default=0)
        if self._cloud_step is None:
            return False
        trainer = json.loads(state["trainer"])
        best = trainer.pop("best_model_checkpoint", None)  # Trainer would look for a folder
        if best is not None and step_at(best) in steps:
            self._cloud_best = step_at(best)
        elif best is not None:
            _log.warning("the best model, %s, is not there any more: it is looked for anew", best)
        (directory / _STATE_FILE).write_text(json.dumps(trainer), encoding="utf-8")
        return True

    def _uri_of_best(self) -> str | None:
        return None if self._cloud_best is None else self._cloud.uri_of(self._cloud_best)

    def _cloud_state_dict(self) -> dict[str, Any]:
        trainer = dataclasses.asdict(self.state) | {"best_model_checkpoint": self._uri_of_best()}
        return {
            "accelerator": AcceleratorState(self.accelerator, restores_random=False),
            "scheduler": packed(self.lr_scheduler.state_dict()),
            "trainer": json.dumps(trainer),
        }

    # What follows stands for the methods of Trainer that write and read a checkpoint's files.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # noqa: ARG002  # Trainer's signature
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        states: dict[str, Any] = {}
        for each in [*self.callback_handler.callbacks, self.control]:
            if isinstance(each, ExportableState):
                states.setdefault(type(each).__name__, []).append(each.state())
        self.state.stateful_callbacks = {name: one[0] if len(one) == 1 else one for name, one in states.items()}
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
            self.state.best_model_checkpoint = self._uri_of_best()

    def _metrics_at(self, step: int) -> dict[str, float]:
        """What Trainer has logged there."""
        logged = [entry for entry in self.state.log_history if entry.get("step") == step]
        return {
            name: value
            for entry in logged
            for name, value in entry.items()
            if (name == "loss" or (name.startswith("eval_") and not name.endswith(_OF_THE_CLOCK)))
            and isinstance(value, (int, float))
        }

    def _load_best_model(self) -> None:
        self._cloud.wait()  # it may be the last one
        _log.info("the best model is that of %s", self._uri_of_best())
        self._cloud.restore({"accelerator": AcceleratorState(self.accelerator, only_models=True)}, self._cloud_best)
        self.state.best_model_checkpoint = None  # beside which Trainer would remove folders of output_dir

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Together with the optimizer's."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._cloud_state_dict()
        self._cloud.restore(state, self._cloud_step)
        self.lr_scheduler.load_state_dict(unpacked(state["scheduler"]))
        self._cloud_random = state["accelerator"].random
        if self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = self._uri_of_best()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Together with the optimizer's."""

    def _load_rng_state(self, checkpoint: str | None) -> None:  # noqa: ARG002  # Trainer's signature
        if self._cloud_random is not None:  # else there are more or fewer ranks than saved
            self._cloud_random.restore()
