"""What is planned for a load, beside what torch's own planner plans for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

import cloudckpt
from cloudckpt._dcp.load_planner import ExplainingLoadPlanner, planned

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(12.0).view(3, 4),
        "parameter": torch.nn.Parameter(torch.ones(5)),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "nested": {"inner": [torch.ones(2), {"deep": torch.zeros(3)}], "step": 5},
        "name": "run",
    }


class Kept:
    """Something of the user's that is a ``Stateful``."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3)
        self.loaded = False

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = True


def metadata_at(uri: str) -> Metadata:
    return cloudckpt.ObjectStoreReader(uri).read_metadata()


def test_the_plan_is_the_one_that_torch_makes(tmp_path: Path) -> None:
    """If this fails, a load leaves out what torch would load, or loads it into something else."""
    cloudckpt.save(state(), tmp_path / "c")
    metadata = metadata_at(str(tmp_path / "c"))

    def items(planner: DefaultLoadPlanner) -> list[ReadItem]:
        planner.set_up_planner(state(), metadata, is_coordinator=True)
        return sorted(planner.create_local_plan().items, key=lambda item: item.dest_index.fqn)

    assert items(ExplainingLoadPlanner("here")) == items(DefaultLoadPlanner())


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 1)], ids=str)
def test_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """If this fails, a load fills a tensor with a part of the stored one, and says nothing."""
    cloudckpt.save({"w": torch.arange(3.0), "step": 1}, tmp_path / "c")
    target = torch.full(shape, -1.0)
    with pytest.raises(cloudckpt.StateDictMismatchError, match=r"'w' was saved with shape \(3,\), not"):
        cloudckpt.load({"w": target, "step": 0}, tmp_path / "c")
    assert torch.equal(target, torch.full(shape, -1.0))


def test_torch_sees_no_entries_where_none_is_stateful() -> None:
    """If this fails, torch takes longer to look at each of 20,000 tensors than it takes to load them."""
    given = state()
    with planned(given, None, "here") as (wanted, planner):
        assert wanted == {}
        planner.set_up_planner(wanted, Metadata({}), is_coordinator=True)
        assert list(planner.state_dict) == sorted(planner.state_dict)
        assert planner.state_dict["weight"] is given["weight"]


def test_stateful_objects_are_asked_and_told(tmp_path: Path) -> None:
    """If this fails, objects with a state of their own are loaded as plain values, or are never told."""
    marked = torch.ones(2)
    marked.state_dict = dict  # type: ignore[attr-defined]  # which alone makes no Stateful
    with planned({"kept": Kept(), "marked": marked}, None, "here") as (_, planner):
        planner.set_up_planner({}, Metadata({}), is_coordinator=True)
        assert list(planner.state_dict) == ["kept.tensor", "marked"]
    kept = Kept()
    kept.tensor = torch.ones(3)
    cloudckpt.save({"kept": kept, "step": 1}, tmp_path / "c")
    fresh = Kept()
    target = {"kept": fresh, "step": 0}
    cloudckpt.load(target, tmp_path / "c")
    assert fresh.loaded
    assert torch.equal(fresh.tensor, torch.ones(3))
    assert target["step"] == 1


def test_a_planner_of_the_users_is_used_as_it_is() -> None:
    """If this fails, what a user's planner does about partial loads or names is lost."""

    class Own(DefaultLoadPlanner):
        pass

    given = state()
    for own in (Own(), DefaultLoadPlanner(flatten_state_dict=False)):
        with planned(given, own, "here") as (wanted, planner):
            assert wanted is given
            assert planner is own


def test_values_are_put_back_after_success_alone(tmp_path: Path) -> None:
    """If this fails, numbers and strings keep their old values after a load, or a failed load changes them."""
    cloudckpt.save(state(), tmp_path / "c")
    target = state() | {"name": "old"}
    target["nested"] = {"inner": [torch.zeros(2), {"deep": torch.ones(3)}], "step": 0}
    with pytest.raises(cloudckpt.StateDictMismatchError):
        cloudckpt.load(target | {"more": torch.ones(1)}, tmp_path / "c")
    assert target["name"] == "old"
    cloudckpt.load(target, tmp_path / "c")
    assert target["name"] == "run"
    assert target["nested"]["step"] == 5
    assert torch.equal(target["nested"]["inner"][0], torch.ones(2))
