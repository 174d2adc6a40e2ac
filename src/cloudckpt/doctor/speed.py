"""How fast a store answers from here, and how much it takes and gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cloudckpt._workers import Workers
from cloudckpt.doctor.trials import Scratch, seconds_of
from cloudckpt.options import KIB, MIB

_NUM_SMALL = 50
_LONGEST_S = 3.0
_SMALL_BYTES = KIB
_LARGE_BYTES = 8 * MIB
_NUM_STREAMS = 8


def latency(scratch: Scratch) -> str:
    """Small puts, and small gets, one after the other."""
    content = bytes(_SMALL_BYTES)
    keys = [scratch.fresh() for _ in range(_NUM_SMALL)]
    puts = _timed([lambda key=key: scratch.put(key, content) for key in keys])  # type: ignore[misc]  # mypy cannot see the default
    put_keys = keys[: len(puts)]
    gets = _timed([lambda key=key: scratch.store.read(key, max_bytes=MIB) for key in put_keys])  # type: ignore[misc]  # as above
    return f"put {_percentiles(puts)}; get {_percentiles(gets)}"


def throughput(scratch: Scratch) -> str:
    """Large puts and gets: one, and eight at once."""
    keys = [scratch.fresh() for _ in range(_NUM_STREAMS)]
    content = bytes(_LARGE_BYTES)

    def send(key: str) -> None:
        scratch.put(key, content)

    def fetch(key: str) -> None:
        scratch.store.read_into(key, 0, [memoryview(bytearray(_LARGE_BYTES))])

    found = {}
    for name, action in (("up", send), ("down", fetch)):
        for num_streams in (1, _NUM_STREAMS):
            seconds = seconds_of(lambda: _at_once(action, keys[:num_streams]))  # noqa: B023  # called at once
            found[name, num_streams] = num_streams * _LARGE_BYTES / MIB / max(seconds, 1e-9)
    return "; ".join(
        f"{name} {found[name, 1]:.0f} MiB/s with one stream, {found[name, _NUM_STREAMS]:.0f} with {_NUM_STREAMS}"
        for name in ("up", "down")
    )


def _at_once(action: Callable[[str], None], keys: Sequence[str]) -> None:
    failures: list[Exception] = []

    def task(key: str) -> None:
        try:
            action(key)
        except Exception as error:  # noqa: BLE001  # raised below
            failures.append(error)

    with Workers(len(keys), name="cloudckpt-doctor") as workers:
        for key in keys:
            workers.submit(lambda key=key: task(key))  # type: ignore[misc]  # mypy cannot see the default
    if failures:
        raise failures[0]


def _timed(actions: Sequence[Callable[[], object]]) -> list[float]:
    until = time.monotonic() + _LONGEST_S
    seconds = []
    for action in actions:
        seconds.append(seconds_of(action))
        if time.monotonic() > until:
            break
    return seconds


def _percentiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms"
