"""Fixtures of the integrity tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.integrity.tiny import Tiny, saved_on_two_ranks

_numbers = itertools.count()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects of a tiny checkpoint of two ranks."""
    return saved_on_two_ranks(tmp_path_factory.mktemp("tiny") / "checkpoint")


def _done_here(items: Sequence[Any], work: Callable[[Any], None], **settings: object) -> Iterator[Any]:
    for item in items:
        work(item)
        yield item


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in the test's own thread: starting others takes longer than all the rest of a small load."""
    monkeypatch.setattr("cloudckpt.pipeline.reader.run_as_completed", _done_here)
    monkeypatch.setattr("cloudckpt._workers.run_as_completed", _done_here)


@pytest.fixture
def tiny(saved: dict[str, bytes]) -> Tiny:
    """Put the checkpoint into memory, whole."""
    return Tiny(f"tiny-{next(_numbers)}", saved)
