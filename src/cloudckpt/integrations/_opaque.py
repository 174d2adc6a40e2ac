"""State of any shape, for which there is nothing to load into: tensors apart, and the rest as one value."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cloudckpt._stage.unpickling import load_safely
from cloudckpt._stage.values import check_value
from cloudckpt.errors import UnsafePickleError, UnsupportedValueError

SKELETON = "skeleton"
"""Under which the rest lies, beside the tensors."""
_PLACE = "cloudckpt.tensor"


def packed(value: object) -> bytes:
    """`value` as ``torch.save`` writes it: one value of a checkpoint, whatever is in it."""
    check_value(value, "the framework's state", uri="a checkpoint")
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, *, allow_pickle: bool = False, uri: str = "") -> Any:
    """The reverse of `packed`. Raises `UnsafePickleError` where it takes the code of a class, unless `allow_pickle`."""
    if allow_pickle:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    try:
        return load_safely(data, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(
            f"the framework's state of {uri or 'this checkpoint'} was not loaded: unpickling it could run any code "
            f"({error}). If you trust who wrote it, allow its classes with "
            "torch.serialization.add_safe_globals, or give weights_only=False where the framework takes it, as "
            "Lightning's fit does",
            uri=uri,
        ) from None


def taken_apart(tree: Mapping[str, Any], *, uri: str) -> dict[str, Any]:
    """A flat state dict of the same contents: each tensor under the path to it, and all else in `SKELETON`.

    Raises `UnsupportedValueError` for a tensor that is spread over ranks.
    """
    tensors: dict[str, Any] = {}

    def place(path: str, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedValueError(
                f"{path} is a {type(tensor).__name__}, of which one rank alone has only a part: save it from all "
                "ranks, with a strategy that does",
                uri=uri,
            )
        name = path
        while name in tensors or name == SKELETON:  # keys with dots, or 1 beside "1"
            name += "_"
        tensors[name] = tensor.detach()
        return {_PLACE: name}

    skeleton = _mapped(tree, "", lambda value: isinstance(value, torch.Tensor), place)
    return {**tensors, SKELETON: packed(skeleton)}


def put_together(
    flat: Mapping[str, Any],
    *,
    without: Callable[[str], object] | None = None,
    allow_pickle: bool = False,
    uri: str = "",
) -> Any:
    """The reverse of `taken_apart`; `without` those keys at the top for which it is true, and their tensors."""
    skeleton = unpacked(flat[SKELETON], allow_pickle=allow_pickle, uri=uri)
    if without is not None:
        skeleton = {key: value for key, value in skeleton.items() if not without(key)}
    return _mapped(
        skeleton,
        "",
        lambda value: type(value) is dict and len(value) == 1 and _PLACE in value,
        lambda _, value: flat[value[_PLACE]],
    )


def _mapped(value: Any, path: str, is_wanted: Callable[[Any], bool], change: Callable[[str, Any], Any]) -> Any:
    if is_wanted(value):
        return change(path, value)
    if isinstance(value, dict):
        items = {key: _mapped(each, _join(path, key), is_wanted, change) for key, each in value.items()}
        if type(value) is dict:
            return items
        copied = value.copy()  # an OrderedDict or the like stays one
        copied.update(items)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, _join(path, index), is_wanted, change) for index, each in enumerate(value))
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Of this process's generators: Python's, numpy's, torch's, and those of its accelerator."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor]

    @classmethod
    def now(cls) -> RandomState:
        """As they are."""
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002  # the one that programs use
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        numpy = (kind, torch.tensor(np.asarray(keys).astype(np.int64)), *rest)
        return cls(python=random.getstate(), numpy=numpy, cpu=torch.get_rng_state(), devices=devices)

    def restore(self) -> None:
        """Make them so again; of devices, where there are as many."""
        random.setstate(self.python)
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if torch.cuda.is_available() and torch.cuda.device_count() == len(self.devices):
            torch.cuda.set_rng_state_all(self.devices)

    def as_bytes(self) -> bytes:
        """For a checkpoint."""
        return packed((self.python, self.numpy, self.cpu, self.devices))

    @classmethod
    def from_bytes(cls, data: bytes) -> RandomState:
        """The reverse of `as_bytes`."""
        python, numpy, cpu, devices = unpacked(data)
        return cls(python=python, numpy=numpy, cpu=cpu, devices=devices)
