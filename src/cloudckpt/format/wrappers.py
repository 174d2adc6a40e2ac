"""Tensors that consist of other tensors (``__tensor_flatten__``), taken apart and put together again.

Their parts are entries like any other tensor. See ``docs/design/028-wrapper-tensors.md``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from cloudckpt._torch_compat import AsyncCollectiveTensor, chunks_wanted_by, is_wrapper_subclass, local_tensor_of
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import StoredWrapper

_NOT_TAKEN_APART = (DTensor, AsyncCollectiveTensor)  # they have the methods, but are saved in other ways
_MAX_DIVISOR = 65
_PLAIN = frozenset({bool, int, str})
_SEQUENCES: dict[Any, str] = {list: "", tuple: "tuple", torch.Size: "size"}
_ENCODERS: dict[Any, Callable[[Any], Any]] = {
    float: lambda value: {"float": str(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _: {"device": None},  # that of the parts, which may be another at the load
}
_MAKERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "size": torch.Size, "dict": dict, "float": float}


class SavedWrapper(NamedTuple):
    """A stored wrapper, with torch's metadata in the place of its parts."""

    registry: Registry
    name: str
    stored: StoredWrapper
    parts: dict[str, Any]

    def rebuild(self, make: Callable[[str, Any], torch.Tensor]) -> torch.Tensor:
        """Return the wrapper of the parts that `make` returns for their names and entries."""
        parts = {
            part: entry.rebuild(make) if isinstance(entry, SavedWrapper) else make(f"{self.name}.{part}", entry)
            for part, entry in self.parts.items()
        }
        return self.registry.rebuild(self.name, self.stored, parts)


class Parts(NamedTuple):
    """A wrapper that was taken apart."""

    tensors: dict[str, torch.Tensor]
    stored: StoredWrapper | None
    """None on a rank that holds an empty shard."""
    compared: list[str]
    """The parts of a shard that other shards must have with the same bits."""


def is_wrapper(value: object) -> bool:
    """Return True if a tensor is taken apart into the tensors that it consists of."""
    if not isinstance(value, torch.Tensor) or isinstance(value, _NOT_TAKEN_APART):
        return False
    return is_wrapper_subclass(value) and not value.is_nested


def holds_wrapper(tensor: torch.Tensor) -> bool:
    """Return True if `take_apart` takes a tensor apart."""
    return is_wrapper(local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor)


def take_apart(value: torch.Tensor, name: str, *, uri: str) -> Parts | None:
    """Take a wrapper apart, or a DTensor whose local tensor is one. The parts share its memory. None for other tensors.

    Raises `UnsupportedValueError` if its class or its metadata cannot be stored.
    """
    local = local_tensor_of(value) if isinstance(value, DTensor) else value
    if not is_wrapper(local):
        return None
    try:
        with torch.no_grad():
            tensors, context = flatten_wrapper(local)
            compared: list[str] = []
            if isinstance(value, DTensor):
                if not local.numel() and value.numel():
                    return Parts({}, None, [])  # the other ranks have it
                tensors, context, compared = _spread_shard(value, local, tensors, context)
            stored = StoredWrapper(
                kind=full_name_of(type(local)),
                tensors=list(tensors),
                context=context,
                shape=tuple(value.shape),
                stride=tuple(value.stride()),
            )
    except Exception as error:  # the code of a class can raise anything
        raise UnsupportedValueError(
            f"cannot save {name!r:.200} to {uri}: it is a {type(local).__name__}, which cannot be taken apart "
            f"({type(error).__name__}: {error}). Convert it to a plain tensor (dequantize()), or save its parts under "
            "names of their own",
            uri=uri,
        ) from error
    return Parts(tensors, stored, compared)


def collapse(
    wrappers: Mapping[str, StoredWrapper],
    entries: Mapping[str, Any],
    paths: Mapping[str, tuple[Any, ...]],
    make: Callable[[str, StoredWrapper, dict[str, Any]], Any],
) -> tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]:
    """Return `entries` and their `paths` with a wrapper in place of its parts, if `entries` has all of its parts."""
    if not wrappers:
        return entries, paths
    entries, paths = dict(entries), dict(paths)
    order = {name: position for position, name in enumerate(entries)}
    for name in sorted(wrappers, key=len, reverse=True):  # a wrapper in another has the longer name
        stored = wrappers[name]
        names = {part: f"{name}.{part}" for part in stored.tensors}
        if names and name not in entries and all(name_of_part in entries for name_of_part in names.values()):
            first = names[stored.tensors[0]]
            entries[name] = make(
                name, stored, {part: entries.pop(name_of_part) for part, name_of_part in names.items()}
            )
            order[name], paths[name] = order[first], paths.get(first, (name, ""))[:-1] or (name,)
    return {name: entries[name] for name in sorted(entries, key=order.__getitem__)}, paths


def describe_difference(saved: StoredWrapper, wanted: StoredWrapper) -> str | None:
    """Return the difference that keeps a wrapper from taking the parts of a stored one; None if it can take them."""
    for aspect, saved_value, wanted_value in (
        ("class", saved.kind, wanted.kind),
        ("shape", list(saved.shape), list(wanted.shape)),
        ("parts", saved.tensors, wanted.tensors),
    ):
        if saved_value != wanted_value:
            return f"{aspect} {saved_value}, not {wanted_value}"
    return None if saved.context == wanted.context else _find_difference(saved.context, wanted.context, "metadata")


def _find_difference(saved: Any, wanted: Any, where: str) -> str:
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(saved, dict) and isinstance(wanted, dict) and saved.keys() == wanted.keys():
        pairs = [(f".{key}" if len(saved) > 1 else "", saved[key], wanted[key]) for key in saved]
    elif isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        name = f".{saved[0]}" if len(saved) == 2 and isinstance(saved[0], str) else ""  # noqa: PLR2004  # a key and its value
        pairs = [(name, *pair) for pair in zip(saved, wanted, strict=True)]
    for name, saved_part, wanted_part in pairs:
        if saved_part != wanted_part and isinstance(saved_part, (dict, list)) and isinstance(wanted_part, (dict, list)):
            return _find_difference(saved_part, wanted_part, where + name)
    return f"{where} {saved!r:.200}, not {wanted!r:.200}"


def _spread_shard(
    whole: DTensor, local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any
) -> tuple[dict[str, torch.Tensor], Any, list[str]]:
    """Return the parts of a shard as DTensors, the metadata of the whole, and the parts that are equal in all shards.

    Slicing the shard once more, as its class does, shows how a shard relates to the whole.
    """
    dims_of: dict[str, dict[int, int | None]] = {part: {} for part in parts}
    following: dict[tuple[Any, ...], int] = {}
    for dim in {dim for placement in whole.placements if (dim := _shard_dim(placement)) is not None}:
        moved, places = _slice_again(local, parts, context, dim)
        following |= dict.fromkeys(places, whole.shape[dim])
        for part, part_dim in moved.items():
            dims_of[part][dim] = part_dim
    for place, length in following.items():
        container = context
        for step in place[:-1]:
            container = container[step]
        container[place[-1]] = length
    spread: dict[str, torch.Tensor] = {
        part: _spread(whole, local, tensor, dims_of[part]) for part, tensor in parts.items()
    }
    return spread, context, [part for part in parts if None in dims_of[part].values()]


def _slice_again(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any, dim: int
) -> tuple[dict[str, int | None], list[tuple[Any, ...]]]:
    """Return the dimension of each part that a slice in `dim` cuts, or None, and the changed places of `context`."""
    extent = local.shape[dim]
    for length in dict.fromkeys([*filter(None, (extent // divisor for divisor in range(2, _MAX_DIVISOR))), 0]):
        try:
            first, first_context = flatten_wrapper(local.narrow(dim, 0, length))
            moved = {part: _cut_dim(parts[part].shape, first[part].shape, extent, length) for part in parts}
            places = list(_find_following(context, first_context, (dim, extent, length), ()))
        except Exception:  # noqa: BLE001, S112  # classes slice at blocks, if they slice at all, and raise anything
            continue
        if length or not places:  # without rows, blocks of one row and of all rows look alike
            return moved, places
    raise ValueError(
        f"its shard of shape {list(local.shape)} cannot be sliced in dimension {dim}, which would tell how its parts "
        "are sharded"
    )


def _cut_dim(whole: torch.Size, first: torch.Size, extent: int, length: int) -> int | None:
    cut = [dim for dim in range(len(whole)) if whole[dim] != first[dim]]
    if not cut:
        return None
    (dim,) = cut
    if whole[dim] * length != first[dim] * extent:
        raise ValueError("it is not cut in proportion")
    return dim


def _find_following(
    whole: Any, first: Any, cut: tuple[int, int, int], place: tuple[Any, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yield the places of metadata that hold the length of a shard. `cut` is its dimension, and the two lengths."""
    if whole == first or (isinstance(whole, dict) and "dtype" in whole):  # slices of some classes lose the dtype
        return
    if isinstance(whole, list) and isinstance(first, list) and len(whole) == len(first):
        for position, pair in enumerate(zip(whole, first, strict=True)):
            if (position, *pair) == cut:
                yield (*place, position)
            else:
                yield from _find_following(*pair, cut, (*place, position))
    elif isinstance(whole, dict) and isinstance(first, dict) and whole.keys() == first.keys():
        for key in whole:
            yield from _find_following(whole[key], first[key], cut, (*place, key))
    else:
        raise ValueError("its metadata differs in another way")


def _spread(whole: DTensor, local: torch.Tensor, part: torch.Tensor, dims: Mapping[int, int | None]) -> DTensor:
    """Return the DTensor whose shard on this rank is `part`. A key of `dims` is cut in `local`, its value in `part`."""
    placements: list[Any] = []
    shape = list(part.shape)
    for placement in whole.placements:
        dim = _shard_dim(placement)
        to = None if dim is None else dims[dim]
        placements.append(Replicate() if to is None else _with_dim(placement, to))
    cuts = [(dim, to) for dim, to in dims.items() if to is not None]
    for dim, to in cuts:
        shape[to] = part.shape[to] * whole.shape[dim] // local.shape[dim]
    spec: Any = whole._spec  # noqa: SLF001  # no public function makes a DTensor without a copy
    stride = torch.empty(shape, device="meta").stride()
    meta = spec.tensor_meta._replace(shape=torch.Size(shape), stride=stride, dtype=part.dtype)
    make: Any = DTensor
    spread: DTensor = make(part, type(spec)(spec.mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
    (held,), (wanted,) = chunks_wanted_by(whole) or [None], chunks_wanted_by(spread) or [None]
    if held is None or wanted is None:
        return spread
    is_in_place = all(wanted.offsets[to] * local.shape[dim] == held.offsets[dim] * part.shape[to] for dim, to in cuts)
    if wanted.sizes != part.shape or not is_in_place:
        raise ValueError(f"its part of shape {list(part.shape)} is not sharded where the whole is")
    return spread


def _shard_dim(placement: Any) -> int | None:
    """Return the dimension that a placement shards, or None. Raises ``ValueError`` for a partial sum."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
        return int(placement.dim)
    raise ValueError(f"its placement is {placement}")


def _with_dim(placement: Any, dim: int) -> Any:
    split = getattr(placement, "split_factor", None)
    return type(placement)(dim) if split is None else type(placement)(dim, split_factor=split)


def encode_context(value: Any, where: str) -> Any:
    """Return `value` as JSON. A value that JSON lacks becomes an object of one member, whose name is its type.

    Raises ``TypeError`` for a value that cannot be encoded.
    """
    kind: Any = type(value)
    if kind is str:
        value.encode()  # raises for a surrogate, which the manifest cannot hold
    if value is None or kind in _PLAIN or (kind is float and math.isfinite(value)):
        return value
    encoded: Any
    if kind in _ENCODERS:
        encoded = _ENCODERS[kind](value)
    elif kind in _SEQUENCES:
        items = [encode_context(element, f"{where}[{position}]") for position, element in enumerate(value)]
        encoded = {_SEQUENCES[kind]: items} if _SEQUENCES[kind] else items
    elif kind is dict:
        encoded = {
            "dict": [
                [encode_context(key, where), encode_context(element, f"{where}[{key!r:.50}]")]
                for key, element in value.items()
            ]
        }
    elif isinstance(value, enum.Enum):
        encoded = {"enum": [full_name_of(kind), value.name]}
    elif _has_fields(kind):
        names = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind) if field.init]
        fields = {name: encode_context(getattr(value, name), f"{where}.{name}") for name in names}
        encoded = {"fields": [full_name_of(kind), fields]}
    elif callable(value):  # a class or a function
        encoded = {"name": full_name_of(value)}
    else:
        raise TypeError(f"{where} holds a {full_name_of(kind)}, which the manifest cannot hold")
    return encoded


def _has_fields(kind: Any) -> bool:
    """Return True if `kind` is a class that can be rebuilt from its fields: a dataclass or a named tuple."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def list_safe_globals() -> dict[str, Any]:
    """Return the objects that this process has allowed with ``torch.serialization.add_safe_globals``, by name."""
    pairs = (
        allowed if isinstance(allowed, tuple) else (allowed, f"{allowed.__module__}.{allowed.__qualname__}")
        for allowed in torch.serialization.get_safe_globals()
    )
    return {name: allowed for allowed, name in pairs}


def put_together(
    kind: type[Any],
    parts: Mapping[str, torch.Tensor],
    context: Any,
    shape: Iterable[int],
    stride: Iterable[int],
    *,
    name: str,
    uri: str = "",
) -> torch.Tensor:
    """Return the wrapper of `parts`, which it holds. Raises `UnsupportedValueError` if its class does not take them."""
    size = torch.Size(shape)
    try:
        made: torch.Tensor = kind.__tensor_unflatten__(parts, context, size, tuple(stride))
        if made.shape == size:
            return made
        cause = f"it has shape {tuple(made.shape)}, not {tuple(size)}"
    except Exception as error:  # noqa: BLE001  # the code of a class can raise anything
        cause = f"{type(error).__name__}: {error}"
    raise UnsupportedValueError(
        f"{name!r}{uri and f' of {uri}'} is a {full_name_of(kind)}, which cannot be made of its parts "
        f"{', '.join(parts)} ({cause}). Load it with the version of its library that saved it, or read its parts alone",
        uri=uri,
    )


class Registry:
    """The classes, by name, that a checkpoint may ask for: those of ``torch.serialization.add_safe_globals``.

    Nothing is imported. A library that this process has imported, such as torchao, has added its own.
    """

    def __init__(self, *, uri: str) -> None:
        self._uri = uri
        self._allowed = list_safe_globals()
        self._device: torch.device | None = None

    def rebuild(self, name: str, stored: StoredWrapper, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the wrapper called `name`, of `parts`. Raises what `find` raises."""
        self._device = next(iter(parts.values())).device
        kind, context = self.find(name, stored)
        return put_together(kind, parts, context, stored.shape, stored.stride, name=name, uri=self._uri)

    def find(self, name: str, stored: StoredWrapper) -> tuple[type[Any], Any]:
        """Return the class and the metadata of a wrapper. Raises `UnsupportedValueError` if one of them is unknown."""
        try:
            kind, context = self._find(stored.kind), self._decode(stored.context)
        except Exception as error:  # noqa: BLE001  # another program may have written it, and a class raise anything
            problem = error.args[0] if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
        else:
            if isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__"):
                return kind, context
            problem = f"{stored.kind} is no tensor class with __tensor_unflatten__"
        raise UnsupportedValueError(
            f"{name!r} of {self._uri} was saved as a {stored.kind}, which is not made here: {problem}. Import the "
            "library that defines it, or allow it with torch.serialization.add_safe_globals([…]). Its parts can be "
            f"read by themselves: include={name + '.' + stored.tensors[0]!r}",
            uri=self._uri,
        ) from None

    def _find(self, name: str) -> Any:
        if name not in self._allowed:
            raise LookupError(f"this process does not allow {name}")
        return self._allowed[name]

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(element) for element in value]
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        decoded: Any = None
        if tag in _MAKERS:
            decoded = _MAKERS[tag](self._decode(content))
        elif tag == "device":
            decoded = self._device
        elif tag == "dtype" and isinstance(dtype := vars(torch).get(content), torch.dtype):
            decoded = dtype
        elif tag == "name":
            decoded = self._find(content)
        elif tag == "enum" and isinstance(kind := self._find(content[0]), enum.EnumMeta):
            decoded = kind[content[1]]
        elif tag == "fields" and _has_fields(kind := self._find(content[0])):
            decoded = kind(**{key: self._decode(element) for key, element in content[1].items()})
        else:
            raise LookupError(f"its metadata has {tag} {content!r:.100}, which is not known here")
        return decoded


def flatten_wrapper(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the parts of a tensor, and the rest of it as JSON. Raises ``TypeError`` and ``ValueError``."""
    names, context = tensor.__tensor_flatten__()
    if not names or not all(isinstance(name, str) and name and "." not in name for name in names):
        raise ValueError(f"__tensor_flatten__ names its parts {names!r:.100}")
    parts = {name: getattr(tensor, name) for name in names}
    if not all(isinstance(part, torch.Tensor) for part in parts.values()):
        raise TypeError(f"not all of its parts {names!r:.100} are tensors")
    return parts, encode_context(context, "its metadata")


def full_name_of(value: Any) -> str:
    """Return the name by which the classes of this process are found. Raises ``TypeError`` if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or name.endswith("<lambda>"):
        raise TypeError(f"its metadata holds {value!r:.100}, which the manifest cannot hold")
    return f"{module}.{name}"
