"""The fault kit: each fault is what it says, happens where it is told to, and happens again with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cloudckpt.errors import (
    AccessDeniedError,
    ChecksumRefusedError,
    InterruptedReadError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.base import Part, Store, crc32c_of
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing.faults import Fails, Faults, FlippedBits, Rule, TruncatedBody

BODY = bytes(range(256)) * 4
_WAIT_S = 30.0


@pytest.fixture
def inner(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(f"faults-{request.node.name}")


def put(store: Store, key: str, body: bytes = BODY) -> None:
    views = [memoryview(body)[:100], memoryview(body)[100:]]
    store.put(key, views, crc32c=crc32c_of(views))


def content(store: Store, key: str) -> bytes:
    return store.read(key, max_bytes=1 << 20)


def filled(store: Store, key: str) -> tuple[bytes, StoreError | None]:
    """Return the memory after `read_into`, in views that do not end where bodies break off, and its error."""
    target = bytearray(len(BODY))
    views = [memoryview(target)[i : i + 37] for i in range(0, len(BODY), 37)]
    try:
        store.read_into(key, 0, views)
    except StoreError as error:
        return bytes(target), error
    return bytes(target), None


def keys(store: Store) -> list[str]:
    return sorted(info.key for info in store.list())


CALLS: dict[str, Callable[[Store], object]] = {
    "abort_multipart": lambda store: store.abort_multipart("k", "gone"),
    "complete_multipart": lambda store: store.complete_multipart("k", store.create_multipart("k"), []),
    "copy_from": lambda store: store.copy_from(store.url("there"), "copied"),
    "copy_part": lambda store: store.copy_part(
        "k",
        store.create_multipart("k"),
        Part(number=1, offset_bytes=0, size_bytes=1),
        source_url=store.url("there"),
        source_begin=0,
    ),
    "create_multipart": lambda store: store.create_multipart("k"),
    "delete": lambda store: store.delete(["there"]),
    "free_bytes": lambda store: store.free_bytes(),
    "head": lambda store: store.head("there"),
    "list": keys,
    "list_directories": lambda store: list(store.list_directories()),
    "list_parts": lambda store: list(store.list_parts("k", store.create_multipart("k"))),
    "list_uploads": lambda store: list(store.list_uploads()),
    "probe": lambda store: store.probe(),
    "put": lambda store: put(store, "k"),
    "read": lambda store: content(store, "there"),
    "read_into": lambda store: store.read_into("there", 0, [memoryview(bytearray(4))]),
    "upload_part": lambda store: store.upload_part(
        "k", store.create_multipart("k"), Part(number=1, offset_bytes=0, size_bytes=0), [], crc32c=0
    ),
}


def test_every_method_of_a_store_is_passed_on_and_can_fail(inner: MemoryStore) -> None:
    """If this fails, a new method of stores goes round the wrappers, and is never tried with faults."""
    methods = {name for name, value in vars(Store).items() if callable(value) and not name.startswith("_")}
    assert set(CALLS) == methods - {"error", "url"}  # an error and an address are no calls
    for name, call in CALLS.items():
        put(inner, "there")
        faults = Faults(Rule(fault=Fails(ThrottledError), operations={name}), seed=3)
        store = faults(inner)
        with pytest.raises(ThrottledError, match="rule 0 with seed 3") as caught:
            call(store)
        assert caught.value.operation == name
        call(store)  # the second time it is passed on
        assert faults.num_injected == {"ThrottledError": 1}
    assert (store.uri, store.capabilities, store.limits) == (inner.uri, inner.capabilities, inner.limits)


@pytest.mark.parametrize("carried_out", [False, True])
def test_a_failed_call_was_carried_out_or_not(inner: MemoryStore, *, carried_out: bool) -> None:
    """If this fails, a lost answer is a lost request, and the hardest case of the commit is never tried."""
    store = Faults(Rule(fault=Fails(StoreTimeoutError, carried_out=carried_out)))(inner)
    with pytest.raises(StoreTimeoutError, match="injected"):
        put(store, "k")
    assert keys(inner) == (["k"] if carried_out else [])
    put(store, "k")


@pytest.mark.parametrize("after_bytes", [None, 0, 1, 500, len(BODY), 5 * len(BODY)])
def test_a_truncated_body_has_filled_the_bytes_that_it_reports(inner: MemoryStore, after_bytes: int | None) -> None:
    """A load resumes at the byte reached: were that not filled, it would take zeros for weights."""
    put(inner, "k")
    store = Faults(Rule(fault=TruncatedBody(after_bytes=after_bytes), times=2))(inner)
    found, error = filled(store, "k")
    assert isinstance(error, InterruptedReadError)
    count = error.received_bytes
    assert count < len(BODY)
    assert after_bytes is None or count == min(after_bytes, len(BODY) - 1)
    assert found == BODY[:count] + bytes(len(BODY) - count)
    with pytest.raises(InterruptedReadError):
        content(store, "k")
    assert filled(store, "k") == (BODY, None)


def num_different_bits(left: bytes, right: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("wrong", [{"fault": Fails}, {"fault": FlippedBits(), "operations": "put"}])
def test_rules_refuse_a_class_for_a_fault_and_a_text_for_names(wrong: dict[str, Any]) -> None:
    """If this fails, a rule injects nothing, and counts it as injected."""
    with pytest.raises(TypeError, match=r", not "):
        Rule(**wrong)


def test_a_bit_flips_on_the_way_and_nowhere_else(inner: MemoryStore) -> None:
    """If this fails, damage in transit is never tried, or the caller's own memory or the stored object is damaged."""
    original = bytearray(BODY)
    views = [memoryview(original)]
    store = Faults(Rule(fault=FlippedBits(), operations={"put"}))(inner)
    with pytest.raises(ChecksumRefusedError):
        store.put("k", views, crc32c=crc32c_of(views))
    assert keys(inner) == []
    assert bytes(original) == BODY
    put(inner, "k")
    store = Faults(Rule(fault=FlippedBits(), times=2))(inner)
    found, error = filled(store, "k")
    assert error is None
    assert num_different_bits(found, BODY) == 1
    assert num_different_bits(content(store, "k"), BODY) == 1
    assert content(store, "k") == BODY


def outcome_of(store: Store, key: str) -> str:
    try:
        put(store, key)
    except StoreError as error:
        return type(error).__name__
    return "done"


def test_rules_count_what_they_match(inner: MemoryStore) -> None:
    """A fault that hits another call than the one meant would test something else, or nothing."""
    faults = Faults(
        Rule(fault=Fails(ThrottledError), operations={"put"}, key="^data/", skip=1, times=2),
        Rule(fault=Fails(AccessDeniedError), operations={"put"}, key="/secret$", times=None),
        Rule(fault=Fails(TransientStoreError), operations={"put"}, key="^each", skip=1, each_key=True),
    )
    store = faults(inner)
    wanted = [
        ("data/0", "done"),
        ("other/data/0", "done"),
        ("data/secret", "ThrottledError"),  # the first that is due acts
        ("data/1", "ThrottledError"),
        ("data/2", "done"),
        ("data/secret", "AccessDeniedError"),
        ("each/a", "done"),
        ("each/a", "TransientStoreError"),
        ("each/b", "done"),
        ("each/a", "done"),
        ("each/b", "TransientStoreError"),
    ]
    assert [(key, outcome_of(store, key)) for key, _ in wanted] == wanted
    assert faults.num_injected == {"ThrottledError": 2, "AccessDeniedError": 1, "TransientStoreError": 2}
    assert faults.num_calls == {"put": len(wanted)}
