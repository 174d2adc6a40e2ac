"""Python objects of a state dict: checked before a save, and loaded without running code from the store (G6)."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import decimal
import io
import pathlib
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from cloudckpt._this_process import warn_user
from cloudckpt._torch_compat import ShardedTensor
from cloudckpt.errors import ALLOW_PICKLE_HINT, UnsafePickleError, UnsupportedValueError
from cloudckpt.format.nesting import PLAIN_TENSORS, has_planner_hooks
from cloudckpt.format.plain_values import decode_plain, encode_plain

_SHARDED_CLASSES = (DTensor, ShardedTensor)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_HARMLESS_CLASSES: tuple[Any, ...] = (
    bytes, frozenset, dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone, decimal.Decimal, pathlib.PosixPath,
    pathlib.PurePosixPath, pathlib.PureWindowsPath, io.BytesIO,
)  # fmt: skip
"""Classes whose calls are as harmless as those that torch's ``weights_only`` unpickler admits by default.

Not those of numpy: its functions take any state that a pickle gives them, and read bytes as addresses.
"""
_safe_globals_lock = threading.Lock()  # the list belongs to the whole process
_ADVISED_FORM = "its state as numbers, text, lists, dicts, tensors or arrays"


def check_value(value: object, name: str, *, uri: str) -> bytes | None:
    """Return `value` as tagged JSON, or None if it is saved as a pickle. Warn if a load would refuse the pickle.

    Raises `UnsupportedValueError` if the value cannot be saved, or holds a class or function that a load would refuse.
    Warning and error name the part that is the cause, by its path and class.
    """
    encoded = encode_plain(value)
    if encoded is not None:
        return encoded
    inspector = _Inspector()
    error = inspector.inspect(value)
    if error is not None:
        raise UnsupportedValueError(
            f"cannot save {describe_unsaved_part(value, name)} to {uri}: {type(error).__name__}: {error}. Leave it out "
            f"of the state dict, or save {_ADVISED_FORM}",
            uri=uri,
        ) from error
    if inspector.holds_shards:
        path, part = _find_cause(value, name, _parts_and_attributes, is_cause=_holds_shards)
        verb = "is" if isinstance(part, torch.Tensor) else "holds"
        raise UnsupportedValueError(
            f"cannot save {name!r} ({_describe(value)}) to {uri}: one rank stores it as one value, and {path!r} {verb} "
            "a tensor of several ranks, whose other shards would be lost. Put its tensors into a dict or a list",
            uri=uri,
        )
    refused = _find_refusal(value)
    if refused is None:
        return None
    path, part = _find_cause(value, name, _parts, is_cause=_is_refused)
    admit = _advise_globals(refused)
    if _qualified_name(part) is not None:
        or_admit = f", or admit it by {admit}" if admit and isinstance(part, type) else ""
        raise UnsupportedValueError(
            f"cannot save {path!r} to {uri}: it is {_describe(part)}, and a checkpoint holds no code. Leave it out of "
            f"the state dict, or save its name as text{or_admit}",
            uri=uri,
        )
    instead = "its state_dict()" if hasattr(part, "state_dict") else _ADVISED_FORM
    warn_user(
        f"{path!r} is {_describe(part)}: unpickling it could run any code, so a load refuses it without "
        f"allow_pickle=True{f' or {admit}' if admit else ''}. Save {instead} to load it without"
    )
    return None


def describe_unsaved_part(value: object, name: str) -> str:
    """Return the path and the class of the part that keeps `value` from being serialised. It may be an attribute."""
    path, part = _find_cause(value, name, _parts_and_attributes, is_cause=_is_unpicklable)
    return f"{path!r} ({_describe(part)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedValue:
    """The stored bytes of one value, and the `allow_pickle` of the load that read them."""

    content: bytes | bytearray
    is_json: bool
    """True for tagged JSON, False for a pickle."""
    allow_pickle: bool
    fqn: str
    uri: str
    is_verified: bool
    """False if the bytes were not compared with their checksums."""

    def load(self) -> Any:
        """Return the object.

        Raises:
            UnsafePickleError: torch's ``weights_only`` unpickler refuses the pickle, and `allow_pickle` is False.
            UnsupportedValueError: The object cannot be made here.

        """
        try:
            if self.allow_pickle and not self.is_json:
                return torch.load(io.BytesIO(self.content), weights_only=False)
            return load_stored(self.content, is_json=self.is_json)
        except pickle.UnpicklingError as error:
            if self.allow_pickle:
                raise self._unloadable_error(error) from error
            advice = _advise_globals(_find_unsafe_globals(io.BytesIO(self.content)))
            raise UnsafePickleError(
                f"{self.fqn!r} of {self.uri} was not loaded: unpickling it could run any code "
                f"({describe_refusal(self.content)}){f'. Admit it with {advice}' if advice else ''}",
                uri=self.uri,
                hint=ALLOW_PICKLE_HINT,
            ) from None
        except Exception as error:  # the code of a class can raise any error
            raise self._unloadable_error(error) from error

    def to_torch(self) -> io.BytesIO:
        """Return the object in bytes of ``torch.save``, for a planner that unpickles all that it gets.

        Raises what `load` raises.
        """
        if self.allow_pickle and not self.is_json:
            return io.BytesIO(self.content)
        copy = io.BytesIO()
        try:
            torch.save(self.load(), copy)
        except RecursionError as error:
            raise UnsupportedValueError(
                f"{self.fqn!r} of {self.uri} is nested too deep for this program. Leave it out", uri=self.uri
            ) from error
        copy.seek(0)
        return copy

    def _unloadable_error(self, error: Exception) -> UnsupportedValueError:
        # The bytes were compared with their checksums before, unless the caller has disabled that.
        doubt = "" if self.is_verified else ", or it is damaged, which Options(verify=False) does not find out"
        return UnsupportedValueError(
            f"{self.fqn!r} of {self.uri} cannot be made here of what was saved ({type(error).__name__}: {error}): its "
            f"class has changed since, or it holds tensors of a device that this machine lacks{doubt}. Leave it out, "
            "or load it where it was saved",
            uri=self.uri,
        )


def load_stored(stored: bytes | bytearray, *, is_json: bool, map_location: str | None = None) -> Any:
    """Return the object in the bytes of a value. Runs no code that the bytes choose.

    Raises ``pickle.UnpicklingError`` for a pickle that needs other code, and any error if the object cannot be made.
    """
    if is_json:
        return decode_plain(stored)
    with _allow_harmless():
        return torch.load(io.BytesIO(stored), map_location=map_location, weights_only=True)


@contextlib.contextmanager
def _allow_harmless() -> Iterator[None]:
    """Add `_HARMLESS_CLASSES` to those that this process allows. On exit, remove those that the user did not allow."""
    with _safe_globals_lock:
        added = [kind for kind in _HARMLESS_CLASSES if kind not in torch.serialization.get_safe_globals()]
        with torch.serialization.safe_globals(added):
            yield


def describe_refusal(stored: bytes | bytearray) -> str:
    """Return the reason why `load_stored` refuses a pickle."""
    names = _find_unsafe_globals(io.BytesIO(stored))
    return f"it uses {', '.join(sorted(names))}" if names else "torch's weights_only unpickler refuses it"


def _advise_globals(names: list[str]) -> str:
    """Return the call that admits `names`; "" if one is a function of Python, such as getattr, that runs any code."""
    is_safe = names and not any(name.startswith("builtins.") for name in names)
    return f"torch.serialization.add_safe_globals([{', '.join(sorted(names))}])" if is_safe else ""


def unsafe_names(file: str) -> str:
    """Return the names in a pickle file that ``weights_only=True`` does not admit, without calling any of them."""
    return ", ".join(_find_unsafe_globals(file)) or "something that torch's weights_only unpickler does not admit"


def _find_unsafe_globals(file: str | io.BytesIO) -> list[str]:
    try:
        with _allow_harmless():
            return torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001  # it serves messages alone
        return []


class _Inspector(pickle.Pickler):
    """Pickles a value as ``torch.save`` does, and drops the bytes."""

    def __init__(self) -> None:
        super().__init__(_NullFile(), protocol=2)
        self.holds_shards = False

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
        if isinstance(value, _SHARDED_CLASSES) or (type(value) in PLAIN_TENSORS and has_planner_hooks(value)):
            self.holds_shards = True
            return "shards"
        return "storage" if isinstance(value, _STORAGES) else None


class _NullFile:
    def write(self, content: bytes) -> int:
        return len(content)


def _is_unpicklable(value: object) -> bool:
    return _Inspector().inspect(value) is not None


def _holds_shards(value: object) -> bool:
    inspector = _Inspector()
    return inspector.inspect(value) is None and inspector.holds_shards


def _is_refused(value: object) -> bool:
    return encode_plain(value) is None and not _is_unpicklable(value) and _find_refusal(value) is not None


def _find_refusal(value: object) -> list[str] | None:
    """Return the names in the pickle of a value that a load would refuse; None if it would load.

    The names are empty if a load would refuse the pickle for another reason.
    """
    stored = io.BytesIO()
    torch.save(value, stored)
    try:
        load_stored(stored.getvalue(), is_json=False, map_location="cpu")
    except Exception:  # noqa: BLE001  # the code of a class that the user allowed can raise anything
        stored.seek(0)
        return _find_unsafe_globals(stored)
    return None


def _find_cause(
    value: object,
    name: str,
    parts: Callable[[Any], Iterable[tuple[object, object]]],
    *,
    is_cause: Callable[[object], bool],
) -> tuple[str, object]:
    """Return the path and the innermost part of `value` that is the cause."""
    visited = {id(value)}
    while True:
        for key, part in parts(value):
            if id(part) not in visited and is_cause(part):
                visited.add(id(part))
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
