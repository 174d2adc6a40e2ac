"""Lightning: `CloudCheckpointIO` for strategies that save on one rank, and for shards `CloudModelParallelStrategy` and
`CloudFSDPStrategy`.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from cloudckpt._convert.whole import load_whole
from cloudckpt._uri import parse_location
from cloudckpt.api import load, save
from cloudckpt.description import describe
from cloudckpt.errors import CheckpointNotFoundError, InvalidOptionError
from cloudckpt.housekeeping import delete
from cloudckpt.integrations._needs import needed
from cloudckpt.integrations._opaque import SKELETON, packed, put_together, taken_apart, unpacked
from cloudckpt.options import Options

with needed("lightning", beside="; pytorch_lightning is another package, whose Trainer does not take these classes"):
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn

_Path = str | os.PathLike[str]
_OF_TRAINING = re.compile(r"optimizer_states|optimizer_[0-9]+|lr_schedulers|loops|callbacks").fullmatch


class CloudCheckpointIO(CheckpointIO):  # type: ignore[misc]  # Lightning is not there where types are checked
    """Saves and loads Lightning's checkpoints by URI: ``Trainer(plugins=[CloudCheckpointIO()])``.

    For strategies whose rank 0 saves all there is (one device, DDP). Each is a checkpoint as any other: atomic,
    checked, listed by ``cloudckpt ls``, its tensors under names such as ``state_dict.layer.weight``. One that is there
    already is replaced at the instant of the commit, as Lightning means it to be (``last.ckpt``), unless
    ``overwrite=False``.
    ``AsyncCheckpointIO(CloudCheckpointIO())`` saves in the background.
    """

    def __init__(self, *, options: Options | None = None, overwrite: bool = True) -> None:
        self._options = options or Options()
        self._overwrite = overwrite

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _Path, storage_options: Any = None) -> None:
        """Called by rank 0 alone. Returns once it is committed."""
        _refuse(storage_options)
        state = taken_apart(checkpoint, uri=parse_location(path).uri)
        save(state, path, no_dist=True, overwrite=self._overwrite, options=self._options)

    def load_checkpoint(
        self,
        path: _Path,
        map_location: Callable[..., Any] | torch.device | str | None = None,
        weights_only: bool | None = None,  # noqa: FBT001  # Lightning's signature
    ) -> dict[str, Any]:
        """Called by every rank, and loads all of it there. Of what is no tensor, plain values load, and the rest
        where `weights_only` is False. Tensors come on the CPU, or on the device that `map_location` is.
        """
        allow_pickle = weights_only is False
        flat = load_whole(parse_location(path), self._options, include=(), allow_pickle=False)
        if isinstance(map_location, (str, torch.device)):
            flat = {name: each.to(map_location) if torch.is_tensor(each) else each for name, each in flat.items()}
        checkpoint: dict[str, Any] = put_together(flat, allow_pickle=allow_pickle, uri=parse_location(path).uri)
        return checkpoint

    def remove_checkpoint(self, path: _Path) -> None:
        """Remove it as `cloudckpt.delete` does; that there is none is as good."""
        _remove(path, self._options)


_Module = TypeVar("_Module", bound="LightningModule")


def load_from_checkpoint(
    module_class: type[_Module],
    uri: _Path,
    *,
    map_location: torch.device | str | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    options: Options | None = None,
    **hyperparameters: Any,
) -> _Module:
    """``module_class.load_from_checkpoint(…)``, which itself opens files alone, of what lies at `uri`.

    For inference: of a checkpoint that one rank or all have saved, nothing of optimizers, schedulers, loops and
    callbacks is read. The weights lie in memory twice meanwhile. Raises what `cloudckpt.load` does.
    """
    location, options = parse_location(uri), options or Options()
    known = describe(uri, options=options)
    names = [tensor.name for tensor in known.tensors] + [value.name for value in known.values]
    tops = {name.partition(".")[0] for name in names}
    include = [pattern for top in sorted(tops) if not _OF_TRAINING(top) for pattern in _patterns(top, names)]
    found = load_whole(location, options, include=tuple(include), allow_pickle=False)
    checkpoint = put_together(found, without=_OF_TRAINING, allow_pickle=weights_only is False, uri=location.uri)
    checkpoint.setdefault("state_dict", found.get("state_dict", {}))  # shards lie there as themselves
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    # What had to be checked has been, above.
    module: _Module = module_class.load_from_checkpoint(
        file, map_location=map_location, strict=strict, weights_only=False, **hyperparameters
    )
    return module


def _patterns(top: str, names: list[str]) -> list[str]:
    patterns = [f"{glob.escape(top)}.*"] if any(name.startswith(f"{top}.") for name in names) else []
    return [*patterns, top] if top in names else patterns


class _CloudShards(ParallelStrategy):  # type: ignore[misc]  # as above
    """Put before a strategy of Lightning's: saves and loads its shards."""

    def __init__(self, *args: Any, options: Options | None = None, overwrite: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cloud_options = options or Options()
        self._overwrite = overwrite

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _Path, storage_options: Any = None) -> None:
        """From all ranks; returns once it is committed."""
        _refuse(storage_options)
        state = {"state_dict": checkpoint.pop("state_dict")}
        for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = optimizer_state
        state[SKELETON] = packed(checkpoint)
        save(state, self.broadcast(os.fspath(filepath)), overwrite=self._overwrite, options=self._cloud_options)

    def load_checkpoint(self, checkpoint_path: _Path, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: FBT001  # as above
        """Into the model and, where training goes on, the optimizers, in place; returns the rest."""
        module = self.lightning_module
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = list(enumerate(self.optimizers)) if is_fitting else []
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model), SKELETON: b""}
        for index, optimizer in optimizers:
            state[f"optimizer_{index}"] = get_optimizer_state_dict(self.model, optimizer)
        load(
            state,
            self.broadcast(os.fspath(checkpoint_path)),
            planner=None if module.strict_loading else DefaultLoadPlanner(allow_partial_load=True),
            options=self._cloud_options,
        )
        strictness = StateDictOptions(strict=module.strict_loading)
        set_model_state_dict(self.model, state["state_dict"], options=strictness)
        for index, optimizer in optimizers:
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{index}"], options=strictness)
        rest: dict[str, Any] = unpacked(
            state[SKELETON], allow_pickle=weights_only is False, uri=parse_location(checkpoint_path).uri
        )
        return rest

    def remove_checkpoint(self, filepath: _Path) -> None:
        """On rank 0."""
        if self.is_global_zero:
            _remove(filepath, self._cloud_options)


class CloudModelParallelStrategy(_CloudShards, ModelParallelStrategy):  # type: ignore[misc]  # as above
    """Lightning's strategy for FSDP2 and tensor parallelism, whose shards all ranks save and load by URI.

    One checkpoint holds all of it: parameters and optimizer state by name, so that it loads on any number of ranks, and
    the rest of Lightning's. So it is there whole, or not at all. Takes every keyword of `ModelParallelStrategy`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("save_distributed_checkpoint") is False:
            raise InvalidOptionError(
                "CloudModelParallelStrategy: its checkpoints are always those of all ranks; leave out "
                "save_distributed_checkpoint. cloudckpt.export_checkpoint makes one file of them"
            )
        super().__init__(*args, **kwargs)


class CloudFSDPStrategy(_CloudShards, FSDPStrategy):  # type: ignore[misc]  # as above
    """Lightning's strategy for FSDP1, whose shards all ranks save and load by URI.

    As `CloudModelParallelStrategy`, and with the same names, so that each loads what the other has saved. Takes every
    keyword of `FSDPStrategy`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.setdefault("state_dict_type", "sharded") != "sharded":
            raise InvalidOptionError(
                "CloudFSDPStrategy: its checkpoints are always those of all ranks; leave out state_dict_type. "
                "cloudckpt.export_checkpoint makes one file of them"
            )
        super().__init__(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Its shards, by the names that the model has without FSDP."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As above."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer  # noqa: SLF001  # as FSDPStrategy
        return get_optimizer_state_dict(self.model, inner)


def _refuse(storage_options: Any) -> None:
    if storage_options is not None:
        raise InvalidOptionError("storage_options belong to cloudckpt.Options, which is given where this one is made")


def _remove(path: _Path, options: Options) -> None:
    try:
        delete(path, options=options)
    except CheckpointNotFoundError:
        return
