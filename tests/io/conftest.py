"""A clock that only the tests move."""

from __future__ import annotations

import pytest
from tests.kit.clock import FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Clients made from here on wait without waiting."""
    fake = FakeClock()
    monkeypatch.setattr("cloudckpt.io.client.SYSTEM_CLOCK", fake)
    return fake
