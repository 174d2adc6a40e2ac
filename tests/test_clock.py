"""This machine's clock beside those of stores."""

from __future__ import annotations

from datetime import datetime, timezone
from email.utils import format_datetime

import pytest
from tests.kit.clock import set_time

from cloudckpt import _clock

OWN_S = 1_795_403_713
HOUR_S = 3600


def answer(host: str, *, seconds_behind: int, age: str | None = None) -> None:
    """Take an answer whose header ``Date`` is so many seconds before this machine's time."""
    moment = datetime.fromtimestamp(OWN_S - seconds_behind, timezone.utc)
    _clock.compare_with_store(format_datetime(moment, usegmt=True), age, host)


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, OWN_S * 10**9)


def hours_corrected() -> float:
    return (OWN_S - _clock.now().timestamp()) / HOUR_S


def test_age_of_a_cached_answer_is_added_to_its_date(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, an old answer of a cache looks like a wrong clock, and gc spares garbage for that long."""
    answer("a", seconds_behind=5 * HOUR_S, age=str(5 * HOUR_S))
    assert hours_corrected() == 0
    assert not caplog.records
    answer("a", seconds_behind=5 * HOUR_S, age="nonsense")
    assert hours_corrected() == 0
    answer("a", seconds_behind=5 * HOUR_S, age="60")
    assert hours_corrected() == pytest.approx(5 - 60 / HOUR_S)


def test_last_answer_of_each_host_counts() -> None:
    """If this fails, a clock that was set again stays corrected, or another store's answer hides that it is ahead."""
    answer("a", seconds_behind=5 * HOUR_S)
    answer("b", seconds_behind=0)
    assert hours_corrected() == 5
    answer("a", seconds_behind=10)
    assert hours_corrected() == 0
