"""The fault kit: that each fault is what it says, happens where it is told to, and happens again with the same seed."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt.errors import (
    AccessDeniedError,
    ChecksumRefusedError,
    InterruptedReadError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.base import Part, Store
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing.faults import (
    Absent,
    BrokenConnection,
    Call,
    Denied,
    Fault,
    Faults,
    FlippedBits,
    LaggingList,
    Rule,
    ServerError,
    Short,
    SlowDown,
    StalledBody,
    Tell,
    TimedOut,
    TruncatedBody,
)
from cloudckpt.testing.faulty_store import EVERYTHING

BODY = bytes(range(256)) * 4
_WAIT_S = 30.0


@pytest.fixture
def inner(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(f"faults-{request.node.name}")


def put(store: Store, key: str, body: bytes = BODY, *, if_absent: bool = False) -> None:
    views = [memoryview(body)[:100], memoryview(body)[100:]]
    store.put(key, views, crc32c=crc32c_of(views), if_absent=if_absent)


def content(store: Store, key: str) -> bytes:
    return store.read(key, max_bytes=1 << 20)


def filled(store: Store, key: str, *, size_bytes: int = len(BODY)) -> tuple[bytes, StoreError | None]:
    """What `read_into` leaves in the caller's memory, in views that do not end where bodies break off."""
    target = bytearray(size_bytes)
    views = [memoryview(target)[i : i + 37] for i in range(0, size_bytes, 37)]
    try:
        store.read_into(key, 0, views)
    except StoreError as error:
        return bytes(target), error
    return bytes(target), None


def keys(store: Store, prefix: str = "") -> list[str]:
    return sorted(info.key for info in store.list(prefix))


def num_different_bits(left: bytes, right: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))


CALLS: dict[str, Callable[[Store], object]] = {
    "abort_multipart": lambda store: store.abort_multipart("k", "gone"),
    "complete_multipart": lambda store: store.complete_multipart("k", store.create_multipart("k"), []),
    "copy_from": lambda store: store.copy_from(store.url("there"), "copied"),
    "create_multipart": lambda store: store.create_multipart("k"),
    "delete": lambda store: store.delete(["there"]),
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
    assert EVERYTHING == set(CALLS) == methods - {"url"}  # an address is no call
    put(inner, "there")
    for name, call in CALLS.items():
        faults = Faults(Rule(fault=SlowDown(), operations={name}), seed=3)
        with pytest.raises(ThrottledError, match="rule 0 with seed 3") as caught:
            call(faults(inner))
        assert caught.value.operation == name
        store = faults(inner)
        put(inner, "there")
        call(store)  # the second time it is passed on
        assert faults.num_injected == {"SlowDown": 1}
    assert store.uri == inner.uri
    assert store.url("a") == inner.url("a")
    assert (store.capabilities, store.limits) == (inner.capabilities, inner.limits)


@pytest.mark.parametrize(
    ("fault", "error", "operations"),
    [(Absent(), ObjectNotFoundError, {"read_into", "read", "head"}), (Short(), ShortObjectError, {"read_into"})],
)
def test_an_object_that_exists_can_be_denied(
    inner: MemoryStore, fault: Fault, error: type[StoreError], operations: set[str]
) -> None:
    """If this fails, a test of what a bogus 404 or 416 does tests nothing."""
    put(inner, "there")
    for name, call in CALLS.items():
        store = Faults(Rule(fault=fault))(inner)
        if name not in operations:
            with pytest.raises(ValueError, match="cannot happen to"):
                Faults(Rule(fault=fault, operations={name}))
            continue
        with pytest.raises(error, match="rule 0"):
            call(store)
        call(store)


@pytest.mark.parametrize(
    ("fault", "error", "is_carried_out"),
    [
        (ServerError(), TransientStoreError, False),
        (ServerError(carried_out=True), TransientStoreError, True),
        (SlowDown(), ThrottledError, False),
        (TimedOut(), StoreTimeoutError, False),
        (TimedOut(carried_out=True), StoreTimeoutError, True),
        (BrokenConnection(), TransientStoreError, False),
        (BrokenConnection(carried_out=True), TransientStoreError, True),
        (Denied(), AccessDeniedError, False),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_a_failed_call_was_carried_out_or_not(
    inner: MemoryStore, fault: Fault, error: type[StoreError], *, is_carried_out: bool
) -> None:
    """If this fails, a lost answer is a lost request, and the hardest case of the commit is never tried."""
    store = Faults(Rule(fault=fault, operations={"put"}))(inner)
    with pytest.raises(error, match="injected") as caught:
        put(store, "k", if_absent=True)
    assert type(caught.value) is error
    assert (caught.value.key, caught.value.operation) == (inner.url("k"), "put")
    assert keys(inner) == (["k"] if is_carried_out else [])
    if is_carried_out:
        with pytest.raises(ObjectExistsError):
            put(store, "k", if_absent=True)


@pytest.mark.parametrize("after_bytes", [None, 0, 1, 500, len(BODY), 5 * len(BODY)])
def test_a_truncated_body_has_filled_what_it_says(inner: MemoryStore, after_bytes: int | None) -> None:
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


def test_a_body_of_what_is_not_there_does_not_break_off_but_fails(inner: MemoryStore) -> None:
    """A missing object must not pass for a network that is worth another try."""
    store = Faults(Rule(fault=TruncatedBody(after_bytes=9), times=None))(inner)
    with pytest.raises(ObjectNotFoundError):
        store.read_into("k", 0, [memoryview(bytearray(100))])
    with pytest.raises(ObjectNotFoundError):
        content(store, "k")


def test_a_stalled_body_stands_still_until_it_is_released(inner: MemoryStore) -> None:
    """If this fails, a test of a stall takes as long as the stall, or the stall is none."""
    put(inner, "k")
    faults = Faults(Rule(fault=StalledBody(stall_s=1e6, after_bytes=10), times=None))
    store = faults(inner)
    with ThreadPoolExecutor() as pool:
        stalled = [pool.submit(filled, store, "k") for _ in range(3)]
        assert not any(future.done() for future in stalled)
        faults.release()
        for future in stalled:
            found, error = future.result(_WAIT_S)
            assert found == BODY[:10] + bytes(len(BODY) - 10)
            assert isinstance(error, InterruptedReadError)
    _, error = filled(Faults(Rule(fault=StalledBody(stall_s=0.01, after_bytes=0)))(inner), "k")
    assert type(error) is StoreTimeoutError


@pytest.mark.parametrize("num_bits", [1, 3, 8 * len(BODY)])
def test_bits_flip_in_what_is_read_and_stay_on_the_store(inner: MemoryStore, num_bits: int) -> None:
    """A flip on the way is healed by reading again, one at rest is not; a test has to know which it made."""
    put(inner, "k")
    store = Faults(Rule(fault=FlippedBits(num_bits=num_bits), times=2))(inner)
    found, error = filled(store, "k")
    assert error is None
    assert num_different_bits(found, BODY) == num_bits
    assert num_different_bits(content(store, "k"), BODY) == num_bits
    assert content(store, "k") == BODY


def test_bits_flip_in_what_is_written_where_nobody_looks(inner: MemoryStore) -> None:
    """If this fails, damage on the way to the store is never tried, or the caller's own memory is damaged."""
    original = bytearray(BODY)
    views = [memoryview(original)]
    store = Faults(Rule(fault=FlippedBits(), operations={"put"}))(inner)
    with pytest.raises(ChecksumRefusedError):
        store.put("k", views, crc32c=crc32c_of(views))
    assert keys(inner) == []
    store = Faults(Rule(fault=FlippedBits(noticed=False), times=2))(inner)
    store.put("k", views, crc32c=crc32c_of(views))
    assert num_different_bits(content(inner, "k"), BODY) == 1
    part = Part(number=1, offset_bytes=0, size_bytes=len(BODY))
    upload_id = store.create_multipart("m")
    uploaded = store.upload_part("m", upload_id, part, views, crc32c=crc32c_of(views))
    store.complete_multipart("m", upload_id, [uploaded])
    assert num_different_bits(content(inner, "m"), BODY) == 1
    assert bytes(original) == BODY


def test_a_listing_lags_by_writes(inner: MemoryStore) -> None:
    """If this fails, what a store shows too late is never tried: new objects missing, removed ones still there."""
    put(inner, "a/old", b"x" * 200)
    faults = Faults(Rule(fault=LaggingList(num_writes=2), times=None))
    store = faults(inner)
    put(store, "a/new")
    assert keys(store) == ["a/old"]
    store.delete(["a/old"])
    assert keys(store) == ["a/old"]
    assert [info.size_bytes for info in store.list("a/")] == [200]
    store.copy_from(store.url("a/new"), "b")
    assert keys(store) == ["a/new", "a/old"]
    assert keys(faults(MemoryStore(inner.uri.removeprefix("memory://"))), "a/") == ["a/new", "a/old"]
    with pytest.raises(ObjectExistsError):
        put(store, "b", if_absent=True)  # changed nothing, so it is no write
    assert keys(store) == ["a/new", "a/old"]
    assert keys(inner) == ["a/new", "b"]


def test_a_listing_lags_by_calls(inner: MemoryStore) -> None:
    """If this fails, a listing never catches up, or never lags."""
    store = Faults(Rule(fault=LaggingList(num_calls=2), times=None))(inner)
    put(store, "a")
    assert keys(store) == []
    store.head("a")
    assert keys(store) == ["a"]


def test_a_lost_answer_is_a_write_all_the_same(inner: MemoryStore) -> None:
    """If this fails, a listing lags behind too few writes when both faults come together."""
    rules = [Rule(fault=LaggingList(num_writes=1), times=None), Rule(fault=BrokenConnection(carried_out=True))]
    store = Faults(rules[0], Rule(fault=rules[1].fault, operations={"put"}))(inner)
    with pytest.raises(TransientStoreError):
        put(store, "a")
    assert keys(inner) == ["a"]
    assert keys(store) == []


def test_told_before_and_after(inner: MemoryStore) -> None:
    """If this fails, a process that a test kills at a call dies one call earlier or later."""
    told: list[tuple[str, list[str]]] = []
    tell = Tell(
        before=lambda call: told.append((f"before {call.operation} {call.key}", keys(inner))),
        after=lambda call: told.append((f"after {call.num_bytes} bytes", keys(inner))),
    )
    store = Faults(Rule(fault=tell, key="^k$"))(inner)
    put(store, "other")
    put(store, "k")
    put(store, "k")
    assert told == [("before put k", ["other"]), (f"after {len(BODY)} bytes", ["k", "other"])]


def outcome_of(store: Store, key: str) -> str:
    try:
        put(store, key)
    except StoreError as error:
        return type(error).__name__
    return "done"


def test_rules_count_what_they_match(inner: MemoryStore) -> None:
    """A fault that hits another call than the one meant would test something else, or nothing."""
    faults = Faults(
        Rule(fault=SlowDown(), operations={"put"}, key="^data/", skip=1, times=2),
        Rule(fault=Denied(), operations={"put"}, key="/secret$", times=None),
    )
    store = faults(inner)
    wanted = [
        ("data/0", "done"),
        ("other/data/0", "done"),
        ("data/secret", "ThrottledError"),  # the first that is due acts
        ("data/1", "ThrottledError"),
        ("data/2", "done"),
        ("data/secret", "AccessDeniedError"),
    ]
    assert [(key, outcome_of(store, key)) for key, _ in wanted] == wanted
    assert keys(store) == ["data/0", "data/2", "other/data/0"]
    assert faults.num_injected == {"SlowDown": 2, "Denied": 1}
    assert faults.num_calls == {"put": 6, "list": 1}
    assert [(done.call.key, done.rule, done.nth) for done in faults.injected] == [
        ("data/secret", 0, 1),
        ("data/1", 0, 1),
        ("data/secret", 1, 2),
    ]


def test_each_key_is_counted_for_itself(inner: MemoryStore) -> None:
    """If this fails, which key fails twice depends on which thread was faster."""
    store = Faults(Rule(fault=ServerError(), operations={"put"}, skip=1, times=1, each_key=True))(inner)
    outcomes = [(key, outcome_of(store, key)) for key in "aabab"]
    failed = "TransientStoreError"
    assert outcomes == [("a", "done"), ("a", failed), ("b", "done"), ("a", "done"), ("b", failed)]


def outcomes_by_key(faults: Faults, inner: Store, names: Sequence[str], *, threads: int) -> dict[str, list[str]]:
    """What became of four calls for each key, the keys' threads getting in each other's way as they like."""
    store = faults(inner)
    start = threading.Barrier(threads)

    def work(mine: Sequence[str]) -> list[tuple[str, list[str]]]:
        start.wait(_WAIT_S)
        return [(name, [outcome_of(store, name) for _ in range(4)]) for name in mine]

    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(work, [names[n::threads] for n in range(threads)], timeout=_WAIT_S)
        return dict(pair for result in results for pair in result)


def test_the_same_seed_gives_the_same_faults_whatever_threads_do(inner: MemoryStore) -> None:
    """If this fails, a failure that a seed found cannot be found again."""
    rules = [
        Rule(fault=SlowDown(), probability=0.2, times=None),
        Rule(fault=BrokenConnection(carried_out=True), probability=0.2, times=None),
    ]
    names = [f"data/{n}" for n in range(100)]
    first = outcomes_by_key(Faults(*rules, seed=5), inner, names, threads=1)
    assert first == outcomes_by_key(Faults(*rules, seed=5), inner, names[::-1], threads=8)
    assert first != outcomes_by_key(Faults(*rules, seed=6), inner, names, threads=1)
    told = [outcome for outcomes in first.values() for outcome in outcomes]
    assert 50 < told.count("ThrottledError") < 110
    assert 40 < told.count("TransientStoreError") < 95


def test_ids_of_attempts_play_no_part(inner: MemoryStore) -> None:
    """Two runs of one save never have the same ids; a seed would mean nothing."""
    rule = Rule(fault=SlowDown(), probability=0.5, times=None)

    def outcomes(attempt: str) -> list[str]:
        store = Faults(rule, seed=1)(inner)
        return [outcome_of(store, f"data/{attempt}/{n}-0.safetensors") for n in range(30)]

    plain = outcomes("20260131T235959123Z-1f2e3d4c5b6a")
    assert plain == outcomes("20270131T235959123Z-000000000000")
    assert len(set(plain)) == 2


def test_a_copy_for_another_process_counts_from_the_beginning(inner: MemoryStore) -> None:
    """If this fails, ranks that are spawned get no faults, or faults that depend on what their parent did."""
    faults = Faults(Rule(fault=ServerError(), operations={"put"}), Rule(fault=Denied(), key="^d"), seed=9)
    assert outcome_of(faults(inner), "a") == "TransientStoreError"
    for again in (pickle.loads(pickle.dumps(faults)), copy.copy(faults), copy.deepcopy(faults)):
        assert again.injected == ()
        assert (again.rules, again.seed, repr(again)) == (faults.rules, 9, repr(faults))
        with pytest.raises(TransientStoreError, match="seed 9"):
            put(again(inner), "a")
    assert outcome_of(faults(inner), "a") == "done"


@pytest.mark.parametrize(
    ("fault", "operations", "message"),
    [
        (SlowDown(), {"get"}, "no operations"),
        (TruncatedBody(), {"put"}, "cannot happen"),
        (LaggingList(), {"list", "head"}, "cannot happen to"),
        (FlippedBits(), {"delete"}, "cannot happen"),
    ],
    ids=["unknown", "truncated put", "lagging head", "flipped delete"],
)
def test_a_rule_that_could_never_act_is_refused(fault: Fault, operations: set[str], message: str) -> None:
    """A mistyped rule would inject nothing, and the test that uses it would pass."""
    with pytest.raises(ValueError, match=message):
        Rule(fault=fault, operations=operations)
    with pytest.raises(TypeError, match="collection"):
        Rule(fault=SlowDown(), operations="put")


def test_a_rule_for_all_happens_only_where_it_can() -> None:
    """If this fails, a body is truncated of a call that has none."""
    assert not Rule(fault=TruncatedBody()).matches(Call(operation="put", key="k"))
    assert Rule(fault=TruncatedBody()).matches(Call(operation="read", key="k"))
    assert Rule(fault=FlippedBits()).matches(Call(operation="upload_part", key="k"))
    assert not Rule(fault=LaggingList()).matches(Call(operation="list_uploads", key="k"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule(fault="SlowDown"), "fault is one of this module's faults"),
        (lambda: Rule(fault=SlowDown), "fault is one of this module's faults"),
        (lambda: Rule(fault=SlowDown(), operations="put"), "collection of names"),
        (lambda: Rule(fault=SlowDown(), operations=[]), "nothing would ever happen"),
        (lambda: Rule(fault=SlowDown(), operations={"upload"}), r"no operations \['upload'\]"),
        (lambda: Rule(fault=SlowDown(), key="("), "key is no regular expression"),
        (lambda: Rule(fault=SlowDown(), skip=-1), "skip must be"),
        (lambda: Rule(fault=SlowDown(), times=0), "times must be"),
        (lambda: Rule(fault=SlowDown(), times=True), "times must be"),
        (lambda: Rule(fault=SlowDown(), probability=5), "probability must be"),
        (lambda: Rule(fault=SlowDown(), skip=-1, probability="1"), "skip must be .*; probability must be"),
        (lambda: Faults(SlowDown()), "Faults takes rules"),
        (lambda: TruncatedBody(after_bytes=-1), "after_bytes must be"),
        (lambda: StalledBody(stall_s=float("inf")), "stall_s must be"),
        (lambda: StalledBody(stall_s=1.0, after_bytes=0.5), "after_bytes must be"),
        (lambda: FlippedBits(num_bits=0), "num_bits must be"),
        (lambda: LaggingList(num_writes=-1), "num_writes must be"),
        (lambda: LaggingList(num_calls=1.5), "num_calls must be"),
        (lambda: Tell(before="x"), "before is a function"),
    ],
)
def test_what_no_rule_can_mean_is_refused_at_once(make, words):
    """If this fails, a test that was to break something breaks nothing, and passes."""
    with pytest.raises((TypeError, ValueError), match=words):
        make()
