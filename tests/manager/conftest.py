"""Helpers that the tests of managers share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.kit.in_memory import state_of

import cloudckpt
from cloudckpt import CheckpointManager

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Each test begins without a save of an earlier one."""
    yield
    with contextlib.suppress(BaseException):
        cloudckpt.close(WAIT_S)


def save_all(manager: CheckpointManager, *steps: int, **settings: Any) -> None:
    """Save steps, one after the other, each with its retention."""
    for step in steps:
        manager.save(step, state_of(float(step)), **settings)
        manager.wait(WAIT_S)
