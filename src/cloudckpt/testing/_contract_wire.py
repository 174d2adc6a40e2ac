"""Clauses about what goes wrong on the way to the store: refusals, lost answers, silence, broken bodies."""
# ruff: noqa: S101
# (these are tests)

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest

from cloudckpt.errors import (
    InterruptedReadError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.base import Store, UploadedPart
from cloudckpt.testing import wire as wires
from cloudckpt.testing._contract_base import Clauses
from cloudckpt.testing._contract_calls import BODY, Call, calls_of, outcome_of
from cloudckpt.testing._contract_tools import (
    bodies_of,
    content,
    crc,
    finished_within,
    keys,
    parts_of,
    put,
    read_range,
    upload_part,
)
from cloudckpt.testing.wire import CutAnswer, CutRequest, LoseAnswer, Reply, Rule, StallAnswer, StallRequest, Wire

_SLACK_S = 10.0
"""What a slow machine may take besides waiting."""
_REFUSALS: dict[str, tuple[Reply, ...]] = {
    "s3": (wires.S3_SLOW_DOWN, Reply(status=503), Reply(status=429)),
    "gs": (wires.GCS_TOO_MANY_REQUESTS, Reply(status=429)),
}


class WireClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`. They need `endpoint_url` and `at`."""

    short_timeout_s = 1.5
    """The patience of the stores that nobody answers."""

    def test_a_throttled_call_says_so(self, store: Store) -> None:
        """Retries go by it: whoever is throttled must wait longer, and whoever takes it for a failure loses a save."""
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            for refusal in _REFUSALS.get(store.uri.partition("://")[0], (Reply(status=429), Reply(status=503))):
                wire.clear()
                calls = _calls_that_send(store, wire, far)
                wire.add(Rule(action=refusal, times=None))
                outcomes = {name: outcome_of(functools.partial(call.run, far)) for name, call in calls.items()}
                assert {name: type(outcome) for name, outcome in outcomes.items()} == dict.fromkeys(
                    calls, ThrottledError
                ), (refusal, outcomes)
                for name, outcome in outcomes.items():
                    assert isinstance(outcome, ThrottledError)
                    # A part that is an object of its own has a longer name.
                    assert outcome.key.startswith(store.url(calls[name].key).rstrip("/")), name

    def test_a_store_that_is_down_is_worth_another_try(self, store: Store) -> None:
        """Servers restart and addresses move; a save must outlive that, and its error must name what it could not
        reach.
        """
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            calls = _calls_that_send(store, wire, far)
            with wire.refusing():
                outcomes = {name: outcome_of(functools.partial(call.run, far)) for name, call in calls.items()}
            failed = {name: isinstance(outcome, TransientStoreError) for name, outcome in outcomes.items()}
            assert failed == dict.fromkeys(calls, True), outcomes
            again = {name: outcome_of(functools.partial(call.run, far)) for name, call in calls.items()}
            assert not [outcome for outcome in again.values() if isinstance(outcome, Exception)], again

    def test_after_a_lost_answer_any_call_can_be_made_again(self, store: Store) -> None:
        """The store has done what it was asked and nobody knows: the error must say that a second try may help, and
        the second try must.
        """
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            for name, call in _calls_that_send(store, wire, far).items():
                wire.clear()
                wire.add(Rule(action=LoseAnswer()))
                lost = outcome_of(functools.partial(call.run, far))
                assert isinstance(lost, TransientStoreError), (name, lost)
                assert not isinstance(lost, ThrottledError), (name, lost)
                again = outcome_of(functools.partial(call.run, far))
                assert not isinstance(again, Exception), (name, again)
            assert content(store, "run/kept") == content(store, "run/new") == content(store, "run/copy") == BODY
            assert "run/removed" not in keys(store)

    def test_a_lost_answer_to_a_create_is_found_out_by_a_second_one(self, store: Store) -> None:
        """The commit is such a call: it must neither be taken for failed for good, nor be made twice."""
        if self.lacks_create(store):
            return
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            wire.add(Rule(action=LoseAnswer()))
            with pytest.raises(TransientStoreError):
                put(far, "manifest", b"ours", if_absent=True)
            assert content(store, "manifest") == b"ours"
            with pytest.raises(ObjectExistsError):
                put(far, "manifest", b"ours", if_absent=True)
            with pytest.raises(ObjectExistsError):
                put(far, "manifest", b"theirs", if_absent=True)
            assert content(store, "manifest") == b"ours"

    def test_whichever_answer_to_a_completion_is_lost_the_object_is_whole(self, store: Store) -> None:
        """The second try completes the upload, or says that it is gone; and whatever cleans up behind it does no harm
        to the object.
        """
        if self.lacks_multipart(store):
            return
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            num_answers = 0
            while self._completes_despite_losing(num_answers, wire, store, far):
                num_answers += 1
            assert num_answers > 0

    def _completes_despite_losing(self, skip: int, wire: wires.Wire, store: Store, far: Store) -> bool:
        key = f"object-{skip}"
        bodies = bodies_of(store, 3)
        upload_id = store.create_multipart(key)
        done: list[UploadedPart] = [
            upload_part(store, key, upload_id, part, body) for part, body in zip(parts_of(bodies), bodies, strict=True)
        ]
        wire.clear()
        wire.add(Rule(action=LoseAnswer(), skip=skip))
        num_before = wire.num_acted
        first = outcome_of(lambda: far.complete_multipart(key, upload_id, done))
        has_lost = wire.num_acted > num_before
        if first is not None:
            assert isinstance(first, TransientStoreError), first
            second = outcome_of(lambda: far.complete_multipart(key, upload_id, done))
            assert second is None or isinstance(second, ObjectNotFoundError), second
        assert content(store, key) == b"".join(bodies)
        store.abort_multipart(key, upload_id)
        assert content(store, key) == b"".join(bodies)
        assert keys(store, key) == [key]
        assert list(store.list_uploads(key)) == []
        return has_lost

    def test_a_broken_upload_writes_nothing(self, store: Store) -> None:
        """Half of a body must never be taken for a whole object: what lay there stays, until the second try."""
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            put(store, "a", b"old")
            body = BODY * 64
            for after_bytes in (0, len(body) // 2, len(body)):
                for key in ("a", "new"):
                    wire.add(Rule(action=CutRequest(after_bytes=after_bytes)))
                    with pytest.raises(TransientStoreError):
                        put(far, key, body)
                assert keys(store) == ["a"]
                assert content(store, "a") == b"old"
            put(far, "a", body)
            assert content(store, "a") == body

    def test_a_broken_part_is_no_part(self, store: Store) -> None:
        """The part is sent again; half of it must not end up in the object."""
        if self.lacks_multipart(store):
            return
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            bodies = bodies_of(store, 2)
            parts = parts_of(bodies)
            upload_id = store.create_multipart("a")
            wire.add(Rule(action=CutRequest(after_bytes=len(bodies[0]) // 2)))
            with pytest.raises(TransientStoreError):
                upload_part(far, "a", upload_id, parts[0], bodies[0])
            done = [upload_part(far, "a", upload_id, part, body) for part, body in zip(parts, bodies, strict=True)]
            store.complete_multipart("a", upload_id, done)
            assert content(store, "a") == b"".join(bodies)

    @pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
    def test_a_broken_answer_says_how_far_it_came(self, store: Store, *, reset: bool) -> None:
        """A read resumes at the byte reached: a wrong count leaves a hole in the weights, or doubles some."""
        with self.wired(store) as wired:
            if wired is None:
                return
            wire, far = wired
            put(store, "a", BODY)
            for after_bytes in (0, 1, 1500, len(BODY)):
                target = bytearray(b"\xee" * len(BODY))
                views = [memoryview(target)[:1000], memoryview(target)[1000:]]
                wire.add(Rule(action=CutAnswer(after_bytes=after_bytes, reset=reset)))
                received = self._interrupted_after(far, views)
                assert received <= min(after_bytes, len(BODY) - 1)
                assert target[:received] == BODY[:received]
                assert reset or received == min(after_bytes, len(BODY) - 1)
                far.read_into("a", received, [memoryview(target)[received:]])
                assert target == BODY
                wire.add(Rule(action=CutAnswer(after_bytes=after_bytes, reset=reset)))
                with pytest.raises(TransientStoreError):
                    content(far, "a")

    @staticmethod
    def _interrupted_after(far: Store, views: list[memoryview]) -> int:
        with pytest.raises(TransientStoreError) as caught:
            far.read_into("a", 0, views)
        error = caught.value
        if isinstance(error, InterruptedReadError):
            return error.received_bytes
        return 0  # nothing came at all, so any other error that is worth a second try is right too

    @pytest.mark.parametrize(
        "action",
        [
            pytest.param(None, id="connect"),
            pytest.param(StallRequest(), id="request"),
            pytest.param(StallAnswer(), id="answer"),
            pytest.param(StallAnswer(after_bytes=1000), id="body"),
        ],
    )
    def test_silence_ends_in_time(self, store: Store, action: StallRequest | StallAnswer | None) -> None:
        """A rank that waits for ever holds up all the others: whoever falls silent costs `timeout_s`, no more."""
        with self.wired(store, timeout_s=self.short_timeout_s) as wired:
            if wired is None:
                return
            wire, far = wired
            body = bytes(16 << 20)  # more than any socket buffers
            put(store, "a", BODY)
            tasks: list[Callable[[], object]] = [
                lambda: far.put("b", [memoryview(body)], crc32c=crc(body)),
                lambda: read_range(far, "a", 0, len(BODY)),
                lambda: keys(far),
            ]
            if action is not None:
                wire.add(Rule(action=action, times=None))
            most_s = 2 * self.short_timeout_s + _SLACK_S
            with wire.deaf() if action is None else contextlib.nullcontext():
                outcomes = finished_within(most_s, tasks)
            if isinstance(action, StallAnswer) and action.after_bytes is not None:
                outcomes = outcomes[1:2]  # the others' answers have no such body
            for outcome in outcomes:
                assert isinstance(outcome, StoreTimeoutError | InterruptedReadError), outcomes


def _calls_that_send(store: Store, wire: Wire, far: Store) -> dict[str, Call]:
    """Every call; but for the beginning of an upload where the store draws the id itself and asks nobody."""
    calls = dict(calls_of(store))
    if "create_multipart" in calls:
        num_before = len(wire.requests)
        upload_id = far.create_multipart("run/asked-for")
        if len(wire.requests) == num_before:
            del calls["create_multipart"]
        store.abort_multipart("run/asked-for", upload_id)
    return calls
