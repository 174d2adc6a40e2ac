"""Convert a framework's nested state to a flat state dict and back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cloudckpt.errors import UnsafePickleError, UnsupportedValueError
from cloudckpt.format.plain_values import encode_plain
from cloudckpt.format.wrappers import is_wrapper
from cloudckpt.tensors.values import check_value, describe_refusal, load_stored

SKELETON = "skeleton"
"""Key of the serialized structure that holds everything except the tensors."""
_PLACEHOLDER = "cloudckpt.tensor"
_PICKLE_STARTS = (b"PK", b"\x80")
"""The first bytes of files of ``torch.save``. No JSON begins with them."""


def serialize(value: object) -> bytes:
    """Serialize any value as tagged JSON or with ``torch.save``, to store it as one value of a checkpoint."""
    encoded = encode_plain(value)
    if encoded is not None:
        return encoded
    check_value(value, "the framework's state", uri="a checkpoint")
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def deserialize(data: bytes, *, allow_pickle: bool = False, uri: str = "") -> Any:
    """Deserialize the result of `serialize`.

    Raises `UnsafePickleError` if that needs a class that could run code, unless `allow_pickle` is true.
    """
    is_json = not data.startswith(_PICKLE_STARTS)
    if allow_pickle and not is_json:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    try:
        return load_stored(data, is_json=is_json, map_location="cpu")
    except pickle.UnpicklingError:
        raise UnsafePickleError(
            f"the framework's state in {uri or 'this checkpoint'} was not loaded, because unpickling it could run any "
            f"code ({describe_refusal(data)}). If you trust its author, allow its classes with "
            "torch.serialization.add_safe_globals, or give weights_only=False if the framework accepts it, as "
            "Lightning's fit does",
            uri=uri,
        ) from None


def to_state_dict(tree: Mapping[str, Any], *, uri: str) -> dict[str, Any]:
    """Return a flat state dict with the contents of `tree`: each tensor under its path, the rest in `SKELETON`.

    Raises `UnsupportedValueError` for a tensor that is sharded over ranks, and a dict that looks like a placeholder.
    """
    tensors: dict[str, Any] = {}

    def replace(path: str, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedValueError(f"{path} is a dict whose only key is {_PLACEHOLDER!r}. Rename the key", uri=uri)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_wrapper(tensor):
            raise UnsupportedValueError(
                f"{path} is a {type(tensor).__name__}, and one rank has only a part of it. Use a strategy that saves "
                "on all ranks",
                uri=uri,
            )
        name = path
        while name in tensors or name == SKELETON:  # two paths are equal if keys contain dots, or are 1 and "1"
            name += "_"
        tensors[name] = tensor.detach()
        return {_PLACEHOLDER: name}

    skeleton = _map_leaves(tree, "", lambda value: isinstance(value, torch.Tensor) or _is_placeholder(value), replace)
    return {**tensors, SKELETON: serialize(skeleton)}


def from_state_dict(
    flat: Mapping[str, Any],
    *,
    without: Callable[[str], object] | None = None,
    allow_pickle: bool = False,
    uri: str = "",
) -> Any:
    """Rebuild the argument of `to_state_dict`, except the top-level keys for which `without` is true."""
    skeleton = deserialize(flat[SKELETON], allow_pickle=allow_pickle, uri=uri)
    if without is not None:
        skeleton = {key: value for key, value in skeleton.items() if not without(key)}
    return _map_leaves(skeleton, "", _is_placeholder, lambda _, value: flat[value[_PLACEHOLDER]])


def _is_placeholder(value: Any) -> bool:
    return type(value) is dict and len(value) == 1 and _PLACEHOLDER in value


def _map_leaves(value: Any, path: str, is_wanted: Callable[[Any], bool], change: Callable[[str, Any], Any]) -> Any:
    if is_wanted(value):
        return change(path, value)
    if isinstance(value, dict):
        items = {key: _map_leaves(item, _join(path, key), is_wanted, change) for key, item in value.items()}
        if type(value) is dict:
            return items
        copied = value.copy()  # keeps the class, such as OrderedDict
        copied.update(items)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(item, _join(path, index), is_wanted, change) for index, item in enumerate(value))
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
