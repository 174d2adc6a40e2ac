"""A saved structure loads into one of the same form, and is exported unchanged."""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.convert.states import contents
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.errors import StateDictMismatchError, UnsupportedValueError

_numbers = itertools.count()


class Sharded(list[int]):
    """Stands for a DTensor: there is no mesh yet when examples are made."""


class Moments(NamedTuple):
    """A tuple as functional optimizers have it."""

    mean: Any
    count: Any


@dataclass
class Held:
    """A class of a user, which is saved as one value."""

    value: Any


class Slotted:
    """The same, without a ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


_leaves = st.sampled_from([torch.zeros(3), Sharded([4]), (torch.zeros(2), 1), 1, 0.5, "text", None, True])
_keys = st.sampled_from(["a", "b", "0", "x.y", 0, 1, -7, True, None, 2.5, (0, "a")])
_nestings = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_keys, inner, max_size=3)
        | st.dictionaries(_keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(_keys, st.integers(0, 9), max_size=2).map(Counter)
        | st.tuples(inner, inner)
    ),
    max_leaves=10,
)
_states = st.dictionaries(st.sampled_from(["model", "optim", "more"]), _nestings, min_size=1)
_named = st.builds(lambda tensor, inner: Moments(tensor, [inner, (inner,)]), st.just(torch.zeros(2)), _nestings)


def filled(form: Any, number: Iterator[int], mesh: DeviceMesh | None) -> Any:
    """The structure with other values in each of its entries."""
    if isinstance(form, torch.Tensor):
        return torch.full(form.shape, float(next(number)))
    if isinstance(form, Sharded):
        tensor = torch.full(form, float(next(number)))
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])
    if isinstance(form, tuple):
        values = [filled(value, number, mesh) for value in form]
        return Moments(*values) if isinstance(form, Moments) else tuple(values)
    if isinstance(form, Mapping):
        made = copy.copy(form)
        made.clear()
        for key, value in form.items():
            made[key] = filled(value, number, mesh)
        return made
    if isinstance(form, list):
        return [filled(value, number, mesh) for value in form]
    return next(number)


def shown(value: Any) -> Any:
    """Return what can be compared with ``==``, with the types of containers, keys and leaves."""
    if isinstance(value, DTensor):
        return "DTensor", value.full_tensor().tolist()
    if isinstance(value, torch.Tensor):
        return "Tensor", value.tolist()
    if isinstance(value, Mapping):
        return type(value).__name__, {repr(key): shown(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shown(each) for each in value]
    return type(value).__name__, value


def names_of(value: Any, prefix: str = "") -> list[str]:
    """The names of all entries and containers, by the rule of torch: keys as text, joined by dots."""
    if isinstance(value, Mapping):
        pairs = [(f"{prefix}{key!s}", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(f"{prefix}{index}", each) for index, each in enumerate(value)]
    else:
        return []
    return [name for at, each in pairs for name in (at, *names_of(each, at + "."))]


def a_place() -> str:
    return f"memory://structures/{next(_numbers)}"


def checked_round_trip(form: Any, mesh: DeviceMesh | None, save: Callable[[Any, str], object]) -> None:
    uri = a_place()
    saved, target = filled(form, itertools.count(1), mesh), filled(form, itertools.count(1000), mesh)
    names = names_of(form)
    if len(set(names)) < len(names):
        try:
            save(saved, uri)
        except UnsupportedValueError:
            return  # two would have one name; where one of them is a container alone, it can be saved
    else:
        save(saved, uri)
    cloudckpt.load(target, uri)
    assert shown(target) == shown(saved)


_of_one_mesh = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(form=_states | st.fixed_dictionaries({"optim": _named}))
@example(form={"model": Sharded([3]), "callbacks": [{}, {"best": 1}]})
@example(form={"optim": {0: Moments([Sharded([4]), ({}, torch.zeros(1))], (1, 2)), "x": (Sharded([2]), ())}})
@example(form={"model": (1,), "callbacks": [{}, {"best": 1}], "state": {}})
@example(form={"o": {"state": {0: {"step": 1, "m": torch.zeros(1)}, -1: {}}, "lr": Counter({30: 1})}})
@example(form={"deep": [[torch.zeros(1), [[]]], [1, 2], {}], "w": Sharded([2])})
@_of_one_mesh
def test_a_structure_that_was_saved_loads_into_itself(mesh: DeviceMesh, form: Any) -> None:
    """If this fails, training cannot resume from a state dict of this form, or resumes with values of its own."""
    checked_round_trip(form, mesh, cloudckpt.save)


@given(form=_states)
@example(form={"optimizer": {"state": {}, "groups": [{}, {"lr": 1}, [{}]]}})
@_of_one_mesh
def test_an_export_has_the_keys_that_were_saved(form: Any) -> None:
    """If this fails, ``Optimizer.load_state_dict`` takes an exported state dict and restores nothing of it."""
    names = names_of(form)
    if len(set(names)) < len(names):
        return
    uri, saved = a_place(), filled(form, itertools.count(1), None)
    cloudckpt.save(saved, uri)
    cloudckpt.export_checkpoint(uri, f"{uri}-out/x.pt", format="torch")
    cloudckpt.import_checkpoint(f"{uri}-out/x.pt", f"{uri}-back", format="torch")
    target = filled(form, itertools.count(1000), None)
    cloudckpt.load(target, f"{uri}-back")
    assert shown(target) == shown(saved)
    exported = torch.load(io.BytesIO(contents(f"{uri}-out")["x.pt"]), weights_only=True)
    assert shown(exported) == shown(as_dicts(saved))


def as_dicts(value: Any) -> Any:
    """With no other mappings than dicts, as an export has them. A tuple without a tensor is one value."""
    if isinstance(value, Mapping):
        return {key: as_dicts(each) for key, each in value.items()}
    if isinstance(value, tuple) and "'Tensor'" not in repr(shown(value)):
        return value
    return type(value)(map(as_dicts, value)) if isinstance(value, (list, tuple)) else value


def trained(make: Callable[[Any], torch.optim.Optimizer], num_steps: int, *, sparse: bool = False) -> Any:
    """An optimizer's state after some steps, with its schedule's."""
    layer = torch.nn.Embedding(5, 3, sparse=sparse)
    optimizer = make(layer.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 80])
    for _ in range(num_steps):
        optimizer.zero_grad()
        layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        schedule.step()
    return optimizer, schedule


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),  # whose steps are ints
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # whose state is an empty dict
}


@pytest.mark.filterwarnings("ignore:torch's own format has no place:UserWarning")  # for SGD's state
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    """If this fails, an optimizer begins anew after a load, an export or an import, and nobody is told."""
    make, sparse = OPTIMIZERS[name], name == "SparseAdam"
    saved, schedule = trained(make, 30, sparse=sparse)
    state = {"optimizer": saved.state_dict(), "schedule": schedule.state_dict()}
    torch.save(state, tmp_path / "in.pt")
    cloudckpt.import_checkpoint(tmp_path / "in.pt", tmp_path / "step-1", format="torch")
    cloudckpt.export_checkpoint(tmp_path / "step-1", tmp_path / "out.pt", format="torch")
    torch_save_to_dcp(tmp_path / "out.pt", tmp_path / "dcp")
    cloudckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "step-2", format="dcp", allow_pickle=True)
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert shown(exported) == shown(as_dicts(state))
    for planner in (None, DefaultLoadPlanner(allow_partial_load=True)):
        for step in ("step-1", "step-2"):  # the second has lost the keys' types: those of the target count
            optimizer, resumed = trained(make, 1, sparse=sparse)
            target = {"optimizer": optimizer.state_dict(), "schedule": resumed.state_dict()}
            cloudckpt.load(target, tmp_path / step, planner=planner)
            assert shown(target) == shown(state)
            optimizer.load_state_dict(target["optimizer"])
            assert shown(optimizer.state_dict()) == shown(saved.state_dict())
            cloudckpt.save({"optimizer": optimizer.state_dict()}, tmp_path / "next", overwrite=True)


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("w", None, r"'w' was saved as a tensor: hold torch\.empty\(\(4,\)\) there, not a value \(NoneType\)"),
        ("w", "text", r"a value \(str\)"),
        ("t", torch.zeros(1), r"'t' was saved as a Python value: hold one there, or None, not a tensor"),
        ("t", torch.nn.Parameter(torch.zeros(2)), r"'t' was saved as a Python value"),
    ],
    ids=["nothing", "text", "tensor", "parameter"],
)
def test_a_tensor_and_a_value_do_not_take_each_others_place(
    name: str,
    value: Any,
    match: str,
    is_partial: bool,  # noqa: FBT001  # of the table
) -> None:
    """If this fails, a tensor of a model keeps its values where a number was saved, or the error does not say which."""
    uri = a_place()
    cloudckpt.save({"w": torch.ones(4), "t": 1}, uri)
    planner = DefaultLoadPlanner(allow_partial_load=True) if is_partial else None
    target = {name: value, **({"missing": 1} if is_partial else {})}
    with pytest.raises(StateDictMismatchError, match=match) as caught:
        cloudckpt.load(target, uri, planner=planner)
    assert "missing" not in str(caught.value)
    assert target[name] is value


@pytest.mark.parametrize(
    "save", [cloudckpt.save, lambda *args: cloudckpt.async_save(*args).result()], ids=["", "async"]
)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (Held, "entry.value"),
        (lambda tensor: [Held({"m": (tensor,)})], "entry.0.value.m.0"),
        (Slotted, "entry"),
        (lambda tensor: deque([1, tensor]), "entry.1"),
        (lambda tensor: {tensor}, "entry.0"),
        (lambda tensor: Held(deque([(1, tensor)])), "entry.value.0.1"),
    ],
    ids=["dataclass", "list", "slots", "deque", "set", "deep"],
)
def test_a_tensor_of_several_ranks_in_a_value_is_refused_by_its_path(
    mesh: DeviceMesh, wrap: Callable[[Any], Any], path: str, placement: Any, save: Callable[..., object]
) -> None:
    """If this fails, a save reports success and stores the shard of one rank for all of them."""
    tensor = distribute_tensor(torch.ones(4), mesh, [placement])
    with pytest.raises(
        UnsupportedValueError, match=rf"'entry' .*'{re.escape(path)}' (is|holds) a tensor of several ranks"
    ):
        save({"w": torch.ones(1), "entry": wrap(tensor)}, a_place())


def test_a_tensor_of_summands_is_refused_by_its_name(mesh: DeviceMesh) -> None:
    """If this fails, the error does not say which of a thousand entries cannot be saved."""
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(UnsupportedValueError, match=r"'layer\.grad' is a DTensor with the placements"):
        cloudckpt.save({"layer": {"grad": tensor}}, a_place())


def test_a_tuple_that_was_saved_as_a_value_loads_as_one(mesh: DeviceMesh) -> None:
    """If this fails, what torch's planner or version 0.1.0 saved as a tuple of tensors is lost; or a rank takes the
    shard of another one from it.
    """
    uri, saved = a_place(), {"pair": (torch.ones(2), [1]), "n": 1}
    cloudckpt.save(saved, uri, planner=DefaultSavePlanner())
    target = {"pair": (torch.zeros(2), [0]), "n": 0}
    cloudckpt.load(target, uri)
    assert shown(target) == shown(saved)
    cloudckpt.save(saved, uri, overwrite=True)
    for place in (None, (), (1, 2), 7, [Moments]):  # values that the saved one replaces
        target = {"pair": place, "n": 0}
        cloudckpt.load(target, uri)
        assert shown(target) == shown(saved)
    cloudckpt.save(saved, uri, planner=DefaultSavePlanner(), overwrite=True)
    sharded = {"pair": (distribute_tensor(torch.zeros(2), mesh, [Shard(0)]), [0])}
    with pytest.raises(StateDictMismatchError, match=r"'pair\.0' is not in it"):
        cloudckpt.load(sharded, uri)
