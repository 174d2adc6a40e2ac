"""verl: a checkpoint manager of FSDP workers that accepts a URI as its path."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist

from cloudckpt.api import load, save
from cloudckpt.errors import InvalidOptionError
from cloudckpt.integrations._requirements import require
from cloudckpt.options import Options
from cloudckpt.removal import delete

with require("verl"):
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager


class CloudCheckpointManager(BaseCheckpointManager):
    """Saves the model, optimizer, scheduler and random generators of verl's FSDP workers as one checkpoint.

    verl's own manager writes files for each rank, which load on the same number of ranks alone. This one writes shards,
    which load on any number. Each rank has its random generators, unless the number changes. ``save_contents`` and
    ``load_contents`` select ``model``, ``optimizer`` and ``extra``. Retention deletes checkpoints of this job, on rank
    0, after the commit of a newer one. A subclass may set `options`.

    Args:
        *args: See verl's ``BaseCheckpointManager``.
        trust_remote_code: Ignored.
        **kwargs: See verl's ``BaseCheckpointManager``.

    Raises:
        InvalidOptionError: ``hf_model`` or ``save_lora_only`` is asked for, which are not saved.

    Example::

        transformer_impl.FSDPCheckpointManager = CloudCheckpointManager

    """

    options: ClassVar[Options] = Options()

    def __init__(self, *args: Any, trust_remote_code: bool = False, **kwargs: Any) -> None:  # verl's
        super().__init__(*args, **kwargs)
        if self.should_save_hf_model or self.should_load_hf_model or self.should_save_lora_only:
            raise InvalidOptionError(
                "hf_model and save_lora_only are not saved to a URI. Remove them from verl's checkpoint settings, and "
                "use `cloudckpt export` for Hugging Face's format"
            )

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,  # verl's
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save to `local_path`, and return once the checkpoint is committed. Raises `CheckpointExistsError`."""
        if local_path is None:
            return
        contents = self._contents(self.checkpoint_save_contents)
        save(local_path, random_state=self.should_save_extra, options=self.options, **contents)
        self.previous_global_step = global_step
        self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,  # verl's
        del_local_after_load: bool = False,  # verl's
    ) -> None:
        """Load from `local_path`. There is no local copy to delete."""
        if local_path is None:
            return
        contents = self._contents(self.checkpoint_load_contents)
        load(local_path, random_state=self.should_load_extra, options=self.options, **contents)

    def remove_previous_save_local_path(self, path: str | list[str]) -> None:
        """Delete checkpoints of this job, on rank 0."""
        for uri in [path] if isinstance(path, str) else path:
            if dist.get_rank() == 0:
                delete(uri, options=self.options)

    def _contents(self, names: Any) -> dict[str, Any]:
        contents = {"model": self.model} if "model" in names else {}
        if "optimizer" in names:
            contents["optimizer"] = self.optimizer
            contents.setdefault("model", self.model)
        if "extra" in names and self.lr_scheduler is not None:
            contents["scheduler"] = self.lr_scheduler
        return contents
