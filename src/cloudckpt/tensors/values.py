"""Python objects of a state dict: checked before a save, and loaded without running code from the store (G6)."""

from __future__ import annotations

import collections
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from cloudckpt._torch_compat import ShardedTensor
from cloudckpt.errors import ALLOW_PICKLE_HINT, UnsafePickleError, UnsupportedValueError
from cloudckpt.format.nesting import PLAIN_TENSORS, answers_planners
from cloudckpt.format.wrapper_metadata import allowed_by_user
from cloudckpt.tensors.unpickling import is_known, is_loadable, load_safely

_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.device, torch.Size})
_SEQUENCES = (list, tuple)
_OF_RANKS = (DTensor, ShardedTensor)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_INSTEAD = "its state as numbers, text, lists, dicts, tensors or arrays"


def check_value(value: object, name: str, *, uri: str) -> None:
    """Raise `UnsupportedValueError` if `value` cannot be saved, and warn if a load would refuse it.

    Both name the part that is the cause, by its path and its class.
    """
    if type(value) in _ATOMS or (type(value) in _SEQUENCES and _ATOMS.issuperset(map(type, value))):  # type: ignore[call-overload]
        return
    inspector = _Inspector()
    error = inspector.inspect(value)
    if error is not None:
        raise UnsupportedValueError(
            f"cannot save {describe_unsaved_part(value, name)} to {uri}: {type(error).__name__}: {error}. Leave it out "
            f"of the state dict, or save {_INSTEAD}",
            uri=uri,
        ) from error
    if inspector.holds_shards:
        path, part = _find_cause(value, name, _parts_and_attributes, is_cause=_holds_shards)
        held = "is" if isinstance(part, torch.Tensor) else "holds"
        raise UnsupportedValueError(
            f"cannot save {name!r} ({_describe(value)}) to {uri}: one rank stores it as one value, and {path!r} {held} "
            "a tensor of several ranks, whose other shards would be lost. Put its tensors into a dict or a list",
            uri=uri,
        )
    if not inspector.refused:
        return
    path, part = _find_cause(value, name, _parts, is_cause=_is_refused)
    names = ", ".join(sorted({_name_of(each) for each in inspector.refused if not isinstance(each, np.dtype)}))
    classes = f" or torch.serialization.add_safe_globals([{names}])" if names else ""
    warnings.warn(
        f"{path!r} is {_describe(part)}: unpickling it could run any code, so a load refuses it without "
        f"allow_pickle=True{classes}. Save {_INSTEAD} to load it without",
        UserWarning,
        stacklevel=2,
    )


def describe_unsaved_part(value: object, name: str) -> str:
    """Return the path and the class of the part that keeps `value` from being serialised. It may be an attribute."""
    path, part = _find_cause(value, name, _parts_and_attributes, is_cause=_is_unpicklable)
    return f"{path!r} ({_describe(part)})"


def load_value(stored: bytes | bytearray, fqn: str, *, uri: str, is_verified: bool) -> Any:
    """Return the object that ``torch.save`` wrote, if it needs no code but that of plain values.

    Raises `UnsafePickleError` if it needs other code, `UnsupportedValueError` if it cannot be made here.
    """
    try:
        return load_safely(stored)
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(
            f"{fqn!r} of {uri} was not loaded: unpickling it could run any code ({error}){_advise_globals(stored)}",
            uri=uri,
            hint=ALLOW_PICKLE_HINT,
        ) from None
    except Exception as error:  # the code of a class can raise anything
        # Its bytes are those that were saved: they were compared before, unless the caller gave that up.
        doubt = "" if is_verified else ", or it is damaged, which Options(verify=False) does not tell"
        raise UnsupportedValueError(
            f"{fqn!r} of {uri} cannot be made here of what was saved ({type(error).__name__}: {error}): its class has "
            f"changed since, or it holds tensors of a device that this machine lacks{doubt}. Leave it out, or load it "
            "where it was saved",
            uri=uri,
        ) from error


def _advise_globals(stored: bytes | bytearray) -> str:
    names = [name for name in _find_unsafe_globals(io.BytesIO(stored)) if not is_known(name)]
    return f". Admit it with torch.serialization.add_safe_globals([{', '.join(sorted(names))}])" if names else ""


def unsafe_names(file: str) -> str:
    """Return the names of a pickle file that ``weights_only=True`` does not admit. Nothing of the file is called."""
    return ", ".join(_find_unsafe_globals(file)) or "something that torch's weights_only unpickler does not admit"


def _find_unsafe_globals(file: str | io.BytesIO) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001  # it serves messages alone
        return []


def copy_safely(stored: bytes | bytearray, fqn: str, *, uri: str, is_verified: bool) -> io.BytesIO:
    """Return the same object in bytes that are made here, for a planner that unpickles all that it gets."""
    value = load_value(stored, fqn, uri=uri, is_verified=is_verified)
    copy = io.BytesIO()
    try:
        torch.save(value, copy)
    except RecursionError as error:
        raise UnsupportedValueError(
            f"{fqn!r} of {uri} is nested too deep for this program. Leave it out", uri=uri
        ) from error
    copy.seek(0)
    return copy


class _Inspector(pickle.Pickler):
    """Pickles as ``torch.save`` does, keeps nothing, and collects the objects that a load would refuse."""

    def __init__(self) -> None:
        super().__init__(_NullFile(), protocol=2)
        self.refused: list[object] = []
        self.holds_shards = False
        self._allowed = set(map(id, allowed_by_user().values()))

    def inspect(self, value: object) -> Exception | None:
        """Return the error that keeps `value` from being pickled."""
        try:
            self.dump(value)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever its own code raises
            return error
        return None

    def persistent_id(self, value: object) -> object:
        """Keep storages, and tensors that several ranks hold, out of the pickle. pickle calls this for each object."""
        if isinstance(value, _OF_RANKS) or (type(value) in PLAIN_TENSORS and answers_planners(value)):
            self.holds_shards = True
            return "shards"
        return "storage" if isinstance(value, _STORAGES) else None

    def reducer_override(self, value: object) -> Any:
        """Check an object that has no opcode of its own. pickle calls this, also for classes and functions."""
        if not is_loadable(value, self._allowed):
            self.refused.append(value)
        return NotImplemented


class _NullFile:
    def write(self, content: bytes) -> int:
        return len(content)


def _is_unpicklable(value: object) -> bool:
    return _Inspector().inspect(value) is not None


def _holds_shards(value: object) -> bool:
    inspector = _Inspector()
    return inspector.inspect(value) is None and inspector.holds_shards


def _is_refused(value: object) -> bool:
    inspector = _Inspector()
    return inspector.inspect(value) is None and bool(inspector.refused)


def _find_cause(
    value: object,
    name: str,
    parts: Callable[[Any], Iterable[tuple[object, object]]],
    *,
    is_cause: Callable[[object], bool],
) -> tuple[str, object]:
    """Return the path and the innermost part of `value` that is the cause."""
    seen = {id(value)}
    while True:
        for key, part in parts(value):
            if id(part) not in seen and is_cause(part):
                seen.add(id(part))
                name, value = f"{name}.{key}", part
                break
        else:
            return name, value


def _parts(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple, set, frozenset, collections.deque)) else []


def _parts_and_attributes(value: object) -> Iterator[tuple[object, object]]:
    yield from _parts(value)
    if not isinstance(value, (type, ModuleType)):
        yield from list(getattr(value, "__dict__", {}).items())


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of class {_name_of(value)} and dtype {value.dtype}"
    own = _qualified_name(value)
    if own is None:
        return f"of class {_name_of(value)}"
    return f"the {'class' if isinstance(value, type) else 'function'} {own}"


def _name_of(value: object) -> str:
    """Return the full name of a class or function, or of the class of anything else."""
    return _qualified_name(value) or _qualified_name(type(value)) or "?"


def _qualified_name(value: Any) -> str | None:
    try:
        module, name = value.__module__, value.__qualname__
    except Exception:  # noqa: BLE001  # an object's own code may raise anything
        return None
    if not isinstance(name, str):
        return None
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name
