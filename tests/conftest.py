"""Settings that all tests share."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from tests.in_memory import Memory

_numbers = itertools.count()

# Derandomised: a failure on one machine is a failure on all. No deadline: a loaded machine is not a defect.
settings.register_profile(
    "cloudckpt",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("cloudckpt")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Every ``memory://`` location, watched; retries do not wait."""
    opened = Memory(f"watched-{next(_numbers)}")
    monkeypatch.setattr("cloudckpt.stores.memory.MemoryStore", opened.open)
    monkeypatch.setattr("cloudckpt._transfer.retry._delay_s", lambda error, num_failures: 0.0)
    return opened
