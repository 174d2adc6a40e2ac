"""Plain values load without consent, what else is saved is said to be refused, and no hostile pickle gets far."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import enum
import functools
import io
import json
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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.docs.independent_reader import plain

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.plain_values import decode_plain, encode_plain
from cloudckpt.tensors.values import check_value, load_stored

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
    if kind is io.BytesIO:
        return kind, value.getvalue(), value.tell()
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        made_by = getattr(value, "default_factory", None)
        return kind, made_by, [(described(key), described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return kind, getattr(value, "maxlen", None), [described(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(described(item)) for item in value)
    return kind, repr(value)


def neutral(value: Any) -> Any:  # noqa: C901, PLR0911, PLR0912  # a table
    """The value as `plain` gives it, which knows neither numpy nor torch."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        return "numpy.array", value.dtype.str, value.shape, order, value.tobytes(order)
    if isinstance(value, np.generic):
        return "numpy.scalar", value.dtype.str, value.tobytes()
    if isinstance(value, np.dtype):
        return "numpy.dtype", value.str
    if isinstance(value, torch.Tensor):
        return "torch.tensor", str(value.dtype)[6:], tuple(value.shape), bytes(value.view(torch.uint8).tolist())
    if kind in (torch.dtype, torch.layout):
        return f"torch.{kind.__name__}", str(value)[6:]
    if kind is io.BytesIO:
        return "BytesIO", value.getvalue(), value.tell()
    if kind is torch.device:
        return "torch.device", str(value)
    if kind is torch.Size:
        return "torch.Size", tuple(value)
    if isinstance(value, pathlib.PurePath):
        return f"pathlib.{kind.__name__}", str(value)
    if isinstance(value, type):
        if issubclass(value, np.generic):
            return "numpy.type", np.dtype(value).str
        return "type", value.__name__ if value.__module__ == "builtins" else f"{value.__module__}.{value.__name__}"
    if isinstance(value, dict):
        items = [(neutral(key), neutral(item)) for key, item in value.items()]
        if kind is collections.defaultdict:
            return "defaultdict", value.default_factory.__name__, dict(items)
        return kind(dict(items))
    if kind is collections.deque:
        return kind(map(neutral, value), value.maxlen)
    return kind(map(neutral, value)) if kind in (list, tuple, set, frozenset) else value


dtypes = hnp.scalar_dtypes()
doubles = st.floats() | st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack(">d", bits)[0])  # payloads
any_text = st.text(st.characters(exclude_categories=()))  # surrogates too
integers = (
    st.integers() | st.integers(2, 5000).map(lambda bits: 2**bits) | st.integers(2000, 2100).map(lambda n: -(2**n))
)
hashable = st.one_of(
    st.none(), st.booleans(), integers, doubles, st.builds(complex, doubles, doubles),
    any_text, st.binary(), st.just(...),
    st.dates(), st.timedeltas(), st.builds(dt.time.replace, st.times(), fold=st.integers(0, 1)),
    st.datetimes(timezones=st.just(dt.timezone(dt.timedelta(hours=-5), "é")) | st.none(), allow_imaginary=False),
    st.timedeltas(dt.timedelta(hours=-5), dt.timedelta(hours=5)).map(dt.timezone), st.decimals(),
    st.lists(st.text("ab/. é"), max_size=3).map(lambda parts: pathlib.Path(*parts)),
    st.just(pathlib.PureWindowsPath("c:\\a")), st.just(range(3, 9, 2)),
    st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.strided] ),
    st.sampled_from([torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 0])]),
    st.sampled_from([int, dict, collections.OrderedDict, np.float32, np.bool_, np.ndarray]),
    dtypes, dtypes.flatmap(lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()])),
)  # fmt: skip
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
leaves = st.one_of(
    hashable, st.binary().map(bytearray), st.binary().map(io.BytesIO), arrays, arrays.map(np.asfortranarray),
    st.builds(slice, integers, st.none()), st.lists(st.floats(width=32)).map(torch.tensor),
    st.randoms(use_true_random=False).map(lambda source: random.Random(source.random()).getstate()),
    st.sampled_from(("MT19937", "PCG64", "Philox", "SFC64")).map(lambda name: getattr(np.random, name)(1).state),
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
    """True also if a save refuses it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_value(value, "v", uri="memory://a")
        except UnsupportedValueError:
            return True
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
        packed(value)
    except (AttributeError, pickle.PicklingError):  # a class that cannot be found again
        return
    encoded = encode_plain(value)
    try:
        loaded = load_stored(packed(value) if encoded is None else encoded, is_json=encoded is not None)
    except pickle.UnpicklingError:
        assert encoded is None
        assert is_warned_of(value)
    else:
        assert described(loaded) == described(value)
        assert not is_warned_of(value)


@quick
@example([float("nan"), float("-inf")])
@given(nested(leaves))
def test_plain_values_are_json_that_an_independent_reader_decodes(value: Any) -> None:
    """If this fails, a program in another language reads other values than were saved, or cannot read them at all."""
    encoded = encode_plain(value)
    assert encoded is not None
    assert described(decode_plain(encoded)) == described(value)
    assert described(plain(json.loads(encoded))) == described(neutral(value))


ONE_LIST: list[Any] = []
CYCLE: list[Any] = []
CYCLE.append((CYCLE,))
LABELLED: Any = collections.OrderedDict(a=1)
LABELLED.version = 2
NOT_PLAIN = {
    "one list in two places": [ONE_LIST, (ONE_LIST,)],
    "cycle": CYCLE,
    "dict with attributes": LABELLED,
    "subclass of str": {"a": Text("x")},
    "named tuple": [Point(1, 2)],
    "member of an enum": {Color.RED: 1},
    "default of a class": collections.defaultdict(Holder),
    "tensor that requires grad": {torch.ones(1, requires_grad=True)},
    "view of a tensor": {torch.ones(3)[1:]},
    "tensors of one storage": collections.deque([(whole := torch.ones(2)), whole.view(2)]),
    "array of objects": np.array([{}], dtype=object),
    "array of fields": np.zeros(1, dtype=[("a", "i4")]),
    "class": Holder,
    "deeper than the stack": functools.reduce(lambda inner, _: [inner], range(100_000), []),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_value_that_json_would_change_is_not_plain(name: str) -> None:
    """If this fails, a class, a shared part or an attribute is lost without a word."""
    assert encode_plain(NOT_PLAIN[name]) is None


MALFORMED = [
    b"", b"{", b"\xff", b'{"a": 1, "b": 2}', b"{}", b'{"no.such.tag": 1}', b'{"type": "os.system"}', b"[" * 100_000,
    b'{"torch.dtype": "nn"}', b'{"torch.layout": "float32"}', b'{"numpy.dtype": "O"}', b'{"numpy.dtype": "i4,O"}',
    b'{"numpy.array": ["|O", [1], "C", "AAAAAAAAAAA="]}', b'{"numpy.array": ["<f8", [1099511627776], "C", ""]}',
    b'{"numpy.array": ["<f8", [-1, -1], "C", "AAAAAAAAAAA="]}', b'{"numpy.scalar": ["<f8", "AAAA"]}',
    b'{"numpy.array": ["<U0", [1099511627776], "C", ""]}', b'{"torch.tensor": ["float32", [1099511627776], ""]}',
    b'{"torch.tensor": ["float32", [-1], "AAAAAA=="]}', b'{"defaultdict": ["os.getcwd", []]}', b'{"set": [[]]}',
    b'{"bytes": 1099511627776}', b'{"bytearray": 1099511627776}', b'{"tuple": 1099511627776}', b'{"float": "00"}',
]  # fmt: skip


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_json_raises(content: bytes) -> None:
    """If this fails, who can write to a bucket takes memory without end, or picks an object of the process."""
    with pytest.raises(Exception) as caught:  # any that a caller can handle
        decode_plain(content)
    assert not isinstance(caught.value, MemoryError)


class Asks:
    """Pickles as a call, which may give a state to what it made."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


HOSTILE = {
    "function of the system": lambda: Asks(os.getcwd, ()),
    "array of objects": lambda: np.array([{}], dtype=object),
    "array whose bytes are taken for addresses": lambda: Asks(
        np.empty(0).__reduce__()[0],
        (np.ndarray, (0,), b"b"),
        (
            1,
            (1,),
            Asks(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)),
            0,
            b"1",
        ),
    ),
    "default by any function": lambda: Asks(collections.defaultdict, (os.getcwd,)),
    "tensor by any function": lambda: Asks(torch._tensor._rebuild_from_type_v2, (os.getcwd, list, (), {})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str) -> None:
    """If this fails, who can write to a bucket runs code in each process that loads from it."""
    with pytest.raises(pickle.UnpicklingError):
        load_stored(packed(HOSTILE[name]()), is_json=False)


@pytest.mark.parametrize(
    "code", [pickle.BYTEARRAY8 + struct.pack("<Q", 2**40), pickle.dumps(os.getcwd, 4)[2:-1], pickle.dumps(id, 2)[2:-1]],
    ids=["of memory without end", "of a later protocol", "that name a function"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_hostile_opcodes_are_refused(code: bytes) -> None:
    """If this fails, a pickle that no pickler of torch writes takes memory, or names a function."""
    buffer = io.BytesIO()
    with torch.serialization._open_zipfile_writer(buffer) as archive:
        data = b"\x80\x02" + code + b"."
        archive.write_record("data.pkl", data, len(data))
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        load_stored(buffer.getvalue(), is_json=False)


def test_load_leaves_the_list_of_allowed_classes_as_it_was() -> None:
    """If this fails, a load takes from the user's list what the user has put there, or adds to it."""
    with torch.serialization.safe_globals([dt.date, Holder]):
        before = set(torch.serialization.get_safe_globals())
        assert load_stored(packed([dt.date(2026, 1, 2), frozenset({1})]), is_json=False)[0] == dt.date(2026, 1, 2)
        assert set(torch.serialization.get_safe_globals()) == before


@quick
@given(st.data())
def test_damaged_json_makes_nothing_else(data: st.DataObject) -> None:
    """If this fails, some bytes crash the process that loads them."""
    encoded = encode_plain((np.arange(4.0), {"a": b"x" * 20}, collections.deque([1], 3), frozenset({2}), torch.ones(2)))
    stored = bytearray(encoded or b"")
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Exception):  # any will do: it is one that a caller can handle
        decode_plain(stored)
