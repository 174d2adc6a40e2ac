"""A nested state dict made flat, under the names that torch's planners give, and nested again.

torch's own functions turn every key into text, and their load first rebuilds the state dict with None in place of empty
containers. Here keys keep their types, and nothing is rebuilt.

A path leads from the state dict to one of its entries. Its steps are the index of a list or tuple (an ``int``), a key
of a mapping that is a ``str``, or any other key of a mapping, in a tuple of its own: ``("state", (0,), "step")``.
"""

from __future__ import annotations

import logging
import math
import numbers
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from cloudckpt._messages import quote_names
from cloudckpt._torch_compat import ShardedTensor, flatten_sharded_tensors
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import StoredWrapper
from cloudckpt.format.plain_values import is_unicode
from cloudckpt.format.wrappers import Parts, take_apart

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
PART_ATTRIBUTES = frozenset({"global_shape", "global_offsets", "local_offsets", "local_sizes"})
"""The attributes of a tensor that holds parts of a larger one, since torch 2.14 (``CheckpointableTensor``)."""
PLANNER_HOOKS = frozenset({"__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"})
"""The methods by which an object gives torch's planners the items of a save and of a load."""
_ASKED = PART_ATTRIBUTES | PLANNER_HOOKS
LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
_MAX_INTEGER_KEY = 2**63 - 1

_log = logging.getLogger("cloudckpt")

Path = tuple[Any, ...]


def has_planner_hooks(tensor: Any) -> bool:
    """Return True if a plain tensor has hooks of torch's planners, by which torch may take it for parts of a tensor."""
    attributes = tensor.__dict__
    return bool(attributes) and not _ASKED.isdisjoint(attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatStateDict:
    """The entries in torch's order and under torch's names, and all that torch's ``flatten_state_dict`` omits."""

    entries: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    keyed: list[str] = field(default_factory=list)
    """The names of the entries under a key that is not a ``str``."""
    containers: dict[str, Path] = field(default_factory=dict)
    """The mappings and lists on the way, by the names under which torch before 2.4 may have saved them whole."""
    empty: list[Path] = field(default_factory=list)
    """The paths of the mappings that hold nothing."""
    wrappers: dict[str, StoredWrapper] = field(default_factory=dict)
    """The tensors that consist of others, which are entries below these names."""
    compared: list[str] = field(default_factory=list)
    """The entries that several ranks must hold with the same bits."""
    tuples: dict[Path, str | None] = field(default_factory=dict)
    """The class of each named tuple, by its path; None for a tuple with entries. torch saves these as values."""
    takes_apart: bool = True
    """False if wrappers are entries themselves."""
    is_value: Callable[[str], bool] | None = None
    """Returns True if a checkpoint holds a tuple of this name as one value."""


class Nesting(dict[str, Path]):
    """The path of each entry, of text and indices as in torch's planners, and all that such a path leaves out."""

    typed: dict[str, Path]
    """The paths with keys that are not text, with these keys."""
    empty: list[Path]
    """See `FlatStateDict`."""
    wrappers: dict[str, StoredWrapper]
    """See `FlatStateDict`."""
    tuples: dict[Path, str | None]
    """See `FlatStateDict`."""
    fingerprints: object
    """Facts that a rank's planner sends to the coordinator's about the items of its plan (`cloudckpt.dcp.replicas`)."""
    placeholders: frozenset[str]
    """The names on one rank that may stand for a container of another's: None, empty lists and tuples, empty shards."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        *,
        typed: Mapping[str, Path],
        empty: Iterable[Path],
        wrappers: Mapping[str, StoredWrapper],
        tuples: Mapping[Path, str | None],
    ) -> None:
        super().__init__(paths)
        self.typed = dict(typed)
        self.empty = list(empty)
        self.wrappers = dict(wrappers)
        self.tuples = dict(tuples)
        self.fingerprints = None
        self.placeholders = frozenset()

    @classmethod
    def of(cls, flat: FlatStateDict, *, uri: str) -> Nesting:
        """Return the nesting to be saved. Raise `UnsupportedValueError` for a key that could not be restored."""
        typed = {name: _check_keys(flat.paths[name], uri) for name in flat.keyed}
        paths = {**flat.paths, **{name: _as_text(path) for name, path in typed.items()}} if typed else flat.paths
        empty = [_check_keys(path, uri) for path in flat.empty]
        tuples = {_check_keys(path, uri): kind for path, kind in flat.tuples.items()}
        check_names((step for path in (*empty, *tuples) for step in path if isinstance(step, str)), uri=uri)
        nesting = cls(paths, typed=typed, empty=empty, wrappers=flat.wrappers, tuples=tuples)
        # A wrapper without parts and without an entry is an empty shard, whose parts other ranks have.
        nesting.placeholders = frozenset(
            name
            for name in flat.paths
            if (_may_stand_for_container(flat.entries[name]) if name in flat.entries else name not in flat.wrappers)
        )
        return nesting

    @classmethod
    def merge(cls, nestings: Sequence[Nesting]) -> Nesting:
        """Return the nesting of all ranks; if two differ, the first one is kept, as in torch."""
        return cls(
            {**nestings[0], **ChainMap(*nestings)},  # in its order: that of a ChainMap begins with the last
            typed=ChainMap(*(nesting.typed for nesting in nestings)),
            empty=dict.fromkeys(path for nesting in nestings for path in nesting.empty),
            wrappers=ChainMap(*(nesting.wrappers for nesting in nestings)),
            tuples=ChainMap(*(nesting.tuples for nesting in nestings)),
        )


def flatten(
    state_dict: Mapping[Any, Any],
    *,
    uri: str,
    takes_apart: bool = True,
    is_value: Callable[[str], bool] | None = None,
) -> FlatStateDict:
    """Flatten `state_dict` as torch's planners do: ``flatten_state_dict``, then ``flatten_sharded_tensors`` of each.

    Named tuples, and tuples that hold a named tuple or a tensor, are taken apart as if they were lists. Raises
    `UnsupportedValueError` if two entries would have one name.
    """
    flat = FlatStateDict(takes_apart=takes_apart, is_value=is_value)
    try:
        _add_all(flat, state_dict, "", (), is_keyed=False, uri=uri)
    except RecursionError:
        path: Path = next(reversed(flat.containers.values()), ())  # the innermost one
        raise UnsupportedValueError(
            f"{name_path(path[:2]) or 'the state dict'!r} or a part of it holds itself, or is nested too deeply to be "
            "saved. Leave it out of the state dict",
            uri=uri,
        ) from None
    return flat


def _add_all(
    flat: FlatStateDict,
    container: Mapping[Any, Any] | Sequence[Any],
    prefix: str,
    path: Path,
    *,
    is_keyed: bool,
    uri: str,
) -> None:
    if not isinstance(container, Mapping):
        for index, value in enumerate(container):
            _add(flat, f"{prefix}{index}", (*path, index), value, is_keyed=is_keyed, uri=uri)
        return
    for key, value in container.items():
        if (
            type(key) is str
            and type(value) in PLAIN_TENSORS
            and not is_keyed
            and (name := prefix + key) not in flat.paths
        ):
            flat.entries[name], flat.paths[name] = value, (*path, key)  # nearly all; calls take as long again
        elif type(key) is str:
            _add(flat, prefix + key, (*path, key), value, is_keyed=is_keyed, uri=uri)
        else:  # its text, and not its format: those of an enumeration may differ
            _add(flat, prefix + str(key), (*path, (key,)), value, is_keyed=True, uri=uri)


def _add(flat: FlatStateDict, name: str, path: Path, value: Any, *, is_keyed: bool, uri: str) -> None:
    kind = type(value)
    if kind in PLAIN_TENSORS or kind in LEAVES:
        flat.entries[name] = value
    elif isinstance(value, tuple):
        if _is_nested_tuple(value) and not (flat.is_value is not None and flat.is_value(name) and _is_plain(value)):
            flat.tuples[path] = None if kind is tuple else _name_class(kind, path, uri)
            _add_all(flat, value, name + ".", path, is_keyed=is_keyed, uri=uri)
            return
        flat.entries[name] = value
    elif isinstance(value, Mapping):
        flat.containers[name] = path
        if not value:
            flat.empty.append(path)
        _add_all(flat, value, name + ".", path, is_keyed=is_keyed, uri=uri)
        return
    elif isinstance(value, list):
        flat.containers[name] = path
        if _holds_entries(value):
            _add_all(flat, value, name + ".", path, is_keyed=is_keyed, uri=uri)
            return
        flat.entries[name] = value
    elif isinstance(value, ShardedTensor):
        flat.entries.update(flatten_sharded_tensors({name: value}))  # nothing, where this rank has no shard
    elif (
        flat.takes_apart and isinstance(value, torch.Tensor) and (parts := take_apart(value, name, uri=uri)) is not None
    ):
        _add_parts(flat, parts, name, path, is_keyed=is_keyed, uri=uri)
    else:
        flat.entries[name] = value
    _add_path(flat, name, path, is_keyed=is_keyed, uri=uri)


def _add_parts(flat: FlatStateDict, parts: Parts, name: str, path: Path, *, is_keyed: bool, uri: str) -> None:
    if parts.stored is not None:
        flat.wrappers[name] = parts.stored
        flat.compared.extend(f"{name}.{part}" for part in parts.compared)
    _add_all(flat, parts.tensors, f"{name}.", path, is_keyed=is_keyed, uri=uri)


def _add_path(flat: FlatStateDict, name: str, path: Path, *, is_keyed: bool, uri: str) -> None:
    if name in flat.paths:
        raise UnsupportedValueError(
            f"two entries of the state dict would be called {name!r}: {_format_path(flat.paths[name])} and "
            f"{_format_path(path)}. Rename one of them",
            uri=uri,
        )
    flat.paths[name] = path
    if is_keyed:
        flat.keyed.append(name)


def _holds_entries(values: list[Any]) -> bool:
    """Return True if torch looks into the list: a tensor or a mapping is in it, or in a list in it."""
    return not LEAVES.issuperset(map(type, values)) and any(
        isinstance(value, (torch.Tensor, Mapping))
        or (isinstance(value, list) and _holds_entries(value))
        or (isinstance(value, tuple) and _is_nested_tuple(value))
        for value in values
    )


def holds_tensors(value: object) -> bool:
    """Return True if there is a tensor in a mapping, list or tuple, at any depth."""
    return _holds(value, lambda part: isinstance(part, torch.Tensor))


def _holds(value: object, is_found: Callable[[object], bool]) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return not LEAVES.issuperset(map(type, parts)) and any(is_found(part) or _holds(part, is_found) for part in parts)


def _is_nested_tuple(value: tuple[Any, ...]) -> bool:
    """Return True if the entries of a tuple are saved apart: it is named, or holds a named tuple or tensors."""
    if type(value) is tuple:
        return _holds(value, lambda part: isinstance(part, torch.Tensor) or _is_named(part))
    return _is_named(value)


def _is_named(value: object) -> bool:
    """Return True if `value` is a named tuple with nothing but its entries, of which there are some."""
    is_named = isinstance(value, tuple) and hasattr(value, "_fields") and not getattr(value, "__dict__", None)
    return is_named and bool(value)


def _is_plain(value: object) -> bool:
    """Return True if a value can hold all tensors in a tuple."""
    if isinstance(value, torch.Tensor):
        return type(value) in PLAIN_TENSORS and not has_planner_hooks(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return all(map(_is_plain, parts))


def _name_class(kind: type, path: Path, uri: str) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _find_class(name) is not kind:
        raise UnsupportedValueError(
            f"cannot save {_format_path(path)} to {uri}: its class {name} is not found under this name, so a load "
            "could not make it. Define the named tuple in a module, or save a tuple or a dict",
            uri=uri,
        )
    return name


def _find_class(name: str) -> type[tuple[Any, ...]] | None:
    """Return the class of named tuples of this name, if the process has imported it: a load imports nothing."""
    parts = name.split(".")
    for num_parts in range(len(parts) - 1, 0, -1):
        member: Any = sys.modules.get(".".join(parts[:num_parts]))
        for part in parts[num_parts:]:
            member = getattr(member, "__dict__", {}).get(part)
        if isinstance(member, type) and issubclass(member, tuple) and hasattr(member, "_fields"):
            return member
    return None


def _may_stand_for_container(value: object) -> bool:
    return value is None or (type(value) in (list, tuple) and not value)


def rebuild_tuple(like: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple of the class of `like`, a tuple or named tuple, which holds `values`."""
    return tuple.__new__(type(like), values)  # the class's own code is not run


def assign(container: Any, path: Path, value: Any) -> Any:
    """Assign `value` to the entry of `container` at `path`. Returns `container`, or a new one if it is read-only.

    Raises ``TypeError`` for a class of containers that cannot be made.
    """
    key = _key(path[0])
    if path[1:]:
        held = container[key]
        value = assign(held, path[1:], value)
        if value is held:
            return container
    if isinstance(container, tuple):
        return rebuild_tuple(container, (*container[:key], value, *container[key + 1 :]))
    if isinstance(container, MappingProxyType):
        return MappingProxyType({**container, key: value})
    container[key] = value
    return container


def unflatten(
    entries: Mapping[str, Any],
    paths: Mapping[str, Path],
    empty: Iterable[Path] = (),
    tuples: Mapping[Path, str | None] | None = None,
) -> dict[Any, Any]:
    """Return the state dict that has `entries` at their `paths`, and empty mappings at the paths `empty`.

    A list at a path of `tuples` becomes a tuple, or a named tuple if this process has imported the class. An entry
    without a path has its name as its key. Positions of lists without an entry hold None. Keys of mappings are in the
    order of `paths`. Raises ``ValueError`` if the paths contradict each other.
    """
    root: dict[Any, Any] = {}
    names = dict.fromkeys([*(name for name in paths if name in entries), *entries])
    for name, value in ((name, entries[name]) for name in names):
        path = paths.get(name, (name,))
        container = _container_at(root, path)
        key = _key(path[-1])
        if _get(container, key) is not None:
            if _may_stand_for_container(value):
                continue  # from a rank whose container was empty
            raise ValueError(f"two entries have the path {_format_path(path)}")
        container[key] = value
    for path in empty:
        container = _container_at(root, path)
        if _get(container, _key(path[-1])) is None:
            container[_key(path[-1])] = {}
    unknown: set[str] = set()
    for path, kind in sorted((tuples or {}).items(), key=lambda pair: -len(pair[0])):  # from the inside
        _make_tuple(root, path, kind, unknown)
    if unknown:
        _log.warning("named tuples become tuples, since this process has not imported %s", quote_names(sorted(unknown)))
    return root


def _make_tuple(root: dict[Any, Any], path: Path, name: str | None, unknown: set[str]) -> None:
    """Replace the list at `path`, if there is one. Adds the class `name` to `unknown` if it does not fit."""
    container: Any = None
    held: Any = root
    for step in path:
        container, held = held, _step_into(held, step)
    if not isinstance(held, list):
        return
    kind: Any = tuple if name is None else _find_class(name)
    if name is not None and (kind is None or len(kind._fields) != len(held)):
        unknown.add(name)
        kind = tuple
    container[_key(path[-1])] = tuple.__new__(kind, held)


def _step_into(container: Any, step: Any) -> Any:
    if type(step) is int:
        return container[step] if isinstance(container, list) and step < len(container) else None
    return container.get(_key(step)) if isinstance(container, dict) else None


def _container_at(root: dict[Any, Any], path: Path) -> Any:
    """Return the container of the entry at `path`, with a place for it. Make the missing ones on the way."""
    container: Any = root
    for depth, step in enumerate(path):
        if not isinstance(container, list if type(step) is int else dict):
            kind = type(container).__name__
            place = _format_path(path[:depth])
            raise ValueError(f"{place} is a {kind} and something else at once")  # noqa: TRY004  # of data
        if isinstance(container, list):
            container.extend([None] * (step + 1 - len(container)))
        if depth + 1 == len(path):
            break
        key = _key(step)
        held = _get(container, key)
        made: Any = [] if type(path[depth + 1]) is int else {}
        if _may_stand_for_container(held) and type(held) is not type(made):
            container[key] = made
        container = container[key]
    return container


def name_path(path: Path) -> str:
    """Return the name that torch's planners give to the entry at `path`."""
    return ".".join(map(str, _as_text(path)))


def check_names(names: Iterable[str], *, uri: str) -> None:
    """Raise `UnsupportedValueError` for a name that no UTF-8 text can be."""
    names = list(names)
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        bad = next(name for name in names if not is_unicode(name))
        raise UnsupportedValueError(
            f"{bad!a:.200} holds a surrogate, which UTF-8 cannot store. Rename that entry of the state dict", uri=uri
        ) from None


def path_to_json(path: Path) -> list[Any]:
    """Return the path as the manifest's ``typed_nesting`` has it: a key that is no text is in a list of its own."""
    return [_to_lists(step) for step in path]


def path_from_json(path: Iterable[Any]) -> Path:
    """Reverse `path_to_json`."""
    return tuple(_to_tuples(step) for step in path)


def _to_lists(step: Any) -> Any:
    return [_to_lists(element) for element in step] if isinstance(step, tuple) else step


def _to_tuples(step: Any) -> Any:
    return tuple(_to_tuples(element) for element in step) if isinstance(step, list) else step


def _as_text(path: Path) -> Path:
    return tuple(str(step[0]) if isinstance(step, tuple) else step for step in path)


def _check_keys(path: Path, uri: str) -> Path:
    """Return `path` with keys of Python's own types, each equal to the key in the state dict."""
    return tuple((_plain_key(step[0], path, uri),) if isinstance(step, tuple) else step for step in path)


def _plain_key(key: Any, path: Path, uri: str) -> Any:
    if isinstance(key, tuple) and not any(isinstance(element, tuple) for element in key):
        return tuple(_plain_key(element, path, uri) for element in key)
    if key is None or isinstance(key, bool):
        return key
    if isinstance(key, str) and is_unicode(key):
        return str.__str__(key)
    if isinstance(key, numbers.Integral) and -_MAX_INTEGER_KEY - 1 <= int(key) <= _MAX_INTEGER_KEY:
        return int(key)
    if isinstance(key, float) and math.isfinite(key):
        return float(key)
    raise UnsupportedValueError(
        f"{name_path(path[:-1]) or 'the state dict'} has the key {key!r:.100} of class {type(key).__name__}, which a "
        f"load could not restore. Keys can be str, int (of 64 bits), float (finite), "
        "bool, None, or a tuple of these",
        uri=uri,
    )


def _get(container: Any, key: Any) -> Any:
    return container[key] if isinstance(container, list) else container.get(key)


def _key(step: Any) -> Any:
    return step[0] if isinstance(step, tuple) else step


def _format_path(path: Path) -> str:
    return "".join(f"[{_key(step)!r:.100}]" for step in path) or "the state dict"
