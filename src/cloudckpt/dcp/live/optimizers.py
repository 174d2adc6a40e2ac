"""The state of live optimizers by the names of the model's parameters."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cloudckpt._messages import name_all, quote_names
from cloudckpt._torch_compat import fqns_of
from cloudckpt.dcp.live.entry import (
    EntryGroup,
    LiveEntry,
    LoadSource,
    get_model_state,
    kind_of,
    load_object,
    log_changed_settings,
    make_empty,
    value_at,
)
from cloudckpt.errors import InvalidOptionError, StateDictMismatchError
from cloudckpt.format.nesting import holds_tensors, rebuild_tuple
from cloudckpt.format.wrappers import SavedWrapper, holds_wrapper

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

_log = logging.getLogger("cloudckpt")

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_MODEL = "model."  # before the names of the model's entries in every load
_PARAMETER_KEYS = frozenset({_PARAMS, "param_names"})
"""Keys of a group that name its parameters. A load keeps their values in the live optimizer."""
_OWN_SETTINGS = frozenset({"alpha", "betas", "etas", "lr_decay", "momentum", "rho"})
"""Settings of groups that only some of torch's optimizers have, by which a load recognizes another kind."""


def wrap_optimizers(optimizer: Any, modules: Mapping[str, nn.Module], *, rank: int) -> LiveEntry:
    """Return the entry for one optimizer, or for a list or a dict of them, of the parameters of `modules`.

    The keys of `modules` are the prefixes of the parameters' names. Rank 0 warns for all.
    """
    if not modules:
        raise InvalidOptionError("optimizer needs model=…: its state is saved by the names of the model's parameters")
    if isinstance(optimizer, Mapping):
        if optimizer.keys() >= {_STATE, _GROUPS}:
            raise InvalidOptionError("optimizer is a state dict: pass the optimizer itself, without .state_dict()")
        return EntryGroup({key: wrap_optimizers(member, modules, rank=rank) for key, member in optimizer.items()})
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for member in optimizers:
        if not isinstance(member, Optimizer):
            raise InvalidOptionError(
                f"optimizer must be a torch.optim.Optimizer, or a list or a dict of them, not {kind_of(member)}. "
                "Pass the optimizer that it wraps, or the wrapper in extra={…}"
            )
    return OptimizerEntry(optimizers, modules, rank=rank) if optimizers else EntryGroup({})


class OptimizerEntry(LiveEntry):
    """The state of optimizers by the names of the model's parameters, as in ``get_optimizer_state_dict``.

    torch's functions first take a step with zero gradients if an optimizer is fresh. It changes its counters, and runs
    its hooks. Here a save leaves a fresh optimizer as it is, and a load plans by the content of the checkpoint.
    """

    is_synchronized = True

    def __init__(self, optimizers: Sequence[Optimizer], modules: Mapping[str, nn.Module], *, rank: int) -> None:
        self._optimizers = optimizers
        self._modules = modules
        self._rank = rank
        self._source: LoadSource | None = None
        self._saved_keys: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        parts = [self._state_dict_of(optimizer) for optimizer in self._optimizers]
        if len(parts) == 1:
            return parts[0]
        groups = [group for part in parts for group in part[_GROUPS]]
        num_by_name = Counter(name for group in groups for name in group[_PARAMS])
        shared = [name for name, number in num_by_name.items() if number > 1]
        others = [str(key) for part in parts for key in _other_entries_of(part)]
        if shared or others:
            reason = f"update the same parameters, {quote_names(shared)}" if shared else f"have {quote_names(others)}"
            raise InvalidOptionError(
                f"the optimizers {reason}, which one state dict cannot hold. Pass them in a dict: each is saved apart"
            )
        return {_STATE: {name: value for part in parts for name, value in part[_STATE].items()}, _GROUPS: groups}

    def find_unsynchronized(self, where: str) -> list[str]:
        num_groups = sum(len(optimizer.param_groups) for optimizer in self._optimizers)
        return [f"{where}.{_GROUPS}.{number}.{_PARAMS}" for number in range(num_groups)]  # of stages of a pipeline

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> dict[str, Any]:
        if not isinstance(saved, Mapping) or not isinstance(saved.get(_GROUPS), list):
            raise StateDictMismatchError(
                f"{where!r} of {source.uri} is no optimizer's state dict. Load it as a state dict, and convert it",
                uri=source.uri,
            )
        self._refuse_other_kind(saved[_GROUPS], uri=source.uri)
        params = self._params_by_name()
        layouts = self._layouts()
        saved_state = saved.get(_STATE) or {}
        self._source = source
        self._refuse_renamed(saved_state, where=where)
        by_name = self._by_name(saved_state)
        self._saved_keys = {name: key for key, name in by_name.items()}
        of_fsdp1 = [optimizer for optimizer in self._optimizers if self._find_fsdp1(optimizer) is not None]
        state = {}
        for key, name in by_name.items():
            if name not in params:  # another rank may have it, and `check_completeness` finds entries that no rank has
                continue
            optimizer, param = params[name]
            # torch's first FSDP holds parts of flat parameters, which can have the size of a whole one by chance.
            live = {} if optimizer in of_fsdp1 else optimizer.state.get(param, {})
            try:
                layout = _Layout(layouts.get(name, param), optimizer, param, live)
                state[key] = _plan_state(saved[_STATE][key], live, layout)
            except NotImplementedError:
                raise StateDictMismatchError(
                    f"the optimizer's state for the sharded parameter {name!r} in {source.uri} has another shape than "
                    "the parameter, and its layout is not known before the optimizer has taken a step. Take one step "
                    "before the load, which replaces all state",
                    uri=source.uri,
                ) from None
        return {**make_empty(_other_entries_of(saved)), _STATE: state, _GROUPS: make_empty(saved[_GROUPS])}

    def find_unused(self, where: str) -> list[str]:
        updated = {id(param) for optimizer in self._optimizers for param in _params_of(optimizer)}
        return [
            f"{where}.{_STATE}.{self._saved_keys.get(name, name)}"
            for param, name in self._names.items()
            if not param.requires_grad and id(param) not in updated
        ]

    def load_state_dict(self, state: Any, *, where: str) -> None:
        self._refuse_renamed([param for group in state[_GROUPS] for param in group[_PARAMS]], where=where)
        self._refuse_other_numbers(state, where=where)
        loaded = {name: state[_STATE][key] for key, name in self._by_name(state[_STATE]).items()}
        position_by_name = {
            name: position
            for position, group in enumerate(state[_GROUPS])
            for name in self._by_name(dict.fromkeys(group[_PARAMS])).values()
        }
        saved_names = {*loaded, *position_by_name}
        if loaded and self._rank == 0 and (new := [name for name in self._params_by_name() if name not in saved_names]):
            _log.warning(
                "%s was saved without the %s: no state of these is loaded",
                where,
                name_all("parameter", [*map(repr, new)]),
            )
        for optimizer in self._optimizers:
            self._load_one(optimizer, {**state, _STATE: loaded}, position_by_name, where=where)
            if self._rank == 0:
                self._warn_of_dtypes(optimizer, where=where)

    def _warn_of_dtypes(self, optimizer: Optimizer, *, where: str) -> None:
        """Warn of state in another dtype than its parameter: the steps of Adam and others of torch fail with it."""
        if not type(optimizer).__module__.startswith("torch.optim"):
            return  # others may keep their state in another precision on purpose
        mismatches = [
            (f"{where}.{_STATE}.{name}.{key}", value.dtype, param.dtype)
            for param, name in self._names.items()
            for key, value in optimizer.state.get(param, {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()
            if value.dtype is not param.dtype
        ]
        if mismatches:
            _log.warning(
                "%d tensors of the optimizer's state keep the dtype that was saved, and their parameters have another, "
                "such as %r (%s, and %s). The next step of %s may fail: call "
                "optimizer.load_state_dict(optimizer.state_dict()), which casts them, or load into a model of the "
                "saved dtype",
                len(mismatches),
                *mismatches[0],
                type(optimizer).__name__,
            )

    def _state_dict_of(self, optimizer: Optimizer) -> dict[str, Any]:
        live = optimizer.state_dict()
        others = _other_entries_of(live)
        if (fsdp1_unit := self._find_fsdp1(optimizer)) is not None:
            prefix, module = fsdp1_unit
            _refuse_containers(optimizer)
            with _sharded_fsdp1(module):
                live = FullyShardedDataParallel.optim_state_dict(module, optimizer, live)
            return {
                **others,
                _STATE: {prefix + _strip_compile_prefix(name): value for name, value in live[_STATE].items()},
                _GROUPS: [
                    {**group, _PARAMS: [prefix + _strip_compile_prefix(name) for name in group[_PARAMS]]}
                    for group in live[_GROUPS]
                ],
            }
        names = self._names_of(optimizer)
        if unnamed := [key for key in live[_STATE] if key not in names]:
            raise InvalidOptionError(
                f"a {type(optimizer).__name__} holds state of no parameter, under {quote_names(unnamed)}. Save it by "
                "itself, as a value in extra={…}"
            )
        return {
            **others,
            _STATE: {names[index]: value for index, value in live[_STATE].items()},
            _GROUPS: [{**group, _PARAMS: [names[index] for index in group[_PARAMS]]} for group in live[_GROUPS]],
        }

    def _load_one(
        self, optimizer: Optimizer, saved: dict[str, Any], position_by_name: Mapping[str, int], *, where: str
    ) -> None:
        loaded, others = saved[_STATE], _other_entries_of(saved)
        match = partial(self._match_groups, optimizer, saved_groups=saved[_GROUPS], position_by_name=position_by_name)
        if (fsdp1_unit := self._find_fsdp1(optimizer)) is not None:
            prefix, module = fsdp1_unit
            with _sharded_fsdp1(module):
                live = {**optimizer.state_dict(), _STATE: {}}  # only the names are of use
                names = FullyShardedDataParallel.optim_state_dict(module, optimizer, live)[_GROUPS]
                groups = match([[prefix + _strip_compile_prefix(name) for name in group[_PARAMS]] for group in names])
                state = {
                    raw: loaded[prefix + _strip_compile_prefix(raw)]
                    for group in names
                    for raw in group[_PARAMS]
                    if prefix + _strip_compile_prefix(raw) in loaded
                }
                for group, raw_names in zip(groups, names, strict=True):
                    group[_PARAMS] = raw_names[_PARAMS]
                flat = FullyShardedDataParallel.optim_state_dict_to_load(
                    module, optimizer, {_STATE: state, _GROUPS: groups}
                )
                _load_state(optimizer, {**others, **flat}, where=where)
            return
        indices = {name: index for index, name in self._names_of(optimizer).items()}
        names_of_groups = [[self._names[param] for param in group[_PARAMS]] for group in optimizer.param_groups]
        groups = match(names_of_groups)
        for group, names_of_group in zip(groups, names_of_groups, strict=True):
            group[_PARAMS] = [indices[name] for name in names_of_group]
        state = {indices[name]: value for name, value in loaded.items() if name in indices}
        _load_state(optimizer, {**others, _STATE: state, _GROUPS: groups}, where=where)

    def _match_groups(
        self,
        optimizer: Optimizer,
        names_of_groups: list[list[str]],
        *,
        saved_groups: list[dict[str, Any]],
        position_by_name: Mapping[str, int],
    ) -> list[dict[str, Any]]:
        """Return the saved settings for each of the optimizer's parameter groups, found by its parameters."""
        positions = [
            {position_by_name[name] for name in names if name in position_by_name} for names in names_of_groups
        ]
        groups: list[dict[str, Any]] = []
        sources: list[set[int]] = []
        for position, (names, live) in enumerate(zip(names_of_groups, optimizer.param_groups, strict=True)):
            saved_positions = positions[position]
            # Each stage of a pipeline has parameters of its own, and the checkpoint has the names of one stage.
            is_free = position < len(saved_groups) and not any(position in of_group for of_group in positions)
            if not saved_positions and is_free and len(self._optimizers) == 1:
                saved_positions = {position}
            settings = [
                {key: value for key, value in saved_groups[number].items() if key not in _PARAMETER_KEYS}
                for number in sorted(saved_positions)
            ]
            if any(not _is_same(settings[0], other) for other in settings[1:]):
                raise StateDictMismatchError(
                    f"parameter group {position} of the optimizer has parameters of {len(settings)} saved groups with "
                    f"different settings, such as {quote_names(names)}. Group the parameters as they were saved",
                    uri="",
                )
            saved = {key: _on_device_of(live.get(key), value) for key, value in (settings or [{}])[0].items()}
            groups.append({**{key: value for key, value in live.items() if key != _PARAMS}, **saved})
            sources.append(saved_positions)
        if self._rank == 0:
            _warn_of_equal_groups(optimizer.param_groups, groups, sources)
            _log_changed_settings(optimizer, groups)
        return groups

    @cached_property
    def _names(self) -> dict[nn.Parameter, str]:
        return {
            param: prefix + next(iter(fqns_of(module, path)))
            for prefix, module in self._modules.items()
            for path, param in module.named_parameters()
        }

    @cached_property
    def _fsdp1_units(self) -> list[tuple[str, nn.Module, list[FullyShardedDataParallel]]]:
        units = [(*unit, FullyShardedDataParallel.fsdp_modules(unit[1])) for unit in self._modules.items()]
        return [unit for unit in units if unit[2]]

    def _names_of(self, optimizer: Optimizer) -> dict[int, str]:
        """Return the parameters' names by their numbers in the optimizer's state dict."""
        names, params = self._names, _params_of(optimizer)
        if any(param not in names for param in params):
            raise InvalidOptionError(
                f"the optimizer ({type(optimizer).__name__}) updates parameters that are not in the model that was "
                "passed. Pass all modules whose parameters it updates, as in model={'net': net, 'loss': loss}. Create "
                "the optimizer after calls that replace parameters, such as to_empty() and fully_shard()"
            )
        return {index: names[param] for index, param in enumerate(params)}

    def _params_by_name(self) -> dict[str, tuple[Optimizer, nn.Parameter]]:
        params: dict[str, tuple[Optimizer, nn.Parameter]] = {}
        for optimizer in self._optimizers:
            if (fsdp1_unit := self._find_fsdp1(optimizer)) is not None:
                prefix, module = fsdp1_unit
                flat_ids = set(map(id, _params_of(optimizer)))
                for path, param in module.named_parameters():
                    if id(param) in flat_ids:
                        params.update({prefix + name: (optimizer, param) for name in fqns_of(module, path)})
            else:
                own = _params_of(optimizer)
                params.update({name: (optimizer, own[index]) for index, name in self._names_of(optimizer).items()})
        return params

    def _layouts(self) -> dict[str, Any]:
        """Return the model's tensors by name. A state of the same shape has the same layout over the ranks."""
        return {
            prefix + name: value
            for prefix, module in self._modules.items()
            for name, value in get_model_state(module).items()
        }

    def _by_name(self, state: Mapping[Any, Any]) -> dict[Any, str]:
        """Return the parameter's name for each key of a saved state, which is a number in a plain state dict."""
        if not self._are_numbers(state):
            return {key: str(key) for key in state}
        names = self._names_of(self._optimizers[0]) if len(self._optimizers) == 1 else {}
        return {key: names.get(int(key), str(key)) for key in state}

    def _are_numbers(self, keys: Collection[Any]) -> bool:
        """Return True if `keys` are numbers of parameters, or their text, and not names as in a ParameterList."""
        if not all(str(key).isdigit() for key in keys):
            return False
        return not {str(key) for key in keys} <= set(self._names.values())

    def _refuse_other_numbers(self, state: Mapping[str, Any], *, where: str) -> None:
        """Refuse a state by number, from a plain state dict, that numbers other parameters than the optimizer's."""
        params = [param for group in state[_GROUPS] for param in group[_PARAMS]]
        saved = [len(group[_PARAMS]) for group in state[_GROUPS]]
        live = [len(group[_PARAMS]) for optimizer in self._optimizers for group in optimizer.param_groups]
        if saved != live and self._are_numbers(params):
            raise StateDictMismatchError(
                f"{where!r} was saved by the numbers of parameters, in groups of {saved}, and the optimizer has groups "
                f"of {live}, so the numbers would mean other parameters. Group the parameters as they were saved",
                uri="",
            )
        # The plan took the keys for names, because a path holds text. The values in the groups are still numbers.
        if any(isinstance(param, int) for param in params) and not self._are_numbers(params):
            names = self._names_of(self._optimizers[0]) if len(self._optimizers) == 1 else {}
            if any(names.get(param) != str(param) for param in params):
                raise StateDictMismatchError(
                    f"{where!r} was saved by the numbers of parameters, which are names of other parameters in this "
                    "model. Pass the parameters to the optimizer in the order of the model, or load "
                    "optimizer.state_dict() by itself",
                    uri="",
                )

    def _refuse_renamed(self, keys: Collection[Any], *, where: str) -> None:
        """Refuse a rename of more than the prefixes of the whole model and the whole optimizer.

        Otherwise the state under one of the `keys` could be given to another parameter, which has the name now.
        """
        if self._source is None or self._source.renaming is None:
            return
        renaming, entries = self._source.renaming, self._source.entries
        own, model = renaming.find_root(f"{where}."), renaming.find_root(_MODEL)
        left = [old for old, new in renaming.new_names.items() if new is None and old.startswith(own or f"{where}.")]
        if not left and (own, model) == (f"{where}.", _MODEL):
            return
        if own is not None and model is not None:
            above = model[: model.rfind(".", 0, -1) + 1]
            parent = model if not above or own.startswith(above) else above  # an optimizer is not below a model
            left += [
                old
                for old, new in renaming.new_names.items()
                if old.startswith((parent, _MODEL)) and not old.startswith(own)
                if new is None or (not new.startswith(_MODEL) and isinstance(entries[new], TensorStorageMetadata))
            ]
            if not self._are_numbers(keys):
                left += [str(key) for key in keys if renaming.old_names.get(f"{_MODEL}{key}") != f"{model}{key}"]
        if own is None or model is None or left:
            raise StateDictMismatchError(
                f"{where!r} of {self._source.uri} cannot be loaded with this rename, which takes a part of the model "
                f"or changes the names of parameters{f', such as {quote_names(left)}' if left else ''}: one could be "
                "given the state of another. Load the model alone with rename, or both without rename, the model under "
                "its saved name, as in model={'net': model}",
                uri=self._source.uri,
            )

    def _refuse_other_kind(self, saved_groups: Sequence[Any], *, uri: str) -> None:
        """Refuse the state of another kind of optimizer, such as moments of Adam for SGD, which would ignore them."""
        live_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        saved = {key for group in saved_groups if isinstance(group, Mapping) for key in group} & _OWN_SETTINGS
        live = {key for group in live_groups for key in group} & _OWN_SETTINGS
        if saved and live and saved.isdisjoint(live):
            classes = sorted({type(optimizer).__name__ for optimizer in self._optimizers})
            raise StateDictMismatchError(
                f"{uri} was saved with an optimizer that has {quote_names(sorted(saved))}, and {', '.join(classes)} "
                f"has {quote_names(sorted(live))} instead. Pass an optimizer of the class that was saved, or leave the "
                "optimizer out and pass strict=False",
                uri=uri,
            )

    def _find_fsdp1(self, optimizer: Optimizer) -> tuple[str, nn.Module] | None:
        """Return the module of torch's first FSDP that has the optimizer's parameters, and the prefix of its names."""
        own_params = set(map(id, _params_of(optimizer)))
        for prefix, module, units in self._fsdp1_units:
            module_params = {id(param) for param in module.parameters()}
            if not own_params.isdisjoint(module_params):
                if not own_params <= module_params:
                    raise InvalidOptionError(
                        f"the optimizer ({type(optimizer).__name__}) updates an FSDP module together with parameters "
                        "of other models, and torch cannot save their states apart. Use one optimizer for each model, "
                        "pass one module that holds them all, or use fully_shard"
                    )
                for unit in units:
                    _refuse_part_of_unit(unit, optimizer, own_params)
                return prefix, module
        return None


class _Layout:
    """Makes empty tensors that are laid out over the ranks like the state of one parameter."""

    def __init__(self, like: torch.Tensor, optimizer: Optimizer, param: nn.Parameter, live: Any) -> None:
        self._like = like
        self._optimizer = optimizer
        self._param = param
        self._live = live
        self._stepped: dict[str, Any] | None = None
        self._handed_out: list[torch.Tensor] = []

    def make(self, path: Sequence[Any], entry: TensorStorageMetadata) -> torch.Tensor:
        """Return an empty tensor for the stored tensor at `path` of the parameter's state."""
        dtype = entry.properties.dtype
        if holds_wrapper(self._like) and entry.size:  # its moments may be plain
            return torch.empty_like(self._find_stepped(path), dtype=dtype)
        if entry.size and entry.size == self._like.size():
            return torch.empty_like(self._like, dtype=dtype, requires_grad=False)
        # Moments of a parameter without dimensions look like a counter. Only a step shows how a DTensor's are held.
        if not entry.size and (self._like.size() or not isinstance(self._like, DTensor)):
            return torch.empty((), dtype=dtype, device="cpu")  # a counter, which optimizers hold on the CPU
        if isinstance(self._like, DTensor):
            # Another shape. The planner reports it, after those of the model.
            return torch.empty_like(self._find_stepped(path), dtype=dtype)
        if type(self._like) not in (torch.Tensor, nn.Parameter):
            raise NotImplementedError
        return torch.empty(entry.size, dtype=dtype, device=self._like.device)

    def make_wrapper(self, path: Sequence[Any], entry: SavedWrapper) -> torch.Tensor:
        if not isinstance(self._like, DTensor):
            tensor: torch.Tensor = make_empty(entry)
            return tensor
        tensor = self._find_stepped(path)
        if any(tensor is handed_out for handed_out in self._handed_out):  # the saved list is longer than the held one
            return tensor.clone()  # torchao's low-bit states have no clone()
        self._handed_out.append(tensor)
        return tensor

    def _find_stepped(self, path: Sequence[Any]) -> torch.Tensor:
        stepped = _find_like(self._live, path)
        if stepped is None:
            try:
                stepped = _find_like(self._step(), path)
            except Exception as error:  # such as the closure that LBFGS asks for
                raise NotImplementedError from error
        if stepped is None:
            raise NotImplementedError
        return stepped

    def _step(self) -> dict[str, Any]:
        """Return the state that a copy of the optimizer makes for a copy of the parameter."""
        if self._stepped is None:
            shadow = object.__new__(type(self._optimizer))  # copy.copy would leave out attributes of a subclass
            shadow.__dict__.update(self._optimizer.__dict__)
            param = self._param.detach().clone().requires_grad_()
            param.grad = torch.zeros_like(param)
            live = next(group for group in shadow.param_groups if any(param is self._param for param in group[_PARAMS]))
            shadow.param_groups = [{**live, _PARAMS: [param]}]
            shadow.state = defaultdict(dict)
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                setattr(shadow, hooks, OrderedDict())
            type(shadow).step(shadow)  # a scheduler replaces the method of the instance
            self._stepped = dict(shadow.state[param])
        return self._stepped


def _find_like(state: Any, path: Sequence[Any]) -> torch.Tensor | None:
    """Return the tensor at `path`. If a list on the path is too short, or holds None there, take its last value."""
    for key in path:
        value = value_at(state, key)
        if value is None and isinstance(state, (list, tuple)):
            value = next((value for value in reversed(state) if value is not None), None)
        state = value
    return state if isinstance(state, torch.Tensor) else None


def _plan_state(saved: Any, live: Any, layout: _Layout, path: tuple[Any, ...] = ()) -> Any:
    """Return the values that a load fills for one parameter: the optimizer's own tensors where they fit."""
    if isinstance(saved, SavedWrapper):
        return live if isinstance(live, torch.Tensor) else layout.make_wrapper(path, saved)
    if isinstance(saved, Mapping):
        return {key: _plan_state(value, value_at(live, key), layout, (*path, key)) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        planned = [
            _plan_state(value, value_at(live, position), layout, (*path, position))
            for position, value in enumerate(saved)
        ]
        return planned if isinstance(saved, list) else rebuild_tuple(saved, planned)
    if not isinstance(saved, TensorStorageMetadata):
        return make_empty(saved)
    if isinstance(live, torch.Tensor) and live.size() == saved.size and live.dtype is saved.properties.dtype:
        return live
    return layout.make(path, saved)


def _load_state(optimizer: Optimizer, saved: dict[str, Any], *, where: str) -> None:
    """Load `saved` into the optimizer, with the values, dtypes and types that torch's method would change."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        load_object(optimizer, saved, where=where)
        return
    load_object(optimizer, {**saved, _STATE: _for_torch(saved[_STATE])}, where=where)
    params = _params_of(optimizer)
    for index, loaded in saved[_STATE].items():
        optimizer.state[params[index]] = _restore_devices(loaded, optimizer.state[params[index]])


def _for_torch(value: Any) -> Any:
    """Return `value` as a tree that ``Optimizer.load_state_dict`` can copy: it fails at named tuples and arrays."""
    if isinstance(value, dict):
        return {key: _for_torch(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_torch(element) for element in value]
    return None if isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, str)) else value


def _restore_devices(loaded: Any, cast: Any) -> Any:
    """Return `loaded` on the devices that ``Optimizer.load_state_dict`` has chosen.

    That method casts tensors at any depth to the parameter's dtype, and changes strings and deques.
    """
    if isinstance(loaded, torch.Tensor):
        return loaded.to(cast.device) if isinstance(cast, torch.Tensor) and cast.dtype is not loaded.dtype else cast
    if isinstance(loaded, dict) and isinstance(cast, dict):
        return {**cast, **{key: _restore_devices(value, cast[key]) for key, value in loaded.items() if key in cast}}
    if isinstance(loaded, (list, tuple)) and isinstance(cast, list) and len(cast) == len(loaded):
        values = [_restore_devices(*pair) for pair in zip(loaded, cast, strict=True)]
        return values if isinstance(loaded, list) else rebuild_tuple(loaded, values)
    return loaded if isinstance(loaded, Iterable) else cast


def _log_changed_settings(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Log the settings in which the loaded groups differ from the script's. Warn if Adam takes AdamW's decay."""
    changed = log_changed_settings(optimizer, optimizer.param_groups, groups)
    if "decoupled_weight_decay" in changed:
        _log.warning(
            "the state of Adam is loaded into AdamW, or the reverse: from now on, the weight decay of this %s is that "
            "of the optimizer that was saved. To keep its own, set decoupled_weight_decay in its param_groups after "
            "the load",
            type(optimizer).__name__,
        )


def _warn_of_equal_groups(
    live: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]], sources: Sequence[set[int]]
) -> None:
    """Warn of settings that differed between groups, and are equal now, because one group was saved in their place."""
    pairs = [
        (first, second)
        for first, second in itertools.combinations(range(len(live)), 2)
        if sources[first] and sources[first] == sources[second]
    ]
    lost: dict[str, set[int]] = {}
    for first, second in pairs:
        for key in live[first].keys() & live[second].keys() & loaded[first].keys() - _PARAMETER_KEYS - {"initial_lr"}:
            is_equal_now = _equal(loaded[first][key], loaded[second][key])
            if is_equal_now and not _equal(live[first][key], live[second][key]):
                lost.setdefault(key, set()).update({first, second})
    if lost:
        settings = "; ".join(f"{key!r} of groups {sorted(lost[key])}" for key in sorted(lost))
        _log.warning(
            "the optimizer was saved with one parameter group in place of several of its groups, and the load made "
            "settings equal in which they differed: %s. Set optimizer.param_groups[…][%r] after the load",
            settings,
            min(lost),
        )


def _refuse_part_of_unit(unit: FullyShardedDataParallel, optimizer: Optimizer, updated: Collection[int]) -> None:
    """Refuse an optimizer of some parameters of one FSDP module, whose state torch cannot take apart."""
    nested = [module for module in FullyShardedDataParallel.fsdp_modules(unit) if module is not unit]
    elsewhere = {id(param) for module in nested for param in module.parameters()}
    own = {name: param for name, param in unit.named_parameters() if param.requires_grad and id(param) not in elsewhere}
    left = [next(iter(fqns_of(unit, name))) for name, param in own.items() if id(param) not in updated]
    if left and len(left) < len(own):
        raise InvalidOptionError(
            f"the optimizer ({type(optimizer).__name__}) updates some parameters of one FSDP module and not "
            f"{quote_names(left)}, and torch cannot save their states apart. Wrap the parameters of each optimizer in "
            "modules of their own, use one optimizer with several groups, or use fully_shard"
        )


def _refuse_containers(optimizer: Optimizer) -> None:
    """Refuse tensors in lists and dicts of a flat parameter's state, which torch takes for values of all ranks."""
    keys = {name for state in optimizer.state.values() for name, value in state.items() if holds_tensors(value)}
    if keys:
        raise InvalidOptionError(
            f"the optimizer ({type(optimizer).__name__}) keeps tensors within {quote_names(sorted(map(str, keys)))}, "
            "which torch's first FSDP cannot take apart by parameters. Shard the model with fully_shard"
        )


def _params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group[_PARAMS]]


def _strip_compile_prefix(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _sharded_fsdp1(module: nn.Module) -> Any:
    return FullyShardedDataParallel.state_dict_type(
        module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    )


def _other_entries_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of an optimizer's state dict that a class or a hook of the user's adds."""
    return {key: value for key, value in state.items() if key not in {_STATE, _GROUPS}}


def _on_device_of(live: Any, saved: Any) -> Any:
    return saved.to(live.device) if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor) else saved


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(_equal(value, second[key]) for key, value in first.items())


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and torch.equal(first, second)
    return bool(first == second)
