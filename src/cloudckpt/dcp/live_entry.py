"""Entries of a state dict that are saved from live objects and loaded into them.

A load plans these entries from what the checkpoint holds, not from what the objects hold already. A fresh optimizer has
no state, so its own state dict would ask for none, and the moments in the checkpoint would be left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from cloudckpt.dcp.replicas import SynchronizedNames
from cloudckpt.errors import (
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    InvalidOptionError,
    StateDictMismatchError,
    quote_names,
)
from cloudckpt.format.nesting import Nesting, rebuild_tuple, unflatten
from cloudckpt.format.wrappers import Registry, SavedWrapper, collapse

IMPORT_HINT = (
    "Check that it is the same model. If it was imported without a prefix, load it with "
    "cloudckpt.load(model.state_dict(), uri), or import again with add_prefix='model' (--add-prefix model)"
)


_NOTHING_DONE = "Nothing was saved or loaded"

NO_PLACE: Any = object()
"""Returned by `make_empty` for what it cannot make."""


@dataclasses.dataclass
class _PartsOfRanks(TensorStorageMetadata):
    """torch's metadata of a tensor of which ranks hold parts. Only a tensor in its place tells which part is whose."""


class LiveEntry:
    """One entry of a state dict that is saved from a live object, and loaded into it.

    Not an ``abc.ABC``: each entry of a state dict is asked whether it is one, which would take ten times as long.
    """

    takes_flat_names = False
    """True if a checkpoint may hold the entry as ``"model.weight"``, as imports do, in the place of a dict."""

    is_synchronized = False
    """True if training keeps the tensors equal on all ranks that hold them."""

    def state_dict(self) -> Any:
        """Return what a save stores."""
        raise NotImplementedError

    def state_at(self, where: str) -> Any:
        """Return what a save stores at the path `where`. An error in a user's code is raised with the path."""
        with _naming(self, f"state_dict() of {where!r}", _NOTHING_DONE, where=where):
            return self.state_dict()

    def find_unsynchronized(self, where: str) -> list[str]:
        """Return the names below `where` that may differ between ranks, of an entry that `is_synchronized`."""
        return []

    def plan_load(self, saved: Any, *, where: str, uri: str) -> Any:
        """Return what a load fills, for the entry that is stored at the path `where` of the checkpoint at `uri`.

        `saved` is nested as the entry was saved, with torch's metadata in the place of tensors and values. Raises
        `StateDictMismatchError` if the object does not fit it.
        """
        raise NotImplementedError

    def load_state_dict(self, state: Any, *, where: str) -> None:
        """Give the object what a load has filled for the path `where`."""
        raise NotImplementedError

    def find_unused(self, where: str) -> list[str]:
        """Return the paths in the checkpoint that the object has no use for, such as moments of frozen parameters."""
        return []


class OptionalEntry(LiveEntry):
    """An entry that may be absent from a checkpoint."""


def plan_live_entries(entries: dict[str, Any], metadata: Metadata, *, uri: str, num_ranks: int) -> list[str]:
    """Replace each `LiveEntry` in `entries` by what the load of a checkpoint with this `metadata` fills.

    Returns the paths that the objects have no use for.
    """
    live = {key: entry for key, entry in entries.items() if isinstance(entry, LiveEntry)}
    if not live:
        return []
    saved = nest_metadata(metadata, num_ranks=num_ranks)
    for key, entry in live.items():
        entries[key] = _plan(entry, saved, key, where=key, uri=uri)
    return [path for key, entry in live.items() for path in entry.find_unused(key)]


def nest_metadata(metadata: Metadata, *, num_ranks: int) -> dict[Any, Any]:
    """Return torch's metadata of each entry, nested as the state dict was that was saved, for a load of `num_ranks`."""
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    if num_ranks > 1:
        saved = {
            name: _PartsOfRanks(**vars(one)) if isinstance(one, TensorStorageMetadata) and len(one.chunks) > 1 else one
            for name, one in saved.items()
        }
    nesting = {} if metadata.planner_data is None else metadata.planner_data
    if not isinstance(nesting, Nesting):
        return unflatten(saved, nesting)
    uri = str(metadata.storage_meta.checkpoint_id) if metadata.storage_meta is not None else ""
    make = functools.partial(SavedWrapper, Registry(uri=uri))
    entries, paths = collapse(nesting.wrappers, saved, {**nesting, **nesting.typed}, make)
    return unflatten(entries, paths, nesting.empty, nesting.tuples)


def _plan(entry: LiveEntry, saved: Mapping[Any, Any], key: str, *, where: str, uri: str) -> Any:
    found = saved.get(key)
    if key not in saved and entry.takes_flat_names:
        found = {name.removeprefix(f"{key}."): one for name, one in saved.items() if str(name).startswith(f"{key}.")}
    if key not in saved and not found and not isinstance(entry, OptionalEntry):
        hint = IMPORT_HINT if entry.takes_flat_names else "Leave it out of this load, or load it as a state dict"
        raise StateDictMismatchError(f"{uri} has no {where!r}, only {quote_names(list(saved))}. {hint}", uri=uri)
    return entry.plan_load(found, where=where, uri=uri)


def find_synchronized(state_dict: Mapping[str, Any]) -> SynchronizedNames:
    """Return the names of the entries whose tensors must not differ between ranks."""
    entries = {
        key: value for key, value in state_dict.items() if isinstance(value, LiveEntry) and value.is_synchronized
    }
    exceptions = (name for key, entry in entries.items() for name in entry.find_unsynchronized(key))
    return SynchronizedNames(keys=frozenset(entries), exceptions=frozenset(exceptions))


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

    def plan_load(self, saved: Any, *, where: str, uri: str) -> dict[str, Any]:
        known = saved if isinstance(saved, Mapping) else {}
        return {key: _plan(entry, known, key, where=f"{where}.{key}", uri=uri) for key, entry in self._entries.items()}

    def find_unsynchronized(self, where: str) -> list[str]:
        return [name for key, entry in self._entries.items() for name in entry.find_unsynchronized(f"{where}.{key}")]

    def find_unused(self, where: str) -> list[str]:
        return [path for key, entry in self._entries.items() for path in entry.find_unused(f"{where}.{key}")]

    def load_state_dict(self, state: Any, *, where: str) -> None:
        for key, entry in self._entries.items():
            entry.load_state_dict(state[key], where=f"{where}.{key}")


def get_model_state(module: nn.Module) -> dict[str, Any]:
    """Return the tensors and values of `module` by name. A module without any, such as a loss, has none."""
    return get_model_state_dict(module, options=StateDictOptions(strict=False))  # strict only refuses an empty one


def kind_of(value: Any) -> str:
    """Describe the class of `value` for a message, or the class that it is."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def refuse_class(held: Any, *, where: str) -> None:
    """Raise `InvalidOptionError` for a class in the place of an object."""
    if isinstance(held, type):
        raise InvalidOptionError(f"{where!r} is {kind_of(held)}, so it has no state. Pass an object of that class")


@contextlib.contextmanager
def _naming(held: Any, subject: str, consequence: str, *, where: str) -> Iterator[None]:
    """Raise an error in the code of `held`, which is a user's, with its path."""
    refuse_class(held, where=where)
    try:
        yield
    except Exception as error:
        # A restore takes an older step for a step that is absent or damaged. An object's own error is no sign of these.
        is_sign = isinstance(error, (CheckpointNotFoundError, CorruptCheckpointError))
        if isinstance(error, CloudckptError) and not is_sign:
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise CloudckptError(
            f"{subject} raised {type(error).__name__}: {error} ({place.filename}:{place.lineno}). {consequence}"
        ) from error


def ask_state(held: Any, *, where: str) -> Any:
    """Return ``held.state_dict()``. An error in a user's code is raised with the path of the object."""
    if isinstance(held, LiveEntry):
        return held.state_at(where)
    with _naming(held, f"state_dict() of {where!r}", _NOTHING_DONE, where=where):
        return held.state_dict()


def load_object(target: Any, state: Any, *, where: str) -> None:
    """Call ``target.load_state_dict(state)``. An error in a user's code is raised with the path of the object."""
    with _naming(
        target,
        f"load_state_dict of {where!r} ({type(target).__name__})",
        "All bytes were read. The objects hold a part of what was loaded, so load again before you continue training",
        where=where,
    ):
        target.load_state_dict(state)


def make_empty(saved: Any, like: Any = None, *, is_whole: bool = False) -> Any:
    """Return what a load fills with the saved structure: CPU tensors, and None in the place of each value.

    A tensor that is a DTensor in the same place of `like` is laid out over the ranks as that. Without one, nobody knows
    which part of a tensor of several ranks belongs to a rank: a dict lacks it, and a list or tuple with it anywhere is
    `NO_PLACE`; so is a dict if `is_whole`.
    """
    if isinstance(saved, (SavedWrapper, TensorStorageMetadata)):
        return _make_empty_tensor(saved, like)
    if isinstance(saved, Mapping):
        by_key = {key: make_empty(value, part_of(like, key), is_whole=is_whole) for key, value in saved.items()}
        placed = {key: value for key, value in by_key.items() if value is not NO_PLACE}
        return NO_PLACE if is_whole and len(placed) < len(by_key) else placed
    if isinstance(saved, (list, tuple)):
        made = [make_empty(value, part_of(like, position), is_whole=True) for position, value in enumerate(saved)]
        if any(one is NO_PLACE for one in made):
            return NO_PLACE
        return made if isinstance(saved, list) else rebuild_tuple(saved, made)
    return None


def _make_empty_tensor(saved: SavedWrapper | TensorStorageMetadata, like: Any) -> Any:
    size = torch.Size(saved.stored.shape) if isinstance(saved, SavedWrapper) else saved.size
    is_laid_out = isinstance(like, DTensor) and like.size() == size
    if not is_laid_out and has_parts_of_ranks(saved):
        return NO_PLACE
    if isinstance(saved, SavedWrapper):  # its class may be unable to make an empty one
        return like if is_laid_out else saved.rebuild(lambda _, entry: make_empty(entry))
    dtype = saved.properties.dtype
    if is_laid_out:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype, device="cpu")


def has_parts_of_ranks(saved: Any) -> bool:
    """Return whether ranks hold parts of a tensor in the saved structure."""
    return any(isinstance(one, _PartsOfRanks) for one in tensors_in(saved))


def tensors_in(saved: Any) -> Iterator[TensorStorageMetadata]:
    """Give torch's metadata of the tensors in a nested state dict of metadata."""
    if isinstance(saved, TensorStorageMetadata):
        yield saved
    elif isinstance(saved, SavedWrapper):
        yield from tensors_in(saved.parts)
    elif isinstance(saved, (Mapping, list, tuple)):
        for one in saved.values() if isinstance(saved, Mapping) else saved:
            yield from tensors_in(one)


def part_of(held: Any, key: Any) -> Any:
    """Return the value at `key` of a mapping, list or tuple; None if there is none."""
    if isinstance(held, Mapping):
        return held.get(key)
    is_within = isinstance(held, (list, tuple)) and type(key) is int and 0 <= key < len(held)
    return held[key] if is_within else None
