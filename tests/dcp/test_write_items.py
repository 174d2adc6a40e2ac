"""Write items, resolved: by a shorter way, but as the planner would."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.samples import views
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from cloudckpt.dcp.save_planner import BalancedSavePlanner
from cloudckpt.dcp.write_items import prepare_items
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.tensors.data_objects import PieceBody, StagedItem, new_piece
from cloudckpt.tensors.extensions import WriteTransforms
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import bytes_view

URI = "memory://items/x"


class OwnPlanner(DefaultSavePlanner):
    """Somebody's own: it has to be asked for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.asked.append(write_item.index.fqn)
        return super().resolve_data(write_item)


def planned(planner: SavePlanner, state: dict[str, Any]) -> list[WriteItem]:
    planner.set_up_planner(state, is_coordinator=True)
    # Without the global plan, in which torch's planner refuses some types.
    return planner.finish_plan(planner.create_local_plan()).items


def all_staged(planner: SavePlanner, items: list[WriteItem]) -> list[StagedItem]:
    return list(prepare_items(items, planner, WriteTransforms(None), uri=URI).stage(range(len(items))))


def told(item: StagedItem) -> tuple[Any, ...]:
    """All that it says, with its bytes."""
    body = PieceBody([new_piece(item.content, begin=0)], Arena(budget_bytes=1 << 20))
    with body.open(0, body.size_bytes) as parts:
        content = b"".join(parts)
    return item.entry, item.index_offsets, content, item.dtype, item.lengths, item.transforms


@settings(max_examples=200)
@given(st.lists(views(), max_size=5), st.sampled_from([torch.Tensor, torch.nn.Parameter]))
def test_tensors_sent_from_their_memory_equal_those_of_the_planner(
    samples: list[tuple[torch.Tensor, bytes]], kind: type
) -> None:
    """If this fails, tensors of some type or memory layout are saved as other bytes than they hold."""
    state: dict[str, Any] = {}
    for number, (tensor, _) in enumerate(samples):
        is_parameter = kind is torch.nn.Parameter and tensor.is_floating_point()
        state[f"t{number}"] = torch.nn.Parameter(tensor) if is_parameter else tensor
    own = OwnPlanner()
    expected = [told(item) for item in all_staged(own, planned(own, state))]
    assert len(own.asked) == len(state)
    for planner in (DefaultSavePlanner(), BalancedSavePlanner()):
        assert [told(item) for item in all_staged(planner, planned(planner, state))] == expected
    for number, (_, content) in enumerate(samples):
        assert any(entry.fqn == f"t{number}" and data == content for entry, _, data, *_ in expected)


@pytest.mark.parametrize("name", ["resolve_data", "lookup_object", "transform_object"])
def test_a_planner_of_the_user_resolves_its_tensors(name: str) -> None:
    """If this fails, what a user's planner makes of a tensor is not what is saved."""
    planner = DefaultSavePlanner()
    items = planned(planner, {"w": torch.arange(6.0)})
    doubled = torch.arange(6.0) * 2
    setattr(planner, name, lambda *_: doubled)
    (item,) = all_staged(planner, items)
    assert bytes(bytes_view(doubled)) == told(item)[2]


def test_a_state_that_has_changed_since_it_was_planned_is_seen() -> None:
    """If this fails, a cached plan has bfloat16 weights saved as float32, or a wrong shape committed."""
    planner = DefaultSavePlanner()
    items = planned(planner, {"w": torch.zeros(4, 2)})
    planner.state_dict["w"] = torch.ones(4, 2, dtype=torch.bfloat16)
    (item,) = all_staged(planner, items)
    assert (item.dtype, item.entry.num_bytes) == ("bfloat16", 16)
    planner.state_dict["w"] = torch.zeros(2, 4)
    with pytest.raises(UnsupportedValueError, match=r"'w' has the shape \(2, 4\), and \(4, 2\) in the plan"):
        all_staged(planner, items)


class _Waits:
    """Takes note of what is waited for."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []

    def wait(self, address: int, num_bytes: int) -> None:
        self.waits.append((address, num_bytes))


class _Fields(NamedTuple):
    first: Any
    second: Any


class _Pair(_Fields):
    """A named tuple that holds more than its entries."""

    note: str


def test_tensors_in_values_are_waited_for() -> None:
    """If this fails, a tuple of tensors is pickled before its snapshot has been copied."""
    first, second, third = torch.zeros(3), torch.zeros(4), torch.zeros(5)
    pair = _Pair(first, {"in": [second]})
    pair.note = "one value, since a tuple of its own has no place for this"
    planner, waits = BalancedSavePlanner(), _Waits()
    items = planned(planner, {"pair": pair, "step": 3, "betas": (0.9, 0.99), "w": third})
    assert {item.index.fqn for item in items if item.tensor_data is None} == {"pair", "step", "betas"}
    with pytest.warns(UserWarning, match="unpickling it could run any code"):
        prepare_items(items, planner, WriteTransforms(None), uri=URI, snapshot=waits)
    assert waits.waits == [(first.data_ptr(), 12), (second.data_ptr(), 16)]


def test_bytes_of_a_value_are_those_of_its_check() -> None:
    """If this fails, a value is encoded twice in a save: to see if it can be saved, and again when it is sent."""
    planner, betas = BalancedSavePlanner(), [0.9, 0.99]
    planned_items = prepare_items(planned(planner, {"betas": betas}), planner, WriteTransforms(None), uri=URI)
    betas.append(0.5)
    assert [told(item)[2] for item in planned_items.stage([0])] == [b"[0.9,0.99]"]
