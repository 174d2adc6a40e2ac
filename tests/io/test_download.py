"""Reads that resume where they broke off, and are checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.clock import FakeClock, InstantClock
from tests.kit.oracles import slow_crc32c
from tests.kit.wrapped import Call, WrappedStore

from cloudckpt.errors import (
    AccessDeniedError,
    CloudckptError,
    CorruptCheckpointError,
    InterruptedReadError,
    ObjectNotFoundError,
    ShortObjectError,
    TransientStoreError,
)
from cloudckpt.io.client import Clock, StoreClient
from cloudckpt.io.download import download_range, find_size, find_wrong_tiles
from cloudckpt.stores.base import Store, Views
from cloudckpt.stores.memory import MemoryStore

TILE_BYTES = 16
KEY = "data/attempt/0-0.safetensors"
DATA = bytes(index * 7 % 256 for index in range(200))


class CuttingStore(WrappedStore):
    """Breaks each read off after the next of `cuts` bytes."""

    def __init__(self, cuts: Sequence[int] = ()) -> None:
        super().__init__(MemoryStore("cutting"))
        self.inner.put(KEY, [memoryview(DATA)], crc32c=slow_crc32c(DATA))
        self.cuts = list(cuts)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        size_bytes = sum(len(view) for view in views)
        self.reads.append((offset_bytes, size_bytes))
        cut = self.cuts.pop(0) if self.cuts else size_bytes
        if cut >= size_bytes:
            super().read_into(key, offset_bytes, views)
            return
        left, filled = cut, []
        for view in views:
            filled.append(view[:left])
            left -= len(filled[-1])
        super().read_into(key, offset_bytes, filled)
        raise InterruptedReadError("cut", key=key, operation="read_into", received_bytes=cut)


def client_of(store: Store, retries: int = 3, clock: Clock | None = None) -> StoreClient:
    return StoreClient(store, retries=retries, timeout_s=100, clock=clock)


def target(sizes_bytes: Sequence[int]) -> tuple[bytearray, list[memoryview]]:
    """Memory in views of these sizes, one after the other."""
    memory = bytearray(b"\xaa" * sum(sizes_bytes))
    views, position = [], 0
    for size_bytes in sizes_bytes:
        views.append(memoryview(memory)[position : position + size_bytes])
        position += size_bytes
    return memory, views


@settings(max_examples=200)
@given(
    begin=st.integers(0, 100),
    sizes_bytes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 30), max_size=8),
)
def test_a_read_that_breaks_off_goes_on_at_the_byte_reached(
    begin: int, sizes_bytes: list[int], cuts: list[int]
) -> None:
    """If this fails, a bad line makes bytes missing or doubled, or has everything sent again and again."""
    store = CuttingStore(cuts)
    memory, views = target(sizes_bytes)
    download_range(client_of(store, 1_000_000, InstantClock()), key=KEY, begin=begin, views=views)
    assert memory == DATA[begin : begin + len(memory)]
    assert sum(min(size, cut) for (_, size), cut in zip(store.reads, [*cuts, 10**9], strict=False)) == len(memory)
    reached = begin
    for (offset, size_bytes), cut in zip(store.reads, [*cuts, 10**9], strict=False):
        assert (offset, size_bytes) == (reached, begin + len(memory) - reached)
        reached += min(cut, size_bytes)


def test_without_progress_it_gives_up(clock: FakeClock) -> None:
    """If this fails, a server that sends nothing holds a load for ever."""
    store = CuttingStore([5, 0, 0, 0, 0, 0, 0])
    with pytest.raises(InterruptedReadError):
        download_range(client_of(store, 2), key=KEY, begin=0, views=target([60])[1])
    assert [offset for offset, _ in store.reads] == [0, 5, 5]


def crc32cs(data: bytes) -> list[int]:
    return [slow_crc32c(data[begin : begin + TILE_BYTES]) for begin in range(0, len(data), TILE_BYTES)]


def load(client: StoreClient, begin: int, views: Views, expected: Sequence[int]) -> None:
    """Fill `views`. Raises `CorruptCheckpointError` with the wrong tiles, or for an object that was cut."""
    try:
        download_range(client, key=KEY, begin=begin, views=views)
    except ShortObjectError as error:
        raise CorruptCheckpointError(str(error), uri=client.uri) from error
    wrong = find_wrong_tiles(
        client, key=KEY, begin=begin, views=views, tile_bytes=TILE_BYTES, expected_crc32cs=expected
    )
    if wrong:
        raise CorruptCheckpointError(str(wrong), uri=client.uri)


def test_the_short_last_tile_is_checked_too(clock: FakeClock) -> None:
    """If this fails, the last bytes of each object are never checked, or always refused."""
    memory, views = target([40])
    load(client_of(CuttingStore()), 160, views, crc32cs(DATA[160:]))
    assert memory == DATA[160:]
    with pytest.raises(CorruptCheckpointError):
        load(client_of(CuttingStore()), 160, target([40])[1], [*crc32cs(DATA[160:])[:-1], 0])


def test_bytes_damaged_in_the_store_are_found_by_three_reads(clock: FakeClock) -> None:
    """If this fails, damaged weights load silently (G4), or bytes damaged on their way count as damage."""
    damaged = bytearray(DATA[32:96])
    damaged[20] ^= 1  # what was saved had another bit here, in the second tile
    store = CuttingStore()
    with pytest.raises(CorruptCheckpointError) as caught:
        load(client_of(store), 32, target([10, 54])[1], crc32cs(bytes(damaged)))
    assert str({1: slow_crc32c(DATA[48:64])}) in str(caught.value)
    assert len(store.reads) == 3


# --- what is believed

Lie: TypeAlias = Literal["absent", "short", "wrong", "failed", "denied"]
ERRORS = {
    "absent": ObjectNotFoundError,
    "short": ShortObjectError,
    "failed": TransientStoreError,
    "denied": AccessDeniedError,
}
_T = TypeVar("_T")


class LyingStore(WrappedStore):
    """Answers the first reads and HEADs of the object with `reads` and `heads`, each a lie or None, then as it is."""

    def __init__(self, reads: Sequence[Lie | None], heads: Sequence[Lie | None], *, body: bytes | None = DATA) -> None:
        super().__init__(MemoryStore("lying"))
        self.inner.delete([KEY])
        if body is not None:
            self.inner.put(KEY, [memoryview(body)], crc32c=slow_crc32c(body))
        self.lies = {"read_into": list(reads), "head": list(heads)}
        self.told: Counter[str] = Counter()
        """The number of answers of each kind, by call."""

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        lies = self.lies.get(call.operation, [])
        lie = lies.pop(0) if lies else None
        if lie in ERRORS:
            self.told[f"{call.operation} {lie}"] += 1
            raise ERRORS[lie](f"a lie: {lie}", key=call.key, operation=call.operation)
        try:
            result = action()
        except (ObjectNotFoundError, ShortObjectError) as error:
            self.told[f"{call.operation} {'absent' if isinstance(error, ObjectNotFoundError) else 'short'}"] += 1
            raise
        self.told[f"{call.operation} {lie}"] += 1
        return result

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        is_wrong = self.lies["read_into"][:1] == ["wrong"]
        super().read_into(key, offset_bytes, views)
        if is_wrong:
            views[0][0] ^= 1


ALWAYS = 99


def load_middle(client: StoreClient) -> None:
    """Load the object's bytes [32, 96)."""
    memory, views = target([64])
    load(client, 32, views, crc32cs(DATA[32:96]))
    assert memory == DATA[32:96], "it said that all is well"


TROUBLE: list[tuple[Lie, int, Lie | None, int, str]] = [
    # what reads say, how often; what HEADs say, how often; the end. Three looks that agree are believed.
    *((lie, times, None, 0, "whole") for lie in ("absent", "short") for times in (1, 2, 3)),
    *((lie, times, lie, times, "whole") for lie in ("absent", "short") for times in (1, 2)),
    *((lie, ALWAYS, None, 0, "TransientStoreError") for lie in ("absent", "short")),
    *((lie, ALWAYS, lie, 2, "TransientStoreError") for lie in ("absent", "short")),
    ("absent", 3, "absent", 3, "ObjectNotFoundError"),
    ("short", ALWAYS, "absent", ALWAYS, "TransientStoreError"),
    ("absent", ALWAYS, "failed", ALWAYS, "TransientStoreError"),
    ("absent", 1, "failed", 1, "whole"),
    ("absent", 1, "denied", 1, "AccessDeniedError"),
    ("wrong", 1, None, 0, "whole"),
    ("wrong", 2, None, 0, "whole"),
    ("wrong", 3, None, 0, "CorruptCheckpointError"),
    ("wrong", 3, "absent", ALWAYS, "TransientStoreError"),
    ("wrong", 3, "failed", ALWAYS, "TransientStoreError"),
]


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_failing_store_is_no_damage(clock: FakeClock, trouble: tuple[Lie, int, Lie | None, int, str]) -> None:
    """If this fails, an answer of a load balancer sends a job back to an older step, or real damage is never told."""
    lie, times, by_head, head_times, end = trouble
    try:
        load_middle(client_of(LyingStore([lie] * times, [by_head] * head_times)))
    except CloudckptError as error:
        assert type(error).__name__ == end  # noqa: PT017  # of the table
    else:
        assert end == "whole"


lies = st.lists(st.sampled_from([None, "absent", "short", "wrong", "failed"]), max_size=9)


@settings(max_examples=300)
@given(
    reads=lies,
    heads=st.lists(st.sampled_from([None, "absent", "failed"]), max_size=9),
    body=st.sampled_from([DATA, None, DATA[:90]]),
)
def test_damage_and_absence_are_believed_after_three_looks(
    reads: list[Any], heads: list[Any], body: bytes | None
) -> None:
    """If this fails, some order of bogus answers makes a whole object damaged, or a damaged one whole."""
    store = LyingStore(reads, heads, body=body)
    try:
        load_middle(client_of(store, clock=InstantClock()))
    except ObjectNotFoundError:
        assert store.told["read_into absent"] >= 3
        assert store.told["head absent"] >= 3
    except CorruptCheckpointError as error:
        if isinstance(error.__cause__, ShortObjectError):
            assert store.told["read_into short"] >= 3
            assert body == DATA[:90], "no HEAD lies about the size here"
        else:
            assert store.told["read_into wrong"] >= 3
    except TransientStoreError:
        assert any(reads + heads), "a store that does not lie contradicts itself"
    else:
        assert body == DATA


@pytest.mark.parametrize(
    ("body", "reads", "heads", "end"),
    [
        (DATA, [], [], 200),
        (DATA, [], ["absent"] * 2, 200),  # a read says that it is there
        (DATA, ["absent"] * 2, ["absent"] * 2, 200),
        (DATA, [], ["absent"] * ALWAYS, "TransientStoreError"),
        (DATA, ["absent"] * ALWAYS, ["absent"] * ALWAYS, None),
        (DATA, [], ["denied"], "AccessDeniedError"),
        (None, [], [], None),
        (DATA[:90], [], [], 90),
        (DATA[:90], ["absent"] * ALWAYS, [], "TransientStoreError"),
        (DATA + b"more", [], [], 204),
        (DATA + b"more", ["short"] * ALWAYS, [], "TransientStoreError"),
        (b"", [], [], 0),
    ],
)
def test_another_size_is_believed_after_three_looks(
    clock: FakeClock, body: bytes | None, reads: list[Any], heads: list[Any], end: int | str | None
) -> None:
    """If this fails, one HEAD with a wrong answer makes `verify` call a checkpoint damaged, or a save fail."""
    store = LyingStore(reads, heads, body=body)
    try:
        found: int | str | None = find_size(client_of(store), key=KEY, size_bytes=len(DATA))
    except CloudckptError as error:
        found = type(error).__name__
    assert found == end
    if not reads and not heads and body == DATA:
        assert store.told == {"head None": 1}
