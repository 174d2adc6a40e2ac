"""Accelerate: what an `Accelerator` has prepared, as one ``Stateful`` that loads on any number of ranks."""

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

from cloudckpt.errors import InvalidOptionError
from cloudckpt.integrations._needs import needed
from cloudckpt.integrations._opaque import RandomState, packed, unpacked

with needed("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, gather_object

_log = logging.getLogger("cloudckpt")

_OF_THE_ENGINE = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class AcceleratorState:
    """What ``accelerator.save_state`` saves: ``cloudckpt.save({"accelerator": AcceleratorState(accelerator)}, uri)``.

    Models and optimizers, by the names of their parameters, so FSDP1, FSDP2 and DDP shards load on any number of ranks;
    schedulers, the gradient scaler, objects registered for checkpointing and the accelerator's step; of each rank its
    random generators, and its data loaders where they are stateful. The last two are given back to as many ranks as
    saved them, and left as they are, with a warning, on another number. All ranks make one, after ``prepare``, and save
    and load it together.

    With ``restores_random=False`` the generators are left to the caller, who finds their state in `random`. With
    ``only_models`` it is the models alone: what is loaded of a checkpoint that has all, for inference or to begin
    another training with.

    Raises `InvalidOptionError` for DeepSpeed and Megatron-LM, which keep their state themselves.
    """

    def __init__(self, accelerator: Accelerator, *, restores_random: bool = True, only_models: bool = False) -> None:
        if accelerator.distributed_type in _OF_THE_ENGINE:
            raise InvalidOptionError(
                f"AcceleratorState: {accelerator.distributed_type.value} keeps its models' state in a format of its own"
            )
        self._accelerator = accelerator
        self._restores_random = restores_random
        self._only_models = only_models
        self.random: RandomState | None = None
        """Of this rank, as it was loaded; None where it was saved by another number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Called on all ranks: it gathers what each has of its own."""
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
            "schedulers": self._packed(accelerator._schedulers),  # noqa: SLF001  # as its own save_state
            "objects": self._packed(accelerator._custom_objects),  # noqa: SLF001  # as above
            "scaler": packed(None if accelerator.scaler is None else accelerator.scaler.state_dict()),
            "step": accelerator.step,
            "ranks": gather_object([self._of_this_rank()]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What was loaded, into what was prepared."""
        accelerator = self._accelerator
        for index, model in enumerate(self._models):
            set_model_state_dict(model, state_dict["models"][str(index)])
        if self._only_models:
            return
        for index, (model, optimizer) in enumerate(self._optimizers()):
            set_optimizer_state_dict(model, optimizer, state_dict["optimizers"][str(index)])
        for objects, states in (
            (accelerator._schedulers, state_dict["schedulers"]),  # noqa: SLF001  # as above
            (accelerator._custom_objects, state_dict["objects"]),  # noqa: SLF001  # as above
        ):
            for each, state in zip(objects, states, strict=True):
                each.load_state_dict(unpacked(state))
        scaler = unpacked(state_dict["scaler"])
        if accelerator.scaler is not None and scaler is not None:
            accelerator.scaler.load_state_dict(scaler)
        accelerator.step = state_dict["step"]
        self.random, ranks = None, state_dict["ranks"]
        if len(ranks) == accelerator.num_processes:
            self._restore_rank(unpacked(ranks[accelerator.process_index]))
        else:
            _log.warning(
                "saved by %d ranks and loaded by %d: random generators and stateful data loaders are left as they are",
                len(ranks),
                accelerator.num_processes,
            )

    @property
    def _models(self) -> list[nn.Module]:
        models: list[nn.Module] = self._accelerator._models  # noqa: SLF001  # as above
        return models

    def _optimizers(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        """Each with the model whose parameters it has."""
        found = []
        for wrapper in self._accelerator._optimizers:  # noqa: SLF001  # as above
            optimizer = wrapper.optimizer
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            model = next((each for each in self._models if held & {id(one) for one in each.parameters()}), None)
            if model is None:
                raise InvalidOptionError(
                    "AcceleratorState: an optimizer was prepared that has no parameter of any prepared model. Under "
                    "FSDP1 the model is prepared first, and the optimizer made of the parameters that it has then"
                )
            found.append((model, optimizer))
        return found

    @staticmethod
    def _packed(objects: list[Any]) -> list[bytes]:
        return [packed(each.state_dict()) for each in objects]

    def _of_this_rank(self) -> bytes:
        loaders = [loader.state_dict() if _is_stateful(loader) else None for loader in self._loaders]
        return packed({"random": RandomState.now().as_bytes(), "loaders": loaders})

    def _restore_rank(self, state: dict[str, Any]) -> None:
        for loader, of_loader in zip(self._loaders, state["loaders"], strict=True):
            if of_loader is not None and _is_stateful(loader):
                loader.load_state_dict(of_loader)
        self.random = RandomState.from_bytes(state["random"])
        if self._restores_random:
            self.random.restore()

    @property
    def _loaders(self) -> list[Any]:
        loaders: list[Any] = self._accelerator._dataloaders  # noqa: SLF001  # as above
        return loaders


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
