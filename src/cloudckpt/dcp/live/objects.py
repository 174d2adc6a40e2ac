"""Live training objects as entries of a state dict: models, schedulers, random generators, values."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from cloudckpt._messages import did_you_mean, find_near, quote_names
from cloudckpt._torch_compat import ShardedTensor, fqns_of
from cloudckpt.dcp.live.entry import (
    MISSING,
    EntryGroup,
    LiveEntry,
    LoadSource,
    OptionalEntry,
    ask_state,
    get_model_state,
    has_shards_of_ranks,
    kind_of,
    load_object,
    log_changed_settings,
    make_empty,
    refuse_class,
    tensors_in,
)
from cloudckpt.dcp.live.loaders import LoaderEntry, RankEntry, refuse_shared_loaders
from cloudckpt.dcp.live.optimizers import Optimizers, wrap_optimizers
from cloudckpt.dcp.renaming import is_below
from cloudckpt.dcp.save_planner import is_stateful
from cloudckpt.errors import InvalidOptionError, StateDictMismatchError
from cloudckpt.tensors.tensor_bytes import writable

__all__ = ["LiveObjects", "Model", "Optimizers", "RandomState"]

Model: TypeAlias = nn.Module | Mapping[str, nn.Module]

_log = logging.getLogger("cloudckpt")

_TRAIN_LONGER = ". To train longer, see docs/recipes.md, 'Train longer than planned'"
_STATE_OF_ALL_SCHEDULERS = frozenset({"base_lrs", "last_epoch", "verbose"})


class ModelEntry(LiveEntry):
    """The parameters and persistent buffers of a model, by names without the names of wrappers (DDP, compile)."""

    takes_flat_names = is_synchronized = True

    def __init__(self, module: nn.Module, *, is_strict: bool = True, rank: int = 0) -> None:
        self._module = module
        self._is_strict = is_strict
        self._rank = rank
        self._tied: dict[str, str] = {}
        """The names that a load does not ask for, each with another name of the same parameter."""

    def state_dict(self) -> dict[str, Any]:
        return get_model_state(self._module)

    def find_unsynchronized(self, where: str) -> list[str]:
        names = []
        for path, module in self._module.named_modules(remove_duplicate=False):
            if buffers := [name for name, _ in module.named_buffers(recurse=False)]:
                buffer_path = f"{path}.{buffers[0]}" if path else buffers[0]
                for name in fqns_of(self._module, buffer_path):  # one call for a module: each takes 20 µs
                    prefix = name.removesuffix(buffers[0])
                    names += [f"{where}.{prefix}{buffer}" for buffer in buffers]
        return names

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> dict[str, Any]:
        wanted = self.state_dict()
        tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}
        meta = [name for name, value in tensors.items() if not isinstance(value, ShardedTensor) and value.is_meta]
        if meta:
            raise InvalidOptionError(
                f"the model has no memory for {quote_names(meta)}, which are on the meta device: call "
                "model.to_empty(device=…) before the load"
            )
        if not isinstance(saved, Mapping):
            raise StateDictMismatchError(
                f"{where!r} of {source.uri} is one tensor or value, and not the state of a model. If it has another "
                "name, pass rename",
                uri=source.uri,
            )
        found = {name: entry for name in wanted if (entry := _find_named(saved, name)) is not MISSING}
        if wanted and saved and not found:
            names = {f"{where}.{name}": value for name, value in wanted.items()}
            advice = source.advise_rename(names, where=where) or "Check that it is the same model"
            problem = source.renaming and source.renaming.explain_unasked(names.keys(), below=f"{where}.")
            problem = problem or (
                f"{where!r} of {source.uri} has only {quote_names(list(saved))}, and the model has other names: "
                f"{quote_names(list(wanted))}"
            )
            is_restore = source.whole_keys is None and source.is_strict  # else a part of a checkpoint may be wanted
            other_root = " If another run has saved it, use another root." if is_restore else ""
            raise StateDictMismatchError(f"{problem}.{other_root} {advice}", uri=source.uri)
        if len(found) < len(wanted):
            self._tied = _find_tied(self._module, found)
            wanted = {name: value for name, value in wanted.items() if name not in self._tied}
        if not self._is_strict:
            new = [name for name in wanted if name not in found]
            if source.renaming is not None:
                source.renaming.lacking += [f"{where}.{name}" for name in new]
            if self._rank == 0 and new:
                _log.warning(
                    "%s of %s lacks %s, which the model keeps as they are", where, source.uri, quote_names(new)
                )
            wanted = {name: value for name, value in wanted.items() if name in found}
        planned = {
            name: make_empty(found[name], value) if name in found and _is_replaced(name, value, found[name]) else value
            for name, value in wanted.items()
        }
        return {name: value for name, value in planned.items() if value is not MISSING}

    def load_state_dict(self, state: Any, *, where: str) -> None:
        if state:
            state = {**state, **{name: state[kept] for name, kept in self._tied.items()}}
            with writable([*self._module.parameters(), *self._module.buffers()]):
                set_model_state_dict(self._module, state, options=StateDictOptions(strict=self._is_strict))


def _find_tied(module: nn.Module, saved: Collection[str]) -> dict[str, str]:
    """Map each name of a parameter or buffer that `saved` lacks to another of its names that `saved` has."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for named in (module.named_parameters, module.named_buffers):
        for path, tensor in named(remove_duplicate=False):
            names[id(tensor)].append(path)
    tied = {}
    for paths in names.values():
        if len(paths) > 1:
            fqns = sorted({fqn for path in paths for fqn in fqns_of(module, path)})
            if names_there := [fqn for fqn in fqns if fqn in saved]:
                tied.update({fqn: names_there[0] for fqn in fqns if fqn not in saved})
    return tied


def _find_named(saved: Any, name: str) -> Any:
    """Return the entry that was saved under a dotted name, nested in any way; `MISSING` if there is none."""
    if not isinstance(saved, Mapping):
        return MISSING
    if name in saved:
        return saved[name]
    dots = [position for position, letter in enumerate(name) if letter == "."]
    inner = (_find_named(saved[name[:position]], name[position + 1 :]) for position in dots if name[:position] in saved)
    return next((value for value in inner if value is not MISSING), MISSING)


def _is_replaced(name: str, live: Any, saved: Any) -> bool:
    """Return True if `live` is not filled in place. A fresh module's extra state may have another shape."""
    is_extra = name.endswith("_extra_state")
    fits = not is_extra or (isinstance(saved, TensorStorageMetadata) and live.shape == saved.size)
    return not (isinstance(live, torch.Tensor) and fits)


class StatefulEntry(LiveEntry):
    """An object with ``state_dict`` and ``load_state_dict``, such as a scheduler. A load gives it its saved state."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._is_logged = False

    def state_dict(self) -> Any:
        return self._value.state_dict()

    def state_at(self, where: str) -> Any:
        refuse_class(self._value, where=where)
        return super().state_at(where)

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> Any:
        refuse_class(self._value, where=where)
        self._is_logged = source.is_logged
        if isinstance(saved, Mapping):
            self._refuse_group(saved, where=where, source=source)
            is_scheduler = isinstance(self._value, LRScheduler)
            if is_scheduler and type(self._value).load_state_dict.__module__ == LRScheduler.__module__:
                # A class with a method of its own may convert the state.
                self._refuse_other_scheduler(saved, where=where, source=source)
        # Only the object's own state says which tensors are DTensors. An object without floats is not asked for it,
        # because a data loader would begin to iterate.
        has_floats = any(tensor.properties.dtype.is_floating_point and tensor.size for tensor in tensors_in(saved))
        is_asked = has_floats or has_shards_of_ranks(saved)
        empty = make_empty(saved, ask_state(self, where=where) if is_asked else None)
        return {} if empty is MISSING else empty

    def load_state_dict(self, state: Any, *, where: str) -> None:
        live = [*_settings_in(self._value)]
        if isinstance(self._value, LRScheduler):
            state = _with_types_of(self._value.state_dict(), state)
        load_object(self._value, state, where=where)
        if self._is_logged:
            log_changed_settings(self._value, live, _settings_in(self._value), advice=_TRAIN_LONGER)

    def _refuse_group(self, saved: Mapping[Any, Any], *, where: str, source: LoadSource) -> None:
        """Raise `StateDictMismatchError` if `saved` are the states of several objects.

        A scheduler accepts unknown names, and would keep its own state. Any other structure is allowed, since an object
        may read its state under other names.
        """
        is_list = bool(saved) and saved.keys() == {str(position) for position in range(len(saved))}
        if not is_list and not isinstance(self._value, LRScheduler):
            return
        live = ask_state(self, where=where)
        if isinstance(live, Mapping) and live and saved.keys().isdisjoint(live):
            raise StateDictMismatchError(
                f"{where!r} of {source.uri} has {quote_names(list(map(str, saved)))}, which is no state of a "
                f"{type(self._value).__name__}: a list or a dict of objects was saved. Pass the same to the load",
                uri=source.uri,
            )

    def _refuse_other_scheduler(self, saved: Mapping[Any, Any], *, where: str, source: LoadSource) -> None:
        """Refuse the state of another class of torch's schedulers, whose method takes any names.

        The settings of one class are never disjoint, also between versions of torch. If some are the same, a warning
        names the settings of the class that were not saved, and saved ones that only other classes of torch have.
        """
        own = inspect.signature(type(self._value)).parameters
        live = ask_state(self, where=where)
        in_live, in_saved = ({key for key in state if _is_setting(key)} for state in (live, saved))
        lacking = sorted(key for key in in_live - in_saved if key in own)
        unknown = sorted(in_saved - in_live - own.keys() & _settings_of_schedulers())
        name = type(self._value).__name__
        if in_live and in_saved and in_live.isdisjoint(in_saved):
            raise StateDictMismatchError(
                f"{where!r} of {source.uri} was saved with {quote_names(sorted(in_saved))}, and {name} has "
                f"{quote_names(sorted(in_live))} instead. Pass a scheduler of the class that was saved, or leave it "
                "out and pass strict=False",
                uri=source.uri,
            )
        if (lacking or unknown) and source.is_logged:
            problems = [f"was saved without {quote_names(lacking)}"] * bool(lacking)
            problems += [f"has {quote_names(unknown)}, which {name} ignores"] * bool(unknown)
            advice = "If it was saved with another class, pass that class: this one does not continue its schedule"
            _log.warning("%s of %s %s. %s", where, source.uri, " and ".join(problems), advice)


def _is_setting(key: object) -> bool:
    return isinstance(key, str) and not key.startswith("_") and key not in _STATE_OF_ALL_SCHEDULERS


def _settings_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments that a scheduler keeps, and those of each scheduler in it; nothing for other objects."""
    if isinstance(value, LRScheduler):
        names = inspect.signature(type(value)).parameters.keys() - _STATE_OF_ALL_SCHEDULERS
        yield {name: vars(value)[name] for name in names & vars(value).keys()}
        for nested in getattr(value, "_schedulers", ()):
            yield from _settings_in(nested)


def _settings_of_schedulers() -> set[str]:
    classes = [value for value in vars(lr_scheduler).values() if isinstance(value, type)]
    return {name for cls in classes if issubclass(cls, LRScheduler) for name in inspect.signature(cls).parameters}


class ScalerEntry(StatefulEntry):
    """A GradScaler. A disabled one has an empty state, which an enabled one does not take."""

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> Any:
        if saved == {} and self._value.is_enabled():
            problem = f"{where!r} of {source.uri} is empty, as a disabled GradScaler saves it, and this one is enabled"
            if source.is_strict:
                advice = "Load without it, and add it afterwards; or pass strict=False to leave it as it is"
                raise StateDictMismatchError(f"{problem}. {advice}", uri=source.uri)
            if source.is_logged:
                _log.warning("%s: it stays as it is", problem)
        if saved and not self._value.is_enabled() and source.is_logged:
            _log.warning(
                "the load leaves %r of %s behind: this GradScaler is disabled. Later saves do not have its state",
                where,
                source.uri,
            )
        return super().plan_load(saved, where=where, source=source)

    def load_state_dict(self, state: Any, *, where: str) -> None:
        if state:
            super().load_state_dict(state, where=where)


class GeneratorEntry(StatefulEntry):
    """A random generator of torch, numpy or Python."""

    def state_dict(self) -> Any:
        if isinstance(self._value, np.random.Generator):
            return self._value.bit_generator.state
        return self._value.getstate() if isinstance(self._value, random.Random) else self._value.get_state()

    def load_state_dict(self, state: Any, *, where: str) -> None:
        if isinstance(self._value, np.random.Generator):
            self._value.bit_generator.state = state
        elif isinstance(self._value, random.Random):
            self._value.setstate(state)
        else:
            self._value.set_state(state)


class ValuesEntry(LiveEntry):
    """A dict of values and objects. A load fills it in place with all its saved entries.

    A value that the checkpoint lacks is an error: its name may be misspelt, and it would keep its first value.
    """

    holds_users_values = True

    def __init__(self, values: Any) -> None:
        if not isinstance(values, dict):
            raise InvalidOptionError(f"extra must be a dict, which a load fills in place, not {kind_of(values)}")
        self._values: dict[Any, Any] = values
        # In one order on all ranks: the methods of the objects may be collective.
        self._live = {
            key: entry for key in sorted(values, key=str) if (entry := _wrap_value(key, values[key])) is not None
        }

    def state_at(self, where: str) -> dict[Any, Any]:
        return {**self._values, **{key: entry.state_at(f"{where}.{key}") for key, entry in self._live.items()}}

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> Any:
        if lacking := self.find_lacking(saved, where=""):
            near = [name for name in lacking.values() if name]
            problem = f"{source.uri} has no {quote_names([*lacking])} under {where!r}{did_you_mean(*near)}"
            old_names = {} if source.renaming is None else source.renaming.old_names
            renamed = [new for new, old in old_names.items() if new != old]
            is_slip = any(is_below(new, f"{where}.{name}") for new in renamed for name in near)
            if is_slip:
                raise StateDictMismatchError(f"{problem}. Let rename give the names in {where}", uri=source.uri)
            if source.is_strict:
                advice = "Load without it, and add it afterwards; or pass strict=False to leave it as it is"
                raise StateDictMismatchError(f"{problem}. {advice}", uri=source.uri)
            if source.is_logged:
                _log.warning("%s: it stays as it is", problem)
        return self.plan_values(saved, where=where, source=source)

    def find_lacking(self, saved: Any, *, where: str) -> dict[str, str]:
        """Return the paths below `where` that the checkpoint lacks, each with a similar saved one, or ""."""
        by_key = saved if isinstance(saved, Mapping) else {}
        unasked = {str(key): key for key in by_key if key not in self._values}
        lacking: dict[str, str] = {}
        for key in self._values:
            entry = self._live.get(key)
            nested = entry if isinstance(entry, ValuesEntry) else None
            lacking_below = {} if nested is None else nested.find_lacking(by_key.get(key), where=f"{where}{key}.")
            if key in by_key:
                lacking |= lacking_below
            elif lacking_below or nested is None:  # an empty dict has no value that would be kept
                near = find_near(key, unasked)
                lacking[f"{where}{key}"] = f"{where}{near}" if near else ""
        return lacking

    def plan_values(self, saved: Any, *, where: str, source: LoadSource) -> dict[Any, Any]:
        """Return the values that a load fills, without a check that the checkpoint has all of them."""
        by_key = saved if isinstance(saved, Mapping) else {}
        planned = {key: self._plan_value(key, entry, where=where, source=source) for key, entry in by_key.items()}
        return {key: value for key, value in planned.items() if value is not MISSING}

    def load_state_dict(self, state: Any, *, where: str) -> None:
        for key, value in state.items():
            if key in self._live and (isinstance(value, dict) or not isinstance(self._live[key], ValuesEntry)):
                self._live[key].load_state_dict(value, where=f"{where}.{key}")
            else:
                self._values[key] = _with_types_of(self._values.get(key), value)

    def _plan_value(self, key: Any, saved: Any, *, where: str, source: LoadSource) -> Any:
        live, value = self._live.get(key), self._values.get(key)
        if isinstance(live, ValuesEntry):
            if isinstance(saved, Mapping):
                return live.plan_values(saved, where=f"{where}.{key}", source=source)
            if live.find_lacking({}, where=""):  # it keeps the values that the checkpoint lacks
                return MISSING
        elif live is not None:
            return live.plan_load(saved, where=f"{where}.{key}", source=source)
        return value if isinstance(value, torch.Tensor) else make_empty(saved, value)


def _wrap_value(key: Any, value: Any) -> LiveEntry | None:
    """Return the entry for a value of `extra` that has a state or values of its own; None for a plain value."""
    if isinstance(value, torch.optim.Optimizer):
        raise InvalidOptionError(f"extra[{key!r}] is an optimizer: pass it as optimizer=…, several in a dict")
    if isinstance(value, nn.Module):
        return ModelEntry(value)
    if isinstance(value, (list, tuple)) and value and all(map(wrap, value)):
        return EntryGroup(
            {str(position): entry for position, element in enumerate(value) if (entry := _wrap_value(key, element))}
        )
    return ValuesEntry(value) if type(value) is dict else wrap(value)


class RefusedEntry(OptionalEntry):
    """The entry of objects that cannot be saved. It raises the reason within the collective call, so on all ranks."""

    def __init__(self, reason: InvalidOptionError) -> None:
        self._reason = reason

    def state_dict(self) -> Any:
        raise self._reason

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> Any:  # nothing fits
        raise self._reason

    def load_state_dict(self, state: Any, *, where: str) -> None:
        raise self._reason


class RandomState(NamedTuple):
    """State of this process's random generators: of Python, numpy, torch, and the current GPU.

    It has no tensors, so that a save stores it as one value for each rank.
    """

    python: Any
    numpy: Any
    cpu: bytes
    devices: list[bytes]

    @classmethod
    def capture(cls) -> RandomState:
        """Return the current state of the generators, including the GPU's if this process uses one."""
        kind, keys, *rest = np.random.get_state()
        devices = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return cls(
            python=random.getstate(),
            numpy=(kind, tuple(np.asarray(keys).tolist()), *rest),
            cpu=torch.get_rng_state().numpy().tobytes(),
            devices=[state.numpy().tobytes() for state in devices],
        )

    def restore(self) -> None:
        """Set the generators to this state. States of several GPUs are set only if this process sees as many GPUs."""
        random.setstate(self.python)
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, np.asarray(keys).astype(np.uint32), *rest))
        torch.set_rng_state(_generator_state(self.cpu))
        devices = list(map(_generator_state, self.devices))
        if devices and torch.cuda.is_available():
            if len(devices) == 1:
                torch.cuda.set_rng_state(devices[0])
            elif len(devices) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(devices)


def _generator_state(saved: bytes | torch.Tensor) -> torch.Tensor:
    """Return the state that torch takes. Checkpoints before format 1.3 have tensors."""
    return saved if isinstance(saved, torch.Tensor) else torch.frombuffer(bytearray(saved), dtype=torch.uint8)


class RandomStateEntry(OptionalEntry):
    """The random generators of this rank's process. They keep their state if the checkpoint has none for this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._key = f"rank-{rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self._key: tuple(RandomState.capture())}

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> dict[str, Any]:
        by_rank = saved if isinstance(saved, Mapping) else {}
        if self._key not in by_rank:
            if all(f"rank-{rank}" in by_rank for rank in range(self._rank)):  # one rank warns for all
                has, whose = f"no {where}", ""
                if by_rank:
                    has, whose = (
                        f"the {where} of {len(by_rank)} rank{'s' * (len(by_rank) > 1)} alone",
                        " of all other ranks",
                    )
                _log.warning("%s has %s: the random generators%s stay as they are", source.uri, has, whose)
            return {}
        return {self._key: None}

    def load_state_dict(self, state: Any, *, where: str) -> None:
        if self._key in state:
            RandomState(*state[self._key]).restore()


def find_parameters(value: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of the modules in a state dict, and the state of its optimizers.

    Looks into objects with a state of their own, such as an object of the user that holds a model and its optimizer.
    """
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors_in(value.state)
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(find_parameters, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(find_parameters, value))
    elif isinstance(value, LiveEntry):
        yield from find_parameters(vars(value))
    elif is_stateful(value):
        attributes = getattr(value, "__dict__", {}).values()
        yield from find_parameters(
            [element for element in attributes if isinstance(element, (nn.Module, torch.optim.Optimizer))]
        )


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors_in(value)


def wrap(value: Any) -> LiveEntry | None:
    """Return the entry for an object with a state of its own; None for a plain value."""
    if isinstance(value, LiveEntry):
        return value
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        return GeneratorEntry(value)
    if not isinstance(value, torch.Tensor) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        entry = ScalerEntry(value) if isinstance(value, torch.amp.GradScaler) else StatefulEntry(value)
        return LoaderEntry(entry, value) if isinstance(value, (DataLoader, Sampler)) else entry
    return None


def wrap_all(value: Any, *, keyword: str) -> LiveEntry:
    """Return the entry for one object or for a dict or a sequence of them."""
    if isinstance(value, (list, tuple)):
        value = {str(position): element for position, element in enumerate(value)}
    if isinstance(value, Mapping):
        return EntryGroup({key: wrap_all(element, keyword=keyword) for key, element in value.items()})
    entry = wrap(value)
    if entry is None:
        hint = ""
        if isinstance(value, DataLoader):
            hint = ". Use torchdata's StatefulDataLoader"
        elif hasattr(value, "set_epoch"):
            hint = ". Save the epoch in extra={…}, and call set_epoch() after the load"
        raise InvalidOptionError(
            f"{keyword} is {kind_of(value)}, which has no state_dict() and load_state_dict(), so it cannot be "
            f"saved{hint}"
        )
    return entry


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
    def given(self) -> list[str]:
        """Names of the objects that are given, besides the random generators, which each process has."""
        names = ("model", "optimizer", "scheduler", "dataloader", "extra")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def are_given(self) -> bool:
        """True if any object is given."""
        return bool(self.given)

    def entries(self, *, rank: int, num_ranks: int, is_strict: bool) -> dict[str, Any]:
        """Return a state dict of the objects, each as a `LiveEntry`.

        Does not raise, since the other ranks wait: an object that cannot be saved is a `RefusedEntry`.
        """
        try:
            return dict(self._make_entries(rank, num_ranks, is_strict=is_strict))
        except InvalidOptionError as error:
            objects = {field.name.removeprefix("has_"): getattr(self, field.name) for field in fields(self)}
            # The ranks compare these names, which must be equal, before any rank's error is raised.
            return {
                name: RefusedEntry(error) for name, value in objects.items() if value is not None and value is not False
            }

    def _make_entries(self, rank: int, num_ranks: int, *, is_strict: bool) -> Iterator[tuple[str, LiveEntry]]:
        modules = {} if self.model is None else _named_modules(self.model)
        if self.model is not None:
            models = {
                key.removesuffix("."): ModelEntry(module, is_strict=is_strict, rank=rank)
                for key, module in modules.items()
            }
            yield "model", models[""] if isinstance(self.model, nn.Module) else EntryGroup(models)
        if self.optimizer is not None:
            yield "optimizer", wrap_optimizers(self.optimizer, modules, rank=rank)
        if self.scheduler is not None:
            yield "scheduler", wrap_all(self.scheduler, keyword="scheduler")
        if self.dataloader is not None:
            loaders = wrap_all(self.dataloader, keyword="dataloader")
            yield "dataloader", RankEntry(loaders, rank=rank, num_ranks=num_ranks)
        if self.extra is not None:
            refuse_shared_loaders(self.extra, num_ranks=num_ranks)
            yield "extra", ValuesEntry(self.extra)
        if self.has_random_state:
            yield "random_state", RandomStateEntry(rank)


def _with_types_of(live: Any, loaded: Any) -> Any:
    """Return `loaded` with the dict classes of the live value, such as the Counter of MultiStepLR."""
    if isinstance(loaded, list) and isinstance(live, list) and len(live) == len(loaded):
        return [_with_types_of(*pair) for pair in zip(live, loaded, strict=True)]
    if not isinstance(loaded, dict) or not isinstance(live, dict):
        return loaded
    values = {key: _with_types_of(live.get(key), value) for key, value in loaded.items()}
    if type(live) is dict:
        return values
    typed = copy.copy(live)
    typed.clear()
    typed.update(values)
    return typed


def _named_modules(model: Model) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    if not isinstance(model, Mapping) or not all(isinstance(module, nn.Module) for module in model.values()):
        is_state = isinstance(model, Mapping) and any(isinstance(value, torch.Tensor) for value in model.values())
        advice = ". Pass a state dict as state_dict, in place of model" if is_state else ""
        raise InvalidOptionError(f"model must be a torch.nn.Module or a dict of them, not {kind_of(model)}{advice}")
    modules = {f"{key}.": module for key, module in model.items()}
    if len(modules) < len(model):
        raise InvalidOptionError(f"two keys of model are the same text: {', '.join(map(repr, model))}. Rename one")
    return modules
