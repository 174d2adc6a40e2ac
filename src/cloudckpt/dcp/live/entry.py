"""Entries of a state dict that are saved from live objects and loaded into them.

A load plans these entries from the content of the checkpoint, not from the state of the objects. A fresh optimizer has
no state, so its own state dict would ask for none, and the load would leave the saved moments behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from cloudckpt._messages import join_first, quote_names
from cloudckpt.dcp.renaming import Renaming, advise_extra, is_below, offer_renames, suggest_renames
from cloudckpt.dcp.replicas import SynchronizedNames
from cloudckpt.errors import (
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    InvalidOptionError,
    StateDictMismatchError,
)
from cloudckpt.format.nesting import Nesting, flatten, rebuild_tuple, unflatten
from cloudckpt.format.wrappers import Registry, SavedWrapper, collapse

_log = logging.getLogger("cloudckpt")

_NOTHING_DONE = "Nothing was saved or loaded"

MISSING: Any = object()
"""Result of `make_empty` for a tensor that it cannot make, and for a container that would lack one."""


@dataclasses.dataclass
class _ShardedTensorMetadata(TensorStorageMetadata):
    """torch's metadata of a tensor of which several ranks hold shards. Only a live tensor shows the shard of a rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadSource:
    """The checkpoint from which live entries are loaded."""

    uri: str
    entries: Mapping[str, Any]
    """torch's metadata of all entries, by the names that the load sees."""
    renaming: Renaming | None = None
    """The names in the checkpoint, if the load renames them."""
    is_strict: bool = True
    """False if an object keeps its values that the checkpoint lacks."""
    keys: Collection[str] = ()
    """The top-level keys of the load."""
    whole_keys: Collection[str] | None = ()
    """Top-level keys below which the load must ask for all that was saved. None means all keys."""
    has_optimizer: bool = False
    """True if an optimizer is loaded, too."""
    is_logged: bool = False
    """True on the one rank that logs messages of all ranks."""

    def advise_rename(
        self, wanted: Mapping[str, Any], *others: str, found_names: Collection[str] = (), where: str
    ) -> str:
        """Return advice to pass a `rename` that finds the `wanted` entries beside those `found_names`; "" if none does.

        The advice has the names in the checkpoint, even if the load renames them. `others` are wanted optimizers.
        `where` is the path of the model or, with a dot at its end, of a dict with one model.
        """
        old_names = {} if self.renaming is None else self.renaming.old_names
        saved = {old_names.get(name, name): entry for name, entry in self.entries.items()}
        renamed = {old for new, old in old_names.items() if new != old}
        maps = suggest_renames(saved, wanted, renamed=renamed) or [{}]
        of_groups = {name[: name.index(".param_groups.")] for name in saved if ".param_groups." in name}
        optimizer = dict.fromkeys(of_groups, *others) if len(of_groups) == 1 == len(others) else {}
        kept_pairs = {} if self.renaming is None else self.renaming.pairs_to(found_names)
        kept = [*found_names] if self.renaming is None else [*kept_pairs]
        maps = [
            {
                old: new
                for old, new in {**renames, **optimizer}.items()
                if not any(is_below(old, other) for other in kept)
            }
            for renames in maps
        ]
        maps = [renames for position, renames in enumerate(maps) if renames and renames not in maps[:position]]
        if not maps:
            return ""
        (old, new), *others_too = maps[0].items()
        other_way = ""
        is_all = all(is_below(name, old) for name in saved if is_below(name, "model"))
        if not others_too and is_all and where == new == "model" == old.rpartition(".")[0]:
            other_way = f", or model={{{old.removeprefix('model.')!r}: …}}"
        elif where == "model." and old == "model" == new.rpartition(".")[0]:
            other_way = ", or the model alone, without a dict: model=…"
        if self.has_optimizer and not is_all and where == "model":
            # It has the state of all models, so that none of them may be renamed beside it.
            olds = [old for renames in maps for old, new in renames.items() if new == "model"]
            tops = [old.removeprefix("model.") for old in olds if old.rpartition(".")[0] == "model"]
            if tops:
                ways = " or ".join(f"model={{{top!r}: …}}, strict=False" for top in tops)
                return f"If it was saved beside others, pass {ways}"
        models = {name.partition(".")[0] for name in wanted}
        offers = offer_renames(
            [{**kept_pairs, **renames} for renames in maps],
            saved,
            wanted,
            whole_keys=self.whole_keys,
            keys=[*found_names, *(key for key in self.keys if key not in models)],
            partial="strict=False" if self.is_strict else "",
        )
        strict = ", strict=False" if other_way and "strict=False" in offers else ""
        when = f"The names in it begin with {old!r}: " if old == new else "If it was saved under another name, "
        return f"{when}{offers}{other_way}{strict}" if offers else ""


class LiveEntry:
    """One entry of a state dict that is saved from a live object, and loaded into it.

    Not an ``abc.ABC``: ``isinstance`` is called for each entry of a state dict, and would take ten times as long.
    """

    takes_flat_names = False
    """True if a checkpoint may hold names such as ``"model.weight"`` in place of a dict, as after an import."""

    is_synchronized = False
    """True if training keeps the tensors equal on all ranks that hold them."""
    holds_users_values = False
    """True for the user's own values. A save warns if they differ between ranks."""

    def state_dict(self) -> Any:
        """Return the state that a save stores."""
        raise NotImplementedError

    def state_at(self, where: str) -> Any:
        """Return the state that a save stores at the path `where`. An error in users' code is raised with the path."""
        with _naming(self, f"state_dict() of {where!r}", _NOTHING_DONE, where=where):
            return self.state_dict()

    def find_unsynchronized(self, where: str) -> list[str]:
        """Return the names below `where` that may differ between ranks although the entry `is_synchronized`."""
        return []

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> Any:
        """Return the values that a load fills, for the entry that is stored at the path `where` of the checkpoint.

        `saved` is nested as the entry was saved, with torch's metadata in the place of tensors and values. Raises
        `StateDictMismatchError` if the object does not fit it.
        """
        raise NotImplementedError

    def load_state_dict(self, state: Any, *, where: str) -> None:
        """Give the object the state that a load has filled for the path `where`."""
        raise NotImplementedError

    def find_unused(self, where: str) -> list[str]:
        """Return the paths in the checkpoint that the object does not use, such as moments of frozen parameters."""
        return []


class OptionalEntry(LiveEntry):
    """An entry that may be absent from a checkpoint."""


def plan_live_entries(entries: dict[str, Any], metadata: Metadata, *, source: LoadSource, num_ranks: int) -> list[str]:
    """Replace each `LiveEntry` in `entries` by the values that the load of a checkpoint with this `metadata` fills.

    Entries that keep their values are removed. Returns the paths that the objects do not use.
    """
    live = {key: entry for key, entry in entries.items() if isinstance(entry, LiveEntry)}
    if not live:
        return []
    try:
        saved = nest_metadata(metadata, num_ranks=num_ranks)
    except ValueError as error:
        raise _overlap_error(error, source) from None
    has_optimizer = any(entry.is_synchronized and not entry.takes_flat_names for entry in live.values())
    planned = _plan_all(live, saved, where="", source=dataclasses.replace(source, has_optimizer=has_optimizer))
    for key in live:
        entries.pop(key)
    entries.update(planned)
    return [path for key in planned for path in live[key].find_unused(key)]


def nest_metadata(metadata: Metadata, *, num_ranks: int) -> dict[Any, Any]:
    """Return torch's metadata of each entry, nested as the state dict was that was saved, for a load of `num_ranks`."""
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    if num_ranks > 1:
        saved = {
            name: _ShardedTensorMetadata(**vars(entry))
            if isinstance(entry, TensorStorageMetadata) and len(entry.chunks) > 1
            else entry
            for name, entry in saved.items()
        }
    nesting = {} if metadata.planner_data is None else metadata.planner_data
    if not isinstance(nesting, Nesting):
        return unflatten(saved, nesting)
    uri = str(metadata.storage_meta.checkpoint_id) if metadata.storage_meta is not None else ""
    make = functools.partial(SavedWrapper, Registry(uri=uri))
    entries, paths = collapse(nesting.wrappers, saved, {**nesting, **nesting.typed}, make)
    return unflatten(entries, paths, nesting.empty, nesting.tuples)


def _plan_all(
    entries: Mapping[str, LiveEntry], saved: Mapping[Any, Any], *, where: str, source: LoadSource
) -> dict[str, Any]:
    """Return the plan of each entry that the checkpoint has. Raises `StateDictMismatchError` if it lacks others."""
    saved_by_key = {}
    for key, entry in entries.items():
        if key in saved:
            saved_by_key[key] = saved[key]
        elif entry.takes_flat_names and any(str(name).startswith(f"{key}.") for name in saved):
            below = {name: saved_entry for name, saved_entry in saved.items() if str(name).startswith(f"{key}.")}
            saved_by_key[key] = {name.removeprefix(f"{key}."): saved_entry for name, saved_entry in below.items()}
        elif isinstance(entry, OptionalEntry):
            saved_by_key[key] = None
    if missing := [f"{where}{key}" for key in entries if key not in saved_by_key]:
        # strict=False loads the objects that fit in part. A load that finds nothing at all is a mistake.
        is_empty = not any(not isinstance(entries[key], OptionalEntry) for key in saved_by_key)
        has_no_model = not where and any(entries[key].takes_flat_names for key in missing)
        # On all ranks, since it calls state_dict(), which may be collective.
        renamed = _advise_rename(missing, saved_by_key, entries, saved, where=where, source=source)
        if source.is_strict or is_empty or has_no_model:
            has = quote_names([f"{where}{name}" for name in saved])
            advice = f"{renamed}. Otherwise leave" if renamed else "Leave"
            keep = ", or pass strict=False to leave it as it is" if source.is_strict else ""
            keys = [f"{where}{key}" for key in entries]
            problem = source.renaming and source.renaming.explain_unasked(
                {*keys, *(name for name in source.entries if any(is_below(name, key) for key in keys))}, below=where
            )
            lack = problem or f"{source.uri} has no {quote_names(missing)}, only {has}"
            text = f"{lack}. {advice} out of the load what it lacks{keep}"
            raise StateDictMismatchError(text, uri=source.uri)
        if source.renaming is not None:
            source.renaming.lacking += missing
        if source.is_logged:
            text = f"{quote_names(missing)}: these objects keep what they have{renamed and f'. {renamed}'}"
            _log.warning("%s has no %s", source.uri, text)
    return {
        key: entries[key].plan_load(saved_entry, where=f"{where}{key}", source=source)
        for key, saved_entry in saved_by_key.items()
    }


def _overlap_error(error: ValueError, source: LoadSource) -> Exception:
    """Return the error for an entry with other entries below its name; or `error`, if there is no such entry.

    A flat state dict may hold both. Most of them come from `rename`.
    """
    prefixes = (
        (name[:position], name) for name in source.entries for position, letter in enumerate(name) if letter == "."
    )
    pair = next((pair for pair in prefixes if pair[0] in source.entries), None)
    if pair is None:
        return error
    if source.renaming is None:
        text = f"{source.uri} has the entry {pair[0]!r}, and {pair[1]!r} below it. Load it with a flat state dict"
        return StateDictMismatchError(text, uri=source.uri)
    olds = [source.renaming.old_names[name] for name in pair]
    return InvalidOptionError(
        f"rename calls {olds[0]!r} of {source.uri} {pair[0]!r}, and {olds[1]!r} {pair[1]!r}, which is below it: one "
        "entry cannot hold another. Give them names apart"
    )


def _advise_rename(
    missing: list[str],
    found_names: Collection[str],
    entries: Mapping[str, LiveEntry],
    saved: Mapping[Any, Any],
    *,
    where: str,
    source: LoadSource,
) -> str:
    lacking = {name: entries[name.removeprefix(where)] for name in missing}
    states = {name: entry.state_at(name) for name, entry in lacking.items() if entry.takes_flat_names}
    optimizers = [name for name, entry in lacking.items() if name not in states and entry.is_synchronized]
    wanted = flatten(states, uri=source.uri).entries
    found_names = [f"{where}{key}" for key in found_names]
    where_of_one = where if len(entries) == 1 else ""
    renamed = source.advise_rename(wanted, *optimizers, found_names=found_names, where=where_of_one)
    others = [key for key in saved if key not in entries and not isinstance(saved[key], Mapping)]
    values = [key for key in others if "." not in str(key)]  # the others are a flat model's, which the map takes
    if missing == ["extra"] and not renamed:
        return advise_extra(values).removeprefix(". ")
    if renamed and values and not where and source.renaming is None:
        renamed += f". To take {quote_names(values)} into extra, add {values[0]!r}: 'extra.{values[0]}' to the map"
    return renamed


def find_synchronized(state_dict: Mapping[str, Any]) -> SynchronizedNames:
    """Return the names of the entries that must not differ between ranks, and of values of which a save warns."""
    entries = {
        key: value for key, value in state_dict.items() if isinstance(value, LiveEntry) and value.is_synchronized
    }
    exceptions = (name for key, entry in entries.items() for name in entry.find_unsynchronized(key))
    users = (key for key, value in state_dict.items() if isinstance(value, LiveEntry) and value.holds_users_values)
    return SynchronizedNames(keys=frozenset(entries), exceptions=frozenset(exceptions), users=frozenset(users))


class EntryGroup(LiveEntry):
    """Several entries under names, such as the schedulers of two optimizers."""

    def __init__(self, entries: Mapping[str, LiveEntry]) -> None:
        # In one order on all ranks: the methods of the objects may be collective.
        self._entries = {key: entries[key] for key in sorted(entries, key=str)}
        self.takes_flat_names = all(entry.takes_flat_names for entry in entries.values())
        self.is_synchronized = all(entry.is_synchronized for entry in entries.values())

    @property
    def names(self) -> Collection[str]:
        """The names of the entries."""
        return self._entries.keys()

    def state_at(self, where: str) -> dict[str, Any]:
        return {key: entry.state_at(f"{where}.{key}") for key, entry in self._entries.items()}

    def plan_load(self, saved: Any, *, where: str, source: LoadSource) -> dict[str, Any]:
        by_key = saved if isinstance(saved, Mapping) else {}
        return _plan_all(self._entries, by_key, where=f"{where}.", source=source)

    def find_unsynchronized(self, where: str) -> list[str]:
        return [name for key, entry in self._entries.items() for name in entry.find_unsynchronized(f"{where}.{key}")]

    def find_unused(self, where: str) -> list[str]:
        return [path for key, entry in self._entries.items() for path in entry.find_unused(f"{where}.{key}")]

    def load_state_dict(self, state: Any, *, where: str) -> None:
        for key in state:
            self._entries[key].load_state_dict(state[key], where=f"{where}.{key}")


def get_model_state(module: nn.Module) -> dict[str, Any]:
    """Return the tensors and values of `module` by name. A module without any, such as a loss, has none."""
    return get_model_state_dict(module, options=StateDictOptions(strict=False))  # strict only refuses an empty one


def kind_of(value: Any) -> str:
    """Return the words for `value` in a message: "a Linear"; or "the class Linear" if it is a class."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def refuse_class(value: Any, *, where: str) -> None:
    """Raise `InvalidOptionError` for a class in the place of an object."""
    if isinstance(value, type):
        raise InvalidOptionError(f"{where!r} is {kind_of(value)}, so it has no state. Pass an object of that class")


@contextlib.contextmanager
def _naming(value: Any, subject: str, consequence: str, *, where: str) -> Iterator[None]:
    """Add the object's path to an error of its own code, which may be the user's."""
    refuse_class(value, where=where)
    try:
        yield
    except Exception as error:
        # After these two, a restore takes an older step, because this one is absent or damaged. An object that raises
        # them itself must not cause that.
        is_about_step = isinstance(error, (CheckpointNotFoundError, CorruptCheckpointError))
        if isinstance(error, CloudckptError) and not is_about_step:
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise CloudckptError(
            f"{subject} raised {type(error).__name__}: {error} ({place.filename}:{place.lineno}). {consequence}"
        ) from error


def ask_state(value: Any, *, where: str) -> Any:
    """Return ``held.state_dict()``. An error in a user's code is raised with the path of the object."""
    if isinstance(value, LiveEntry):
        return value.state_at(where)
    with _naming(value, f"state_dict() of {where!r}", _NOTHING_DONE, where=where):
        return value.state_dict()


def load_object(target: Any, state: Any, *, where: str) -> None:
    """Call ``target.load_state_dict(state)``. An error in a user's code is raised with the path of the object."""
    with _naming(
        target,
        f"load_state_dict of {where!r} ({type(target).__name__})",
        "All bytes were read. The objects hold a part of what was loaded, so load again before you continue training",
        where=where,
    ):
        target.load_state_dict(state)


def log_changed_settings(
    target: Any, live: Iterable[Mapping[str, Any]], loaded: Iterable[Mapping[str, Any]], *, advice: str = ""
) -> Collection[str]:
    """Log the settings in which what is loaded differs from what the script has set. Return their names.

    With an `advice`, it is a warning: training does not change such settings, so the script has others than the save.
    """
    changes = {
        f"{key}: {before[key]!r} -> {after[key]!r}": key
        for before, after in zip(live, loaded, strict=True)
        for key in before.keys() & after.keys() - {"initial_lr"}
        if isinstance(before[key], (int, float)) and isinstance(after[key], (int, float)) and before[key] != after[key]
    }
    if changes:
        words = join_first(sorted(changes), 5, separator=", ")
        level = logging.WARNING if advice else logging.INFO
        _log.log(level, "the load changes settings of %s: %s%s", type(target).__name__, words, advice)
    return changes.values()


def make_empty(saved: Any, like: Any = None, *, is_whole: bool = False) -> Any:
    """Return values of the saved structure for a load to fill: CPU tensors, and None in the place of each value.

    A tensor is laid out over the ranks like the DTensor in the same place of `like`. Without one there, it is unknown
    which part of a sharded tensor belongs to which rank. A dict then lacks the tensor, and a list or tuple that has it
    at any depth is `MISSING`; so is the dict if `is_whole`.
    """
    if isinstance(saved, (SavedWrapper, TensorStorageMetadata)):
        return _make_empty_tensor(saved, like)
    if isinstance(saved, Mapping):
        by_key = {key: make_empty(value, value_at(like, key), is_whole=is_whole) for key, value in saved.items()}
        possible = {key: value for key, value in by_key.items() if value is not MISSING}
        return MISSING if is_whole and len(possible) < len(by_key) else possible
    if isinstance(saved, (list, tuple)):
        elements = [make_empty(value, value_at(like, position), is_whole=True) for position, value in enumerate(saved)]
        if any(element is MISSING for element in elements):
            return MISSING
        return elements if isinstance(saved, list) else rebuild_tuple(saved, elements)
    return None


def _make_empty_tensor(saved: SavedWrapper | TensorStorageMetadata, like: Any) -> Any:
    size = torch.Size(saved.stored.shape) if isinstance(saved, SavedWrapper) else saved.size
    is_laid_out = isinstance(like, DTensor) and like.size() == size
    if not is_laid_out and has_shards_of_ranks(saved):
        return MISSING
    if isinstance(saved, SavedWrapper):  # its class may be unable to make an empty one
        return like if is_laid_out else saved.rebuild(lambda _, entry: make_empty(entry))
    dtype = saved.properties.dtype
    if is_laid_out:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype, device="cpu")


def has_shards_of_ranks(saved: Any) -> bool:
    """Return True if several ranks hold shards of a tensor in the saved structure."""
    return any(isinstance(tensor, _ShardedTensorMetadata) for tensor in tensors_in(saved))


def tensors_in(saved: Any) -> Iterator[TensorStorageMetadata]:
    """Yield torch's metadata of the tensors in a nested state dict of metadata."""
    if isinstance(saved, TensorStorageMetadata):
        yield saved
    elif isinstance(saved, SavedWrapper):
        yield from tensors_in(saved.parts)
    elif isinstance(saved, (Mapping, list, tuple)):
        for value in saved.values() if isinstance(saved, Mapping) else saved:
            yield from tensors_in(value)


def value_at(container: Any, key: Any) -> Any:
    """Return the value at `key` of a mapping, list or tuple; None if there is none."""
    if isinstance(container, Mapping):
        return container.get(key)
    is_within = isinstance(container, (list, tuple)) and type(key) is int and 0 <= key < len(container)
    return container[key] if is_within else None
