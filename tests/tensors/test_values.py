"""Plain values load without consent, what else is saved is said to be refused, and no hostile pickle gets far."""

from __future__ import annotations

import codecs
import collections
import datetime as dt
import enum
import io
import os
import pathlib
import pickle
import random
import struct
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cloudckpt.tensors.unpickling import load_safely
from cloudckpt.tensors.values import check_value

quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024  # as users have them


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


class Text(str):
    __slots__ = ()


def packed(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def described(value: Any) -> Any:  # noqa: PLR0911  # a table
    """Equal for values of the same types and bits alone."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist()
    if kind is io.BytesIO:
        return kind, value.getvalue(), value.tell()
    if isinstance(value, dict):
        made_by = getattr(value, "default_factory", None)
        return kind, made_by, [(described(key), described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return kind, getattr(value, "maxlen", None), [described(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(described(item)) for item in value)
    return kind, repr(value)


dtypes = hnp.scalar_dtypes()
native = dtypes.map(lambda dtype: dtype.newbyteorder("="))  # arrays of others are turned round by numpy's own pickling
any_text = st.text(st.characters(exclude_categories=()))  # surrogates too
integers = (
    st.integers() | st.integers(2, 5000).map(lambda bits: 2**bits) | st.integers(2000, 2100).map(lambda n: -(2**n))
)
hashable = st.one_of(
    st.none(), st.booleans(), integers, st.floats(), st.complex_numbers(), any_text, st.binary(), st.just(...),
    st.dates(), st.timedeltas(), st.times().map(lambda time: time.replace(fold=0)),  # protocol 2 loses it
    st.datetimes(timezones=st.just(dt.timezone.utc) | st.none()).map(lambda time: time.replace(fold=0)),
    st.timedeltas(dt.timedelta(hours=-5), dt.timedelta(hours=5)).map(dt.timezone), st.decimals(allow_nan=False),
    st.lists(st.text("ab/. é"), max_size=3).map(lambda parts: pathlib.Path(*parts)),
    st.just(pathlib.PureWindowsPath("c:\\a")), st.just(range(3, 9, 2)),
    st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.strided, torch.device("cuda:1"), torch.Size([2, 0])]),
    st.sampled_from([int, dict, collections.OrderedDict, np.float32, np.bool_, np.ndarray, torch.per_tensor_affine]),
    dtypes, dtypes.flatmap(lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()])),
)  # fmt: skip
arrays = hnp.arrays(native, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
leaves = st.one_of(
    hashable, st.binary().map(bytearray), st.binary().map(io.BytesIO), arrays, arrays.map(np.asfortranarray),
    st.builds(slice, integers, st.none()), st.lists(st.floats(width=32)).map(torch.tensor),
    st.randoms(use_true_random=False).map(lambda source: random.Random(source.random()).getstate()),
    st.sampled_from([getattr(np.random, name)(1).state for name in ("MT19937", "PCG64", "Philox", "SFC64")]),
    st.integers(0, 9).map(lambda seed: np.random.RandomState(seed).get_state()),
)  # fmt: skip


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(hashable, inner, max_size=3),
            st.dictionaries(hashable, inner, max_size=3).map(collections.OrderedDict),
            st.dictionaries(hashable, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
            st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 3)),
            st.sets(hashable, max_size=3), st.frozensets(hashable, max_size=3),
            st.lists(any_text).map(collections.Counter),
        ),
        max_leaves=8,
    )  # fmt: skip


def is_warned_of(value: object) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_value(value, "v", uri="memory://a")
    return bool(caught)


refused = st.sampled_from([
    Color.RED, Point(1, b""), Holder(3), Text("x"), Holder, os.system, np.random.default_rng(0), random.Random(0),
    np.array([{}], dtype=object), np.zeros(1, dtype=[("a", "i4"), ("b", "O")]), np.zeros(1, dtype=[("a", "i4")]),
    np.ma.array([1]), np.dtype("f4", metadata={"a": 1}), torch.Generator(),
    torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
])  # fmt: skip


@quick
@given(nested(leaves | refused))
def test_every_plain_value_comes_back_and_of_others_a_save_warns(value: Any) -> None:
    """If this fails, a save is silent about a value that no load gives back, or gives back as something else."""
    try:
        stored = packed(value)
    except (AttributeError, pickle.PicklingError):  # a class that cannot be found again
        return
    try:
        loaded = load_safely(stored)
    except pickle.UnpicklingError:
        assert is_warned_of(value)
    else:
        assert described(loaded) == described(value)
        assert not is_warned_of(value)


class Asks:
    """Pickles as a call, which may give a state to what it made."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


RECONSTRUCT, SCALAR = np.empty(0).__reduce__()[0], np.float64().__reduce__()[0]
HUGE = 2**40


def array(shape: tuple[int, ...], dtype: object, content: object) -> Asks:
    return Asks(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, content))


def dtype_of(name: str, state: tuple[Any, ...] | None = None) -> Asks:
    return Asks(np.dtype, (name, False, True), *([] if state is None else [state]))


def amplified() -> Any:
    items = list(range(1000))
    return [Asks(set, (items,)) for _ in range(1000)]


def nested_dtype() -> Asks:
    made: Any = dtype_of("V0", (3, "|", None, ("a",), {"a": (np.dtype("V0"), 0)}, 0, 1, 0))
    for _ in range(60):
        made = dtype_of("V0", (3, "|", None, ("a", "b"), {"a": (made, 0), "b": (made, 0)}, 0, 1, 0))
    return made


def tensor_with(name: str, value: object) -> Asks:
    rebuild, arguments = torch.ones(1).__reduce_ex__(2)[:2]
    call: Any = torch._tensor._rebuild_from_type_v2
    return (
        Asks(call, (arguments[0], torch.Tensor, arguments[1], {name: value}))
        if rebuild is call
        else Asks(call, (rebuild, torch.Tensor, arguments, {name: value}))
    )


HIDDEN = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)  # flags that say: there are no objects
HOSTILE = {
    "array larger than its bytes": lambda: array((2**57,), np.dtype("f8"), b""),
    "array smaller than its bytes": lambda: array((1,), np.dtype("f8"), b"0" * 16),
    "array of a negative shape": lambda: array((-1, -8), np.dtype("u1"), b"0" * 8),
    "array of objects": lambda: array((1,), np.dtype("O"), [1]),
    "array of bytes as objects": lambda: array((1,), dtype_of("V8", HIDDEN), b"\x01" * 8),
    "array of bytes as objects, deeper": lambda: array(
        (1,), dtype_of("V8", (3, "|", (dtype_of("V8", HIDDEN), (1,)), None, None, 8, 1, 0)), b"\x01" * 8
    ),
    "array of larger elements than it says": lambda: array(
        (1,), dtype_of("V8", (3, "|", None, ("a",), {"a": (np.dtype("f8"), HUGE)}, 8, 1, 16)), b"\x01" * 8
    ),
    "array made of a huge shape": lambda: Asks(RECONSTRUCT, (np.ndarray, (HUGE,), b"b")),
    "array made by its class": lambda: Asks(np.ndarray, ((HUGE,),)),
    "dtype of objects": lambda: dtype_of("O8"),
    "dtype of numpy itself, changed": lambda: Asks(
        np.dtype, ("f8", False, False), (3, ">", None, None, None, -1, -1, 0)
    ),
    "dtype by a list": lambda: Asks(np.dtype, ([("a", "O")], False, True)),
    "scalar of objects": lambda: Asks(SCALAR, (np.dtype("O"), 3)),
    "scalar of too few bytes": lambda: Asks(SCALAR, (np.dtype("f8"), b"1")),
    "bytearray by its size": lambda: Asks(bytearray, (HUGE,)),
    "bytes by their number": lambda: Asks(bytes, (HUGE,)),
    "set of a range": lambda: Asks(set, (range(HUGE),)),
    "frozenset of a range": lambda: Asks(frozenset, (range(HUGE),)),
    "list of a range": lambda: Asks(list, (range(HUGE),)),
    "deque of a range": lambda: Asks(collections.deque, (range(HUGE),)),
    "counter of a range": lambda: Asks(collections.Counter, (range(HUGE),)),
    "size of a range": lambda: Asks(torch.Size, (range(HUGE),)),
    "number of a text": lambda: Asks(int, ("9" * 10,)),
    "tensor by its size": lambda: Asks(torch.Tensor, (HUGE,)),
    "typed tensor by its size": lambda: Asks(torch.FloatTensor, (HUGE,)),
    "tensor by any function": lambda: Asks(torch._tensor._rebuild_from_type_v2, (list, list, (range(HUGE),), {})),
    "quantized tensor beyond its storage": lambda: Asks(
        torch._utils._rebuild_qtensor,
        (torch.ones(1).untyped_storage(), 0, (HUGE,), (1,), (torch.per_tensor_affine, 0.1, 0), False, {}),
    ),
    "another codec": lambda: Asks(codecs.encode, ("uryyb", "rot13")),
    "a default by any function": lambda: Asks(collections.defaultdict, (os.getcwd,)),
    "a default by a function that is allowed": lambda: Asks(collections.defaultdict, (codecs.encode,)),
    "many sets of one list": amplified,
    "dtype of dtypes without end": nested_dtype,
    "array of a subarray's dtype": lambda: array(
        (1,), dtype_of("V8", (3, "|", (np.dtype("u1"), (8,)), None, None, 8, 1, 0)), b"0" * 8
    ),
    "one element that becomes many": lambda: Asks(
        torch._utils._rebuild_device_tensor_from_cpu_tensor,
        (torch.ones(1).expand(HUGE), torch.float64, "cpu", False),
    ),
    "tensor that is given other data": lambda: tensor_with("data", torch.ones(2)),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_hostile_pickles_are_refused(name: str) -> None:
    """If this fails, who can write to a bucket can take memory without end, or has bytes of his read as addresses."""
    stored = packed(HOSTILE[name]())
    assert len(stored) < 100_000
    with pytest.raises(
        (pickle.UnpicklingError, ValueError)
    ):  # no MemoryError, and nothing else that says: it was tried
        load_safely(stored)


def test_a_sparse_tensor_with_an_index_outside_is_refused() -> None:
    """If this fails, who can write to a bucket reads and writes memory beside a tensor."""
    layout_and_parts = (torch.sparse_coo, (torch.tensor([[HUGE]]), torch.ones(1), torch.Size([2]), False))
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        load_safely(packed(Asks(torch._utils._rebuild_sparse_tensor, layout_and_parts)))


def opcodes(value: object) -> bytes:
    """Those that leave `value` on the stack."""
    return pickle.dumps(value, 2)[2:-1]


STATE_OF_ONE_BYTE = (1, (1,), np.dtype("u1"), False, b"1")


@pytest.mark.parametrize(
    "code",
    [
        opcodes(array((1,), np.dtype("u1"), b"1")) + opcodes(STATE_OF_ONE_BYTE) + pickle.BUILD,
        opcodes(collections.OrderedDict) + opcodes({"x": 1}) + pickle.BUILD,
        opcodes(torch.ones) + opcodes((2,)) + pickle.REDUCE,
        opcodes(bytearray(b"x")) + opcodes(1) + pickle.APPEND,
        opcodes(np.arange(3)) + opcodes(0) + opcodes(1) + pickle.SETITEM,
        opcodes(list) + opcodes(()) + pickle.NEWOBJ,
        opcodes(os.getcwd),
        pickle.dumps(os.getcwd, 4)[2:-1],
        pickle.BYTEARRAY8 + struct.pack("<Q", HUGE),
    ],
    ids=[
        "fills an array twice",
        "changes a class",
        "calls torch",
        "appends",
        "sets",
        "makes",
        "names",
        "later",
        "huge",
    ],
)
def test_hostile_opcodes_are_refused(code: bytes) -> None:
    """If this fails, a pickle that no pickler writes frees memory that is in use, or changes a class of the process."""
    buffer = io.BytesIO()
    with torch.serialization._open_zipfile_writer(buffer) as archive:
        data = b"\x80\x02" + code + b"."
        archive.write_record("data.pkl", data, len(data))
    with pytest.raises(pickle.UnpicklingError):
        load_safely(buffer.getvalue())


@quick
@given(st.data())
def test_damaged_pickles_make_nothing_else(data: st.DataObject) -> None:
    """If this fails, some bytes of a pickle crash the process that loads it, or run what is not on the list."""
    stored = bytearray(packed((np.arange(4.0), {"a": b"x" * 20}, collections.deque([1], 3), frozenset({2}))))
    begin = stored.index(b"\x80\x02")
    for _ in range(data.draw(st.integers(1, 3))):
        stored[begin + data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_safely(stored)
        except Exception as error:  # noqa: BLE001  # any will do: it is one that a caller can handle
            assert str(error) is not None  # noqa: PT017
