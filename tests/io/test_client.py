"""The errors that are retried, how long, and the end of the retries, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.kit.clock import FakeClock

from cloudckpt.errors import (
    AccessDeniedError,
    ChecksumRefusedError,
    CloudckptError,
    InterruptedReadError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.memory import MemoryStore

PASSING = [TransientStoreError, ThrottledError, StoreTimeoutError, ChecksumRefusedError]
LASTING = [StoreError, ObjectNotFoundError, AccessDeniedError, ShortObjectError]


def client_with(**settings: Any) -> StoreClient:
    return StoreClient(MemoryStore("retry"), **settings)


def error_of(kind: type[StoreError]) -> StoreError:
    return kind("no", key="s3://bucket/key", operation="put")


@dataclass(slots=True)
class Failing:
    """Raises `errors` one after the other, then returns 'done'."""

    errors: list[Exception]
    before: Callable[[], None] = lambda: None
    num_calls: int = field(default=0)

    def __call__(self) -> str:
        self.num_calls += 1
        self.before()
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.mark.parametrize("kind", PASSING)
def test_transient_error_is_retried(clock: FakeClock, kind: type[StoreError]) -> None:
    """If this fails, one lost packet fails a save of terabytes."""
    seen: list[StoreError] = []
    client = client_with(retries=3, timeout_s=60, on_retry=seen.append)
    errors = [error_of(kind) for _ in range(3)]
    attempt = Failing(list(errors))
    assert client.call(attempt) == "done"
    assert attempt.num_calls == 4
    assert (client.num_requests, client.num_retries) == (4, 3)
    assert seen == errors
    assert len(clock.waits_s) == 3


@pytest.mark.parametrize("kind", LASTING)
def test_permanent_error_is_raised_at_once(clock: FakeClock, kind: type[StoreError]) -> None:
    """If this fails, a missing permission is found only after a minute of trying."""
    attempt = Failing([error_of(kind)])
    with pytest.raises(kind):
        client_with(retries=3, timeout_s=60).call(attempt)
    assert (attempt.num_calls, clock.waits_s) == (1, [])


def test_foreign_exception_becomes_a_store_error_that_names_it(clock: FakeClock) -> None:
    """If this fails, bugs are hidden by repetition, or pass by all that handles the failures of stores."""
    error = ValueError("a bug")
    attempt = Failing([error])  # type: ignore[list-item]
    with pytest.raises(StoreError, match="ValueError: a bug") as caught:
        client_with(retries=3, timeout_s=60).call(attempt)
    assert caught.value.__cause__ is error
    assert attempt.num_calls == 1


@pytest.mark.parametrize("retries", [0, 1, 5])
def test_a_call_fails_after_the_last_retry(clock: FakeClock, retries: int) -> None:
    """If this fails, a store that is down is asked for ever, or not often enough."""
    attempt = Failing([error_of(TransientStoreError) for _ in range(100)])
    client = client_with(retries=retries, timeout_s=1e9)
    with pytest.raises(TransientStoreError):
        client.call(attempt)
    assert attempt.num_calls == retries + 1
    assert (client.num_requests, client.num_retries) == (retries + 1, retries)


def test_a_call_fails_at_the_deadline(clock: FakeClock) -> None:
    """If this fails, a save hangs for longer than timeout_s without progress."""
    attempt = Failing([error_of(TransientStoreError) for _ in range(1000)])
    begun_s = clock.now_s
    with pytest.raises(TransientStoreError):
        client_with(retries=1000, timeout_s=30).call(attempt)
    assert clock.now_s - begun_s < 30
    assert attempt.num_calls > 3


def test_stop_gives_up_what_would_be_tried_again(clock: FakeClock) -> None:
    """If this fails, a save that has failed on one thread keeps its others waiting."""
    client = client_with(retries=5, timeout_s=60)
    attempt = Failing([error_of(TransientStoreError) for _ in range(9)])
    client.stop()
    with pytest.raises(TransientStoreError):
        client.call(attempt)
    assert (attempt.num_calls, clock.waits_s, client.num_retries) == (1, [], 0)
    assert client.call(lambda: "a first attempt is still made") == "a first attempt is still made"


def test_refusal_outlasts_later_stops(clock: FakeClock) -> None:
    """If this fails, a cancelled save goes on with requests, because one of its threads failed afterwards."""
    client, refusal = client_with(retries=5, timeout_s=60), CloudckptError("the save was cancelled")
    client.stop(refusal)
    client.stop()
    attempt = Failing([])
    with pytest.raises(CloudckptError) as caught:
        client.call(attempt)
    assert (caught.value, attempt.num_calls, clock.waits_s) == (refusal, 0, [])


# --- what is confirmed


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_an_answer_to_be_confirmed_is_asked_for_again(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """If this fails, one bogus answer is believed, or a gateway that restarts is given no time."""
    monkeypatch.setattr("cloudckpt.io.client.FIRST_LOOK_DELAY_S", 0.1)
    look = Failing([error_of(ObjectNotFoundError) for _ in range(num_failures)])
    assert client_with(retries=0, timeout_s=60).confirm(look, errors=ObjectNotFoundError) == "done"
    assert look.num_calls == num_failures + 1
    assert [0.05 * 2**i <= wait_s <= 0.1 * 2**i for i, wait_s in enumerate(clock.waits_s)] == [True] * num_failures


def test_an_unconfirmed_answer_is_not_returned_after_a_stop(clock: FakeClock) -> None:
    """If this fails, a failure elsewhere makes the first bogus answer damage."""
    client = client_with(retries=9, timeout_s=60)
    look = Failing([error_of(ObjectNotFoundError)], before=client.stop)
    with pytest.raises(CloudckptError, match="was not looked at again") as caught:
        client.confirm(look, errors=ObjectNotFoundError)
    assert not isinstance(caught.value, ObjectNotFoundError)


@pytest.mark.parametrize(
    ("kinds", "num_calls", "end"),
    [
        ("AAA", 3, ObjectNotFoundError),
        ("AABAAA", 6, ObjectNotFoundError),
        ("AABBABBB", 8, ShortObjectError),
        ("ABABA", 6, None),  # three in all, and never two in a row
        ("AABAAB", 7, None),
        ("ABABABABABABABAB", 16, TransientStoreError),
        ("AABBAABBAABBAABB", 16, TransientStoreError),
    ],
)
def test_only_looks_in_a_row_confirm(
    clock: FakeClock, kinds: str, num_calls: int, end: type[StoreError] | None
) -> None:
    """If this fails, three bogus answers among good ones are damage, or contradictions are asked for without end."""
    errors = {"A": ObjectNotFoundError, "B": ShortObjectError}
    look = Failing([error_of(errors[kind]) for kind in kinds])
    client = client_with(retries=0, timeout_s=60)
    if end is None:
        assert client.confirm(look, errors=tuple(errors.values())) == "done"
    else:
        with pytest.raises(StoreError) as caught:
            client.confirm(look, errors=tuple(errors.values()))
        assert type(caught.value) is end
    assert look.num_calls == num_calls


def test_each_confirmation_has_evidence_of_its_own(clock: FakeClock) -> None:
    """If this fails, the evidence of one call counts for the next, and its first bogus answer is believed."""
    client = client_with(retries=0, timeout_s=60)
    for _ in range(3):
        look = Failing([error_of(ObjectNotFoundError) for _ in range(2)])
        assert client.confirm(look, errors=ObjectNotFoundError) == "done"


@pytest.mark.parametrize(("received_bytes", "num_calls"), [(0, 3), (1, 11)])
def test_only_progress_renews_the_retries(clock: FakeClock, received_bytes: int, num_calls: int) -> None:
    """If this fails, a body that breaks off ten times in all ends a load, or one that never begins has no end."""
    broken = [
        InterruptedReadError("no", key="k", operation="read_into", received_bytes=received_bytes) for _ in range(10)
    ]
    attempt = Failing(list(broken))
    client = client_with(retries=2, timeout_s=60)
    if received_bytes:
        assert client.call(attempt) == "done"
    else:
        with pytest.raises(InterruptedReadError):
            client.call(attempt)
    assert attempt.num_calls == num_calls


def test_throttling_is_waited_out_for_longer_than_other_failures(clock: FakeClock) -> None:
    """If this fails, a store that asks for fewer requests gets as many as before."""
    for kind, first_s in ((TransientStoreError, 0.1), (ThrottledError, 0.5)):
        clock.waits_s.clear()
        client_with(retries=9, timeout_s=600).call(Failing([error_of(kind) for _ in range(9)]))
        longest_s = [min(first_s * 2**num_failures, 10.0) for num_failures in range(9)]
        assert all(limit_s / 2 <= wait_s <= limit_s for wait_s, limit_s in zip(clock.waits_s, longest_s, strict=True))


# --- calls of which no request was made


def unsent() -> StoreError:
    error = error_of(TransientStoreError)
    error.is_unsent = True
    return error


def test_unsent_request_is_bounded_by_time_only(clock: FakeClock) -> None:
    """If this fails, a metadata service that starts ends a job after the five retries that are meant for the store."""
    attempt = Failing([unsent() for _ in range(9)])
    assert client_with(retries=0, timeout_s=60).call(attempt) == "done"
    attempt, begun_s = Failing([unsent() for _ in range(10_000)]), clock.now_s
    with pytest.raises(TransientStoreError):
        client_with(retries=0, timeout_s=30).call(attempt)
    assert 15 < clock.now_s - begun_s < 30


def test_unsent_request_waits_while_other_calls_progress(clock: FakeClock) -> None:
    """If this fails, a part that waits for another's connection is given up in the middle of a save that proceeds."""
    client = client_with(retries=0, timeout_s=1)
    attempt = Failing([unsent() for _ in range(100)], before=lambda: client.call(lambda: None))
    assert client.call(attempt) == "done"
    attempt = Failing([unsent() for _ in range(100)])
    with pytest.raises(TransientStoreError):
        client.call(attempt)
