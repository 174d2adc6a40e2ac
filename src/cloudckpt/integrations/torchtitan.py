"""torchtitan: a checkpoint manager whose folder may be a URI."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import cloudckpt.manager
from cloudckpt._background.handle import AsyncSave
from cloudckpt._uri import parse_location
from cloudckpt.api import load
from cloudckpt.errors import CheckpointNotFoundError, portable
from cloudckpt.integrations._needs import needed
from cloudckpt.integrations._taken import refuse_taken, steps_under
from cloudckpt.options import Options

with needed("torchtitan"):
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

_TO_DO = (
    "Go on from the newest (load_step=-1), only load (load_only=True), give another folder, or replace them "
    "(overwrite=True)"
)


class CloudCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan is not there where types are checked
    """torchtitan's checkpoints, by `cloudckpt.CheckpointManager`: ``checkpoint=CloudCheckpointManager.Config(…)``.

    The fields of the configuration mean what they do in torchtitan; ``folder`` may be a URI. Steps lie at
    ``<folder>/step-<n>``. A load takes the newest that is whole, and a step that is asked for and missing is an error.
    ``keep_latest_k`` counts committed checkpoints, and an older one goes once a newer one is committed. Both
    asynchronous modes are `cloudckpt.async_save`.

    With ``overwrite`` a step that is there already is replaced; without it that is a `CheckpointExistsError`, raised by
    the load of an earlier step, if that is not ``load_only``.
    `options` is for a subclass to set.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]  # as above
        """torchtitan's, and one field more."""

        overwrite: bool = False
        """Whether a step that is there already is replaced."""

    options: ClassVar[Options] = Options()

    def __init__(self, config: Config, **parts: Any) -> None:
        keep_latest_k, async_mode = config.keep_latest_k, config.async_mode
        # torchtitan's own thread would remove what is not committed, and its group is not needed.
        config.keep_latest_k, config.async_mode = 0, "disabled"
        try:
            super().__init__(config, **parts)
        finally:
            config.keep_latest_k, config.async_mode = keep_latest_k, async_mode
        if not self.enable:
            return
        self.keep_latest_k, self.async_mode = keep_latest_k, AsyncMode(async_mode)
        self._overwrite = config.overwrite
        self.staging_future: Future[None] | None = None
        self._manager = cloudckpt.manager.CheckpointManager(
            self.folder,
            keep_last=keep_latest_k or None,
            async_=self.async_mode is not AsyncMode.DISABLED,
            options=self.options,
        )

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,  # noqa: FBT001, FBT002  # torchtitan's signature
        to_hf: bool = False,  # noqa: FBT001, FBT002  # as above
    ) -> Future[Any] | None:
        """Save a step; in Hugging Face's format as torchtitan does."""
        if to_hf:
            hf: Future[Any] | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf=True
            )
            return hf
        step = int(checkpoint_id.rpartition("step-")[2])
        answer = self._manager.save(step, state_dict, force=True, overwrite=self._overwrite)
        if not isinstance(answer, AsyncSave):
            return None
        if async_mode is AsyncMode.DISABLED:  # the last one
            answer.result()
            return None
        self.staging_future = answer.staged
        return answer.committed

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:  # noqa: FBT001  # torchtitan's signature
        """Load what lies at `checkpoint_id`."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id, options=self.options)
        self.states[MODEL].load_state_dict(state_dict)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002  # torchtitan's signature
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step:
            self._save_last_step(curr_step)
            return True
        uri = self._create_checkpoint_id(curr_step)
        self.save_future = self.dcp_save(self._flattened_model_states_sd(), uri, self.async_mode)
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        found = self._find_load_step() if step == -1 else step
        if found == -1:
            return self._load_initial()
        states = self._states_to_load(model_only=found == 0)
        if self._manager.restore(states, None if step == -1 else step) is None:
            raise CheckpointNotFoundError(
                f"step {found} under {self._manager.root} was removed meanwhile: begin again", uri=self._manager.root
            )
        self.states[MODEL].load_state_dict(states)
        if step != -1 and not self.load_only and not self._overwrite:
            refuse_taken(self._manager.root, steps_under(self._manager.root, self.options), after=step, to_do=_TO_DO)
        return True

    def _load_initial(self) -> bool:
        from_hf = self.initial_load_in_hf
        uri = self.initial_load_path
        if not uri and from_hf:
            uri = self.sd_adapter and self.sd_adapter.hf_assets_path
        if not uri:
            return False
        states = self._states_to_load(self.initial_load_model_only)
        self.dcp_load(states, uri, from_hf=from_hf, from_quantized=self.initial_load_in_hf_quantized)
        return True

    def _find_load_step(self, folder: str = "") -> int:
        """The one that was committed last, on all ranks the same; -1 where there is none."""
        if folder and parse_location(folder).uri != self._manager.root:
            raise ValueError(f"steps are looked for under {self._manager.root} alone, not {folder}")
        found: list[int | Exception] = [-1]
        if dist.get_rank() == 0:
            try:
                newest = self._manager.latest()
                found = [-1 if newest is None else newest.step]
            except Exception as error:  # noqa: BLE001  # the other ranks wait for it, and raise it too
                found = [portable(error)]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _maybe_wait_for_staging(self) -> None:
        if self.staging_future is not None:
            self.staging_future.result()
            self.staging_future = None

    def _close(self) -> None:
        if hasattr(self, "_manager"):  # torchtitan's destructor calls this, however far the constructor got
            self._manager.close()
