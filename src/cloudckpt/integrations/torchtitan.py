"""torchtitan: a checkpoint manager that accepts a URI as its folder."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import cloudckpt.manager.checkpoint_manager
from cloudckpt.api import load
from cloudckpt.background.handle import AsyncSave
from cloudckpt.dcp.ranks.rank_calls import RankCalls
from cloudckpt.errors import CheckpointNotFoundError
from cloudckpt.integrations._requirements import require
from cloudckpt.manager.steps import find_steps_on_all_ranks, refuse_existing_steps
from cloudckpt.options import Options
from cloudckpt.uri import parse_location

with require("torchtitan"):
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

_HINT = (
    "Continue from the newest step (load_step=-1), only load (load_only=True), use another folder, or replace "
    "the steps (overwrite=True)"
)


class CloudCheckpointManager(CheckpointManager):
    """Saves torchtitan's checkpoints with `cloudckpt.CheckpointManager`.

    The fields of `Config` mean the same as in torchtitan; ``folder`` may be a URI. The step ``n`` is saved to
    ``<folder>/step-<n>``. A load takes the newest undamaged step; a requested step that is missing is an error.
    ``keep_latest_k`` counts committed checkpoints, and an older one is deleted once a newer one is committed. Both
    asynchronous modes use `cloudckpt.async_save`. A subclass may set `options`.

    Without ``overwrite``, loading an earlier step raises `CheckpointExistsError`, unless ``load_only`` is set.

    Args:
        config: A `Config`.
        **parts: See torchtitan's ``CheckpointManager``.

    Example::

        config.checkpoint = CloudCheckpointManager.Config(enable=True, folder="s3://bucket/run", keep_latest_k=3)

    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's configuration with one additional field."""

        overwrite: bool = False
        """Replace existing steps."""

    options: ClassVar[Options] = Options()

    def __init__(self, config: Config, **parts: Any) -> None:
        keep_latest_k, async_mode = config.keep_latest_k, config.async_mode
        # torchtitan's own thread would delete uncommitted steps, and its process group is not needed.
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
        self._manager = cloudckpt.manager.checkpoint_manager.CheckpointManager(
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
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save a step. torchtitan itself saves Hugging Face's format."""
        if to_hf:
            hf: Future[Any] | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf=True
            )
            return hf
        step = int(checkpoint_id.rpartition("step-")[2])
        answer = self._manager.save(step, state_dict, force=True, overwrite=self._overwrite)
        if not isinstance(answer, AsyncSave):
            return None
        if async_mode is AsyncMode.DISABLED:  # the last step
            answer.result()
            return None
        self.staging_future = answer.staged
        return answer.committed

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the checkpoint at `checkpoint_id`."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id, options=self.options)
        self.states[MODEL].load_state_dict(state_dict)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
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
        step_found = self._find_load_step() if step == -1 else step
        if step_found == -1:
            return self._load_initial()
        states = self._states_to_load(model_only=step_found == 0)
        if self._manager.restore(states, None if step == -1 else step) is None:
            raise CheckpointNotFoundError(
                f"step {step_found} under {self._manager.root} was deleted during the load. Start the job again",
                uri=self._manager.root,
            )
        self.states[MODEL].load_state_dict(states)
        if step != -1 and not self.load_only and not self._overwrite:
            refuse_existing_steps(
                self._manager.root, find_steps_on_all_ranks(self._manager.root, self.options), after=step, hint=_HINT
            )
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
        """Return the newest committed step, the same on all ranks; -1 if there is none."""
        if folder and parse_location(folder).uri != self._manager.root:
            raise ValueError(f"only the folder {self._manager.root} is searched for steps, not {folder}")

        def find() -> int:
            newest = self._manager.latest()
            return -1 if newest is None else newest.step

        ranks = RankCalls(None, no_dist=False, root=self._manager.root, timeout_s=self.options.timeout_s)
        return ranks.broadcast("find", find)

    def _maybe_wait_for_staging(self) -> None:
        if self.staging_future is not None:
            self.staging_future.result()
            self.staging_future = None

    def _close(self) -> None:
        if hasattr(self, "_manager"):  # torchtitan's destructor calls this also after the constructor has failed
            self._manager.close()
