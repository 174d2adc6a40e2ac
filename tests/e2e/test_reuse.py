"""Objects that are used again: nothing of the first use counts in the next."""

from __future__ import annotations

import datetime as dt
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.kit.in_memory import Memory
from tests.kit.ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.dcp.ranks.collectives import begin_call
from cloudckpt.dcp.ranks.failures import failure_of
from cloudckpt.dcp.ranks.rendezvous import TRANSFER_FRACTION
from cloudckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from cloudckpt.manager.candidates import Candidate, load_newest
from cloudckpt.report import LoadReport


@pytest.mark.parametrize("api", ["ours", "torch"])
def test_a_reader_reads_checkpoints_of_both_kinds_in_turn(api: str, tmp_path: Path) -> None:
    """If this fails, a reader that was used for torch's checkpoint reads the next one with torch's code, or reports the
    bytes of another load.
    """
    places = [tmp_path / name for name in "abcd"]
    for number, place in enumerate(places):
        saved = {"w": torch.full((10 * (number + 1),), float(number)), "step": number}
        if number % 2:
            cloudckpt.save(saved, place, no_dist=True)
        else:
            dcp.save(saved, checkpoint_id=place, no_dist=True)
    reader = cloudckpt.ObjectStoreReader(places[0], allow_pickle=True)
    for number in (0, 1, 2, 3, 1, 0):
        state: dict[str, Any] = {"w": torch.zeros(10 * (number + 1)), "step": -1}
        if api == "ours":
            cloudckpt.load(state, places[number], storage_reader=reader, no_dist=True)
        else:
            dcp.load(state, checkpoint_id=places[number], storage_reader=reader, no_dist=True)
        assert state["step"] == number
        assert torch.equal(state["w"], torch.full((10 * (number + 1),), float(number)))
        assert reader.report is not None
        assert reader.report.uri == str(places[number])
        assert bool(reader.report.attempt) == bool(number % 2)


@on_ranks(2)
def test_each_call_has_its_own_timeout() -> None:
    """If this fails, ``Options(timeout_s=…)`` of the first save or load of a process group holds for all later ones."""
    for number, timeout_s in enumerate((60.0, 5.0, 90.0)):
        call = begin_call(None, "foreground", doing="saving", uri=f"memory://{number}", timeout_s=timeout_s)
        assert call is not None
        assert call._link.rendezvous.timeout_s == timeout_s
        assert call._link.gloo.options._timeout == dt.timedelta(seconds=TRANSFER_FRACTION * timeout_s)
        call.end(None)


def load_by_fates(
    fates: dict[str, list[list[Exception]]], looks: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], LoadReport]:
    """Load the newest of the candidates of `looks`, each time with the next of its fates: errors of the ranks, or none.

    Returns the candidates that were tried, and the report.
    """
    tried: list[str] = []

    def load(state_dict: dict[str, Any], uri: str, **_: Any) -> LoadReport:
        tried.append(uri)
        if errors := fates[uri].pop(0):
            failures: Any = {rank: (error, traceback.StackSummary()) for rank, error in enumerate(errors)}
            raise failure_of(CheckpointException("read", failures), subject=f"loading {uri}", is_alone=True)
        return cloudckpt.load(state_dict, "memory://reused/whole", no_dist=True)

    cloudckpt.save({"w": torch.ones(1)}, "memory://reused/whole", no_dist=True, overwrite=True)
    monkeypatch.setattr("cloudckpt.manager.candidates.load", load)
    found = load_newest(
        {"w": torch.zeros(1)},
        "memory://reused",
        "memory://reused",
        lambda _: [Candidate(uri=uri) for uri in looks.pop(0)],
        reader_of=lambda _: cloudckpt.ObjectStoreReader("memory://reused"),
        planner=None,
        process_group=None,
        no_dist=True,
        verify_first=False,
        options=cloudckpt.Options(),
    )
    assert found is not None
    assert not looks
    return tried, found[1]


DAMAGED = CorruptCheckpointError("bits flipped", uri="memory://reused")
GONE = CheckpointNotFoundError("nothing is committed", uri="memory://reused")


def test_a_candidate_that_was_damaged_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, each candidate that is gone makes a restore read the damaged ones before it once more."""
    fates: dict[str, list[list[Exception]]] = {"a": [[DAMAGED]], "b": [[GONE]], "c": [[DAMAGED]], "d": [[]]}
    tried, report = load_by_fates(fates, [["a", "b", "c", "d"], ["a", "c", "d"]], monkeypatch)
    assert tried == ["a", "b", "c", "d"]
    assert [(one.uri, one.is_gone) for one in report.skipped] == [("a", False), ("b", True), ("c", False)]


def test_a_candidate_that_was_replaced_meanwhile_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a restore passes over the newest checkpoint, because a save replaced it while it was read."""
    fates: dict[str, list[list[Exception]]] = {"a": [[DAMAGED, GONE], []], "b": [[]]}
    tried, report = load_by_fates(fates, [["a", "b"], ["a", "b"]], monkeypatch)
    assert (tried, report.skipped) == (["a", "a"], ())


def test_a_step_that_was_deleted_and_saved_again_is_looked_at_anew(memory: Memory) -> None:
    """If this fails, a manager that has seen a step takes its metrics and its time for those of the step that took its
    place: ``best`` names the wrong one, and ``latest`` an older one.
    """
    manager = cloudckpt.CheckpointManager(memory.root, async_=False)
    state = {"w": torch.ones(1)}
    manager.save(1, state, metrics={"loss": 1.0})
    manager.save(2, state, metrics={"loss": 2.0})
    best, latest = manager.best("loss"), manager.latest()
    assert best is not None
    assert latest is not None
    assert (best.step, latest.step) == (1, 2)
    with cloudckpt.CheckpointManager(memory.root, async_=False) as other:
        cloudckpt.delete(memory.uri("step-1"))
        cloudckpt.gc(memory.root, older_than=0, dry_run=False)
        other.save(1, state, metrics={"loss": 9.0})
    best, latest = manager.best("loss"), manager.latest()
    assert best is not None
    assert latest is not None
    assert (best.step, best.metrics) == (2, {"loss": 2.0})
    assert (latest.step, latest.metrics) == (1, {"loss": 9.0})
    manager.close()
