"""Clocks of a `StoreClient` in tests."""

from __future__ import annotations

import threading
import time

import pytest
from typing_extensions import override

from cloudckpt import _clock
from cloudckpt.io.client import Clock


class InstantClock(Clock):
    """Waits end at once, and the time is the real one."""

    @override
    def wait(self, stopped: threading.Event, delay_s: float) -> bool:
        return stopped.is_set()


class FakeClock(Clock):
    """The time moves only by waits, which end at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waits_s: list[float] = []

    @override
    def monotonic(self) -> float:
        return self.now_s

    @override
    def wait(self, stopped: threading.Event, delay_s: float) -> bool:
        if stopped.is_set():
            return True
        self.waits_s.append(delay_s)
        self.now_s += delay_s
        return False


def skip_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all waits of later clients end at once."""
    monkeypatch.setattr("cloudckpt.io.client.SYSTEM_CLOCK", InstantClock())


def set_time(monkeypatch: pytest.MonkeyPatch, time_ns: int | None = None, *, ahead_s: float = 0.0) -> None:
    """Set this machine's clock: stop it at a time, or let it run ahead of the real one."""
    read = (lambda: time.time_ns() + int(ahead_s * 1e9)) if time_ns is None else lambda: time_ns
    monkeypatch.setattr(_clock.MACHINE, "time_ns", read)


def set_time_in_new_process(
    monkeypatch: pytest.MonkeyPatch, time_ns: int | None = None, *, ahead_s: float = 0.0
) -> None:
    """Set the clock of a process that has seen no other."""
    monkeypatch.setattr(_clock, "MACHINE", _clock.MachineClock())
    set_time(monkeypatch, time_ns, ahead_s=ahead_s)
