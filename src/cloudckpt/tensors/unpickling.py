"""Reads plain values from the bytes of ``torch.save`` without running code that the bytes choose (G6).

torch's ``weights_only=True`` refuses much that is as harmless as what it admits: ``b""``, large integers, frozensets,
deques, dates, and everything of numpy. Its list of further functions belongs to the whole process, and numpy's own
functions are not safe there: a dtype and an array take any state that a pickle gives them. It also makes a bytearray of
any size. So this is an unpickler of our own, with three rules:

1. It executes the opcodes that ``torch.save`` writes (protocol 2), and refuses all others.
2. A pickle can name the objects of `_GLOBALS`, those of torch's list, and those that the user allowed; and no other.
3. It can call those that have an entry in `_CALLS`, which checks the arguments; and no other, but the user's.
"""

from __future__ import annotations

import codecs
import collections
import datetime as dt
import decimal
import functools
import io
import math
import pathlib
import pickle
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cloudckpt._torch_compat import load_archive, open_archive, pickle_globals
from cloudckpt.format.wrapper_metadata import allowed_by_user

_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]  # each major version of numpy has another name for it
_SCALAR: Any = np.float64().__reduce__()[0]
_MAX_PARTS = 1000
_NESTED = frozenset({tuple, frozenset})
_MAX_GROWTH = 16  # the memory that calls may take for each byte of the pickle
_STATE_WITH_SLOTS = 2  # the length of the tuple of attributes and slots
_SIMPLE_DTYPE = re.compile(r"[biufcmMSUV][0-9]{1,9}", re.ASCII)


def load_safely(stored: bytes | bytearray, *, map_location: str | None = None) -> Any:
    """Return the object in the bytes of ``torch.save``. Runs no code that the bytes choose.

    Raises ``pickle.UnpicklingError`` if `Unpickler` refuses it, any other error if the object cannot be made here.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(stored)) as records:
            if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
                raise pickle.UnpicklingError("it is compressed, which torch.save never does")
        archive = open_archive(io.BytesIO(stored))
    except (RuntimeError, ValueError, OSError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
        raise pickle.UnpicklingError("it is not what torch.save writes") from error
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        return load_archive(archive, map_location, SimpleNamespace(Unpickler=Unpickler))


def is_loadable(value: object, allowed: Collection[int]) -> bool:
    """Return True if `load_safely` can make `value`, apart from its parts. `allowed` has the ids of further objects.

    `value` is no list, dict or other type for which pickles have opcodes.
    """
    kind = type(value)
    if kind in _KINDS or isinstance(value, (np.generic, torch.Tensor)):
        return True  # the caller asks about the class of a derived one, and about the dtype, too
    if not isinstance(value, np.dtype):
        return any(id(each) in known for each in (value, kind) for known in (_KNOWN, allowed))
    try:
        name, state = _reduce_dtype(value)
        return bool(_SIMPLE_DTYPE.fullmatch(name)) and _rebuild_dtype(np.dtype(name), state) == value
    except Exception:  # noqa: BLE001  # classes derived from np.dtype pickle in ways of their own
        return id(kind) in allowed


def is_known(name: str) -> bool:
    """Return True if `Unpickler` admits the object of this name without the user's consent."""
    return name in _GLOBALS or name in _TORCH


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001  # the only one whose opcodes can be replaced


class Unpickler(_PythonUnpickler):  # type: ignore[misc]  # typeshed lacks most of it
    """Reads pickles by the rules of this module. Memory stays in proportion to the pickle."""

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._room_bytes = _MAX_GROWTH * len(file.getbuffer())
        self._users = allowed_by_user()
        self._users_ids = set(map(id, self._users.values()))

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        for known in (_GLOBALS, _TORCH, self._users):
            if full in known:
                return known[full]
        raise pickle.UnpicklingError(f"it uses {full}")

    def take(self, num_bytes: int) -> None:
        """Refuse a pickle whose calls take much more memory than it has bytes."""
        self._room_bytes -= num_bytes
        if self._room_bytes < 0:
            raise pickle.UnpicklingError("it asks for much more memory than it has bytes")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if id(function) in self._users_ids:
            self.stack[-1] = function(*arguments)
        elif id(function) in _CALLS:
            self.stack[-1] = _CALLS[id(function)](self, *arguments)
        else:
            raise pickle.UnpicklingError(f"it calls a {type(function).__name__}")

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        kind: Any = self.stack.pop()
        if kind is io.BytesIO:
            self.append(io.BytesIO())
        elif id(kind) in self._users_ids:
            self.append(kind.__new__(kind, *arguments))
        else:
            raise pickle.UnpicklingError(f"it makes a {kind!r:.100}")

    def load_build(self) -> None:
        state = self.stack.pop()
        made: Any = self.stack[-1]
        if id(type(made)) in self._users_ids:
            _set_state(made, state)
        elif type(made) is np.ndarray:
            _fill_array(self, made, state)
        elif isinstance(made, np.dtype):
            made.__setstate__(_reduce_dtype(_rebuild_dtype(made, state))[1])  # type: ignore[attr-defined]  # numpy's stubs lack it
        elif type(made) is io.BytesIO:
            content, position, _ = state
            self.take(len(content))
            made.write(content)
            made.seek(position)
        elif type(made) is collections.OrderedDict:
            made.__dict__.update(state)
        else:
            raise pickle.UnpicklingError(f"it gives a state to a {type(made).__name__}")

    def load_append(self) -> None:
        _expect_type(self.stack[-2], list, collections.deque)
        super().load_append()

    def load_appends(self) -> None:
        _expect_type(self.metastack[-1][-1], list, collections.deque)
        super().load_appends()

    def load_setitem(self) -> None:
        _check_hashable(self.stack[-2:-1])
        _expect_type(self.stack[-3], dict, collections.OrderedDict, collections.defaultdict)
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_hashable(self.stack[::2])
        _expect_type(self.metastack[-1][-1], dict, collections.OrderedDict, collections.defaultdict)
        super().load_setitems()

    def refuse_opcode(self) -> None:
        raise pickle.UnpicklingError("it is damaged, or no pickle of protocol 2")


_OPCODES = (
    "PROTO STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE "
    "EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET BINPERSID GLOBAL REDUCE NEWOBJ BUILD"
)
Unpickler.dispatch = dict.fromkeys(range(256), Unpickler.refuse_opcode) | {
    code: getattr(Unpickler, _PythonUnpickler.dispatch[code].__name__)
    for (code,) in (getattr(pickle, name) for name in _OPCODES.split())
}


def _expect_type(found: object, *kinds: type) -> None:
    if type(found) not in kinds:
        raise pickle.UnpicklingError(f"it puts something into a {type(found).__name__}")


def _set_state(made: Any, state: Any) -> None:
    """Give its state to an object of a class that the user allowed, as ``pickle`` does."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    has_slots = isinstance(state, tuple) and len(state) == _STATE_WITH_SLOTS
    attributes, slots = state if has_slots else (state, None)
    made.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def _reduce_dtype(dtype: Any) -> tuple[Any, Any]:
    """Return the name by which a dtype is made, and the state that it gets then."""
    _, (name, *_), state = dtype.__reduce__()
    return name, state


def _rebuild_dtype(dtype: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """Return the dtype that `state` describes. The state of a pickle is never used itself.

    An array of Python objects would take its bytes for their addresses, wherever in the dtype they are.
    """
    _, order, subarray, names, _, _, _, _, *extra = state
    if subarray is not None or names is not None:
        raise pickle.UnpicklingError("it has a dtype of fields or of arrays")
    made = dtype
    if dtype.kind in "mM":
        unit, count, *_ = extra[0][-1]
        made = np.dtype(f"{dtype.kind}8" if unit == b"generic" else f"{dtype.kind}8[{count}{unit.decode('ascii')}]")
    elif extra:
        raise pickle.UnpicklingError("it has a dtype with metadata")
    if made.hasobject or (made.kind, made.itemsize) != (dtype.kind, dtype.itemsize):
        raise pickle.UnpicklingError("it has an array of Python objects, or a dtype that is none of numpy's own")
    ordered: np.dtype[Any] = made.newbyteorder(order)
    return ordered


def _fill_array(reader: Unpickler, array: Any, state: Any) -> None:
    _, shape, dtype, is_fortran, content = state
    _check_elements(reader, dtype, content, shape)
    if array.shape != (0,):
        raise pickle.UnpicklingError("it fills an array twice")
    array.__setstate__((1, shape, dtype, bool(is_fortran), content))


def _check_elements(reader: Unpickler, dtype: Any, content: Any, shape: tuple[int, ...] = ()) -> None:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.subdtype or type(content) is not bytes:
        raise pickle.UnpicklingError("it has an array of Python objects")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise pickle.UnpicklingError("it has an array of no possible shape")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise pickle.UnpicklingError(f"an array in it has {len(content)} bytes, which are not those of its shape")
    reader.take(len(content))


def _check_hashable(items: Iterable[Any]) -> None:
    """Refuse keys and elements whose hash would recurse too deep, or visit shared parts again and again."""
    for item in items:
        waiting = [item] if type(item) in _NESTED else []
        num_parts = 0
        while waiting:
            parts = waiting.pop()
            num_parts += len(parts)
            if num_parts > _MAX_PARTS:
                raise pickle.UnpicklingError(f"it has a key of more than {_MAX_PARTS} parts")
            waiting += [part for part in parts if type(part) in _NESTED]


# The calls. Each takes the reader and the arguments of the pickle.


def _call_scalar(reader: Unpickler, dtype: object, content: object = None) -> Any:
    _check_elements(reader, dtype, content)
    return _SCALAR(dtype, content)


def _call_reconstruct(_: Unpickler, kind: object, shape: object, __: object) -> Any:
    if kind is not np.ndarray or shape != (0,):
        raise pickle.UnpicklingError("it has an array of another class than numpy's own")
    return _RECONSTRUCT(np.ndarray, (0,), b"b")


def _call_dtype(_: Unpickler, name: Any, align: object, copy: object) -> np.dtype[Any]:
    # Without the copy it would be numpy's own, for the whole process.
    if type(name) is not str or not _SIMPLE_DTYPE.fullmatch(name) or (align, copy) != (False, True):
        raise pickle.UnpicklingError("it has a dtype that is none of numpy's own, or one of Python objects")
    return np.dtype(name, align=False, copy=True)


def _call_encode(reader: Unpickler, text: Any, encoding: object) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("it encodes what is no bytes")
    reader.take(len(text))
    return text.encode("latin1")


def _call_bytearray(reader: Unpickler, content: object = b"", encoding: object = "latin1") -> bytearray:
    content = content if type(content) is bytes else _call_encode(reader, content, encoding)
    reader.take(len(content))
    return bytearray(content)


def _call_collection(kind: Callable[[Any], Any], expected: type[Any], reader: Unpickler, items: Any) -> Any:
    """Make a collection of the items of another, which the pickle holds."""
    if type(items) is not expected:
        raise pickle.UnpicklingError(f"it makes a {kind!r:.100} of a {type(items).__name__}")
    reader.take(len(items))
    _check_hashable(items)
    return kind(items)


def _call_deque(_: Unpickler, items: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    if type(items) is not tuple or items:
        raise pickle.UnpicklingError("it makes a deque of something")  # its elements come afterwards
    return collections.deque(maxlen=maxlen)


def _call_defaultdict(_: Unpickler, factory: Any = None) -> Any:
    if factory is not None and factory not in _PLAIN_TYPES:
        raise pickle.UnpicklingError("it has a defaultdict whose default is made by something else than a plain type")
    return collections.defaultdict(factory)


def _call_plain(kind: Callable[..., Any], expected: tuple[type, ...], _: Unpickler, *arguments: Any) -> Any:
    """Make a `kind` of arguments of the `expected` types. Its memory is in proportion to theirs."""
    if any(type(each) not in expected for each in arguments):
        raise pickle.UnpicklingError(
            f"it makes a {kind!r:.100} of something else than {len(arguments)} plain arguments"
        )
    return kind(*arguments)


def _call_rebuild(function: Callable[..., Any], _: Unpickler, *arguments: Any) -> Any:
    """Make a tensor of the archive's storages, by a function of torch that checks them."""
    return function(*arguments)


def _call_typed_tensor(_: Unpickler, function: object, *arguments: Any) -> Any:
    """Make a tensor of a subclass, or with attributes. torch would call any function for that."""
    if id(function) not in _REBUILDS:
        raise pickle.UnpicklingError("it makes a tensor by what is no function of torch for that")
    _check_attributes(*arguments[-1:])
    return _TYPED(function, *arguments)


def _call_parameter_with_state(_: Unpickler, *arguments: Any) -> Any:
    _check_attributes(*arguments[-1:])
    return _PARAMETER_WITH_STATE(*arguments)


def _check_attributes(state: Any) -> None:
    """Refuse a tensor's state that sets what torch itself keeps in a tensor."""
    for attributes in state if isinstance(state, tuple) else (state,):
        if attributes and not all(type(name) is str and not hasattr(torch.Tensor, name) for name in attributes):
            raise pickle.UnpicklingError("it has a tensor with attributes that are torch's own")


def _call_quantized(_: Unpickler, storage: Any, offset: int, size: Any, *rest: Any) -> Any:
    if math.prod(size) > 2 * storage.nbytes():  # torch takes the memory before it sees that the storage has less
        raise pickle.UnpicklingError("it has a tensor that is larger than its storage")
    return _QUANTIZED(storage, offset, size, *rest)


_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
_PLAIN_TYPES: tuple[Any, ...] = (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, io.BytesIO,
    collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict,
    dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone, decimal.Decimal, *_PATHS,
)  # fmt: skip
_KINDS = frozenset({*_PLAIN_TYPES, np.ndarray, torch.device, torch.layout, torch.Size})
_GLOBALS: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in (*_PLAIN_TYPES, np.ndarray, np.dtype)},
    **{f"pathlib.{kind.__name__}": kind for kind in _PATHS},
    **{f"numpy.{kind.__name__}": kind for kind in np.sctypeDict.values()},
    "builtins.Ellipsis": ...,
    "_codecs.encode": codecs.encode,
    **{f"numpy.{core}.multiarray._reconstruct": _RECONSTRUCT for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _SCALAR for core in ("core", "_core")},
}
"""The objects that a pickle may name, by their full names."""
_TORCH: dict[str, Any] = pickle_globals()
"""The objects of torch's own list."""
_KNOWN = frozenset(map(id, (*_GLOBALS.values(), *_TORCH.values())))
_LAYOUT = _TORCH["torch.serialization._get_layout"]
_QUANTIZED = _TORCH["torch._utils._rebuild_qtensor"]
_TYPED = _TORCH["torch._tensor._rebuild_from_type_v2"]
_PARAMETER_WITH_STATE = _TORCH["torch._utils._rebuild_parameter_with_state"]
_REBUILDS = {
    id(function): functools.partial(_call_rebuild, function)
    for name, function in _TORCH.items()
    if name.startswith("torch._utils._rebuild_") and not name.endswith(("qtensor", "from_cpu_tensor", "from_numpy"))
}
_OF_PLAIN_ARGUMENTS: tuple[tuple[Callable[..., Any], tuple[type, ...]], ...] = (
    (bytes, ()),
    (complex, (float,)),
    (range, (int,)),
    (slice, (int, float, str, type(None))),
    (collections.OrderedDict, ()),
    (dt.date, (bytes, dt.timezone)),
    (dt.time, (bytes, dt.timezone)),
    (dt.datetime, (bytes, dt.timezone)),
    (dt.timedelta, (int,)),
    (dt.timezone, (dt.timedelta, str)),
    (decimal.Decimal, (str,)),
    (torch.device, (str, int)),
    (_LAYOUT, (str,)),
    *((path, (str,)) for path in _PATHS),
)
"""Callables, and the types of the arguments that they may get."""
_COLLECTIONS: tuple[tuple[Callable[[Any], Any], type[Any]], ...] = (
    (set, list),
    (frozenset, list),
    (collections.Counter, dict),
    (torch.Size, tuple),
)
"""Collections, and the type that they are made of."""
_CALLS: dict[int, Callable[..., Any]] = {
    **_REBUILDS,
    **{id(kind): functools.partial(_call_plain, kind, expected) for kind, expected in _OF_PLAIN_ARGUMENTS},
    **{id(kind): functools.partial(_call_collection, kind, expected) for kind, expected in _COLLECTIONS},
    id(_RECONSTRUCT): _call_reconstruct,
    id(_SCALAR): _call_scalar,
    id(np.dtype): _call_dtype,
    id(codecs.encode): _call_encode,
    id(bytearray): _call_bytearray,
    id(collections.deque): _call_deque,
    id(collections.defaultdict): _call_defaultdict,
    id(_QUANTIZED): _call_quantized,
    id(_TYPED): _call_typed_tensor,
    id(_PARAMETER_WITH_STATE): _call_parameter_with_state,
}
"""The calls that a pickle may make, by the identity of the function."""
