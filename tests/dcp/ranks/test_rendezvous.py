"""Ranks that wait for one another, as threads of one process, with stores that work, hang and break."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cloudckpt.dcp.ranks.rendezvous import Failure, GroupState, Rendezvous
from cloudckpt.errors import RankLostError

WAIT_S = 60.0
HANG_S = 20.0
TIMEOUT_S = 1.0


@pytest.fixture
def three() -> Iterator[list[Rendezvous]]:
    """Three ranks on one store."""
    store = dist.HashStore()
    ranks = [Rendezvous(store, rank=rank, num_ranks=3, store_keeper=None) for rank in range(3)]
    yield ranks
    for one in ranks:
        one.end(one.call, None)


def begin(
    one: Rendezvous, call: int, *, doing: str = "saving", uri: str = "s3://b/k", timeout_s: float = WAIT_S
) -> None:
    one.begin(call, doing=doing, uri=uri, timeout_s=timeout_s)


def on_all(ranks: list[Rendezvous], *steps: Callable[[Rendezvous], object]) -> list[BaseException | None]:
    """Make the steps on all ranks at once. Returns what each rank raised."""

    raised: dict[int, BaseException | None] = {}

    def run(one: Rendezvous) -> None:
        try:
            for step in steps:
                step(one)
        except RankLostError as error:
            raised[one.rank] = error
        else:
            raised[one.rank] = None

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(raised) == len(ranks), "a rank waits without end, or raised something else"
    return [raised[one.rank] for one in ranks]


def assert_lost(errors: list[BaseException | None], lost: tuple[int, ...], text: str) -> None:
    for error in errors:
        assert isinstance(error, RankLostError), errors
        assert error.ranks == lost, error
        assert text in str(error), error


def test_a_barrier_waits_for_all_ranks(three: list[Rendezvous]) -> None:
    """If this fails, a collective begins although a rank is missing, and waits in gloo."""
    left: list[int] = []
    threads = [
        threading.Thread(target=lambda one=one: (begin(one, 1), one.barrier(), left.append(one.rank)))
        for one in three[:2]
    ]
    for thread in threads:
        thread.start()
    begin(three[2], 1)
    threads[0].join(0.2)
    assert left == []
    three[2].barrier()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(left) == [0, 1]


def test_a_silent_rank_ends_the_group_and_later_calls_fail_at_once(three: list[Rendezvous]) -> None:
    """If this fails, a rank that hangs is waited for without end, or by each later call anew."""
    here = [three[0], three[2]]
    errors = on_all(here, lambda one: begin(one, 1, timeout_s=TIMEOUT_S), lambda one: one.barrier())
    assert_lost(errors, (1,), "gave no sign of life")
    begun_s = time.monotonic()
    assert_lost(on_all(three, lambda one: begin(one, 2)), (1,), "make a new one, or restart the job")
    assert time.monotonic() - begun_s < TIMEOUT_S * 5


@pytest.mark.parametrize("call", [1, 2])
def test_a_load_of_some_ranks_says_that_all_must_make_the_call(three: list[Rendezvous], call: int) -> None:
    """If this fails, a load under ``if rank == 0`` tells the user to look for a save that may have been committed."""
    if call > 1:
        on_all(
            three,
            lambda one: begin(one, 1, timeout_s=TIMEOUT_S),
            lambda one: one.barrier(),
            lambda one: one.end(1, None),
        )
    steps = (lambda one: begin(one, call, doing="loading", timeout_s=TIMEOUT_S), lambda one: one.barrier())
    errors = on_all(three[:1], *steps)
    assert_lost(errors, (1, 2), "all ranks must make this call, and none under 'if rank == 0' alone")
    assert_lost(errors, (1, 2), "load again before you continue training")
    assert "committed" not in str(errors[0])


@pytest.mark.parametrize(
    ("doing", "advice"),
    [
        ("saving", "may have been committed"),
        ("beginning to save", ""),
        ("loading model of", "load again"),
        ("pulling from", "pull again"),
    ],
)
def test_a_failed_call_says_what_it_may_have_left(three: list[Rendezvous], doing: str, advice: str) -> None:
    """If this fails, a call that wrote nothing says that it did, or one that filled a model partly does not."""

    def come_or_leave(one: Rendezvous) -> None:
        one.barrier() if one.rank < 2 else one.end(1, ValueError("no"))

    error = str(on_all(three, lambda one: begin(one, 1, doing=doing), come_or_leave)[0])
    assert advice in error
    assert [one for one in ("committed", "load again", "pull again") if one in error and one not in advice] == []


def test_a_rank_that_is_slow_but_alive_is_waited_for(three: list[Rendezvous]) -> None:
    """If this fails, a save breaks where one rank has more to send than the others."""

    def come(one: Rendezvous) -> None:
        begin(one, 1, timeout_s=TIMEOUT_S)
        if one.rank == 1:
            # A rank posts eight heartbeats within the timeout.
            while json.loads(one.store.get(str(one.rank)))["beat"] < 20:
                time.sleep(0.01)
        one.barrier()

    assert on_all(three, come) == [None] * 3


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_ends_the_call_at_once_and_the_next_one_works(three: list[Rendezvous], who: int) -> None:
    """If this fails, ranks wait for one that has said goodbye, or one error ends all later saves."""

    def fail(one: Rendezvous) -> None:
        begin(one, 1)
        if one.rank == who:
            one.end(1, ValueError("no state here"))
        else:
            one.barrier()

    errors = on_all(three, fail)
    assert_lost([error for rank, error in enumerate(errors) if rank != who], (who,), "ValueError: no state here")
    assert on_all(three, lambda one: begin(one, 2), lambda one: one.barrier()) == [None] * 3


def test_ranks_with_different_calls_are_refused_and_the_next_one_works(three: list[Rendezvous]) -> None:
    """If this fails, ranks that save to different URIs make one save together."""
    errors = on_all(three, lambda one: begin(one, 1, uri=f"s3://b/{one.rank == 2}"), lambda one: one.barrier())
    text = "rank 2 came to do something else than rank 0 (rank 0: saving s3://b/False; rank 2: saving s3://b/True): all"
    assert_lost(errors, (2,), text)
    assert on_all(three, lambda one: begin(one, 2), lambda one: one.barrier()) == [None] * 3


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_ends_a_call_early_is_not_waited_for(three: list[Rendezvous], who: int) -> None:
    """If this fails, ranks whose calls differ in the number of collectives wait for one another for ever."""

    def come(one: Rendezvous) -> None:
        begin(one, 1)
        if one.rank == who:
            one.end(1, None)
            begin(one, 2)
        else:
            one.barrier()

    errors = on_all(three, come)
    assert_lost([error for rank, error in enumerate(errors) if rank != who], (who,), "left before the end")


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_barrier_is_left_by_all_or_by_none_whenever_a_rank_fails(three: list[Rendezvous], who: int) -> None:
    """If this fails, an interrupt in the instant of a barrier leaves the other ranks in a collective without it."""
    for call in range(1, 31):

        def come(one: Rendezvous, call: int = call) -> None:
            begin(one, call)
            if one.rank == who:
                threading.Timer(0.0004 * (call % 10), lambda: one.fail(KeyboardInterrupt())).start()
            one.barrier()

        failed = {error is not None for error in on_all(three, come)}
        assert len(failed) == 1, call
        for one in three:
            one.end(call, None)


def test_a_cancel_reaches_all_ranks_and_no_later_call(three: list[Rendezvous]) -> None:
    """If this fails, a rank uploads a save to its end that another has cancelled, or a later save is cancelled."""
    heard = [threading.Event() for _ in three]
    for one in three:
        begin(one, 1, timeout_s=TIMEOUT_S)
        one.set_on_cancel(1, lambda ranks, rank=one.rank: heard[rank].set() if ranks == (1,) else None)
    three[1].cancel(1)
    assert all(one.wait(WAIT_S) for one in heard)
    later = threading.Event()
    for one in three:
        begin(one, 2, timeout_s=TIMEOUT_S)
        one.set_on_cancel(2, lambda _: later.set())
    three[1].cancel(1)
    assert not later.wait(0.5)


class StoreThatHangs:
    def __init__(self) -> None:
        self.released = threading.Event()

    def add(self, _key: str, _amount: int) -> int:
        assert self.released.wait(WAIT_S)
        raise RuntimeError("the store has gone")


@pytest.mark.parametrize("breaks", [False, True])
def test_a_store_that_hangs_or_breaks_is_an_error_that_names_its_keeper(*, breaks: bool) -> None:
    """If this fails, ranks wait without end once rank 0 has died and taken the store along."""
    store = StoreThatHangs()
    if breaks:
        store.released.set()
    one = Rendezvous(store, rank=1, num_ranks=2, store_keeper=0)
    begun_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"which rank 0 keeps, (is out of reach|did not answer)") as caught:
            begin(one, 1, timeout_s=0.3)
        assert caught.value.ranks == (0,)
    store.released.set()
    assert time.monotonic() - begun_s < 20


def test_a_rank_that_is_lost_in_a_transfer_is_named_within_the_time_out(three: list[Rendezvous]) -> None:
    """If this fails, ranks wait twice as long as the user allows: first in gloo, and then for the name."""
    is_silent, released = threading.Event(), threading.Event()
    on_all(three, lambda one: begin(one, 1, timeout_s=2.0), lambda one: one.barrier())
    three[1].set_on_cancel(1, lambda _: (is_silent.set(), released.wait(WAIT_S)))  # keeps its heartbeats waiting
    begun_s = time.monotonic()
    three[1].cancel(1)
    assert is_silent.wait(WAIT_S)
    released.wait(0.75 * 2.0)  # the transfer

    def explain(one: Rendezvous) -> None:
        raise one.explain(RuntimeError("timed out"))

    errors = on_all([three[0], three[2]], explain)
    released.set()
    assert_lost(errors, (1,), "gave no sign of life for 2 s")
    assert time.monotonic() - begun_s < 1.5 * 2.0


def test_an_earlier_group_on_the_same_store_gives_no_signs_of_life(tmp_path: Path) -> None:
    """If this fails, a group that is made anew on the same store goes on without ranks that have not come."""
    for has_come in (True, False):
        store = str(tmp_path / "store")
        both = [Rendezvous(dist.FileStore(store, 2), rank=rank, num_ranks=2, store_keeper=None) for rank in range(2)]
        steps: Any = (lambda one: begin(one, 1, timeout_s=TIMEOUT_S), lambda one: one.barrier())
        errors = on_all(both if has_come else both[:1], *steps)
        assert (errors == [None, None]) == has_come
        for one in both:
            one.end(1, None)


def test_decisions_about_a_call_are_made_once() -> None:
    """If this fails, two ranks come to different conclusions about one call."""
    permitted = GroupState().permit(3, 2)
    assert permitted.permits(3, 2)
    assert not permitted.permits(3, 3)
    failed = permitted.fail(3, Failure((1,), "first"))
    assert failed.permits(3, 2)
    assert failed.fail(3, Failure((2,), "second")) == failed == failed.permit(3, 3)
    assert failed.permit(4, 1).permits(4, 1)
    final = failed.fail(4, Failure((2,), "lost", is_final=True))
    assert final.permit(5, 1) == final == final.fail(5, Failure((0,), "other", is_final=True))
    assert failed.cancel(4, 2).cancel(4, 0).cancelled_by == (0, 2)
    assert failed.cancel(4, 2).cancel(5, 0).cancelled_by == (0,)
