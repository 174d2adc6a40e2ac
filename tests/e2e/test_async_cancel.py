"""Background saves of several ranks that are cancelled, or fail, by the doing of one of them: what the others learn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.in_memory import Gate
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.places import Place
from tests.kit.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.background.in_flight import wait_for_previous
from cloudckpt.options import MIB

pytestmark = pytest.mark.multirank

WAIT_S = 90.0
TIMEOUT_S = 16.0  # signs of life, and with them the word of a cancel, come eight times in it


def values(fill: float) -> dict[str, torch.Tensor]:
    """Return tensors of this rank alone, in several parts."""
    return {f"own-{dist.get_rank()}": torch.full((12 * MIB // 4,), fill)}


def options_of(**settings: Any) -> cloudckpt.Options:
    return make_options(part_bytes=5 * MIB, timeout_s=TIMEOUT_S, **settings)


def until(is_so: Callable[[], bool]) -> None:
    """Wait until another thread has come so far."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        os.sched_yield()


def assert_ends_cancelled(handle: cloudckpt.AsyncSave, by: tuple[int, ...]) -> None:
    error = handle.exception(WAIT_S)
    assert isinstance(error, cloudckpt.errors.SaveCancelledError), error
    assert isinstance(error, CheckpointException)
    assert error.ranks == by, error
    assert handle.cancelled()
    assert handle.progress.phase == "cancelled"


def save_again(root: str) -> None:
    """Nothing of the cancelled one is in its way, and nobody is told of it."""
    cloudckpt.async_save(values(2.0), f"{root}/next", options=options_of()).result(WAIT_S)
    state = values(0.0)
    cloudckpt.load(state, f"{root}/next")
    assert_same(state, values(2.0))


def cancel_on_one(root: str, canceller: int, moment: str) -> None:
    """On each rank: one cancels when its own save is at `moment`; the others go their way."""
    gate = Gate()
    if dist.get_rank() != canceller:
        gate.opened.set()
    handle = cloudckpt.async_save(values(1.0), f"{root}/cancelled", options=options_of(on_event=gate.at_event(moment)))
    if dist.get_rank() == canceller:
        assert gate.reached.wait(WAIT_S)
        assert handle.cancel()
        gate.opened.set()
    assert_ends_cancelled(handle, (canceller,))
    save_again(root)


def names_at(place: Place) -> set[str]:
    """Return the names of the checkpoints that have an object."""
    keys = place.keys()
    return {key.partition("/")[0] for key in keys}


def assert_only_the_next_is_there(place: Place) -> None:
    assert names_at(place) == {"next"}
    assert place.num_unfinished_uploads() == 0


@pytest.mark.every_store
@pytest.mark.parametrize(
    ("num_ranks", "canceller", "moment"), [(2, 0, "save.set_up"), (3, 2, "save.part_uploaded"), (2, 1, "save.written")]
)
def test_one_rank_cancels_a_save_of_all_ranks(place: Place, num_ranks: int, canceller: int, moment: str) -> None:
    """If this fails, a rank that cancels leaves the others with a checkpoint, a hang, or uploads that cost money."""
    run_ranks(cancel_on_one, place.root, canceller, moment, world_size=num_ranks)
    assert_only_the_next_is_there(place)


@on_ranks(2)
def test_a_failure_that_one_rank_has_not_seen_is_told_to_all(root: str, place: Place) -> None:
    """If this fails, a rank waits in vain for one that stumbled over an earlier failure, or a failure is lost."""
    cloudckpt.save(values(1.0), f"{root}/taken", options=options_of())
    handle = cloudckpt.async_save(values(2.0), f"{root}/taken", options=options_of())
    if dist.get_rank() == 0:
        assert handle.exception(WAIT_S) is not None
    wait_for_previous()
    begun_s = time.monotonic()
    with pytest.raises(cloudckpt.CheckpointExistsError, match="the background save to") as caught:
        cloudckpt.save(values(3.0), f"{root}/not-made", options=options_of())
    assert isinstance(caught.value, CheckpointException)
    assert set(caught.value.failures) == {1}
    assert time.monotonic() - begun_s < TIMEOUT_S  # it is told, and not found out by waiting
    dist.barrier()
    save_again(root)
    dist.barrier()
    assert names_at(place) == {"taken", "next"}
