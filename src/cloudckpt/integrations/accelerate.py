"""Accelerate: everything that an `Accelerator` has prepared, as one ``Stateful`` that loads on any number of ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from cloudckpt.dcp.live_objects import RandomState
from cloudckpt.errors import InvalidOptionError
from cloudckpt.integrations import require
from cloudckpt.integrations._state import deserialize, serialize

with require("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, gather_object

_log = logging.getLogger("cloudckpt")

_UNSUPPORTED_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class AcceleratorState:
    """Saves what ``accelerator.save_state`` saves, as one ``Stateful`` for `cloudckpt.save` or a manager.

    Models and optimizers are saved by the names of their parameters, so FSDP1, FSDP2 and DDP shards load on any number
    of ranks. Schedulers, the gradient scaler, registered objects and the accelerator's step are saved too, and for each
    rank its random generators and stateful data loaders. On another number of ranks these two are not changed, and a
    warning is logged. All ranks make an instance after ``prepare``, and save and load it together.

    Args:
        accelerator: The accelerator, after ``prepare``.
        restores_random: Restore the random generators. If False, their state is in `random`.
        only_models: Save or load only the models, for inference or to start another training.

    Raises:
        InvalidOptionError: DeepSpeed and Megatron-LM have state formats of their own.

    Example::

        state = {"accelerator": AcceleratorState(accelerator), "step": 0}
        with cloudckpt.CheckpointManager("s3://bucket/run", keep_last=3, save_every=2) as manager:
            manager.restore(state)

    """

    def __init__(self, accelerator: Accelerator, *, restores_random: bool = True, only_models: bool = False) -> None:
        if accelerator.distributed_type in _UNSUPPORTED_ENGINES:
            raise InvalidOptionError(
                f"AcceleratorState does not support {accelerator.distributed_type.value}, which keeps the state of its "
                "models in a format of its own"
            )
        self._accelerator = accelerator
        self._restores_random = restores_random
        self._only_models = only_models
        self.random: RandomState | None = None
        """The loaded random state of this rank; None if another number of ranks saved it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state. A collective call: it gathers the state of each rank."""
        accelerator = self._accelerator
        models = {str(index): get_model_state_dict(model) for index, model in enumerate(self._models)}
        if self._only_models:
            return {"models": models}
        return {
            "models": models,
            "optimizers": {
                str(index): get_optimizer_state_dict(model, optimizer)
                for index, (model, optimizer) in enumerate(self._optimizers())
            },
            "schedulers": self._serialize_states(accelerator._schedulers),
            "objects": self._serialize_states(accelerator._custom_objects),
            "scaler": serialize(None if accelerator.scaler is None else accelerator.scaler.state_dict()),
            "step": accelerator.step,
            "ranks": gather_object([self._serialize_rank()]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Apply the loaded state to the prepared objects."""
        accelerator = self._accelerator
        for index, model in enumerate(self._models):
            set_model_state_dict(model, state_dict["models"][str(index)])
        if self._only_models:
            return
        for index, (model, optimizer) in enumerate(self._optimizers()):
            set_optimizer_state_dict(model, optimizer, state_dict["optimizers"][str(index)])
        for objects, states in (
            (accelerator._schedulers, state_dict["schedulers"]),
            (accelerator._custom_objects, state_dict["objects"]),
        ):
            for each, state in zip(objects, states, strict=True):
                each.load_state_dict(deserialize(state))
        scaler = deserialize(state_dict["scaler"])
        if accelerator.scaler is not None and scaler is not None:
            accelerator.scaler.load_state_dict(scaler)
        accelerator.step = state_dict["step"]
        self.random, ranks = None, state_dict["ranks"]
        if len(ranks) == accelerator.num_processes:
            self._restore_rank(deserialize(ranks[accelerator.process_index]))
        else:
            _log.warning(
                "the checkpoint was saved by %d ranks and is loaded by %d: random generators and stateful data loaders "
                "are not restored",
                len(ranks),
                accelerator.num_processes,
            )

    @property
    def _models(self) -> list[nn.Module]:
        models: list[nn.Module] = self._accelerator._models
        return models

    def _optimizers(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        """Return each optimizer with the model whose parameters it updates."""
        found = []
        for wrapper in self._accelerator._optimizers:
            optimizer = wrapper.optimizer
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            model = next((each for each in self._models if held & {id(one) for one in each.parameters()}), None)
            if model is None:
                raise InvalidOptionError(
                    "AcceleratorState: a prepared optimizer has no parameter of any prepared model. With FSDP1, "
                    "prepare the model first, and create the optimizer from its parameters afterwards"
                )
            found.append((model, optimizer))
        return found

    @staticmethod
    def _serialize_states(objects: list[Any]) -> list[bytes]:
        return [serialize(each.state_dict()) for each in objects]

    def _serialize_rank(self) -> bytes:
        loaders = [loader.state_dict() if _is_stateful(loader) else None for loader in self._loaders]
        return serialize({"random": serialize(tuple(RandomState.capture())), "loaders": loaders})

    def _restore_rank(self, state: dict[str, Any]) -> None:
        for loader, of_loader in zip(self._loaders, state["loaders"], strict=True):
            if of_loader is not None and _is_stateful(loader):
                loader.load_state_dict(of_loader)
        self.random = RandomState(*deserialize(state["random"]))
        if self._restores_random:
            self.random.restore()

    @property
    def _loaders(self) -> list[Any]:
        loaders: list[Any] = self._accelerator._dataloaders
        return loaders


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
