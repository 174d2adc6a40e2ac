"""Accelerate: everything that an `Accelerator` has prepared, as one ``Stateful`` that loads on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler

from cloudckpt._display import count
from cloudckpt.dcp.live.entry import EntryGroup, LiveEntry, LoadSource, make_empty
from cloudckpt.dcp.live.loaders import length_of, make_position_error
from cloudckpt.dcp.live.objects import ModelEntry, RandomState
from cloudckpt.dcp.live.optimizers import wrap_optimizers
from cloudckpt.errors import InvalidOptionError
from cloudckpt.integrations._nested_state import deserialize, serialize
from cloudckpt.integrations._requirements import require

with require("accelerate"):
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler, get_sampler
    from accelerate.utils import DistributedType, gather_object

_log = logging.getLogger("cloudckpt")

_UNSUPPORTED_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_MODELS, _OPTIMIZERS = "models", "optimizers"
_EPOCH = "_epoch"
"""Key of the epoch in the state of a data loader. Accelerate leaves out the epoch, which decides the order."""
_VALUES = ("schedulers", "objects", "scaler", "step", "ranks")


class AcceleratorState(LiveEntry):
    """Saves what ``accelerator.save_state`` saves, as one entry of a state dict for `cloudckpt.save` or a manager.

    Models and optimizers are saved by the names of their parameters, so FSDP1, FSDP2 and DDP shards load on any number
    of ranks. Schedulers, the gradient scaler, registered objects and the accelerator's step are saved too, the seeds
    of seedable samplers, and for each rank its random generators and stateful data loaders. On another number of ranks,
    the generators are not changed, with a warning, and stateful data loaders are refused. All ranks make an instance
    after ``prepare``, and save and load it together.

    Args:
        accelerator: The accelerator, after ``prepare``.
        restores_random: Restore the random generators. If False, their state is in `random`.
        only_models: Save or load only the models, for inference or to start another training.

    Raises:
        InvalidOptionError: DeepSpeed and Megatron-LM have state formats of their own. And Accelerate does not save the
            order of a stateful data loader that shuffles with workers, or without ``use_seedable_sampler``, nor the
            position of one that dispatches the batches of workers.

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
        for position, loader in enumerate([] if only_models else self._loaders):
            _refuse_unsaved_order(loader, position)
        self._restores_random = restores_random
        self._only_models = only_models
        self._has_warned = False
        self.random: RandomState | None = None
        """The loaded random state of this rank; None if another number of ranks saved it."""
        self._surplus: list[str] = []
        self._uri = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state. A collective call: it gathers the state of each rank."""
        accelerator = self._accelerator
        state: dict[str, Any] = {key: group.state_at(key) for key, group in self._groups().items()}
        if self._only_models:
            return state
        if self._restores_random:
            self._warn_of_shared_generator()
        return {
            **state,
            "schedulers": self._serialize_states(accelerator._schedulers),
            "objects": self._serialize_states(accelerator._custom_objects),
            "scaler": serialize(None if accelerator.scaler is None else accelerator.scaler.state_dict()),
            "step": accelerator.step,
            "ranks": gather_object([self._serialize_rank()]),
        }

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> dict[str, Any]:
        """Return the values that a load fills. A fresh optimizer stays fresh until then."""
        groups, self._uri = self._groups(), source.uri
        # Without members, there is nothing to load.
        members = EntryGroup({key: group for key, group in groups.items() if group.names})
        by_key = saved if isinstance(saved, Mapping) else {}
        self._surplus = sorted(set(by_key.get(_MODELS) or ()) - set(groups[_MODELS].names))
        if self._surplus and self._accelerator.is_main_process:
            _log.warning(
                "%s has more models than are prepared: those at the positions %s are not restored",
                source.uri,
                ", ".join(self._surplus),
            )
        values = {} if self._only_models else {key: make_empty(by_key[key]) for key in _VALUES if key in by_key}
        return {**members.plan_load(saved, where=where, source=source), **values}

    def find_unused(self, where: str) -> list[str]:
        """Return the paths in the checkpoint that this object does not use."""
        others = (_OPTIMIZERS, *_VALUES) if self._only_models else ()
        unused = [*others, *(f"{_MODELS}.{index}" for index in self._surplus)]
        of_groups = EntryGroup(self._groups()).find_unused(where)
        return [*(f"{where}.{path}" for path in unused), *of_groups]

    def load_state_dict(self, state_dict: dict[str, Any], *, where: str = "accelerator") -> None:
        """Apply the loaded state to the prepared objects."""
        accelerator = self._accelerator
        for key, group in self._groups().items():
            if group.names:
                group.load_state_dict(state_dict[key], where=f"{where}.{key}")
        if self._only_models:
            return
        for objects, states in (
            (accelerator._schedulers, state_dict["schedulers"]),
            (accelerator._custom_objects, state_dict["objects"]),
        ):
            for target, state in zip(objects, states, strict=True):
                target.load_state_dict(deserialize(state))
        scaler = deserialize(state_dict["scaler"])
        if accelerator.scaler is not None and scaler is not None:
            accelerator.scaler.load_state_dict(scaler)
        accelerator.step = state_dict["step"]
        self._load_ranks(state_dict["ranks"])

    def _load_ranks(self, ranks: list[bytes]) -> None:
        accelerator, self.random = self._accelerator, None
        rank_state = deserialize(ranks[min(accelerator.process_index, len(ranks) - 1)])
        for loader, seed in zip(self._loaders, rank_state.get("seeds", ()), strict=False):
            if seed is not None and (sampler := _seedable_sampler_of(loader)) is not None:
                sampler.initial_seed = seed
        if len(ranks) == accelerator.num_processes:
            self._restore_rank(rank_state)
        elif any(map(_is_stateful, self._loaders)):
            raise make_position_error(
                "the position of stateful data loaders",
                f"{len(ranks)} ranks",
                str(accelerator.num_processes),
                advice="Set use_stateful_dataloader=False for this job, and use skip_first_batches",
                uri=self._uri,
            )
        elif accelerator.is_main_process:
            _log.warning(
                "the checkpoint was saved by %s and is loaded by %d: random generators are not restored",
                count(len(ranks), "rank"),
                accelerator.num_processes,
            )

    def _groups(self) -> dict[str, EntryGroup]:
        rank = self._accelerator.process_index
        models = self._models()
        groups = {_MODELS: EntryGroup({key: ModelEntry(model, rank=rank) for key, model in models.items()})}
        if not self._only_models:
            optimizers = enumerate(wrapper.optimizer for wrapper in self._accelerator._optimizers)
            entries = {str(index): self._wrap_optimizer(optimizer, models) for index, optimizer in optimizers}
            groups[_OPTIMIZERS] = EntryGroup(entries)
        return groups

    def _models(self) -> dict[str, nn.Module]:
        """Return the prepared models by position, each once: preparing one again, for an evaluation, appends it."""
        models, visited = {}, set[int]()
        for index, model in enumerate(self._accelerator._models):
            params = {id(param) for param in model.parameters()}
            if not params or not params <= visited:
                models[str(index)] = model
            visited |= params
        return models

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]) -> LiveEntry:
        """Return the entry of an optimizer, by the names that its parameters have in the models."""
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        modules = {
            f"{key}.": model for key, model in models.items() if not params.isdisjoint(map(id, model.parameters()))
        }
        if not modules:
            raise InvalidOptionError(
                "AcceleratorState: a prepared optimizer has no parameter of any prepared model. With FSDP1, "
                "prepare the model first, and create the optimizer from its parameters afterwards"
            )
        named = modules if len(modules) > 1 else {"": next(iter(modules.values()))}
        return wrap_optimizers(optimizer, named, rank=self._accelerator.process_index)

    @staticmethod
    def _serialize_states(objects: list[Any]) -> list[bytes]:
        return [serialize(stateful.state_dict()) for stateful in objects]

    def _serialize_rank(self) -> bytes:
        numbered = enumerate(self._loaders)
        loaders = [self._position_of(loader, index) if _is_stateful(loader) else None for index, loader in numbered]
        lengths = [length_of(loader) for loader in self._loaders]
        seeds = [getattr(_seedable_sampler_of(loader), "initial_seed", None) for loader in self._loaders]
        random = serialize(tuple(RandomState.capture()))
        return serialize({"random": random, "loaders": loaders, "lengths": lengths, "seeds": seeds})

    def _warn_of_shared_generator(self) -> None:
        """Warn once if the state is of the middle of an epoch, whose loader draws from the process's generator.

        ``iter(loader)`` draws a seed there, so a resume draws once more than the run that saved.
        """
        if self._has_warned or not self._accelerator.is_main_process:
            return
        running = [loader for loader in self._accelerator.gradient_state.dataloader_references if loader is not None]
        self._has_warned = any(getattr(loader, "generator", None) is None for loader in running)
        if self._has_warned:
            _log.warning(
                "a save within an epoch: its data loader has no generator of its own, so a resume continues with other "
                "random numbers, as of dropout. Make it with DataLoader(…, generator=torch.Generator())"
            )

    def _position_of(self, loader: Any, index: int) -> dict[str, Any]:
        """Return the state of a stateful data loader and the epoch that it is in.

        At the last batch, Accelerate 1.15 already counts the epoch as ended: a loop that is resumed there would repeat
        the whole epoch. With this state, the resumed loop is empty, and the next loop is the next epoch. A loop of
        dispatched batches cannot be empty, so a warning is logged for it.
        """
        state = {**loader.state_dict(), _EPOCH: loader.iteration}
        is_in_loop = any(running is loader for running in loader.gradient_state.dataloader_references)
        if not (is_in_loop and loader.end_of_dataloader):
            return state
        state[_EPOCH] += 1
        if not isinstance(loader, DataLoaderDispatcher):
            state["_iterator_finished"] = False
        elif self._accelerator.is_main_process:
            _log.warning(
                "prepared data loader %d is saved at its last batch, and Accelerate counts epoch %d as ended. After a "
                "resume, begin with epoch %d",
                index,
                loader.iteration,
                loader.iteration + 1,
            )
        return state

    def _restore_rank(self, state: dict[str, Any]) -> None:
        saved = dict(enumerate(zip(state["loaders"], state.get("lengths", state["loaders"]), strict=True)))
        # Loaders are identified by position. Each evaluation may prepare one more, so their numbers differ.
        for position, loader in enumerate(self._loaders):
            loader_state, length = saved.get(position, (None, None))
            if _is_stateful(loader) and loader_state is None:
                _log.warning("the checkpoint has no state of prepared data loader %d, which starts anew", position)
            elif _is_stateful(loader):
                if None not in (length, length_of(loader)) and length != length_of(loader):
                    raise make_position_error(
                        f"prepared data loader {position}",
                        f"{length} batches",
                        str(length_of(loader)),
                        advice="Prepare the loaders in the order of the run that saved, with the same data; or set "
                        "use_stateful_dataloader=False and use skip_first_batches",
                        uri=self._uri,
                    )
                epoch = loader_state.pop(_EPOCH, None)
                loader.load_state_dict(loader_state)
                if epoch is not None:
                    loader.set_epoch(epoch)
        self.random = RandomState(*deserialize(state["random"]))
        if self._restores_random:
            self.random.restore()

    @property
    def _loaders(self) -> list[Any]:
        loaders: list[Any] = self._accelerator._dataloaders
        return loaders


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _refuse_unsaved_order(loader: Any, position: int) -> None:
    """Raise `InvalidOptionError` for a stateful data loader whose order or position is not saved.

    With workers, Accelerate 1.15 draws the first order before it gives the loader its seedable sampler. And on several
    ranks, it does not subtract the batches of workers that it has fetched to dispatch them.
    """
    if not _is_stateful(loader):
        return
    if isinstance(loader, DataLoaderDispatcher) and loader.num_workers and loader.state.num_processes > 1:
        raise InvalidOptionError(
            f"prepared data loader {position} is stateful and dispatches the batches of its workers, and Accelerate "
            "does not save its position: a resume would continue with other batches. Give the loader num_workers=0; or "
            "give DataLoaderConfiguration dispatch_batches=False or use_stateful_dataloader=False"
        )
    is_saved = _seedable_sampler_of(loader) is not None and loader.num_workers == 0
    if isinstance(get_sampler(loader), RandomSampler) and not is_saved:
        raise InvalidOptionError(
            f"prepared data loader {position} is stateful and shuffles, and Accelerate does not save its order: a "
            "resume would continue with other batches. Give DataLoaderConfiguration use_seedable_sampler=True. With "
            "workers, give it also use_stateful_dataloader=False, and use skip_first_batches after a resume"
        )


def _seedable_sampler_of(loader: Any) -> Any:
    sampler = get_sampler(loader)
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
