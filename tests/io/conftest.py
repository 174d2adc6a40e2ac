"""A clock that only the tests move, and waits that end at once."""

from __future__ import annotations

import threading

import pytest

from cloudckpt.io.retry import Retrier


class FakeClock:
    """Time as `cloudckpt.io.retry` sees it; waiting moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waits_s: list[float] = []
        self.stopped = False

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, delay_s: float) -> bool:
        if self.stopped:
            return True
        self.waits_s.append(delay_s)
        self.now_s += delay_s
        return False

    def set(self) -> None:
        self.stopped = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Retriers made from here on wait without waiting."""
    fake = FakeClock()

    class _Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            return self.is_set() or fake.wait(timeout)

    original = Retrier.__init__

    def initialise(self: Retrier, **kwargs: object) -> None:
        original(self, **kwargs)  # type: ignore[arg-type]
        self._stopped = _Event()

    monkeypatch.setattr(Retrier, "__init__", initialise)
    monkeypatch.setattr("cloudckpt.io.retry.time", fake)
    return fake
