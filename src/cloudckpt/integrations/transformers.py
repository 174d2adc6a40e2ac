"""transformers: a `Trainer` that saves to and resumes from URIs."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.trainer_callback import ExportableState

from cloudckpt.errors import InvalidOptionError
from cloudckpt.integrations._opaque import RandomState, packed, unpacked
from cloudckpt.integrations.accelerate import AcceleratorState
from cloudckpt.manager import CheckpointManager
from cloudckpt.options import Options

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the class is to be put before whichever Trainer there is

_STATE_FILE = "trainer_state.json"


class CloudCheckpoints(_Trainer):  # type: ignore[misc]  # transformers is not there where types are checked
    """Lets the ``Trainer`` before which it is put save to ``<cloud_root>/step-<n>``, and nowhere else.

    ::

        class CloudTrainer(CloudCheckpoints, Trainer):
            pass

        trainer = CloudTrainer(model, args, train_dataset=dataset, cloud_root="s3://bucket/run")
        trainer.train(resume_from_checkpoint=True)

    When Trainer would save (``save_strategy``, ``save_steps``), all ranks save their shards of model and optimizer with
    all else that is needed to go on exactly: scheduler, scaler, random generators, Trainer's own state. Of them
    ``save_total_limit`` are kept. ``resume_from_checkpoint=True`` takes the one that was committed last, or begins anew
    where there is none; a number that step, or it is an error. Saves are in the background, unless
    ``cloud_async=False``; the last one is committed when ``train`` returns. A step that is there already is an error,
    unless ``cloud_overwrite``. Raises `InvalidOptionError` for ``load_best_model_at_end``.
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
        if self.args.load_best_model_at_end:
            raise InvalidOptionError(
                f"{type(self).__name__}: load_best_model_at_end looks for a folder in output_dir, and the "
                f"checkpoints are under {cloud_root!s}"
            )
        self._cloud_overwrite = cloud_overwrite
        self._cloud = CheckpointManager(
            cloud_root,
            keep_last=self.args.save_total_limit,
            async_=cloud_async,
            options=cloud_options,
        )
        self._cloud_step: int | None = None
        self._cloud_random: RandomState | None = None

    def train(self, resume_from_checkpoint: bool | int | None = None, **kwargs: Any) -> Any:  # noqa: FBT001  # Trainer's
        """As Trainer's; see above for what it resumes from. Raises what `CheckpointManager.restore` and `close` do."""
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            raise InvalidOptionError(
                f"{type(self).__name__}: checkpoints are looked for under {self._cloud.root}; resume from a step of "
                f"it, or from True, the newest, and not from {resume_from_checkpoint!s}"
            )
        with self._cloud, tempfile.TemporaryDirectory(prefix="cloudckpt-") as directory:
            is_resumed = self._fetch_trainer_state(resume_from_checkpoint, Path(directory))
            # Of Trainer's own files it finds only this one, and the methods below stand for the others.
            return super().train(resume_from_checkpoint=directory if is_resumed else None, **kwargs)

    def _fetch_trainer_state(self, wanted: bool | int | None, directory: Path) -> bool:  # noqa: FBT001  # as above
        self._cloud_step = self._cloud_random = None
        if wanted is None or wanted is False:
            return False
        state = {"trainer": ""}
        restored = self._cloud.restore(state, None if wanted is True else wanted)
        if restored is None:
            return False
        self._cloud_step = restored.step
        (directory / _STATE_FILE).write_text(state["trainer"], encoding="utf-8")
        return True

    def _cloud_state_dict(self) -> dict[str, Any]:
        return {
            "accelerator": AcceleratorState(self.accelerator, restores_random=False),
            "scheduler": packed(self.lr_scheduler.state_dict()),
            "trainer": json.dumps(dataclasses.asdict(self.state)),
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
        self._cloud.save(self.state.global_step, self._cloud_state_dict(), force=True, overwrite=self._cloud_overwrite)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Together with the optimizer's."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._cloud_state_dict()
        self._cloud.restore(state, self._cloud_step)
        self.lr_scheduler.load_state_dict(unpacked(state["scheduler"]))
        self._cloud_random = state["accelerator"].random

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Together with the optimizer's."""

    def _load_rng_state(self, checkpoint: str | None) -> None:  # noqa: ARG002  # Trainer's signature
        if self._cloud_random is not None:  # else there are more or fewer ranks than saved
            self._cloud_random.restore()
