"""Plain Python values as tagged JSON, which a reader in any language decodes (``docs/format.md``, "Values").

A value comes back with the same types, bits and order, or it is not plain. The bytes cannot make decoding run code.
"""

from __future__ import annotations

import base64
import collections
import datetime as dt
import decimal
import io
import math
import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from cloudckpt.format.model import ITEMSIZE_BYTES

_Coder: TypeAlias = Callable[[Any], Any]

_MAX_TENSOR_BYTES = 1 << 20  # of a larger tensor, base64 would cost more than binary bytes gain
_NUMPY_KINDS = "biufcmMSUV"
_NUMPY_SCALARS = frozenset(np.sctypeDict.values())
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice)
} | {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (
        collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict, np.ndarray,
        dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone, decimal.Decimal,
    )
}  # fmt: skip
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}
_PATHS = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


class _NotPlainError(Exception):
    """Raised for a part that tagged JSON does not represent exactly."""


def encode_plain(value: object) -> bytes | None:
    """Return `value` as tagged JSON; None if it is not plain."""
    try:
        return msgspec.json.encode(_Encoder().encode(value))
    except (_NotPlainError, RecursionError):
        return None


def decode_plain(content: bytes | bytearray) -> Any:
    """Return the value that `encode_plain` encoded. Raises any error for other bytes."""
    return _decode(msgspec.json.decode(content))


class _Encoder:
    """Encodes one value. A mutable part that occurs twice is not plain, since two parts would come back."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def encode(self, part: Any) -> Any:
        """Return `part` as msgspec encodes it to JSON."""
        encode = _ENCODERS.get(type(part))
        if encode is not None:
            return encode(self, part)
        if isinstance(part, np.dtype):  # each dtype is of a class of its own
            return {"numpy.dtype": _name_dtype(part)}
        if isinstance(part, type):
            return _encode_type(part)
        raise _NotPlainError

    def encode_all(self, parts: Iterable[Any]) -> list[Any]:
        return [self.encode(part) for part in parts]

    def encode_pairs(self, mapping: Mapping[Any, Any]) -> list[Any]:
        self.note(mapping)
        return [[self.encode(key), self.encode(value)] for key, value in mapping.items()]

    def note(self, part: object) -> None:
        """Refuse a mutable part that occurs again, or has attributes."""
        self._note(id(part))
        if getattr(part, "__dict__", None):
            raise _NotPlainError

    def encode_list(self, part: list[Any]) -> Any:
        self._note(id(part))
        return self.encode_all(part)

    def encode_set(self, part: set[Any]) -> Any:
        self._note(id(part))
        return {"set": self.encode_all(part)}

    def encode_bytearray(self, part: bytearray) -> Any:
        self._note(id(part))
        return {"bytearray": _to_base64(part)}

    def encode_file(self, part: io.BytesIO) -> Any:
        self.note(part)
        return {"BytesIO": [_to_base64(part.getvalue()), part.tell()]}

    def encode_deque(self, part: collections.deque[Any]) -> Any:
        self._note(id(part))
        return {"deque": [self.encode_all(part), part.maxlen]}

    def encode_defaultdict(self, part: collections.defaultdict[Any, Any]) -> Any:
        factory = part.default_factory
        return {"defaultdict": [None if factory is None else _name_type(factory), self.encode_pairs(part)]}

    def encode_time(self, part: Any) -> Any:
        zone, naive = part.tzinfo, part.replace(tzinfo=None)
        if type(zone) not in (dt.timezone, type(None)):
            raise _NotPlainError
        return {type(part).__name__: [naive.isoformat(), part.fold, self.encode(zone)]}

    def encode_array(self, array: np.ndarray[Any, Any]) -> Any:
        self._note(id(array))
        if not array.dtype.itemsize:  # numpy makes no such arrays but by pickles
            raise _NotPlainError
        order: Any = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return {"numpy.array": [_name_dtype(array.dtype), list(array.shape), order, _to_base64(array.tobytes(order))]}

    def encode_tensor(self, tensor: torch.Tensor) -> Any:
        self.note(tensor)
        name = _name_torch(tensor.dtype)
        if (
            tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or name not in ITEMSIZE_BYTES
            or tensor.nbytes > _MAX_TENSOR_BYTES
            or tensor.requires_grad
            or tensor.is_conj()
            or tensor.is_neg()
            or not tensor.is_contiguous()
            or tensor.untyped_storage().nbytes() != tensor.nbytes
        ):
            raise _NotPlainError
        if tensor.nbytes:
            self._note(-tensor.data_ptr())  # no object's identity is negative
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"torch.tensor": [name, list(tensor.shape), _to_base64(raw)]}

    def _note(self, identity: int) -> None:
        if identity in self._seen:
            raise _NotPlainError
        self._seen.add(identity)


def _decode(part: Any) -> Any:
    if isinstance(part, list):
        return [_decode(element) for element in part]
    if not isinstance(part, dict):
        return part
    ((tag, content),) = part.items()
    if tag not in _DECODERS:
        raise ValueError(f"its tag {tag!r:.100} is not known here: a newer version of cloudckpt saved it")
    return _DECODERS[tag](content)


def is_unicode(text: str) -> bool:
    """Return False for a string with lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_base64(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _name_type(kind: Any) -> str:
    if not isinstance(kind, type) or kind not in _TYPE_NAMES:
        raise _NotPlainError
    return _TYPE_NAMES[kind]


def _encode_type(kind: type) -> Any:
    if kind in _NUMPY_SCALARS:
        dtype: np.dtype[Any] = np.dtype(kind)
        if dtype.hasobject or np.dtype(dtype.str).type is not kind:
            raise _NotPlainError
        return {"numpy.type": dtype.str}
    return {"type": _name_type(kind)}


def _encode_timezone(zone: dt.timezone) -> Any:
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]  # typeshed lacks it
    if name and not is_unicode(name[0]):
        raise _NotPlainError
    return [_encode_timedelta(offset), *name]


def _encode_timedelta(span: dt.timedelta) -> list[int]:
    return [span.days, span.seconds, span.microseconds]


def _encode_text(value: object) -> str:
    text = str(value)
    if not is_unicode(text):
        raise _NotPlainError
    return text


def _to_hex(value: float) -> str:
    return struct.pack(">d", value).hex()


def _name_torch(value: object) -> str:
    return str(value).removeprefix("torch.")


def _name_dtype(dtype: np.dtype[Any]) -> str:
    if (
        dtype.kind not in _NUMPY_KINDS
        or dtype.names is not None
        or dtype.subdtype is not None
        or dtype.metadata is not None
        or np.dtype(dtype.str) != dtype
    ):
        raise _NotPlainError
    return str(dtype.str)


def _encode_int(_: _Encoder, value: int) -> Any:
    return value if -(2**63) <= value < 2**63 else {"int": hex(value)}


def _encode_float(_: _Encoder, value: float) -> Any:
    return value if math.isfinite(value) else {"float": _to_hex(value)}


def _encode_str(_: _Encoder, text: str) -> Any:
    return text if text.isascii() or is_unicode(text) else {"str": text.encode("utf-8", "surrogatepass").hex()}


def _encode_scalar(_: _Encoder, value: Any) -> Any:
    return {"numpy.scalar": [_name_dtype(value.dtype), _to_base64(value.tobytes())]}


_ENCODERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: lambda _, value: {"complex": [_to_hex(value.real), _to_hex(value.imag)]},
    bytes: lambda _, value: {"bytes": _to_base64(value)},
    bytearray: _Encoder.encode_bytearray,
    io.BytesIO: _Encoder.encode_file,
    type(...): lambda _, __: {"ellipsis": None},
    list: _Encoder.encode_list,
    tuple: lambda encoder, value: {"tuple": encoder.encode_all(value)},
    set: _Encoder.encode_set,
    frozenset: lambda encoder, value: {"frozenset": encoder.encode_all(value)},
    slice: lambda encoder, value: {"slice": encoder.encode_all((value.start, value.stop, value.step))},
    range: lambda encoder, value: {"range": encoder.encode_all((value.start, value.stop, value.step))},
    dict: lambda encoder, value: {"dict": encoder.encode_pairs(value)},
    collections.OrderedDict: lambda encoder, value: {"OrderedDict": encoder.encode_pairs(value)},
    collections.Counter: lambda encoder, value: {"Counter": encoder.encode_pairs(value)},
    collections.defaultdict: _Encoder.encode_defaultdict,
    collections.deque: _Encoder.encode_deque,
    dt.date: lambda _, value: {"date": value.isoformat()},
    dt.time: _Encoder.encode_time,
    dt.datetime: _Encoder.encode_time,
    dt.timedelta: lambda _, value: {"timedelta": _encode_timedelta(value)},
    dt.timezone: lambda _, value: {"timezone": _encode_timezone(value)},
    decimal.Decimal: lambda _, value: {"decimal": str(value)},
    **dict.fromkeys(_PATHS.values(), lambda _, value: {f"pathlib.{type(value).__name__}": _encode_text(value)}),
    **dict.fromkeys(_NUMPY_SCALARS, _encode_scalar),
    np.ndarray: _Encoder.encode_array,
    torch.dtype: lambda _, value: {"torch.dtype": _name_torch(value)},
    torch.device: lambda _, value: {"torch.device": str(value)},
    torch.layout: lambda _, value: {"torch.layout": _name_torch(value)},
    torch.Size: lambda encoder, value: {"torch.Size": encoder.encode_all(value)},
    torch.Tensor: _Encoder.encode_tensor,
}


# The decoders. Each takes the content of its tag.


def _decode_float(text: str) -> float:
    number: float
    (number,) = struct.unpack(">d", bytes.fromhex(text))
    return number


def _new_from_parts(kind: Callable[[list[Any]], Any]) -> _Coder:
    return lambda content: kind([_decode(element) for element in content])


def _new_from_pairs(kind: Callable[[], Any]) -> _Coder:
    def decode(content: Any) -> Any:
        mapping = kind()
        for key, value in content:
            mapping[_decode(key)] = _decode(value)
        return mapping

    return decode


def _decode_defaultdict(content: Any) -> Any:
    factory, pairs = content
    return collections.defaultdict(None if factory is None else _TYPES[factory], _new_from_pairs(dict)(pairs))


def _decode_time(kind: Any) -> _Coder:
    def decode(content: Any) -> Any:
        text, fold, zone = content
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=_decode(zone))

    return decode


def _decode_file(content: Any) -> io.BytesIO:
    text, position = content
    file = io.BytesIO(_from_base64(text))
    file.seek(position)
    return file


def _decode_timezone(content: Any) -> dt.timezone:
    (days, seconds, microseconds), *name = content
    return dt.timezone(dt.timedelta(days, seconds, microseconds), *name)


def _dtype_of(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(name)
    if dtype.str != name or dtype.kind not in _NUMPY_KINDS or dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(f"{name!r:.100} is no plain dtype of numpy")
    return dtype


def _decode_array(content: Any) -> np.ndarray[Any, Any]:
    name, shape, order, text = content
    raw, dtype = bytearray(_from_base64(text)), _dtype_of(name)
    if not dtype.itemsize or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"an array in it has {len(raw)} bytes, which are not those of its shape")
    array: np.ndarray[Any, Any] = np.ndarray(tuple(shape), dtype, raw, order=order)
    return array


def _decode_scalar(content: Any) -> Any:
    name, text = content
    raw, dtype = _from_base64(text), _dtype_of(name)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"a scalar in it has {len(raw)} bytes, which are not those of its dtype")
    if dtype.kind == "S":
        return np.bytes_(raw)
    if dtype.kind == "U":
        return np.str_(raw.decode("utf-32-le", "surrogatepass"))
    return np.void(raw) if dtype.kind == "V" else np.ndarray((), dtype, raw)[()]


def _decode_tensor(content: Any) -> torch.Tensor:
    name, shape, text = content
    raw = bytearray(_from_base64(text))
    if min(shape, default=0) < 0 or math.prod(shape) * ITEMSIZE_BYTES[name] != len(raw):
        raise ValueError(f"a tensor in it has {len(raw)} bytes, which are not those of its shape")
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, name), device="cpu")
    flat: torch.Tensor = torch.frombuffer(raw, dtype=torch.uint8)
    return flat.clone().view(getattr(torch, name)).reshape(shape)


def _member_of_torch(kind: type) -> _Coder:
    def decode(name: str) -> Any:
        member = vars(torch).get(name)
        if not isinstance(member, kind):
            raise ValueError(f"this version of torch has no {name!r:.100}")  # noqa: TRY004  # another torch wrote it
        return member

    return decode


_DECODERS: dict[str, _Coder] = {
    "int": lambda text: int(text, 16),
    "float": _decode_float,
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "complex": lambda content: complex(*map(_decode_float, content)),
    "bytes": _from_base64,
    "bytearray": lambda text: bytearray(_from_base64(text)),
    "BytesIO": _decode_file,
    "ellipsis": lambda _: ...,
    "tuple": _new_from_parts(tuple),
    "set": _new_from_parts(set),
    "frozenset": _new_from_parts(frozenset),
    "deque": lambda content: collections.deque(map(_decode, content[0]), content[1]),
    "range": lambda content: range(*map(_decode, content)),
    "slice": lambda content: slice(*map(_decode, content)),
    "dict": _new_from_pairs(dict),
    "OrderedDict": _new_from_pairs(collections.OrderedDict),
    "Counter": _new_from_pairs(collections.Counter),
    "defaultdict": _decode_defaultdict,
    "date": dt.date.fromisoformat,
    "time": _decode_time(dt.time),
    "datetime": _decode_time(dt.datetime),
    "timedelta": lambda content: dt.timedelta(*content),
    "timezone": _decode_timezone,
    "decimal": decimal.Decimal,
    **{f"pathlib.{name}": kind for name, kind in _PATHS.items()},
    "type": _TYPES.__getitem__,
    "numpy.type": lambda name: _dtype_of(name).type,
    "numpy.dtype": _dtype_of,
    "numpy.scalar": _decode_scalar,
    "numpy.array": _decode_array,
    "torch.dtype": _member_of_torch(torch.dtype),
    "torch.device": torch.device,
    "torch.layout": _member_of_torch(torch.layout),
    "torch.Size": _new_from_parts(torch.Size),
    "torch.tensor": _decode_tensor,
}
