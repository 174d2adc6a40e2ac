"""Objects that no save can store and no load can fill: each error names the entry, and what to pass instead."""

from __future__ import annotations

import enum
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.errors import CloudckptError, InvalidOptionError, StateDictMismatchError, UnsupportedValueError


class Color(enum.Enum):
    RED = 1


class Broken:
    """An object whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("shuffle")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take any state."""


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def endless() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


UNSAVABLE: dict[str, tuple[Callable[[], object], str]] = {
    "generator": (lambda: (one for one in ()), "'extra.d' .*generator"),
    "open stream": (lambda: io.TextIOWrapper(io.BytesIO()), "'extra.d' .*TextIOWrapper"),
    "lambda": (lambda: lambda: 1, "'extra.d' .*function"),
    "class in a list": (lambda: [io.StringIO], r"'extra\.d\.0' .*_io\.StringIO.*no code.* or admit it by torch.*IO\]"),
    "function in a dict": (lambda: {"e": freed}, r"'extra\.d\.e' .*the function .*\.freed, and .* its name as text$"),
    "lock": (threading.Lock, "'extra.d' .*lock"),
    "lock in an object": (threading.Event, r"'extra\.d\._cond\._lock' .*lock"),
    "module": (lambda: threading, "'extra.d' .*module"),
    "iterator": (lambda: iter(torch.utils.data.DataLoader([1])), r"'extra\.d[\w.]*' "),  # type: ignore[arg-type]  # a list does
    "class": (lambda: nn.Linear, r"'extra\.d' is the class Linear, so it has no state\. Pass an object"),
    "class in a dict": (lambda: {"e": torch.optim.Adam}, r"'extra\.d\.e' is the class Adam"),
    "broken object": (Broken, r"state_dict\(\) of 'extra\.d' raised KeyError: 'shuffle'"),
    "lazy module": (lambda: nn.LazyLinear(3), r"'extra\.d\.weight'.* lazy module, .*Run the module once"),
    "lazy parameter": (lambda: nn.LazyLinear(3).weight, r"'extra\.d'.* lazy module, .*Run the module once"),
    "meta tensor": (lambda: torch.ones(3, device="meta"), r"'extra\.d'.* meta tensor"),
    "sparse tensor": (lambda: torch.eye(3).to_sparse(), r"'extra\.d'.* layout torch.sparse_coo.*to_dense"),
    "freed tensor": (freed, r"'extra\.d'.* memory was freed"),
    "list in itself": (endless, r"'extra\.d' or a part of it holds itself"),
    "key": (lambda: {object(): 1}, r"extra\.d has the key <object .*of class object"),
}


CALLS: dict[str, Callable[[str, dict[str, Any]], object]] = {
    "save": lambda uri, values: cloudckpt.save(uri, extra=values),
    "async_save": lambda uri, values: cloudckpt.async_save(uri, extra=values).result(60),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", UNSAVABLE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_value_that_cannot_be_saved_is_named_by_its_entry(kind: str, call: str) -> None:
    """If this fails, a user searches a large state for an error of pickle or of torch."""
    make, message = UNSAVABLE[kind]
    uri = f"memory://unsavable/{call}/{kind}"
    with pytest.raises(CloudckptError, match=message) as caught:
        CALLS[call](uri, {"d": make(), "n": 1})
    assert "rank" not in str(caught.value).partition(" rank has it")[0]
    assert isinstance(caught.value, (UnsupportedValueError, InvalidOptionError)) or kind == "broken object"
    assert cloudckpt.latest(f"memory://unsavable/{call}") is None


def test_admitted_class_is_saved() -> None:
    """If this fails, a user who admits a class of a framework's state to loads cannot save it."""
    with torch.serialization.safe_globals([Broken]):
        cloudckpt.save({"d": [Broken]}, "memory://unsavable/admitted")
        state: dict[str, Any] = {"d": None}
        cloudckpt.load(state, "memory://unsavable/admitted")
    assert state["d"] == [Broken]


@pytest.mark.parametrize("call", CALLS)
def test_warning_points_at_the_line_of_the_user(call: str) -> None:
    """If this fails, the warning names a line of the library, or of a thread, and a user cannot find the call."""
    with pytest.warns(UserWarning, match=r"'extra\.d' is of class .*Color.*add_safe_globals") as caught:
        CALLS[call](f"memory://unsavable/warned-{call}", {"d": Color.RED})
    assert [one.filename for one in caught] == [__file__]


TARGETS: dict[str, tuple[Callable[[], object], str]] = {
    "expanded": (lambda: torch.zeros(1).expand(3), r"'n\.w' .*several elements share memory, .*clone\(\)"),
    "sparse": (lambda: torch.zeros(3).to_sparse(), r"'n\.w' .*layout torch.sparse_coo. Load into a plain tensor"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        r"'n\.w' .*quantized \(torch.qint8\). Load into a plain tensor",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1)]), r"'n\.w' .*nested tensor .* plain tensor"),
    "lazy": (lambda: nn.LazyLinear(3).bias, r"'n\.w' .*lazy module, .*Run the module once before the load"),
    "freed": (freed, r"'n\.w' (was saved with|.*memory was freed)"),
    "function": (
        lambda: freed,
        r"'n\.w' was saved as a tensor: hold torch\.empty\(\(3,\)\) there, not a value \(function\)",
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_target_that_cannot_be_filled_is_named_by_its_entry(kind: str) -> None:
    """If this fails, a load ends in an error of torch's that names no entry."""
    uri = f"memory://targets/{kind}"
    cloudckpt.save({"n": {"w": torch.ones(3)}}, uri)
    make, message = TARGETS[kind]
    with pytest.raises((UnsupportedValueError, StateDictMismatchError), match=message):
        cloudckpt.load({"n": {"w": make()}}, uri)


def test_meta_tensor_is_loaded_without_a_process_group() -> None:
    """If this fails, one process cannot load into tensors of the meta device, and reads of process groups."""
    cloudckpt.save({"w": torch.arange(3)}, "memory://targets/meta")
    state = {"w": torch.empty(3, dtype=torch.int64, device="meta")}
    cloudckpt.load(state, "memory://targets/meta")
    assert state["w"].tolist() == [0, 1, 2]


def test_class_in_the_place_of_an_object_is_named_by_a_load() -> None:
    """If this fails, a load of a class ends in an argument that load_state_dict misses."""
    cloudckpt.save("memory://targets/class", model=nn.Linear(2, 2), extra={"d": nn.Linear(1, 1)})
    with pytest.raises(InvalidOptionError, match=r"'extra\.d' is the class Linear"):
        cloudckpt.load("memory://targets/class", extra={"d": nn.Linear})
    with pytest.raises(InvalidOptionError, match="not the class Linear"):
        cloudckpt.load("memory://targets/class", model=nn.Linear)  # type: ignore[arg-type]  # on purpose


def test_missing_entry_comes_with_a_name_that_can_be_meant() -> None:
    """If this fails, the error for one layer names the same parameter of another layer."""
    uri = "memory://targets/names"
    cloudckpt.save({"model": {"head.weight": torch.ones(1), "bias": torch.ones(1)}}, uri)
    for asked, message in [
        ({"head.weight": torch.ones(1)}, r"'head\.weight' is not in it \(did you mean 'model\.head\.weight'\?\)"),
        ({"model": {"mid.weight": torch.ones(1)}}, r"'model\.mid\.weight' is not in it[;.] "),
        ({"model": {"head.weigth": torch.ones(1)}}, r"\(did you mean 'model\.head\.weight'\?\)"),
    ]:
        with pytest.raises(StateDictMismatchError, match=message):
            cloudckpt.load(asked, uri)


@on_ranks(2)
def test_ranks_hear_of_the_entry_of_another_rank(root: str) -> None:
    """If this fails, a rank whose state is whole hangs, or does not learn which entry of which rank is bad."""
    mine = {"d1": threading.Lock()} if dist.get_rank() else {"d0": 1}
    for values, message in [
        (mine, r"on rank 1: .*'extra\.d1' .*lock"),
        ({"d": nn.LazyLinear(3)}, r"on ranks 0-1: .*'extra\.d\.weight'"),
    ]:
        for name, call in CALLS.items():
            with pytest.raises(CheckpointException, match=message):
                call(f"{root}/{name}", values)
    dist.barrier()
    assert cloudckpt.list_checkpoints(root) == []
