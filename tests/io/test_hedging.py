"""Stragglers are made again, the first to end counts, and a loser touches nothing any more when its caller goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.kit.oracles import slow_crc32c

from cloudckpt.errors import InterruptedReadError, StoreError, ThrottledError, TransientStoreError
from cloudckpt.io.hedging import MIN_PATIENCE_S, ConcurrencyLimit, Hedger, PeerTimes, max_hedges
from cloudckpt.stores.base import FoundPart, Part, UploadedPart, Views
from cloudckpt.stores.http_clients import follow
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing.faults import WrappedStore

SIZE_BYTES = 1000
_TIMEOUT_S = 60
LATE_S = MIN_PATIENCE_S + 1


class Clock:
    """Moves when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Line:
    """A request that waits on a real connection until the other end says something, or somebody closes it."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.here.settimeout(_TIMEOUT_S)
        self.waits = threading.Event()

    def ask(self) -> str:
        follow(self.here)
        self.waits.set()
        answer = self.here.recv(100)
        if not answer:
            raise TransientStoreError("the connection was closed", key="k", operation="read_into")
        return answer.decode()

    def answer(self, text: str) -> None:
        self.there.send(text.encode())

    def close(self) -> None:
        self.here.close()
        self.there.close()


@contextmanager
def lines(number: int) -> Iterator[list[Line]]:
    made = [Line() for _ in range(number)]
    try:
        yield made
    finally:
        for line in made:
            line.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hedger(clock: Clock) -> Hedger:
    """One that knows what requests take: a second."""
    return with_peers(Hedger(ConcurrencyLimit(4), budget_bytes=2 * SIZE_BYTES, clock=clock), clock)


def with_peers(hedger: Hedger, clock: Clock) -> Hedger:
    def in_a_second() -> str:
        clock.now_s += 1
        return "done"

    for number in range(5):
        make(hedger, ("peer", number), in_a_second)
    return hedger


def make(hedger: Hedger, name: object, first: Callable[[], str], second: Callable[[], str] | None = None) -> str:
    def repeat() -> str:
        assert second is not None
        return second()

    with hedger.request("download", name, num_bytes=SIZE_BYTES, hedge_bytes=SIZE_BYTES, send_hedge=repeat) as request:
        request.result = first()
    assert request.result is not None
    return request.result


class InThread:
    """`function`, in a thread; its result or error."""

    def __init__(self, function: Callable[[], str]) -> None:
        self._function = function
        self._result: str | BaseException = "nothing"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001  # it is raised again where it can be looked at
            self._result = error

    def has_ended(self, *, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def result(self) -> str:
        self._thread.join(_TIMEOUT_S)
        assert not self._thread.is_alive()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


@pytest.mark.parametrize(
    ("peers", "expected_s"),
    [
        ([(100, 10.0)] * 3, None),
        ([(100, 10.0)] * 4, 30.0),
        ([(50, 10.0), (200, 10.0), (100, 10.0), (100, 10.0)], 30.0),
        ([(49, 10.0), (100, 10.0), (100, 10.0), (100, 10.0)], None),
        ([(201, 10.0), (100, 10.0), (100, 10.0), (100, 10.0)], None),
        ([(100, 1.0), (100, 2.0), (100, 4.0), (100, 90.0)], 9.0),
        ([(100, 0.1)] * 4, MIN_PATIENCE_S),
        ([(100, 50.0)] * 64 + [(100, 10.0)] * 64, 30.0),
    ],
)
def test_a_straggler_takes_three_times_as_long_as_four_peers_of_its_size(
    peers: list[tuple[int, float]], expected_s: float | None
) -> None:
    """If this fails, requests are repeated that are as fast as their peers, or none that stalls."""
    times = PeerTimes()
    for size_bytes, took_s in peers:
        times.add(num_bytes=size_bytes, duration_s=took_s)
    assert times.patience_s(100) == expected_s


@pytest.mark.parametrize(("num_requests", "expected"), [(0, 2), (59, 2), (60, 3), (2000, 100)])
def test_one_request_in_twenty_may_be_repeated_in_all(num_requests: int, expected: int) -> None:
    """If this fails, a store that is slow as a whole gets twice the requests."""
    assert max_hedges(num_requests) == expected


def test_a_request_that_stalls_is_ended_by_the_second_one(hedger: Hedger, clock: Clock) -> None:
    """If this fails, one dead connection holds a whole save or load up until its timeout."""
    with lines(2) as (first, second):
        call = InThread(lambda: make(hedger, "x", first.ask, second.ask))
        assert first.waits.wait(_TIMEOUT_S)
        hedger.watch()
        assert hedger.num_hedges == 0  # it has only just begun
        clock.now_s += 3 * 1 + LATE_S
        hedger.watch()
        assert second.waits.wait(_TIMEOUT_S)
        second.answer("second")
        assert call.result() == "second"
    assert hedger.num_hedges == 1


def test_the_first_request_counts_if_it_ends_first_and_the_second_has_ended_then(hedger: Hedger, clock: Clock) -> None:
    """If this fails, a request that nobody needs goes on sending from memory that the caller has let go of."""
    is_closed, may_end = threading.Event(), threading.Event()

    def ask_second() -> str:
        try:
            return second.ask()
        finally:
            is_closed.set()
            may_end.wait(_TIMEOUT_S)

    with lines(2) as (first, second):
        call = InThread(lambda: make(hedger, "x", first.ask, ask_second))
        assert first.waits.wait(_TIMEOUT_S)
        clock.now_s += 3 + LATE_S
        hedger.watch()
        assert second.waits.wait(_TIMEOUT_S)
        first.answer("first")
        assert is_closed.wait(_TIMEOUT_S)
        assert not call.has_ended(within_s=0.2)
        may_end.set()
        assert call.result() == "first"


def test_no_more_is_held_than_the_budget_and_few_are_made_twice(hedger: Hedger, clock: Clock) -> None:
    """If this fails, a store in which everything stalls gets everything twice, into memory beyond the read budget."""
    with lines(4) as firsts, lines(4) as seconds:
        pairs = list(zip(firsts, seconds, strict=True))
        calls = [
            InThread(lambda number=number, pair=pair: make(hedger, number, pair[0].ask, pair[1].ask))
            for number, pair in enumerate(pairs)
        ]
        assert all(first.waits.wait(_TIMEOUT_S) for first in firsts)
        clock.now_s += 1000
        hedger.watch()
        hedger.watch()
        assert hedger.num_hedges == 2
        for first in firsts:
            first.answer("first")
        assert [call.result() for call in calls] == ["first"] * 4


@pytest.mark.parametrize("by", ["first", "second"])
def test_nothing_is_made_twice_while_the_store_asks_to_slow_down(hedger: Hedger, clock: Clock, by: str) -> None:
    """If this fails, a store that cannot keep up is asked more, not less."""

    def refuse() -> str:
        raise ThrottledError("slow down", key="k", operation="read_into")

    if by == "first":
        with pytest.raises(ThrottledError):
            make(hedger, "refused", refuse)
    else:
        with lines(1) as (first,):
            call = InThread(lambda: make(hedger, "y", first.ask, refuse))
            assert first.waits.wait(_TIMEOUT_S)
            clock.now_s += 10
            hedger.watch()
            first.answer("first")
            call.result()
    assert hedger.connections_now() == 2
    before = hedger.num_hedges
    with lines(1) as (first,):
        call = InThread(lambda: make(hedger, "x", first.ask))
        assert first.waits.wait(_TIMEOUT_S)
        clock.now_s += 10
        hedger.watch()
        first.answer("first")
        assert call.result() == "first"
    assert hedger.num_hedges == before


class Stalling(WrappedStore):
    """The first read writes some bytes that are not the object's, then stalls until its connection is closed."""

    def __init__(self, line: Line) -> None:
        super().__init__(MemoryStore("hedged"))
        self.line: Line | None = line

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        line, self.line = self.line, None
        if line is not None:
            views[0][:5] = b"wrong"
            try:
                line.ask()
            except TransientStoreError:
                raise InterruptedReadError("cut", key=key, operation="read_into", received_bytes=5) from None
        super().read_into(key, offset_bytes, views)


@pytest.mark.parametrize("is_unsent", [True, False])
def test_fewer_requests_are_made_if_the_process_may_open_no_more_files(hedger: Hedger, *, is_unsent: bool) -> None:
    """If this fails, a save under a limit of open files goes on with more connections than it can have."""
    error = TransientStoreError("no more files", key="k", operation="read_into")
    error.is_unsent = is_unsent
    with pytest.raises(TransientStoreError):
        make(hedger, "a", _raising(error))
    assert hedger.connections_now() == (2 if is_unsent else 4)


def _raising(error: Exception) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


def test_a_range_comes_whole_from_the_second_request(hedger: Hedger, clock: Clock) -> None:
    """If this fails, a tensor holds what a connection that was given up had written (G4)."""
    data = bytes(index % 251 for index in range(SIZE_BYTES))
    with lines(1) as (line,):
        store = Stalling(line)
        store.inner.put("k", [memoryview(data)], crc32c=slow_crc32c(data))
        memory = bytearray(SIZE_BYTES)
        views = [memoryview(memory)[:10], memoryview(memory)[10:]]

        def read() -> str:
            hedger.read_into(store, "k", 0, views)
            return "read"

        call = InThread(read)
        assert line.waits.wait(_TIMEOUT_S)
        clock.now_s += 1000
        hedger.watch()
        assert call.result() == "read"
    assert memory == data
    assert hedger.num_hedges == 1


class Keyed(WrappedStore):
    """Give each upload of a part an ETag of its own, as with a foreign encryption key. The last one counts."""

    def __init__(self) -> None:
        super().__init__(MemoryStore("keyed"))
        self.tokens: dict[int, UploadedPart] = {}
        self.num_uploads = self.num_completions = 0

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        self.num_uploads += 1
        uploaded = UploadedPart(part=part, token=f"etag-{self.num_uploads}", crc32c=crc32c)
        self.tokens[part.number] = uploaded
        return uploaded

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        for number, done in self.tokens.items():
            size_bytes = done.part.size_bytes
            yield FoundPart(number=number, size_bytes=size_bytes, token=done.token, crc32c=done.crc32c, md5=None)

    def complete_multipart(self, key: str, upload_id: str, parts: list[UploadedPart]) -> None:  # type: ignore[override]
        self.num_completions += 1
        if any(self.tokens[done.part.number].token != done.token for done in parts):
            raise StoreError("InvalidPart", key=key, operation="complete_multipart")


@pytest.mark.parametrize("was_hedged", [True, False])
def test_a_loser_that_lands_late_fails_no_upload(hedger: Hedger, was_hedged: object) -> None:
    """If this fails, a save under SSE-KMS fails because of a request that was given up, or hides a real mistake."""
    store = Keyed()
    part = Part(number=1, offset_bytes=0, size_bytes=SIZE_BYTES)
    uploaded = hedger.upload_part(store, "k", "u", part, [memoryview(bytes(SIZE_BYTES))], crc32c=7)
    store.upload_part("k", "u", part, [], crc32c=7)  # the loser
    if not was_hedged:
        with pytest.raises(StoreError, match="InvalidPart"):
            hedger.complete_multipart(store, "k", "u", [uploaded])
        return
    hedger._hedged.add(("upload", "k", "u", 1))
    hedger.complete_multipart(store, "k", "u", [uploaded])
    assert store.num_completions == 2
    store.upload_part("k", "u", part, [], crc32c=8)  # somebody else's bytes
    with pytest.raises(StoreError, match="InvalidPart"):
        hedger.complete_multipart(store, "k", "u", [uploaded])


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), ValueError()])
def test_a_second_request_that_raises_is_as_if_there_were_none(
    hedger: Hedger, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """If this fails, an exit in the store's code ends the thread, or the first request waits for a second for ever."""
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    def raise_error() -> str:
        raise error

    with lines(1) as (line,):
        first = InThread(lambda: make(hedger, "slow", line.ask, raise_error))
        assert line.waits.wait(_TIMEOUT_S)
        clock.now_s += 3 + LATE_S
        hedger.watch()
        assert hedger.num_hedges == 1
        line.answer("first")
        assert first.result() == "first"
    assert not died
