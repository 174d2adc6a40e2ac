"""Live training objects as entries of a state dict: models, optimizers, schedulers, data loaders, random generators.

A load plans these entries from what the checkpoint holds, not from what the objects hold already. A fresh optimizer has
no state, so its own state dict would ask for none, and the moments in the checkpoint would be left behind.
"""

from __future__ import annotations

import abc
import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cloudckpt._torch_compat import fqns_of
from cloudckpt.dcp.random_state import RandomState
from cloudckpt.errors import InvalidOptionError, StateDictMismatchError
from cloudckpt.format.nesting import Nesting, unflatten

Model: TypeAlias = nn.Module | Mapping[str, nn.Module]
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

_log = logging.getLogger("cloudckpt")
_MAX_SHOWN = 5
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_STRICT_HINT = "or pass strict=False to leave it out"


class LiveEntry(abc.ABC):
    """One entry of a state dict that is saved from a live object, and loaded into it."""

    @abc.abstractmethod
    def state_dict(self) -> Any:
        """Return what a save stores."""

    @abc.abstractmethod
    def plan_load(self, saved: Any, *, where: str, uri: str) -> Any:
        """Return what a load fills, for the entry that is stored at the path `where` of the checkpoint at `uri`.

        `saved` is nested as the entry was saved, with torch's metadata in the place of tensors and values. Raises
        `StateDictMismatchError` if the object does not fit it.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: Any) -> None:
        """Give the object what a load has filled."""


def plan_live_entries(entries: dict[str, Any], metadata: Metadata, *, uri: str) -> None:
    """Replace each `LiveEntry` in `entries` by what the load of a checkpoint with this `metadata` fills."""
    live = {key: entry for key, entry in entries.items() if isinstance(entry, LiveEntry)}
    if not live:
        return
    saved = nest_metadata(metadata)
    for key, entry in live.items():
        entries[key] = _plan(entry, saved, key, where=key, uri=uri)


def nest_metadata(metadata: Metadata) -> dict[Any, Any]:
    """Return torch's metadata of each entry, nested as the state dict was that was saved."""
    nesting = {} if metadata.planner_data is None else metadata.planner_data
    typed, empty = (nesting.typed, nesting.empty) if isinstance(nesting, Nesting) else ({}, [])
    return unflatten(metadata.state_dict_metadata, {**nesting, **typed}, empty)


def _plan(entry: LiveEntry, saved: Mapping[Any, Any], key: str, *, where: str, uri: str) -> Any:
    if key not in saved and not isinstance(entry, OptionalEntry):
        raise StateDictMismatchError(
            f"{uri} has no {where!r}, only {_quote(list(saved))}. Leave it out of this load", uri=uri
        )
    return entry.plan_load(saved.get(key), where=where, uri=uri)


class EntryGroup(LiveEntry):
    """Several entries under names, such as the schedulers of two optimizers."""

    def __init__(self, entries: Mapping[str, LiveEntry]) -> None:
        self._entries = entries

    def state_dict(self) -> dict[str, Any]:
        return {key: entry.state_dict() for key, entry in self._entries.items()}

    def plan_load(self, saved: Any, *, where: str, uri: str) -> dict[str, Any]:
        known = saved if isinstance(saved, Mapping) else {}
        return {key: _plan(entry, known, key, where=f"{where}.{key}", uri=uri) for key, entry in self._entries.items()}

    def load_state_dict(self, state: Any) -> None:
        for key, entry in self._entries.items():
            entry.load_state_dict(state[key])


class ModelEntry(LiveEntry):
    """The parameters and persistent buffers of a model by their names, without those of wrappers (DDP, compile)."""

    def __init__(self, module: nn.Module, *, is_strict: bool) -> None:
        self._module = module
        self._is_strict = is_strict

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._module)

    def plan_load(self, saved: Any, *, where: str, uri: str) -> dict[str, Any]:
        meta = [name for name, param in self._module.named_parameters() if param.is_meta]
        if meta:
            raise InvalidOptionError(
                f"the model has no memory for {_quote(meta)}, which are on the meta device: call "
                "model.to_empty(device=…) before the load"
            )
        wanted = self.state_dict()
        known = saved if isinstance(saved, Mapping) else {}
        if self._is_strict and (unexpected := [name for name in known if name not in wanted]):
            raise StateDictMismatchError(
                f"{uri} holds parameters or buffers under {where!r} that the model lacks: {_quote(unexpected)}. Pass "
                "the model that was saved, or strict=False to leave them out",
                uri=uri,
            )
        if not self._is_strict:
            wanted = {name: value for name, value in wanted.items() if name in known}
        # A fresh module's extra state may have another structure than the one that was saved.
        return {
            name: value if isinstance(value, torch.Tensor) or name not in known else make_empty(known[name])
            for name, value in wanted.items()
        }

    def load_state_dict(self, state: Any) -> None:
        set_model_state_dict(self._module, state, options=StateDictOptions(strict=self._is_strict))


class OptimizerEntry(LiveEntry):
    """The state of optimizers by the names of the model's parameters, as ``get_optimizer_state_dict`` has it.

    torch's functions first take a step with zero gradients if an optimizer is fresh. This changes its counters, and
    runs its hooks. Here a fresh optimizer stays fresh in a save, and a load plans by the checkpoint.
    """

    def __init__(self, optimizers: Sequence[Optimizer], modules: Mapping[str, nn.Module], *, is_strict: bool) -> None:
        self._optimizers = optimizers
        self._modules = modules
        self._is_strict = is_strict

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer in self._optimizers:
            of_one = self._state_dict_of(optimizer)
            state.update(of_one[_STATE])
            groups += of_one[_GROUPS]
        return {_STATE: state, _GROUPS: groups}

    def plan_load(self, saved: Any, *, where: str, uri: str) -> dict[str, Any]:
        if not isinstance(saved, Mapping) or not isinstance(saved.get(_GROUPS), list):
            raise StateDictMismatchError(
                f"{where!r} of {uri} is no optimizer's state dict. Load it as a state dict, and convert it", uri=uri
            )
        params = self._params_by_name()
        layouts = self._layouts()
        by_name = self._by_name(saved.get(_STATE) or {})
        state = {}
        for key, name in by_name.items():
            if name not in params:
                if self._is_strict:
                    raise StateDictMismatchError(
                        f"{uri} holds the state of an optimizer for the parameter {name!r}, which is in no optimizer "
                        f"that was passed. Pass all of them, with the parameters that were saved, {_STRICT_HINT}",
                        uri=uri,
                    )
                continue
            optimizer, param = params[name]
            held = optimizer.state.get(param, {})
            try:
                state[key] = _plan_state(saved[_STATE][key], held, _Layout(layouts[name], optimizer, param))
            except NotImplementedError:
                raise StateDictMismatchError(
                    f"the optimizer's state for the sharded parameter {name!r} in {uri} has another shape than the "
                    "parameter, and its layout is not known before the optimizer has taken a step. Take one step with "
                    "gradients of zero before the load",
                    uri=uri,
                ) from None
        return {_STATE: state, _GROUPS: make_empty(saved[_GROUPS])}

    def load_state_dict(self, state: Any) -> None:
        by_name = self._by_name(state[_STATE])
        loaded = {name: state[_STATE][key] for key, name in by_name.items()}
        groups = state[_GROUPS]
        for optimizer in self._optimizers:
            self._load_one(optimizer, loaded, groups)

    def _state_dict_of(self, optimizer: Optimizer) -> dict[str, Any]:
        held = optimizer.state_dict()
        if (found := self._find_fsdp1(optimizer)) is not None:
            prefix, module = found
            with _sharded_fsdp1(module):
                held = FSDP1.optim_state_dict(module, optimizer, held)
            return {
                _STATE: {prefix + _unwrapped(name): value for name, value in held[_STATE].items()},
                _GROUPS: [
                    {**group, _PARAMS: [prefix + _unwrapped(name) for name in group[_PARAMS]]}
                    for group in held[_GROUPS]
                ],
            }
        names = self._names_of(optimizer)
        return {
            _STATE: {names[index]: value for index, value in held[_STATE].items()},
            _GROUPS: [{**group, _PARAMS: [names[index] for index in group[_PARAMS]]} for group in held[_GROUPS]],
        }

    def _load_one(self, optimizer: Optimizer, loaded: dict[str, Any], saved_groups: list[dict[str, Any]]) -> None:
        if (found := self._find_fsdp1(optimizer)) is not None:
            prefix, module = found
            with _sharded_fsdp1(module):
                names = FSDP1.optim_state_dict(module, optimizer, optimizer.state_dict())[_GROUPS]
                groups = self._match_groups(
                    optimizer, [[prefix + _unwrapped(name) for name in group[_PARAMS]] for group in names], saved_groups
                )
                state = {
                    raw: loaded[prefix + _unwrapped(raw)]
                    for group in names
                    for raw in group[_PARAMS]
                    if prefix + _unwrapped(raw) in loaded
                }
                for group, raw_names in zip(groups, names, strict=True):
                    group[_PARAMS] = raw_names[_PARAMS]
                optimizer.load_state_dict(
                    FSDP1.optim_state_dict_to_load(module, optimizer, {_STATE: state, _GROUPS: groups})
                )
            return
        by_index = self._names_of(optimizer)
        indices = {name: index for index, name in by_index.items()}
        live_groups = optimizer.state_dict()[_GROUPS]
        names_of_groups = [[by_index[index] for index in group[_PARAMS]] for group in live_groups]
        groups = self._match_groups(optimizer, names_of_groups, saved_groups)
        for group, names_of_group in zip(groups, names_of_groups, strict=True):
            group[_PARAMS] = [indices[name] for name in names_of_group]
        state = {indices[name]: value for name, value in loaded.items() if name in indices}
        optimizer.load_state_dict({_STATE: state, _GROUPS: groups})
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            _keep_dtypes(optimizer, state)

    def _match_groups(
        self, optimizer: Optimizer, names_of_groups: list[list[str]], saved_groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the saved settings for each of the optimizer's parameter groups, found by its parameters."""
        of_param = {
            name: position for position, group in enumerate(saved_groups) for name in self._names_in(group[_PARAMS])
        }
        groups = []
        for position, (names, live) in enumerate(zip(names_of_groups, optimizer.param_groups, strict=True)):
            found = {of_param[name] for name in names if name in of_param}
            # Each stage of a pipeline has parameters of its own, and one stage's names are in the checkpoint.
            if not found and len(saved_groups) == len(names_of_groups):
                found = {position}
            settings = [_without_params(saved_groups[number]) for number in sorted(found)]
            if any(not _is_same(settings[0], other) for other in settings[1:]):
                raise StateDictMismatchError(
                    f"parameter group {position} of the optimizer takes parameters of {len(settings)} saved groups with "
                    f"different settings, such as {_quote(names)}. Group the parameters as they were saved",
                    uri="",
                )
            groups.append({**_without_params(live), **(settings[0] if settings else {})})
        return groups

    def _names_of(self, optimizer: Optimizer) -> dict[int, str]:
        """Return the parameters' names by their numbers in the optimizer's state dict."""
        names = _name_params(self._modules)
        params = [param for group in optimizer.param_groups for param in group[_PARAMS]]
        if any(param not in names for param in params):
            raise InvalidOptionError(
                f"a {type(optimizer).__name__} updates parameters that are not in the model that was passed. Pass all "
                "modules whose parameters it updates, as in model={'net': net, 'loss': loss}"
            )
        return {index: names[param] for index, param in enumerate(params)}

    def _params_by_name(self) -> dict[str, tuple[Optimizer, nn.Parameter]]:
        params: dict[str, tuple[Optimizer, nn.Parameter]] = {}
        for optimizer in self._optimizers:
            if (found := self._find_fsdp1(optimizer)) is not None:
                prefix, module = found
                flat = {id(param): param for group in optimizer.param_groups for param in group[_PARAMS]}
                for raw, param in module.named_parameters():
                    if id(param) in flat:
                        params.update({prefix + name: (optimizer, param) for name in fqns_of(module, raw)})
            else:
                held = [param for group in optimizer.param_groups for param in group[_PARAMS]]
                params.update({name: (optimizer, held[index]) for index, name in self._names_of(optimizer).items()})
        return params

    def _layouts(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name, whose layout over the ranks a state of the same shape has."""
        return {
            prefix + name: value
            for prefix, module in self._modules.items()
            for name, value in get_model_state_dict(module).items()
        }

    def _by_name(self, state: Mapping[Any, Any]) -> dict[Any, str]:
        """Return the parameter's name for each key of a saved state, which is a number in a plain state dict."""
        if not all(isinstance(key, int) for key in state):
            return {key: str(key) for key in state}
        names = self._names_of(self._optimizers[0]) if len(self._optimizers) == 1 else {}
        return {key: names.get(key, str(key)) for key in state}

    def _names_in(self, params: Sequence[Any]) -> list[str]:
        return list(self._by_name(dict.fromkeys(params)).values())

    def _find_fsdp1(self, optimizer: Optimizer) -> tuple[str, nn.Module] | None:
        """Return the module of torch's first FSDP that has the optimizer's parameters, and the prefix of its names."""
        mine = {id(param) for group in optimizer.param_groups for param in group[_PARAMS]}
        for prefix, module in self._modules.items():
            if FSDP1.fsdp_modules(module) and any(id(param) in mine for param in module.parameters()):
                return prefix, module
        return None


class _Layout:
    """Makes empty tensors laid out over the ranks as the state of one parameter is."""

    def __init__(self, like: torch.Tensor, optimizer: Optimizer, param: nn.Parameter) -> None:
        self._like = like
        self._optimizer = optimizer
        self._param = param
        self._stepped: dict[str, Any] | None = None

    def make(self, name: str, entry: TensorStorageMetadata) -> torch.Tensor:
        dtype = entry.properties.dtype
        if entry.size == self._like.size() and entry.size:
            return torch.empty_like(self._like, dtype=dtype, requires_grad=False)
        if not entry.size:
            return torch.empty((), dtype=dtype)  # a counter, which optimizers hold on the CPU
        if isinstance(self._like, DTensor):
            stepped = self._step().get(name)
            if not isinstance(stepped, torch.Tensor) or stepped.size() != entry.size:
                raise NotImplementedError
            return torch.empty_like(stepped, dtype=dtype)
        if type(self._like) not in (torch.Tensor, nn.Parameter):
            raise NotImplementedError
        return torch.empty(entry.size, dtype=dtype, device=self._like.device)

    def _step(self) -> dict[str, Any]:
        """Return the state that a copy of the optimizer makes for a copy of the parameter."""
        if self._stepped is None:
            shadow = copy.copy(self._optimizer)
            param = self._param.detach().clone().requires_grad_()
            param.grad = torch.zeros_like(param)
            live = next(group for group in shadow.param_groups if any(one is self._param for one in group[_PARAMS]))
            shadow.param_groups = [{**live, _PARAMS: [param]}]
            shadow.state = defaultdict(dict)
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                setattr(shadow, hooks, OrderedDict())
            type(shadow).step(shadow)  # a scheduler replaces the method of the instance
            self._stepped = dict(shadow.state[param])
        return self._stepped


def _plan_state(saved: Any, held: Any, layout: _Layout) -> Any:
    """Return what a load fills for one parameter's state: the tensors that the optimizer holds, where they fit."""
    if not isinstance(saved, Mapping):
        return make_empty(saved)
    planned: dict[Any, Any] = {}
    for name, entry in saved.items():
        value = held.get(name) if isinstance(held, Mapping) else None
        if isinstance(entry, Mapping):
            planned[name] = _plan_state(entry, value, layout)
        elif not isinstance(entry, TensorStorageMetadata):
            planned[name] = make_empty(entry)
        elif isinstance(value, torch.Tensor) and value.size() == entry.size and value.dtype is entry.properties.dtype:
            planned[name] = value
        else:
            planned[name] = layout.make(name, entry)
    return planned


def _keep_dtypes(optimizer: Optimizer, state: Mapping[int, Any]) -> None:
    """Give the state the dtypes that were saved: ``Optimizer.load_state_dict`` casts it to those of the parameters."""
    params = [param for group in optimizer.param_groups for param in group[_PARAMS]]
    for index, values in state.items():
        held = optimizer.state[params[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and held[name].dtype is not value.dtype:
                held[name] = value.to(held[name].device)


class StatefulEntry(LiveEntry):
    """An object with ``state_dict`` and ``load_state_dict``, such as a scheduler. Takes the structure that was saved."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value.state_dict()

    def plan_load(self, saved: Any, *, where: str, uri: str) -> Any:  # noqa: ARG002  # any structure fits
        return make_empty(saved)

    def load_state_dict(self, state: Any) -> None:
        self._value.load_state_dict(state)


class GeneratorEntry(StatefulEntry):
    """A ``torch.Generator``."""

    def state_dict(self) -> torch.Tensor:
        return self._value.get_state()  # type: ignore[no-any-return]  # the object's type is open

    def load_state_dict(self, state: torch.Tensor) -> None:
        self._value.set_state(state)


class ValuesEntry(LiveEntry):
    """A dict of values and objects. A load fills it in place, with everything that was saved in it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._live = {key: entry for key, value in values.items() if (entry := wrap(value)) is not None}

    def state_dict(self) -> dict[str, Any]:
        return {
            key: self._live[key].state_dict() if key in self._live else value for key, value in self._values.items()
        }

    def plan_load(self, saved: Any, *, where: str, uri: str) -> Any:
        known = saved if isinstance(saved, Mapping) else {}
        missing = [key for key in self._live if key not in known]
        if missing:
            raise StateDictMismatchError(f"{uri} has no {_quote(missing)} under {where!r}", uri=uri)
        return make_empty(known)

    def load_state_dict(self, state: Any) -> None:
        for key, value in state.items():
            if key in self._live:
                self._live[key].load_state_dict(value)
            else:
                self._values[key] = value


class RankEntry(LiveEntry):
    """An entry that differs between ranks: each saves and loads its own, under ``rank-<r>``."""

    def __init__(self, entry: LiveEntry, rank: int) -> None:
        self._entry = entry
        self._key = f"rank-{rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self._key: self._entry.state_dict()}

    def plan_load(self, saved: Any, *, where: str, uri: str) -> dict[str, Any]:
        known = saved if isinstance(saved, Mapping) else {}
        if self._key not in known:
            raise StateDictMismatchError(
                f"{where!r} of {uri} was saved by {len(known)} ranks, and {self._key} is none of them. It cannot be "
                f"shared out to another number of ranks: leave {where} out of this load, and set its position yourself",
                uri=uri,
            )
        return {self._key: self._entry.plan_load(known[self._key], where=f"{where}.{self._key}", uri=uri)}

    def load_state_dict(self, state: Any) -> None:
        self._entry.load_state_dict(state[self._key])


class OptionalEntry(LiveEntry):
    """An entry that may be absent from a checkpoint."""


class RandomStateEntry(OptionalEntry):
    """The random generators of this rank's process. They keep their state if the checkpoint has none for this rank."""

    def __init__(self, rank: int) -> None:
        self._key = f"rank-{rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self._key: tuple(RandomState.capture())}

    def plan_load(self, saved: Any, *, where: str, uri: str) -> dict[str, Any]:
        known = saved if isinstance(saved, Mapping) else {}
        if self._key not in known:
            _log.warning(
                "%s has no %s of %s: the random generators of this rank stay as they are", uri, where, self._key
            )
            return {}
        return {self._key: None}

    def load_state_dict(self, state: Any) -> None:
        if self._key in state:
            RandomState(*state[self._key]).restore()


def wrap(value: Any) -> LiveEntry | None:
    """Return the entry for an object with a state of its own; None for a plain value."""
    if isinstance(value, LiveEntry):
        return value
    if isinstance(value, torch.Generator):
        return GeneratorEntry(value)
    if not isinstance(value, torch.Tensor) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StatefulEntry(value)
    return None


def wrap_all(value: Any, *, keyword: str) -> LiveEntry:
    """Return the entry for one object or for a dict or a sequence of them."""
    if isinstance(value, (list, tuple)):
        value = {str(position): one for position, one in enumerate(value)}
    if isinstance(value, Mapping):
        return EntryGroup({key: wrap_all(one, keyword=keyword) for key, one in value.items()})
    entry = wrap(value)
    if entry is None:
        hint = " Use torchdata's StatefulDataLoader" if isinstance(value, torch.utils.data.DataLoader) else ""
        raise InvalidOptionError(
            f"{keyword} is a {type(value).__name__}, which has no state_dict() and load_state_dict() to save and restore "
            f"it with.{hint}"
        )
    return entry


def make_empty(saved: Any) -> Any:
    """Return what a load fills with the saved structure: CPU tensors, and None in the place of each value."""
    if isinstance(saved, TensorStorageMetadata):
        return torch.empty(saved.size, dtype=saved.properties.dtype)
    if isinstance(saved, Mapping):
        return {key: make_empty(value) for key, value in saved.items()}
    if isinstance(saved, list):
        return [make_empty(value) for value in saved]
    return None


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """The live objects that one call of `save` or `load` is given."""

    model: Model | None
    optimizer: Optimizers | None
    scheduler: Any
    dataloader: Any
    extra: dict[str, Any] | None
    has_random_state: bool

    @property
    def are_given(self) -> bool:
        """True if there is an object, apart from the random generators, which each process has."""
        given = (self.model, self.optimizer, self.scheduler, self.dataloader, self.extra)
        return any(value is not None for value in given)

    def entries(self, rank: int, *, is_strict: bool) -> dict[str, Any]:
        """Return a state dict of the objects, each as a `LiveEntry`.

        Raises `InvalidOptionError` for an object that cannot be saved.
        """
        entries: dict[str, Any] = {}
        modules = {} if self.model is None else _named_modules(self.model)
        if self.model is not None:
            models = {key.rstrip("."): ModelEntry(one, is_strict=is_strict) for key, one in modules.items()}
            entries["model"] = models.get("") or EntryGroup(models)
        if self.optimizer is not None:
            entries["optimizer"] = _wrap_optimizers(self.optimizer, modules, is_strict=is_strict)
        if self.scheduler is not None:
            entries["scheduler"] = wrap_all(self.scheduler, keyword="scheduler")
        if self.dataloader is not None:
            entries["dataloader"] = RankEntry(wrap_all(self.dataloader, keyword="dataloader"), rank)
        if self.extra is not None:
            if not isinstance(self.extra, dict):
                kind = type(self.extra).__name__
                raise InvalidOptionError(f"extra must be a dict, which a load fills in place, not a {kind}")
            entries["extra"] = ValuesEntry(self.extra)
        if self.has_random_state:
            entries["random_state"] = RandomStateEntry(rank)
        return entries


def _named_modules(model: Model) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    if not isinstance(model, Mapping) or not all(isinstance(one, nn.Module) for one in model.values()):
        raise InvalidOptionError(f"model must be a torch.nn.Module or a dict of them, not a {type(model).__name__}")
    return {f"{key}.": one for key, one in model.items()}


def _wrap_optimizers(optimizer: Any, modules: Mapping[str, nn.Module], *, is_strict: bool) -> LiveEntry:
    if not modules:
        raise InvalidOptionError("optimizer needs model=…: its state is saved by the names of the model's parameters")
    if isinstance(optimizer, Mapping):
        return EntryGroup({key: _wrap_optimizers(one, modules, is_strict=is_strict) for key, one in optimizer.items()})
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise InvalidOptionError(
                f"optimizer must be a torch.optim.Optimizer, or a list or a dict of them, not a {type(one).__name__}"
            )
    return OptimizerEntry(optimizers, modules, is_strict=is_strict)


def _name_params(modules: Mapping[str, nn.Module]) -> dict[nn.Parameter, str]:
    return {
        param: prefix + next(iter(fqns_of(module, raw)))
        for prefix, module in modules.items()
        for raw, param in module.named_parameters()
    }


def _unwrapped(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _sharded_fsdp1(module: nn.Module) -> Any:
    return FSDP1.state_dict_type(
        module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    )


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != _PARAMS}


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _quote(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(repr(name) for name in names[:_MAX_SHOWN]) + more if names else "nothing"
