"""The metadata of tensors that consist of others, as JSON, and the classes that may be made of it."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import StoredWrapper

_PLAIN = frozenset({bool, int, str})
_SEQUENCES: dict[Any, str] = {list: "", tuple: "tuple", torch.Size: "size"}
_ENCODERS: dict[Any, Callable[[Any], Any]] = {
    float: lambda value: {"float": str(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _: {"device": None},  # that of the parts, which may be another at the load
}
_MAKERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "size": torch.Size, "dict": dict, "float": float}


def encode(value: Any, where: str) -> Any:
    """Return `value` as JSON. All that JSON does not have is an object of one member, whose name says what it is.

    Raises ``TypeError`` for what cannot be encoded.
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
        items = [encode(one, f"{where}[{position}]") for position, one in enumerate(value)]
        encoded = {_SEQUENCES[kind]: items} if _SEQUENCES[kind] else items
    elif kind is dict:
        encoded = {"dict": [[encode(key, where), encode(one, f"{where}[{key!r:.50}]")] for key, one in value.items()]}
    elif isinstance(value, enum.Enum):
        encoded = {"enum": [name_of(kind), value.name]}
    elif _has_fields(kind):
        names = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind) if field.init]
        fields = {name: encode(getattr(value, name), f"{where}.{name}") for name in names}
        encoded = {"fields": [name_of(kind), fields]}
    elif callable(value):  # a class or a function
        encoded = {"name": name_of(value)}
    else:
        raise TypeError(f"{where} holds a {name_of(kind)}, which the manifest cannot hold")
    return encoded


def _has_fields(kind: Any) -> bool:
    """Return whether `kind` is a class that can be made anew of its fields: a dataclass or a named tuple."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def allowed_by_user() -> dict[str, Any]:
    """Return by name the objects that this process has allowed with ``torch.serialization.add_safe_globals``."""
    pairs = (
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        for each in torch.serialization.get_safe_globals()
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
        f"{name!r}{uri and f' of {uri}'} is a {name_of(kind)}, which cannot be made of its parts {', '.join(parts)} "
        f"({cause}). Load it with the version of its library that saved it, or read its parts alone",
        uri=uri,
    )


class Registry:
    """The classes, by name, that a checkpoint may ask for: those of ``torch.serialization.add_safe_globals``.

    Nothing is imported. A library that this process has imported, such as torchao, has added its own.
    """

    def __init__(self, *, uri: str) -> None:
        self._uri = uri
        self._allowed = allowed_by_user()
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
            found = error.args[0] if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
        else:
            if isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__"):
                return kind, context
            found = f"{stored.kind} is no tensor class with __tensor_unflatten__"
        raise UnsupportedValueError(
            f"{name!r} of {self._uri} was saved as a {stored.kind}, which is not made here: {found}. Import the "
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
            return [self._decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        made: Any = None
        if tag in _MAKERS:
            made = _MAKERS[tag](self._decode(content))
        elif tag == "device":
            made = self._device
        elif tag == "dtype" and isinstance(dtype := vars(torch).get(content), torch.dtype):
            made = dtype
        elif tag == "name":
            made = self._find(content)
        elif tag == "enum" and isinstance(kind := self._find(content[0]), enum.EnumMeta):
            made = kind[content[1]]
        elif tag == "fields" and _has_fields(kind := self._find(content[0])):
            made = kind(**{key: self._decode(one) for key, one in content[1].items()})
        else:
            raise LookupError(f"its metadata has {tag} {content!r:.100}, which is not known here")
        return made


def flatten_wrapper(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the parts of a tensor, and the rest of it as JSON. Raises ``TypeError`` and ``ValueError``."""
    names, context = tensor.__tensor_flatten__()
    if not names or not all(isinstance(name, str) and name and "." not in name for name in names):
        raise ValueError(f"__tensor_flatten__ names its parts {names!r:.100}")
    parts = {name: getattr(tensor, name) for name in names}
    if not all(isinstance(part, torch.Tensor) for part in parts.values()):
        raise TypeError(f"not all of its parts {names!r:.100} are tensors")
    return parts, encode(context, "its metadata")


def name_of(value: Any) -> str:
    """Return the name by which the classes of this process are found. Raises ``TypeError`` if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or name.endswith("<lambda>"):
        raise TypeError(f"its metadata holds {value!r:.100}, which the manifest cannot hold")
    return f"{module}.{name}"
