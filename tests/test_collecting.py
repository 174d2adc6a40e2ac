"""The garbage collector's thresholds: they change while a call blocks the main thread, and never beside training."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import cloudckpt
from cloudckpt._this_process import rare_collections
from cloudckpt.options import Options

STATE = {f"t{number}": torch.ones(4) for number in range(100)}


@pytest.fixture(autouse=True)
def before() -> Iterator[tuple[int, int, int]]:
    """The thresholds that the program has set, which it has again afterwards."""
    thresholds = gc.get_threshold()
    gc.set_threshold(701, *thresholds[1:])
    yield gc.get_threshold()
    gc.set_threshold(*thresholds)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread of each change of the thresholds."""
    threads: list[threading.Thread] = []
    set_threshold = gc.set_threshold

    def record(*thresholds: int) -> None:
        threads.append(threading.current_thread())
        set_threshold(*thresholds)

    monkeypatch.setattr(gc, "set_threshold", record)
    return threads


def test_the_thresholds_come_back(before: tuple[int, int, int]) -> None:
    """If this fails, a save changes for good how often Python looks for garbage, also one that fails."""
    with contextlib.suppress(KeyError), rare_collections():
        assert gc.get_threshold() == (100_000, *before[1:])
        with rare_collections():
            pass
        assert gc.get_threshold() == (100_000, *before[1:])
        raise KeyError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("overlap", [False, True])
def test_a_background_save_leaves_them_alone(
    changes: list[threading.Thread], before: tuple[int, ...], *, overlap: bool
) -> None:
    """If this fails, a background save changes how the training loop beside it is collected."""
    may_begin = threading.Event()
    thresholds: list[tuple[int, ...]] = []

    def watch(_event: cloudckpt.Event) -> None:
        if threading.current_thread() is threading.main_thread():  # at the snapshot, which blocks it
            return
        assert may_begin.wait(60)
        thresholds.append(gc.get_threshold())

    options = Options(on_event=watch, async_overlap=overlap)
    saving = cloudckpt.async_save(STATE, f"memory://collecting/{overlap}", options=options)
    changed_by, on_return = set(changes), gc.get_threshold()
    changes.clear()
    may_begin.set()
    saving.result(60)
    assert changed_by <= {threading.main_thread()}  # while the snapshot was planned
    assert on_return == before
    assert not changes
    assert set(thresholds) == {before}
