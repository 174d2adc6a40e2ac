"""Integrations with training frameworks: one module for each framework, and only that module imports it.

Here is what several of them need: errors for a framework that is not installed, and for a training that would meet
steps that exist already; and the conversion of a framework's nested state to a flat state dict and back.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cloudckpt.dcp.protocol import Coordinator
from cloudckpt.errors import CheckpointExistsError, MissingDependencyError, UnsafePickleError, UnsupportedValueError
from cloudckpt.format.plain_values import encode_plain
from cloudckpt.format.wrappers import is_wrapper
from cloudckpt.manager.steps import Steps
from cloudckpt.options import Options
from cloudckpt.tensors.values import check_value, describe_refusal, load_stored
from cloudckpt.uri import parse_location

TESTED_VERSIONS = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "megatron-core": "0.19.2",
    "ray[train]": "2.60.0",
    "torch_checkpointing": "0.1.1",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
    "verl": "0.9.1",
}
"""The versions that ``make frameworks`` tests."""
_MAX_SHOWN = 5
SKELETON = "skeleton"
"""Key of the serialized structure that holds everything except the tensors."""
_PLACEHOLDER = "cloudckpt.tensor"
_PICKLE_STARTS = (b"PK", b"\x80")
"""The first bytes of the files of ``torch.save``, with which no JSON begins."""


@contextmanager
def require(distribution: str, *, note: str = "") -> Iterator[None]:
    """Raise `MissingDependencyError` if an import from `distribution` inside the context fails.

    `note` is appended to the message, for example to name a package that is easily confused with `distribution`.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"{distribution} cannot be imported: {error}. This integration is tested with version "
            f"{TESTED_VERSIONS[distribution]}: pip install '{distribution}=={TESTED_VERSIONS[distribution]}'{note}"
        ) from error


def find_steps(root: str, options: Options) -> list[int]:
    """Return the committed steps on all ranks, lowest first. Rank 0 lists them and reads only the manifests' heads.

    Steps of torch's own writer are included, because a save would collide with them too. Raises torch's
    ``CheckpointException`` on all ranks if the store fails.
    """

    def find() -> list[int]:
        steps = Steps(parse_location(root), options)
        return sorted({*(info.step for info in steps.find_committed(with_metrics=False)), *steps.find_torch_steps()})

    return Coordinator(None, no_dist=False, root=root, timeout_s=options.timeout_s).broadcast("find", find)


def refuse_existing_steps(root: str, steps: Collection[int], *, after: int | None, hint: str) -> None:
    """Raise `CheckpointExistsError` if there are steps above `after`, or any step if `after` is None.

    Without this check, training would collide with them hours later, or its retention would remove them.
    """
    existing = [step for step in sorted(steps) if after is None or step > after]
    if not existing:
        return
    shown = ", ".join(map(str, existing[:_MAX_SHOWN])) + (", …" if len(existing) > _MAX_SHOWN else "")
    starts = "starts from scratch" if after is None else f"continues from step {after}"
    raise CheckpointExistsError(
        f"training {starts}, but {root} already has step{'s' if len(existing) > 1 else ''} {shown}. {hint}", uri=root
    )


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
    """Deserialize what `serialize` returned.

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


def flatten(tree: Mapping[str, Any], *, uri: str) -> dict[str, Any]:
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


def unflatten(
    flat: Mapping[str, Any],
    *,
    without: Callable[[str], object] | None = None,
    allow_pickle: bool = False,
    uri: str = "",
) -> Any:
    """Rebuild what `flatten` was given, except the top-level keys for which `without` is true."""
    skeleton = deserialize(flat[SKELETON], allow_pickle=allow_pickle, uri=uri)
    if without is not None:
        skeleton = {key: value for key, value in skeleton.items() if not without(key)}
    return _map_leaves(
        skeleton,
        "",
        _is_placeholder,
        lambda _, value: flat[value[_PLACEHOLDER]],
    )


def _is_placeholder(value: Any) -> bool:
    return type(value) is dict and len(value) == 1 and _PLACEHOLDER in value


def _map_leaves(value: Any, path: str, is_wanted: Callable[[Any], bool], change: Callable[[str, Any], Any]) -> Any:
    if is_wanted(value):
        return change(path, value)
    if isinstance(value, dict):
        items = {key: _map_leaves(each, _join(path, key), is_wanted, change) for key, each in value.items()}
        if type(value) is dict:
            return items
        copied = value.copy()  # keeps the class, such as OrderedDict
        copied.update(items)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(each, _join(path, index), is_wanted, change) for index, each in enumerate(value))
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
