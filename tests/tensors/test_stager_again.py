"""Snapshots one after the other: made as the last one was, and never of anything but the values that there are now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from cloudckpt.tensors.stager import PinnedStager
from cloudckpt.tensors.tensor_bytes import is_short

WAIT_S = 60
LENGTH = 12


@pytest.fixture
def stager() -> Iterator[PinnedStager]:
    """With two threads, so that copies are made beside what looks at the tensors."""
    with closing(PinnedStager(num_threads=2)) as made:
        yield made


def copied(stager: PinnedStager, state_dict: Any) -> Any:
    """A complete snapshot."""
    staging = stager.begin(state_dict)
    staging.completed.result(WAIT_S)
    assert staging.copied_bytes == staging.num_bytes
    return staging.state_dict


def as_values(value: Any) -> Any:
    """What it is, in Python's own values."""
    if isinstance(value, torch.Tensor):
        there = value.layout is torch.sparse_coo or not is_short(value)
        # In words: NaN, as which some bits of other types are read, is not equal to itself.
        return str(value.dtype), list(value.shape), str(value.to_dense().tolist()) if there else None
    if isinstance(value, dict):
        return [(name, as_values(item)) for name, item in value.items()]
    return [as_values(item) for item in value] if isinstance(value, list) else value


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether it has some."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and not is_short(tensor)


class Odd(torch.Tensor):
    """A subclass of the user's own."""


State = dict[str, Any]
"""Of tensors, by name, some of which may be of one memory."""
Change = Callable[[State, str], None]


def _set(make: Callable[[torch.Tensor], Any]) -> Change:
    def change(state: State, name: str) -> None:
        state[name] = make(state[name])

    return change


def _put_there_what_is_elsewhere(state: State, name: str) -> None:
    state[name].data = torch.arange(LENGTH, dtype=state[name].dtype) + 100


def _give_it_the_memory_of_another(state: State, name: str) -> None:
    other = state[next(iter(state))]
    if isinstance(other, torch.Tensor) and is_memory(other):
        state[name] = other.detach()


def _let_it_go_and_take_its_place(state: State, name: str) -> None:
    size, dtype = state[name].size(), state[name].dtype
    del state[name]  # what is allocated next mostly gets its address
    state[name] = torch.full(size, 7, dtype=dtype)


def _move_to_the_end(state: State, name: str) -> None:
    state[name] = state.pop(name)


def _take_a_part_and_free_it(state: State, name: str) -> None:
    state[name] = state[name][2:]
    state[name].untyped_storage().resize_(0)


def _shrink(state: State, name: str) -> None:
    state[name].resize_(LENGTH // 2)


CHANGES: dict[str, Change] = {
    "other values": lambda state, name: state[name].fill_(5),
    "nothing": lambda state, name: None,  # a change like the others
    "resized in place": _shrink,
    "other memory in place": _put_there_what_is_elsewhere,
    "other dtype": _set(lambda tensor: tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.float32)),
    "half as many of twice the size": _set(lambda tensor: tensor.view(torch.int64)),
    "other shape": _set(lambda tensor: tensor.view(-1, 2)),
    "a dimension more": _set(lambda tensor: tensor[None]),
    "a dimension more in place": lambda state, name: state[name].unsqueeze_(0),
    "other strides": _set(lambda tensor: tensor.view(-1, 2).t()),
    "a part": _set(lambda tensor: tensor[::2]),
    "later": _set(lambda tensor: tensor[2:]),
    "negative": _set(torch._neg_view),
    "a clone": _set(torch.clone),
    "a parameter": _set(lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    "a subclass": _set(lambda tensor: tensor.as_subclass(Odd)),
    "a number": _set(lambda tensor: int(tensor.numel())),
    "nothing left": _set(lambda tensor: tensor[:0]),
    "sparse": _set(torch.Tensor.to_sparse),
    "in a list": _set(lambda tensor: [tensor, 1]),
    "gone": lambda state, name: state.pop(name),
    "new": lambda state, name: state.update({name + "'": torch.arange(LENGTH)}),
    "freed": lambda state, name: state[name].untyped_storage().resize_(0),
    "a part, and freed": _take_a_part_and_free_it,
    "tied": _give_it_the_memory_of_another,
    "let go": _let_it_go_and_take_its_place,
    "last": _move_to_the_end,
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_alone_is_seen(stager: PinnedStager, change: str) -> None:
    """If this fails, a checkpoint holds what a tensor was in the save before."""
    state: State = {name: torch.arange(LENGTH, dtype=torch.float32) for name in "abc"}
    for _ in range(2):
        assert as_values(copied(stager, state)) == as_values(state)
    CHANGES[change](state, "b")
    for _ in range(2):
        assert as_values(copied(stager, state)) == as_values(state)


def test_ties_that_come_and_go_are_known(stager: PinnedStager) -> None:
    """If this fails, tied weights are stored twice, or one tensor is stored under the name of another."""
    one, two = torch.ones(100), torch.full((100,), 2.0)
    for _ in range(2):
        for state in ({"a": one, "b": two}, {"a": one, "b": one}, {"a": two, "b": two}, {"a": two, "b": one[:50]}):
            for _ in range(2):
                staging = stager.begin(state)
                staging.completed.result(WAIT_S)
                assert staging.num_bytes == (400 if state["a"] is state["b"] else 400 + state["b"].nbytes)
                assert as_values(staging.state_dict) == as_values(state)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: tensor.resize_(4),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.set_(torch.zeros(6, 6)),
        lambda tensor: setattr(tensor, "data", torch.zeros(6, 6)),
    ],
    ids=["unsqueeze", "resize", "t", "set", "data"],
)
def test_copies_that_somebody_made_others_are_not_used_again(
    stager: PinnedStager, tamper: Callable[[torch.Tensor], None]
) -> None:
    """If this fails, a planner that changes a tensor in place changes it in all later checkpoints."""
    state = {"a": torch.arange(36.0).view(6, 6), "b": torch.ones(3)}
    tamper(copied(stager, state)["a"])
    state["a"].add_(1)
    assert as_values(copied(stager, state)) == as_values(state)


def test_other_containers_around_the_same_tensors_are_seen(stager: PinnedStager) -> None:
    """If this fails, a checkpoint has the names and the nesting of an earlier one."""
    one, two = torch.ones(3), torch.zeros(3)
    for state in (
        {"a": one, "b": two},
        {"b": one, "a": two},
        {"a": {"c": one}, "b": [two]},
        {"a": [one, two]},
        {"a": (one, two)},
        OrderedDict(a=one, b=two),
        {"a": one, "n": 1, "b": two},
        {"a": one, "n": 2, "b": two},
    ):
        snapshot = copied(stager, state)
        assert list(snapshot) == list(state)
        assert str(snapshot) == str(dict(state) if type(state) is not OrderedDict else state)
