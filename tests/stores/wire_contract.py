"""Clauses about denied calls, and about a broken network: refusals, lost answers, silence, truncated bodies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import pytest
from tests.kit.wire import (
    GCS_TOO_MANY_REQUESTS,
    LOSE_ANSWER,
    S3_SLOW_DOWN,
    CutAnswer,
    CutRequest,
    Reply,
    Wire,
    WireRule,
)

from cloudckpt.errors import (
    AccessDeniedError,
    CredentialsError,
    InterruptedReadError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract import StoreContract
from cloudckpt.testing.contract_base import (
    capture_outcome,
    content,
    crc,
    keys,
    make_bodies,
    make_parts,
    put,
    read_range,
    upload_part,
    upload_parts,
)

# The credentials may allow reading, and some stores begin an upload without a request.
_MAY_SUCCEED = ("create_multipart", "head", "list", "list_directories", "list_uploads", "read", "read_into")
_SLACK_S = 10.0
"""Additional time that a slow machine may take."""
_REFUSALS: dict[str, tuple[Reply, ...]] = {
    "s3": (S3_SLOW_DOWN, Reply(status=503), Reply(status=429)),
    "gs": (GCS_TOO_MANY_REQUESTS, Reply(status=429)),
}


BODY = bytes(range(256)) * 16
"""Content of the objects that the calls are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """A repeatable call of one method of the store."""

    key: str
    run: Callable[[Store], object]


class DeniedContract(StoreContract):
    """The contract of all stores, with a clause for stores that refuse credentials or permissions."""

    def denied(self, store: Store) -> Store:
        """Return a store with the same root whose credentials are refused or may not write."""
        pytest.skip("the server refuses nobody")

    def test_a_denied_call_says_so(self, store: Store) -> None:
        """The error must name the operation and the key: neither a retry nor another checkpoint helps."""
        denied = self.denied(store)
        calls = make_calls(store)
        if store.probe().conditional_create:
            calls["create"] = StoreCall(
                key="run/created", run=lambda far: put(far, "run/created", b"x", if_absent=True)
            )
        before = {key: content(store, key) for key in keys(store)}
        outcomes = {name: capture_outcome(functools.partial(call.run, denied)) for name, call in calls.items()}
        for name, outcome in outcomes.items():
            if name in _MAY_SUCCEED and not isinstance(outcome, Exception):
                continue
            assert isinstance(outcome, AccessDeniedError | CredentialsError), (name, outcome)
            url = store.url(calls[name].key).rstrip("/")
            assert outcome.key.startswith(url), name
            assert url in str(outcome), name
        assert {key: content(store, key) for key in keys(store)} == before


class WireContract(DeniedContract):
    """The contract of all stores, with further clauses for stores over HTTP."""

    short_timeout_s = 1.5
    """Timeout of the store in the clause about silent servers."""

    def endpoint_url(self, store: Store) -> str:
        """Return the endpoint of `store` as ``http://host:port``."""
        raise NotImplementedError

    def at(self, store: Store, endpoint_url: str, *, timeout_s: float) -> Store:
        """Return a store with the same root at another endpoint."""
        raise NotImplementedError

    @contextlib.contextmanager
    def open_wire(self, store: Store, *, timeout_s: float = 30.0) -> Iterator[tuple[Wire, Store]]:
        """Yield a wire in front of the store, and the store reached through it."""
        with Wire(self.endpoint_url(store)) as wire:
            yield wire, self.at(store, wire.url, timeout_s=timeout_s)

    def test_a_throttled_call_says_so(self, store: Store) -> None:
        """A throttled client must wait longer before it retries; a client that gives up loses a save."""
        with self.open_wire(store) as (wire, far):
            for refusal in _REFUSALS[store.uri.partition("://")[0]]:
                wire.clear()
                calls = _calls_that_send(store, wire, far)
                wire.add(WireRule(action=refusal, times=None))
                outcomes = {name: capture_outcome(functools.partial(call.run, far)) for name, call in calls.items()}
                assert {name: type(outcome) for name, outcome in outcomes.items()} == dict.fromkeys(
                    calls, ThrottledError
                ), (refusal, outcomes)
                for name, outcome in outcomes.items():
                    assert isinstance(outcome, ThrottledError)
                    # A part that is an object of its own has a longer name.
                    assert outcome.key.startswith(store.url(calls[name].key).rstrip("/")), name

    def test_a_store_that_is_down_is_worth_another_try(self, store: Store) -> None:
        """Servers restart and addresses change; the error must allow a retry and name the unreachable key."""
        with self.open_wire(store) as (wire, far):
            calls = _calls_that_send(store, wire, far)
            with wire.refusing():
                outcomes = {name: capture_outcome(functools.partial(call.run, far)) for name, call in calls.items()}
            failed = {name: isinstance(outcome, TransientStoreError) for name, outcome in outcomes.items()}
            assert failed == dict.fromkeys(calls, True), outcomes
            again = {name: capture_outcome(functools.partial(call.run, far)) for name, call in calls.items()}
            assert not [outcome for outcome in again.values() if isinstance(outcome, Exception)], again

    def test_any_call_can_be_repeated_after_a_lost_answer(self, store: Store) -> None:
        """The store carried the call out, but the client does not know: a retry must be allowed and must succeed."""
        with self.open_wire(store) as (wire, far):
            for name, call in _calls_that_send(store, wire, far).items():
                wire.clear()
                wire.add(WireRule(action=LOSE_ANSWER))
                lost = capture_outcome(functools.partial(call.run, far))
                assert isinstance(lost, TransientStoreError), (name, lost)
                assert not isinstance(lost, ThrottledError), (name, lost)
                again = capture_outcome(functools.partial(call.run, far))
                assert not isinstance(again, Exception), (name, again)
            assert content(store, "run/kept") == content(store, "run/new") == BODY
            assert "run/removed" not in keys(store)

    def test_a_lost_answer_to_a_create_is_found_out_by_a_second_one(self, store: Store) -> None:
        """The commit is such a call: it must neither count as failed nor be made twice."""
        self.require_create(store)
        with self.open_wire(store) as (wire, far):
            wire.add(WireRule(action=LOSE_ANSWER))
            with pytest.raises(TransientStoreError):
                put(far, "manifest", b"ours", if_absent=True)
            assert content(store, "manifest") == b"ours"
            with pytest.raises(ObjectExistsError):
                put(far, "manifest", b"ours", if_absent=True)
            with pytest.raises(ObjectExistsError):
                put(far, "manifest", b"theirs", if_absent=True)
            assert content(store, "manifest") == b"ours"

    def test_whichever_answer_to_a_completion_is_lost_the_object_is_whole(self, store: Store) -> None:
        """The second try completes the upload or reports that it is gone, and an abort does not harm the object."""
        self.require_multipart(store)
        with self.open_wire(store) as (wire, far):
            num_answers = 0
            while self._complete_with_lost_answer(num_answers, wire, store, far):
                num_answers += 1
            assert num_answers > 0

    def _complete_with_lost_answer(self, skip: int, wire: Wire, store: Store, far: Store) -> bool:
        key = f"object-{skip}"
        bodies = make_bodies(store, 3)
        upload_id = store.create_multipart(key)
        done = upload_parts(store, key, upload_id, bodies)
        wire.clear()
        wire.add(WireRule(action=LOSE_ANSWER, skip=skip))
        num_before = wire.num_acted
        first = capture_outcome(lambda: far.complete_multipart(key, upload_id, done))
        has_lost = wire.num_acted > num_before
        if first is not None:
            assert isinstance(first, TransientStoreError), first
            second = capture_outcome(lambda: far.complete_multipart(key, upload_id, done))
            assert second is None or isinstance(second, ObjectNotFoundError), second
        assert content(store, key) == b"".join(bodies)
        store.abort_multipart(key, upload_id)
        assert content(store, key) == b"".join(bodies)
        assert keys(store, key) == [key]
        assert list(store.list_uploads(key)) == []
        return has_lost

    def test_a_broken_upload_writes_nothing(self, store: Store) -> None:
        """Half of a body must never become an object: the old object remains until the second try."""
        with self.open_wire(store) as (wire, far):
            put(store, "a", b"old")
            body = BODY * 64
            for after_bytes in (0, len(body) // 2, len(body)):
                for key in ("a", "new"):
                    wire.add(WireRule(action=CutRequest(after_bytes=after_bytes)))
                    with pytest.raises(TransientStoreError):
                        put(far, key, body)
                assert keys(store) == ["a"]
                assert content(store, "a") == b"old"
            put(far, "a", body)
            assert content(store, "a") == body

    @pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
    def test_a_broken_answer_says_how_far_it_came(self, store: Store, *, reset: bool) -> None:
        """A read resumes at the byte reached: a wrong count leaves a hole in the weights, or doubles some."""
        with self.open_wire(store) as (wire, far):
            put(store, "a", BODY)
            for after_bytes in (0, 1, 1500, len(BODY)):
                target = bytearray(b"\xee" * len(BODY))
                views = [memoryview(target)[:1000], memoryview(target)[1000:]]
                wire.add(WireRule(action=CutAnswer(after_bytes=after_bytes, reset=reset)))
                received = self._count_bytes_before_interruption(far, views)
                assert received <= min(after_bytes, len(BODY) - 1)
                assert target[:received] == BODY[:received]
                assert reset or received == min(after_bytes, len(BODY) - 1)
                far.read_into("a", received, [memoryview(target)[received:]])
                assert target == BODY
                wire.add(WireRule(action=CutAnswer(after_bytes=after_bytes, reset=reset)))
                with pytest.raises(TransientStoreError):
                    content(far, "a")

    @staticmethod
    def _count_bytes_before_interruption(far: Store, views: list[memoryview]) -> int:
        with pytest.raises(TransientStoreError) as caught:
            far.read_into("a", 0, views)
        error = caught.value
        if isinstance(error, InterruptedReadError):
            return error.received_bytes
        return 0  # nothing was received, so any other transient error is right too

    @pytest.mark.parametrize(
        "action",
        [
            pytest.param(None, id="connect"),
            pytest.param(CutRequest(stalls=True), id="request"),
            pytest.param(CutAnswer(stalls=True), id="answer"),
            pytest.param(CutAnswer(after_bytes=1000, stalls=True), id="body"),
        ],
    )
    def test_silence_ends_in_time(self, store: Store, action: CutRequest | CutAnswer | None) -> None:
        """A rank that waits for ever blocks all others: a silent server may cost `timeout_s`, and no more."""
        with self.open_wire(store, timeout_s=self.short_timeout_s) as (wire, far):
            body = bytes(16 << 20)  # more than any socket buffers
            put(store, "a", BODY)
            tasks: list[Callable[[], object]] = [
                lambda: far.put("b", [memoryview(body)], crc32c=crc(body)),
                lambda: read_range(far, "a", 0, len(BODY)),
                lambda: keys(far),
            ]
            if action is not None:
                wire.add(WireRule(action=action, times=None))
            most_s = 2 * self.short_timeout_s + _SLACK_S
            pool = ThreadPoolExecutor(len(tasks))
            with wire.deaf() if action is None else contextlib.nullcontext():
                futures = [pool.submit(capture_outcome, task) for task in tasks]
                hanging = wait(futures, most_s).not_done
            pool.shutdown(wait=False)  # a call that hangs ends with the wire
            assert not hanging
            outcomes = [future.result() for future in futures]
            if isinstance(action, CutAnswer) and action.after_bytes is not None:
                outcomes = outcomes[1:2]  # the answers to the other calls have no such body
            for outcome in outcomes:
                assert isinstance(outcome, StoreTimeoutError | InterruptedReadError), outcomes


def make_calls(store: Store) -> dict[str, StoreCall]:
    """Make one call of each method of the store, about objects that exist."""
    for key in ("run/kept", "run/removed"):
        put(store, key, BODY)
    found = {
        "put": StoreCall(key="run/new", run=lambda far: put(far, "run/new", BODY)),
        "read_into": StoreCall(key="run/kept", run=lambda far: read_range(far, "run/kept", 0, len(BODY))),
        "read": StoreCall(key="run/kept", run=lambda far: content(far, "run/kept")),
        "head": StoreCall(key="run/kept", run=lambda far: far.head("run/kept")),
        "list": StoreCall(key="run/", run=lambda far: keys(far, "run/")),
        "list_directories": StoreCall(key="", run=lambda far: list(far.list_directories())),
        "delete": StoreCall(key="run/removed", run=lambda far: far.delete(["run/removed"])),
    }
    with contextlib.suppress(UnsupportedOperationError):
        source_url = store.url("run/kept")
        store.copy_from(source_url, "run/by-service")
        found["copy_from"] = StoreCall(key="run/kept", run=lambda far: far.copy_from(source_url, "run/by-service"))
    if store.capabilities.multipart:
        body = make_bodies(store, 1)[0]
        part = make_parts([body])[0]
        upload_id = store.create_multipart("run/upload")
        gone_id = store.create_multipart("run/gone")
        found |= {
            "create_multipart": StoreCall(key="run/more", run=lambda far: far.create_multipart("run/more")),
            "upload_part": StoreCall(
                key="run/upload", run=lambda far: upload_part(far, "run/upload", upload_id, part, body)
            ),
            "list_uploads": StoreCall(key="", run=lambda far: list(far.list_uploads())),
            "abort_multipart": StoreCall(key="run/gone", run=lambda far: far.abort_multipart("run/gone", gone_id)),
        }
    if store.capabilities.listed_parts != "none":
        found["list_parts"] = StoreCall(key="run/upload", run=lambda far: list(far.list_parts("run/upload", upload_id)))
    return found


def _calls_that_send(store: Store, wire: Wire, far: Store) -> dict[str, StoreCall]:
    """Return the calls of `make_calls` that send requests; some stores begin an upload without one."""
    calls = dict(make_calls(store))
    if "create_multipart" in calls:
        num_before = len(wire.requests)
        upload_id = far.create_multipart("run/asked-for")
        if len(wire.requests) == num_before:
            del calls["create_multipart"]
        store.abort_multipart("run/asked-for", upload_id)
    return calls
