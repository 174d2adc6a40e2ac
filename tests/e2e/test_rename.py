"""Loads under other names than those of the checkpoint: a part of a model, an EMA copy, a state dict of any program."""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.kit.models import assert_same, local
from tests.kit.places import Place
from tests.kit.ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import cloudckpt
from cloudckpt.errors import CloudckptError, InvalidOptionError, StateDictMismatchError


class Point(NamedTuple):
    x: Any
    y: Any


class Net(nn.Module):
    """A model with a part that others want."""

    def __init__(self, part: str = "encoder", head: str = "head") -> None:
        super().__init__()
        self.add_module(part, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.add_module(head, nn.Linear(4, 2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            values = child(values)
        return values


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def make_both() -> nn.Module:
    return nn.ModuleDict({"net": Net(), "ema": Net()})


def train(model: nn.Module, lr: float = 0.03) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    step(model, optimizer)
    return optimizer


NET, EMA = Net(), Net()
OPTIMIZER = train(NET)
STATES: dict[str, Any] = {
    "live": {"model": NET.state_dict(), "random_state": 5},
    "averaged": {"model": {"net": NET.state_dict(), "ema": EMA.state_dict()}},
    "beside": {"model": EMA.state_dict(), "ema": NET.state_dict()},
    "dict": {"net": NET.state_dict(), "optim": OPTIMIZER.state_dict(), "step": 7},
    "app": {"app": {"model": NET.state_dict(), "optim": get_optimizer_state_dict(NET, OPTIMIZER)}, "step": 7},
    "wrapped": {"model": {f"module.{name}": value for name, value in NET.state_dict().items()}},
    "flat": NET.state_dict(),
}
LOADS: dict[str, tuple[str, Any, Callable[[], nn.Module]]] = {
    "a part": ("live", {"model.encoder": "model"}, lambda: Net().encoder),
    "a part, with dots": ("live", {"model.encoder.": "model."}, lambda: Net().encoder),
    "a part, by a function": (
        "live",
        lambda name: name.replace(".encoder", "") if name.startswith("model.encoder.") else None,
        lambda: Net().encoder,
    ),
    "a part of a part": ("averaged", {"model.net.encoder.1": "model"}, lambda: nn.Linear(4, 4)),
    "a part into a part": ("live", {"model.encoder": "model.body"}, lambda: Net("body")),
    "two parts": ("live", {"model.encoder": "model.body", "model.head": "model.end"}, lambda: Net("body", "end")),
    "a copy": ("beside", {"ema": "model"}, Net),
    "one of two": ("averaged", {"model.net": "model"}, Net),
    "another key": ("dict", {"net": "model"}, Net),
    "another key, by a function": ("dict", lambda name: re.sub(r"^net\b", "model", name), Net),
    "a wrapper's": ("wrapped", {"model.module": "model"}, Net),
    "deeper": ("app", {"app.model": "model"}, Net),
    "no key": ("flat", {"": "model"}, Net),
    "no key, a part": ("flat", {"encoder": "model"}, lambda: Net().encoder),
    "into one of two": ("live", {"model": "model.net"}, lambda: nn.ModuleDict({"net": Net()})),
}


def oracle(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module of any of `LOADS` must have: those of `NET` in the same order."""
    found = [value.detach() for value in NET.parameters()]
    mine = dict(module.named_parameters())
    if len(mine) == 2:
        found = found[2:]
    return dict(zip(mine, found, strict=False))


@pytest.mark.every_store
def test_a_renamed_entry_fills_the_object_of_its_new_name(place: Place) -> None:
    """If this fails, a part of a model, or its average, is loaded into another model wrongly or not at all."""
    for name, state in STATES.items():
        cloudckpt.save(state, place.uri(name), no_dist=True)
    for saved, rename, make in LOADS.values():
        module = make()
        cloudckpt.load(place.uri(saved), model=module, rename=rename, no_dist=True)
        assert_same(dict(module.named_parameters()), oracle(module))
    plain = {name: torch.zeros_like(value) for name, value in NET.encoder.state_dict().items()}
    cloudckpt.load(plain, place.uri("live"), rename={"model.encoder": ""}, no_dist=True)
    assert_same(plain, oracle(NET.encoder))
    dcp.load(
        {"encoder": (into := Net().encoder).state_dict()},
        storage_reader=cloudckpt.ObjectStoreReader(place.uri("live"), rename={"model": ""}),
        no_dist=True,
    )
    assert_same(dict(into.named_parameters()), oracle(into))


@pytest.mark.parametrize("name", sorted(LOADS.keys() - {"a copy", "a part of a part"}))  # these have several answers
def test_an_error_names_the_argument_that_helps(name: str, tmp_path: Path) -> None:
    """If this fails, an error tells a user of names that differ, and its advice does not lead to the load."""
    saved, _, make = LOADS[name]
    cloudckpt.save(STATES[saved], tmp_path / "a", no_dist=True)
    module = make()
    with pytest.raises(StateDictMismatchError) as caught:
        cloudckpt.load(tmp_path / "a", model=module, no_dist=True)
    found = re.search(r"pass rename=(\{[^}]*\})", str(caught.value), re.IGNORECASE)
    assert found is not None, caught.value
    cloudckpt.load(tmp_path / "a", model=module, rename=ast.literal_eval(found[1]), no_dist=True)
    assert_same(dict(module.named_parameters()), oracle(module))


def test_one_error_has_the_names_of_both_sides(tmp_path: Path) -> None:
    """If this fails, a user mends a mismatch name by name, with a load for each."""
    cloudckpt.save(tmp_path / "a", model=NET, optimizer=OPTIMIZER, no_dist=True)
    other = Net(head="end")
    for call in (
        lambda: cloudckpt.load(tmp_path / "a", model=other, no_dist=True),
        lambda: cloudckpt.load({"model": other.state_dict()}, tmp_path / "a", no_dist=True),
    ):
        with pytest.raises(StateDictMismatchError, match=r"'model\.end\.weight' is not") as caught:
            call()
        assert "'model.end.bias' is not" in str(caught.value)
        assert "nothing asks for 'model.head.weight', 'model.head.bias' in it" in str(caught.value)
        assert "rename={'model.head': 'model.end'}" in str(caught.value)
    more = nn.ModuleDict({**dict(NET.named_children()), "more": nn.Linear(2, 2)})
    with pytest.raises(StateDictMismatchError, match=r"'model\.more\.weight' is not in it; '[a-z.]*' is .*it\. Ask"):
        cloudckpt.load(tmp_path / "a", model=more, no_dist=True)  # nobody has asked for the optimizer
    with pytest.raises(StateDictMismatchError, match=r"rename=\{'model\.encoder\.1': 'model'\}"):  # of the same shape
        cloudckpt.load(tmp_path / "a", model=nn.Linear(4, 4), no_dist=True)
    with pytest.raises(StateDictMismatchError, match=r"has no 'extra', 'scheduler', only 'model', 'optimizer'"):
        cloudckpt.load(tmp_path / "a", model=NET, extra={}, scheduler=OPTIMIZER, no_dist=True)


def test_entries_of_no_object_are_taken_into_extra_as_the_error_says(tmp_path: Path) -> None:
    """If this fails, who continues a state dict of their own has to guess where its step goes."""
    saved = {"model": NET.state_dict(), "optim": OPTIMIZER.state_dict(), "epoch": 3, "w": torch.ones(2)}
    cloudckpt.save(saved, tmp_path / "step-1", no_dist=True)
    manager = cloudckpt.CheckpointManager(tmp_path, no_dist=True)
    rename, extra = {"optim": "optimizer"}, {"x": 1}
    for objects in ({}, {"extra": extra}):
        with pytest.raises(StateDictMismatchError) as caught:
            manager.restore(model=NET, optimizer=OPTIMIZER, rename=rename, **objects)
        found = re.search(
            r"To take '(\w+)', '(\w+)' into extra, pass rename=\{'(\w+)': 'extra\.\3'\}", str(caught.value)
        )
        assert found is not None, str(caught.value)
        assert {*found.groups()} == {"epoch", "w"}
    rename |= {"epoch": "extra.epoch", "w": "extra.w"}
    assert manager.restore(model=NET, optimizer=OPTIMIZER, extra={}, rename=rename) is not None


def test_a_value_beside_renamed_objects_is_taken_into_extra_as_the_error_says(tmp_path: Path) -> None:
    """If this fails, who brings the dict of another loop to a manager loses the step in it, with ``strict=False``."""
    net = nn.Linear(2, 2)
    cloudckpt.save({"net": net.state_dict(), "step": 7}, tmp_path / "step-7", no_dist=True)
    with pytest.raises(StateDictMismatchError) as caught:
        cloudckpt.load(tmp_path / "step-7", model=net, no_dist=True)
    advised = re.search(
        r"pass rename=(\{[^}]+\}).*To take 'step' into extra, add ('step': 'extra.step')", str(caught.value)
    )
    assert advised is not None
    rename = {**ast.literal_eval(advised[1]), **ast.literal_eval(f"{{{advised[2]}}}")}
    extra = {"step": 0}
    cloudckpt.load(tmp_path / "step-7", model=net, extra=extra, rename=rename, no_dist=True)
    assert extra == {"step": 7}


def test_tensors_of_a_flat_model_are_not_advised_to_be_extra(tmp_path: Path) -> None:
    """If this fails, who loads a mean of files reads of a map that puts a model's weights into extra."""
    cloudckpt.save({f"net.{name}": value for name, value in NET.state_dict().items()}, tmp_path / "a", no_dist=True)
    with pytest.raises(StateDictMismatchError, match=r"pass rename=\{'net': 'model'\}\. Otherwise") as caught:
        cloudckpt.load(tmp_path / "a", model=Net(), no_dist=True)
    assert "extra" not in str(caught.value)


MENDED: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("dict", {"nett": "model", "optimm": "optimizer"}, {"net": "model", "optim": "optimizer"}),
    ("dict", {"nett": "modle", "optim": "optimizer", "stp": "extra.step"}, {"net": "model", "optim": "optimizer"}),
    ("dict", {"model": "net", "optimizer": "optim"}, {"net": "model", "optim": "optimizer"}),
    ("dict", {"net": "model", "optim": "optimzer"}, {"net": "model", "optim": "optimizer"}),
    ("dict", {"net": "modle", "optim": "optimizer"}, {"net": "model", "optim": "optimizer"}),
    ("live", {"model.encodr": "model"}, {"model.encoder": "model"}),
    ("live", {"encoder": "model"}, {"model.encoder": "model"}),
    ("live", {"model": "model.encoder"}, {"model.encoder": "model"}),
]


@pytest.mark.parametrize(("saved", "wrong", "right"), MENDED, ids=range(len(MENDED)))
def test_one_error_has_the_whole_map_that_is_meant(
    saved: str, wrong: dict[str, str], right: dict[str, str], tmp_path: Path
) -> None:
    """If this fails, a user mends a map pair by pair, with a load for each, or guesses which way round it is read."""
    cloudckpt.save(STATES[saved], tmp_path / "a", no_dist=True)
    module = Net() if saved == "dict" else Net().encoder
    objects = {"model": module, "optimizer": torch.optim.AdamW(module.parameters())}
    objects = objects if saved == "dict" else {"model": module}
    with pytest.raises(StateDictMismatchError) as caught:
        cloudckpt.load(tmp_path / "a", **objects, rename=wrong, no_dist=True)
    found = re.findall(r"(?:pass|Did you mean) rename=(\{[^}]*\})", str(caught.value))
    assert [ast.literal_eval(one) for one in found] == [right], caught.value
    assert ("not the other way round" in str(caught.value)) == ("net" in wrong.values())
    assert all(repr(old) in str(caught.value) for old in wrong.keys() - right.keys() - {"model"}), caught.value
    cloudckpt.load(tmp_path / "a", **objects, rename=right, no_dist=True)
    assert_same(dict(module.named_parameters()), oracle(module))


def test_restore_of_a_step_with_no_common_name_speaks_of_another_run(tmp_path: Path) -> None:
    """If this fails, a new run on the root of another one is told to rename, and takes over the other's steps."""
    cloudckpt.save(tmp_path / "step-1", model=NET)
    for load, is_told in ((cloudckpt.CheckpointManager(tmp_path).restore, True), (cloudckpt.load_latest, False)):
        with pytest.raises(StateDictMismatchError) as caught:
            load(*([] if is_told else [tmp_path]), model=nn.Linear(4, 4))
        assert ("If another run has saved it, use another root." in str(caught.value)) == is_told


def test_a_model_that_is_a_level_off_is_passed_as_advised(tmp_path: Path) -> None:
    """If this fails, a model saved in a dict needs a rename, which its optimizer may not follow, for lack of a hint."""
    cloudckpt.save(tmp_path / "in a dict", model={"net": NET}, optimizer={"net": OPTIMIZER})
    cloudckpt.save(tmp_path / "alone", model=NET)
    with pytest.raises(StateDictMismatchError, match=r"rename=\{'model.net': 'model'\}, or model=\{'net': …\}"):
        cloudckpt.load(tmp_path / "in a dict", model=Net(), optimizer={"net": OPTIMIZER})
    with pytest.raises(StateDictMismatchError, match=r"rename=\{'model': 'model.net'\}, or the model alone, without"):
        cloudckpt.load(tmp_path / "alone", model={"net": Net()})


def make_wider() -> nn.Module:
    net = Net()
    net.head = nn.Linear(4, 7)
    return net


def make_pair(net_of: Callable[[], nn.Module] = Net) -> dict[str, Any]:
    net = net_of()
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "strict": True}


ADVISED: dict[str, tuple[str, Callable[[], dict[str, Any]], Any, int]] = {
    "a level in the middle": ("both", lambda: {"model": Net().encoder}, {"model.ema.encoder": "model"}, 1),
    "a new name": (
        "one",
        lambda: {"model": nn.ModuleDict({"body": Net(), "more": nn.Linear(3, 3)}), "strict": False},
        {"model": "model.bdy"},
        2,
    ),
    "a new name in a dict": ("one", lambda: {"model": {"net": Net()}}, {"model": "model.nett"}, 2),
    "one of two new names": (
        "one",
        lambda: {"model": Net("body", "end")},
        {"model.encoder": "model.bdy", "model.head": "model.end"},
        1,
    ),
    "a shape": ("one", lambda: {"model": make_wider()}, None, 1),
    "a shape under a new name": ("dict", lambda: {"model": make_wider()}, {"net": "model"}, 1),
    "a shape in files": ("files", lambda: {"model": make_wider()}, None, 1),
    "a shape beside an optimizer": ("two", lambda: make_pair(make_wider), None, 1),
    "one of two models": ("both", lambda: {"model": Net(), "strict": True}, None, 2),
    "one of two models, and the optimizer": ("both", make_pair, None, 1),
    "a model in a dict": ("alone", lambda: {"model": Net()}, None, 2),
}


@pytest.mark.parametrize("name", ADVISED)
def test_every_suggestion_loads_as_it_is_written(name: str, tmp_path: Path) -> None:
    """If this fails, a user pastes what an error suggests, and the next error refuses it."""
    saved, make, rename, number = ADVISED[name]
    objects: dict[str, Any] = {
        "both": {"model": {"net": NET, "ema": torch.optim.swa_utils.AveragedModel(NET)}, "optimizer": OPTIMIZER},
        "one": {"model": NET},
        "two": {"model": NET, "optimizer": OPTIMIZER},
        "alone": {"model": {"net": NET}},
        "dict": {"state_dict": STATES["dict"]},
    }
    uri = tmp_path / "a"
    if saved == "files":
        save_file(NET.state_dict(), uri := tmp_path / "a.safetensors")
    else:
        cloudckpt.save(checkpoint_id=uri, **objects[saved], no_dist=True)
    with pytest.raises(StateDictMismatchError) as caught:
        cloudckpt.load(uri, **make(), rename=rename, no_dist=True)
    message = str(caught.value)
    given_parts = {f"rename={ {old: new} }" for old, new in (rename or {}).items()}
    found = re.findall(r"(?:strict=False, )?\b(?:rename|model)=\{[^}]*\}(?:, strict=False)?", message)
    calls = [one for one in found if one not in given_parts]
    meant = re.findall(r"did you mean '([^']*)'", message)
    for near in meant:
        (wrong,) = [new for new in rename.values() if f"{new!r}}} gives names" in message]
        calls.append(f"rename={ {old: near if new == wrong else new for old, new in rename.items()} }")
    assert len(calls) == number, message
    for call in calls:
        given = make()
        module = given["model"]
        keywords = eval(f"dict({call.replace('…', 'module')})", {"module": module})  # noqa: S307  # text of our own
        if "without its optimizer" in message:
            del given["optimizer"]
        before = copy.deepcopy(module)
        cloudckpt.load(uri, **{**given, "rename": None, **keywords}, no_dist=True)
        loaded = module["net"] if isinstance(module, dict) else module
        assert any(torch.equal(one, NET.encoder[0].weight) for one in loaded.parameters()), call
        if "shape" in name:
            assert_same(module.head.state_dict(), before.head.state_dict())


class Other(nn.Module):
    """A model of another program, with a part that was saved; perhaps with a part of its own."""

    def __init__(self, *, has_more: bool) -> None:
        super().__init__()
        self.backbone = Net()
        if has_more:
            self.more = nn.Linear(3, 3)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "other": lambda: Other(has_more=False),
    "other with more": lambda: Other(has_more=True),
    "plain": Net,
    "wrapped": lambda: nn.ModuleDict({"module": Net()}),
    "part": lambda: Net().encoder,
}
CALLS: dict[str, Callable[..., object]] = {
    "load": lambda root, model, **given: cloudckpt.load(root / "step-1", model=model, **given),
    "load_latest": lambda root, model, **given: cloudckpt.load_latest(root, model=model, **given),
    "restore": lambda root, model, **given: cloudckpt.CheckpointManager(root).restore(model=model, **given),
    "dict": lambda root, model, **given: cloudckpt.load({"model": model.state_dict()}, root / "step-1", **given),
    "torch's": lambda root, model, **given: dcp.load(
        {"model": model.state_dict()}, checkpoint_id=(root / "step-1").as_uri(), **given
    ),
}


@pytest.fixture
def enabled() -> Iterator[None]:
    cloudckpt.enable()
    yield
    cloudckpt.disable()


@pytest.mark.usefixtures("enabled")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("call", CALLS)
def test_each_of_several_maps_loads_what_it_says(call: str, other: str, tmp_path: Path) -> None:
    """If this fails, a pasted rename is refused for what it leaves behind, or the other of two models is loaded."""
    net, ema = Net(), torch.optim.swa_utils.AveragedModel(Net())
    cloudckpt.save(tmp_path / "step-1", model={"net": net, "ema": ema}, optimizer=train(net), no_dist=True)
    with pytest.raises((StateDictMismatchError, CheckpointException)) as caught:
        CALLS[call](tmp_path, OTHERS[other]())
    causes = [error for error, _ in getattr(caught.value, "failures", {}).values()]
    (message,) = {str(error) for error in causes or [caught.value]}
    offers = re.search(r"under (?:another|other) names?, pass (.*?)(?:, which fit equally well)?$", message)
    assert offers is not None, message
    names = {"cloudckpt": cloudckpt, "DefaultLoadPlanner": DefaultLoadPlanner, "dict": dict}
    for offer in offers[1].split(" or "):
        code, _, left = offer.partition(" (leaves ")
        given = eval(f"dict({code.replace('…', repr(str(tmp_path / 'step-1')))})", names)  # noqa: S307  # our own text
        model = OTHERS[other]()
        CALLS[call](tmp_path, model, **given)
        source = ema.module if "model.ema" in code else net
        held = next(value for value in model.parameters() if value.shape == (4, 4))
        assert torch.equal(held, source.encoder[0].weight), offer
        whole = other.startswith("other") and call.startswith("load")
        assert ("'model.net'" if "model.ema" in code else "'model.ema'") in left or not whole, offer
    assert "model.ema" in message.rpartition("pass ")[2]


def test_maps_that_fit_equally_well_are_all_named(tmp_path: Path) -> None:
    """If this fails, an error picks one of two copies of a model by the alphabet, and a user loads the other's weights.

    Names of many layers are compared by a sample, in which one copy may have a name more.
    """

    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(33)))

    students = {"student": deep(), "head": nn.Linear(2, 3), "teacher": deep()}
    cloudckpt.save(tmp_path / "both", model=students)
    cloudckpt.save(tmp_path / "one", model=students["student"])
    cloudckpt.save(flatten := {"a": NET.state_dict(), "b": EMA.state_dict()}, tmp_path / "dict", no_dist=True)
    into = nn.ModuleDict({"student": deep(), "head": nn.Linear(2, 3), "teacher": deep()})
    cases: list[tuple[str, dict[str, Any], list[dict[str, str]], bool]] = [
        ("both", {"model": deep()}, [{f"model.{one}": "model"} for one in ("student", "teacher")], False),
        ("one", {"model": into}, [{"model": f"model.{one}"} for one in ("student", "teacher")], False),
        (
            "dict",
            {"model": nn.Linear(4, 4)},
            [{f"{one}.encoder.{at}": "model"} for one in flatten for at in (0, 1)],
            True,
        ),
    ]
    for saved, objects, maps, is_cut in cases:
        with pytest.raises(StateDictMismatchError, match=", which fit equally well") as caught:
            cloudckpt.load(tmp_path / saved, **objects, no_dist=True)
        found = [ast.literal_eval(one) for one in re.findall(r" rename=(\{[^}]*\})", str(caught.value))]
        assert len(found) == min(3, len(maps)), caught.value
        assert all(one in maps for one in found), caught.value
        assert (" or another map, which" in str(caught.value)) == is_cut
    with pytest.raises(StateDictMismatchError, match=r"rename=\{'b': 'net'\} or rename=\{'a': 'net'\}, which fit"):
        cloudckpt.load({"net": Net().state_dict()}, tmp_path / "dict", no_dist=True)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_parts_without_a_likeness_are_left_to_the_user(num_layers: int, tmp_path: Path) -> None:
    """If this fails, a map that swaps two layers of one shape is offered, and who pastes it loads wrong weights."""

    def make(*names: str) -> nn.Module:
        return nn.Sequential(*(nn.ModuleDict({name: nn.Linear(4, 4) for name in names}) for _ in range(num_layers)))

    cloudckpt.save(tmp_path / "a", model=make("fc_in", "fc_out", "mix"))
    with pytest.raises(StateDictMismatchError, match="choose, since several parts fit equally well") as caught:
        cloudckpt.load(tmp_path / "a", model=make("up", "down", "mix"))
    advice = str(caught.value).partition("choose, since")[2]
    assert all(f"'model.{at}.{name}': …" in advice for at in range(num_layers) for name in ("fc_in", "fc_out"))
    assert not re.search(r"': '\S+\.(up|down)'", str(caught.value))
    cloudckpt.save({"a": NET.state_dict(), "b": EMA.state_dict()}, tmp_path / "b", no_dist=True)
    with pytest.raises(StateDictMismatchError, match=r"equally well \('a', 'b' as 'model.x', 'model.y'\)"):
        cloudckpt.load(tmp_path / "b", model={"x": Net(), "y": Net()}, no_dist=True)


def test_the_part_of_a_model_that_fits_is_named(tmp_path: Path) -> None:
    """If this fails, a model with more layers than its pretrained part finds nothing of it, and no advice."""
    cloudckpt.save(tmp_path / "a", model=NET)
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "backbone": Net(), **{f"n{at}": nn.Linear(3, 3) for at in range(9)}})
    with pytest.raises(StateDictMismatchError, match=r"pass rename=\{'model': 'model.backbone'\}, strict=False$"):
        cloudckpt.load(tmp_path / "a", model=model)
    cloudckpt.load(tmp_path / "a", model=model, rename={"model": "model.backbone"}, strict=False)
    assert_same(dict(model.backbone.named_parameters()), oracle(model.backbone))


@pytest.mark.parametrize(("new", "meant"), [("model.bdy", "model.body"), ("modle", "model")])
def test_misspelt_new_name_comes_with_the_one_that_is_meant_without_strictness(
    new: str, meant: str, tmp_path: Path
) -> None:
    """If this fails, a slip in the name here reads as if the checkpoint had nothing for the model."""
    cloudckpt.save(tmp_path / "a", model=NET)
    with pytest.raises(StateDictMismatchError, match=rf"did you mean '{meant}'\?"):
        cloudckpt.load(tmp_path / "a", model=Net("body"), rename={"model.encoder": new}, strict=False)


def test_entry_that_is_to_hold_another_is_named(tmp_path: Path) -> None:
    """If this fails, a load into objects ends in an error of Python that names no entry."""
    ones, net = torch.ones(2), nn.Linear(2, 2)
    cloudckpt.save({"a": ones, "b": ones, "model": ones}, tmp_path / "a")
    told = r"rename calls 'a' of \S+ 'extra', and 'b' 'extra\.x', which is below it"
    with pytest.raises(InvalidOptionError, match=told):
        cloudckpt.load(tmp_path / "a", extra={}, rename={"a": "extra", "b": "extra.x"})
    with pytest.raises(StateDictMismatchError, match=r"'model' of .* is one tensor or value, and not the state"):
        cloudckpt.load(tmp_path / "a", model=net)


SLIPS: list[tuple[Callable[[Path], object], str]] = [
    (lambda uri: cloudckpt.load(uri, model=NET, rename={"model.encoder": "model.encodr"}), "model.encoder"),
    (lambda uri: cloudckpt.read(uri, include="model.encodr.*"), "model.encoder"),
    (lambda uri: cloudckpt.read(uri, include=["model.head", "encoder.1"]), "model.encoder.1"),
    (lambda uri: cloudckpt.load({"model": {"encoder.0.weigth": torch.ones(4, 4)}}, uri), "model.encoder.0.weight"),
    (lambda uri: cloudckpt.export_checkpoint(uri, uri.parent / "b", strip_prefix="modle"), "model"),
]


@pytest.mark.parametrize(("call", "meant"), SLIPS, ids=range(len(SLIPS)))
def test_slip_below_the_top_level_comes_with_the_name_that_is_meant(
    call: Callable[[Path], object], meant: str, tmp_path: Path
) -> None:
    """If this fails, a user compares hundreds of names of layers by eye."""
    cloudckpt.save(STATES["live"], tmp_path / "a", no_dist=True)
    with pytest.raises((StateDictMismatchError, InvalidOptionError), match=re.escape(f"(did you mean {meant!r}?)")):
        call(tmp_path / "a")


@pytest.mark.parametrize(
    ("rename", "pattern"),
    [
        (
            {"decoder": "model"},
            r"rename=\{'decoder': 'model'\} changes no name of .*, which has 'model', 'rand",
        ),
        ({"rand": "model"}, r"rename=\{'rand': 'model'\} changes no name"),
        (lambda name: name, "rename=<function> changes no name"),
        ({"random_state": "modle"}, r"rename=\{'random_state': 'modle'\} gives names .*nothing asks for, 'modle'"),
        (lambda name: name.replace("random_state", "x"), "rename=<function> gives names .*nothing asks for, 'x'"),
        (lambda name: "model.x", r"gives both 'model\.\S+' and 'model\.\S+' of .* the name 'model\.x'"),
        (lambda name: 5, "must return a str or None, and it returned 5"),
    ],
)
@pytest.mark.parametrize("strict", [None, False])
def test_a_map_that_does_nothing_is_refused(
    rename: Any,
    pattern: str,
    strict: bool | None,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """If this fails, a slip in a name loads the entries that it was to replace, or none, and nobody is told."""
    cloudckpt.save(STATES["live"], tmp_path / "a", no_dist=True)
    with pytest.raises(CloudckptError, match=pattern):
        cloudckpt.load(tmp_path / "a", model=Net(), rename=rename, strict=strict, no_dist=True)


def test_a_strict_load_refuses_what_a_dict_hides(tmp_path: Path) -> None:
    """If this fails, strict=True loads a part of a model, and the rest stays behind without a word."""
    cloudckpt.save(tmp_path / "a", model=NET, no_dist=True)
    part = {"model": Net().encoder, "rename": {"model.encoder": "model"}, "no_dist": True}
    with pytest.raises(StateDictMismatchError, match=r"rename hides .*strict=True.*'model\.head\.weight'"):
        cloudckpt.load(tmp_path / "a", **part, strict=True)
    cloudckpt.load(tmp_path / "a", **part)


def test_a_load_that_is_renamed_is_given_no_names(tmp_path: Path) -> None:
    """If this fails, an error advises names that the checkpoint does not have."""
    cloudckpt.save({"a": {"w": torch.ones(2, 2)}, "b": {"w": torch.zeros(2, 2)}}, tmp_path / "a", no_dist=True)
    wanted = {"x": {"w": torch.empty(2, 2)}, "other": {"w": torch.empty(2, 2)}}
    with pytest.raises(StateDictMismatchError, match=r"nothing asks for, 'old\.w'\.") as caught:
        cloudckpt.load(wanted, tmp_path / "a", rename={"a": "x", "b": "old"}, no_dist=True)
    assert "pass rename" not in str(caught.value)


def test_a_function_is_asked_for_entries_alone_and_containers_follow(tmp_path: Path) -> None:
    """If this fails, a tuple comes back as a list, or a table of names fails at a name that no entry has."""
    saved = {"a": {0: torch.ones(2), 1: (torch.zeros(2), 3), "e": {}, "point": Point(torch.ones(1), 2)}}
    cloudckpt.save(saved, tmp_path / "a", no_dist=True)
    about = cloudckpt.describe(tmp_path / "a")
    table = {one.name: f"extra.b{one.name[1:]}" for one in (*about.tensors, *about.values)}
    for rename in (table.__getitem__, table.get, table):
        extra: dict[str, Any] = {}
        cloudckpt.load(tmp_path / "a", extra=extra, rename=rename, no_dist=True)
        assert_same(extra, {"b": saved["a"]})
    swapped = {**table, "a.1.0": "extra.b.1.1", "a.1.1": "extra.b.1.0"}
    with pytest.raises(StateDictMismatchError, match=r"takes 'a\.1' .*apart, which is a tuple"):
        cloudckpt.load(tmp_path / "a", extra={}, rename=swapped, no_dist=True)
    with pytest.raises(InvalidOptionError, match=r"rename raised KeyError for 'a\.0'"):
        cloudckpt.load(tmp_path / "a", extra={}, rename={}.__getitem__, no_dist=True)


@pytest.mark.parametrize("rename", ["ema", {}, {"ema": 5}, ["ema"]])
def test_an_argument_that_cannot_rename_is_refused(rename: Any) -> None:
    """If this fails, a prefix that is passed as a text is taken for something else."""
    with pytest.raises(InvalidOptionError, match=r"pass a dict, as in \{'ema': 'model'\}, or a function"):
        cloudckpt.load("memory://none", model=Net(), rename=rename, no_dist=True)
    reader = cloudckpt.ObjectStoreReader("memory://none")
    with pytest.raises(InvalidOptionError, match="belong to the reader"):
        cloudckpt.load(storage_reader=reader, model=Net(), rename={"ema": "model"}, no_dist=True)


_KEYS = st.sampled_from(["a", "b", "a.b", "b.a", 0, 1])
_LEAVES = st.one_of(
    st.integers(0, 9),
    st.integers(0, 9).map(lambda number: torch.tensor([number])),
    st.just(Point(torch.ones(2), 3)),
    st.just((torch.zeros(1), {"a": 4})),
    st.just(TwoTensor(torch.ones(2), torch.zeros(2))),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.dictionaries(_KEYS, inner, max_size=3) | st.lists(inner, min_size=1, max_size=2),
    max_leaves=6,
)


def leaves_of(tree: Any) -> list[Any]:
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return [tree] if parts is None else [leaf for part in parts for leaf in leaves_of(part)]


@given(tree=st.dictionaries(_KEYS, _TREES, min_size=1, max_size=3), has_function=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_renamed_tree_keeps_its_structure(tree: dict[Any, Any], has_function: bool) -> None:  # noqa: FBT001
    """If this fails, dicts, lists, tuples, keys that are no text, or wrapped tensors become others under a new name."""
    torch.serialization.add_safe_globals([TwoTensor])
    uri = f"memory://renamed-{id(tree)}"
    try:
        cloudckpt.save({"old": {"tree": tree}}, uri, no_dist=True)
    except CloudckptError:
        return  # of keys that would have one name
    filled: dict[str, Any] = {}
    rename: Any = (lambda name: name.replace("old.tree", "extra.new")) if has_function else {"old.tree": "extra.new"}
    try:
        cloudckpt.load(uri, extra=filled, rename=rename, no_dist=True)
    except StateDictMismatchError:
        assert not leaves_of(tree)  # of empty dicts alone, no name is changed
        return
    assert_same(filled, {"new": cloudckpt.read(uri)["old"]["tree"]})


WITH_AVERAGE = {"app": {"ema": EMA.state_dict(), **STATES["app"]["app"]}}
RESUMED: dict[str, tuple[Any, Any]] = {
    "numbers": (STATES["dict"], {"net": "model", "optim": "optimizer"}),
    "names": (STATES["app"], {"app.model": "model", "app.optim": "optimizer"}),
    "an average beside": (WITH_AVERAGE, {"app.model": "model", "app.optim": "optimizer"}),
    "no key": ({**STATES["flat"], "optim": OPTIMIZER.state_dict()}, {"": "model", "optim": "optimizer"}),
    "a function": (STATES["dict"], lambda name: re.sub(r"^net\b", "model", name.replace("optim", "optimizer"))),
    "the optimizer alone": ({"model": NET, "optim": OPTIMIZER}, {"optim": "optimizer"}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_an_optimizer_goes_on_under_other_names(name: str, tmp_path: Path) -> None:
    """If this fails, a run that is resumed under other names has the moments of other parameters, or none."""
    saved, rename = RESUMED[name]
    cloudckpt.save(saved, tmp_path / "a", no_dist=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    cloudckpt.load(tmp_path / "a", model=model, optimizer=optimizer, rename=rename, no_dist=True)
    assert_same(dict(model.named_parameters()), dict(NET.named_parameters()))
    assert_same(optimizer.state_dict(), OPTIMIZER.state_dict())


NAMED = get_optimizer_state_dict(NET, OPTIMIZER)
REFUSED: dict[str, tuple[Any, Any, Callable[[], nn.Module]]] = {
    "a part": (STATES["app"], {"app.model.encoder": "model", "app.optim": "optimizer"}, lambda: Net().encoder),
    "a part, by numbers": (STATES["dict"], {"net.head": "model", "optim": "optimizer"}, lambda: nn.Linear(4, 2)),
    "into a part": ({"model": NET, "optimizer": NAMED}, {"model": "model.net"}, lambda: nn.ModuleDict({"net": Net()})),
    "both into parts": (
        {"net": NET, "ema": EMA, "optim": NAMED},
        {"ema": "model.ema", "net": "model.net", "optim": "optimizer"},
        make_both,
    ),
    "an average": ({"model": NET, "ema": EMA, "optimizer": NAMED}, {"ema": "model"}, Net),
    "an average, by numbers": ({"model": NET, "ema": EMA, "optimizer": OPTIMIZER}, {"ema": "model"}, Net),
    "a name": ({"model": NET, "optimizer": NAMED}, lambda name: name.replace("encoder.", "body."), lambda: Net("body")),
    "a name of the model alone": (
        {"model": NET, "optimizer": NAMED},
        lambda name: re.sub(r"^model\.encoder\b", "model.body", name),
        lambda: Net("body"),
    ),
    "a key of the state": ({"model": NET, "optimizer": NAMED}, lambda name: name.replace("e.head.", "e.end."), Net),
    "half of the state": (
        {"model": NET, "optimizer": NAMED},
        lambda name: None if name.endswith("exp_avg_sq") else name,
        Net,
    ),
}


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_whose_parameters_are_renamed_is_refused(
    name: str,
    strict: bool | None,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """If this fails, a parameter is given the moments of another one of the same shape, or none, and nobody is told."""
    saved, rename, make = REFUSED[name]
    cloudckpt.save(saved, tmp_path / "a", no_dist=True)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    load = functools.partial(cloudckpt.load, tmp_path / "a", model=model, no_dist=True)
    with pytest.raises(StateDictMismatchError, match=r"'optimizer' of \S+ cannot be loaded .*Load the model alone"):
        load(optimizer=optimizer, rename=rename, strict=strict)
    assert not optimizer.state
    if name != "a key of the state":
        alone = rename if callable(rename) else {old: new for old, new in rename.items() if new != "optimizer"}
        load(rename=alone)


_PARTS = st.sampled_from(["w", "x", "sub.w", "sub.x", "sub.sub.w", "other.w"])
_OLD = st.sampled_from(["net", "net.sub", "net.sub.sub", "net.other", "net.w"])
_NEW = st.sampled_from(["model", "model.sub", "model.other", "model.x"])


class Params(nn.Module):
    """Parameters of one shape under dotted names. Each has a value of its own, and so have its moments."""

    def __init__(self, values: dict[str, float]) -> None:
        super().__init__()
        tops = dict.fromkeys(name.partition(".")[0] for name in values)
        for top in tops:
            below = {name.removeprefix(f"{top}."): one for name, one in values.items() if name.startswith(f"{top}.")}
            if below:
                self.add_module(top, Params(below))
            else:
                self.register_parameter(top, nn.Parameter(torch.tensor(values[top])))


@given(
    names=st.sets(_PARTS, min_size=1).map(sorted),
    pairs=st.dictionaries(_OLD, _NEW, min_size=1, max_size=3),
    frozen=st.sets(_PARTS, max_size=2),
    form=st.sampled_from(["numbers", "names"]),
    has_function=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_renamed_parameter_has_its_own_moments_or_an_error(
    names: list[str],
    pairs: dict[str, str],
    frozen: set[str],
    form: str,
    has_function: bool,  # noqa: FBT001
) -> None:
    """If this fails, some rename gives a parameter the moments of another one, or drops them."""
    assume(not frozen.issuperset(names))
    values = {name: float(number) for number, name in enumerate(names, start=1)}
    net = Params(values)
    optimizer = torch.optim.AdamW([param for name, param in net.named_parameters() if name not in frozen])
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param] = {name: param.detach().clone() for name in ("step", "exp_avg", "exp_avg_sq")}
    state: Any = optimizer.state_dict()
    if form == "names":
        keys = [name for name in dict(net.named_parameters()) if name not in frozen]
        state = {
            "state": {keys[number]: one for number, one in state["state"].items()},
            "param_groups": [{**state["param_groups"][0], "params": keys}],
        }
    uri = f"memory://moments-{id(names)}"
    cloudckpt.save({"net": net.state_dict(), "optim": state}, uri, no_dist=True, overwrite=True)
    pairs = {**pairs, "optim": "optimizer"}

    def new_name(name: str) -> str:
        fits = [old for old in pairs if f"{name}.".startswith(f"{old}.")]
        old = max(fits, key=len, default=name)
        return pairs.get(old, old) + name[len(old) :]

    news = {new_name(f"net.{name}"): value for name, value in values.items()}
    wanted = {new.removeprefix("model."): 0.0 for new in news if new.startswith("model.")}
    assume(len(news) == len(names) and wanted)
    assume(not any(other.startswith(f"{new}.") for new in news for other in news))
    model = Params(wanted)
    live = torch.optim.AdamW(model.parameters())
    try:
        cloudckpt.load(uri, model=model, optimizer=live, rename=new_name if has_function else pairs, no_dist=True)
    except StateDictMismatchError:
        assert set(pairs) != {"net", "optim"} or pairs["net"] != "model" or (form == "numbers" and frozen)
        return
    for name, param in model.named_parameters():
        assert param.item() == news[f"model.{name}"]
        is_frozen = names[int(param.item()) - 1] in frozen
        assert [one.item() for one in live.state.get(param, {}).values()] == ([] if is_frozen else [param.item()] * 3)


def test_a_wrapped_tensor_is_not_taken_apart(tmp_path: Path) -> None:
    """If this fails, a half of a quantized tensor is loaded as if it were all of it."""
    cloudckpt.save({"w": TwoTensor(torch.ones(2), torch.ones(2))}, tmp_path / "a", no_dist=True)
    with pytest.raises(StateDictMismatchError, match=r"takes 'w' .*apart.* leaves out or renames a part"):
        cloudckpt.load({"x": torch.zeros(2)}, tmp_path / "a", rename={"w.b": "x"}, no_dist=True)


def test_the_managers_steps_and_torchs_checkpoints_are_renamed(tmp_path: Path) -> None:
    """If this fails, a run that was begun with dicts of its own, or with torch's writer, cannot go on in a manager."""
    cloudckpt.save(STATES["dict"], tmp_path / "run" / "step-7", no_dist=True)
    dcp.save(copy.deepcopy(STATES["dict"]), checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    rename = {"net": "model", "optim": "optimizer", "step": "extra.step"}
    with cloudckpt.CheckpointManager(tmp_path / "run", no_dist=True) as manager:
        for load in (
            manager.restore,
            lambda **state: manager.restore(step=7, **state),
            lambda **state: cloudckpt.load_latest(tmp_path / "run", **state, no_dist=True),
            lambda **state: cloudckpt.load(tmp_path / "torch", **state, allow_pickle=True, no_dist=True),
        ):
            model, extra = Net(), {}
            optimizer = torch.optim.AdamW(model.parameters())
            load(model=model, optimizer=optimizer, extra=extra, rename=rename)
            assert_same(dict(model.named_parameters()), oracle(model))
            assert_same(optimizer.state_dict(), OPTIMIZER.state_dict())
            assert extra == {"step": 7}
        with pytest.raises(StateDictMismatchError, match=r"leaves behind.*'step'.*strict=False"):
            manager.restore(model=model, optimizer=optimizer, rename={"net": "model", "optim": "optimizer"})


@pytest.mark.parametrize("way", ["dict", "function"])
def test_a_run_that_was_renamed_is_started_again_by_the_same_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """If this fails, a script that took over another run's step works once alone, or a misspelt name passes."""
    cloudckpt.save(STATES["dict"], tmp_path / "step-7", no_dist=True)
    pairs = {"net": "model", "optim": "optimizer", "step": "extra.step"}

    def function(name: str) -> str:
        first, _, rest = name.partition(".")
        return ".".join(filter(None, (pairs.get(first, first), rest)))

    rename: Any = pairs if way == "dict" else function
    for start in (7, 8, 9):
        model, extra = Net(), {"step": 0}
        optimizer = torch.optim.AdamW(model.parameters())
        with cloudckpt.CheckpointManager(tmp_path, async_=False, no_dist=True) as manager:
            wanted = None if start < 9 else 8
            restored = manager.restore(
                step=wanted, model=model, optimizer=optimizer, extra=extra, rename=rename, random_state=False
            )
            assert restored is not None
            assert (restored.step, extra) == (min(start, 8), {"step": 7})
            assert_same(dict(model.named_parameters()), oracle(model))
            assert_same(optimizer.state_dict(), OPTIMIZER.state_dict())
            if start == 7:
                manager.save(8, model=model, optimizer=optimizer, extra=extra, random_state=False)
            for wrong in ({"nett": "modle"}, {"net": "model", "optimm": "optimiser"}):
                with pytest.raises(StateDictMismatchError, match="changes no name of"):
                    manager.restore(model=model, optimizer=optimizer, extra=extra, rename=wrong)
    messages = [record.getMessage() for record in caplog.records if "is not needed for" in record.getMessage()]
    given = "a function" if way == "function" else pairs
    assert f"rename={given} is not needed for {tmp_path}/step-8, which has the new names: they are loaded" in messages


def test_a_run_that_began_with_weights_without_a_prefix_starts_again(tmp_path: Path) -> None:
    """If this fails, the error of a restart says that a step lacks what it has."""
    cloudckpt.save(NET.state_dict(), tmp_path / "step-7", no_dist=True)
    for strict, step in ((False, 7), (True, 8), (False, 8)):
        model, extra = Net(), {}
        optimizer = torch.optim.AdamW(model.parameters())
        with cloudckpt.CheckpointManager(tmp_path, async_=False, no_dist=True) as manager:
            restored = manager.restore(
                model=model, optimizer=optimizer, extra=extra, rename={"": "model"}, strict=strict, random_state=False
            )
            assert restored is not None
            assert (restored.step, extra) == (step, {} if step == 7 else {"epoch": 1})
            assert_same(dict(model.named_parameters()), oracle(model))
            if step == 7:
                manager.save(8, model=model, optimizer=optimizer, extra={"epoch": 1}, random_state=False)


def test_objects_that_a_step_lacks_keep_what_they_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, weights alone cannot begin a run, or a run begins without its weights and nobody is told."""
    with cloudckpt.CheckpointManager(tmp_path / "run", async_=False, no_dist=True) as manager:
        manager.save(0, model={"net": NET})
        models = {"net": Net(), "ema": copy.deepcopy(EMA)}
        optimizer = train(models["ema"])
        before = copy.deepcopy((optimizer.state_dict(), dict(models["ema"].named_parameters())))
        objects: dict[str, Any] = {"model": models, "optimizer": optimizer, "extra": {"epoch": 3}}
        with pytest.raises(StateDictMismatchError, match=r"has no 'extra', 'optimizer'.*or pass strict=False"):
            manager.restore(**objects)
        assert manager.restore(**objects, strict=False) is not None
        assert_same(dict(models["net"].named_parameters()), oracle(models["net"]))
        assert_same((optimizer.state_dict(), dict(models["ema"].named_parameters())), before)
        assert objects["extra"] == {"epoch": 3}
        messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert ["has no 'model.ema': these" in one for one in messages].count(True) == 1
        assert ["has no 'extra', 'optimizer': these" in one for one in messages].count(True) == 1
        assert manager.restore(model=nn.ModuleDict({"net": nn.ModuleDict({"encoder": Net().encoder})}), strict=False)
        messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert "leaves behind" in messages[-1]
        assert not any("pass strict=False" in one for one in messages)
        manager.save(1, model=NET, optimizer=OPTIMIZER, extra={"epoch": 3, "tokens": 5})
        caplog.clear()
        assert manager.restore(model=Net(), strict=False) is not None
        (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert re.search(r"leaves behind a part of .*step-1: optimizer \(\d+ entries\), extra \(2 entries\)$", message)
        caplog.clear()
        cloudckpt.load(tmp_path / "run" / "step-1", model=Net(), no_dist=True)  # a part, on purpose
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        cloudckpt.save({"model": NET, "optim": OPTIMIZER}, tmp_path / "mine", no_dist=True)
        cloudckpt.load(tmp_path / "mine", model=models["net"], optimizer=optimizer, strict=False, no_dist=True)
        messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert re.search(r"has no 'optimizer': these .*pass rename={'optim': 'optimizer'}$", messages[0])
        for given in ({"model": {"other": Net()}}, {"model": nn.Linear(2, 2)}):
            with pytest.raises(StateDictMismatchError) as caught:
                manager.restore(**given, random_state=False, strict=False)
            assert "pass strict=False" not in str(caught.value)


@on_ranks(2)
def test_ranks_load_their_shards_under_other_names(tmp_path: Path) -> None:
    """If this fails, a sharded model takes a part of another one wrongly, or ranks with unlike maps are not refused."""
    torch.manual_seed(7)
    source = Net()
    optimizer = train(source)
    whole = {name: value.detach().clone() for name, value in source.encoder.named_parameters()}
    fully_shard(source)
    live = torch.optim.AdamW(source.parameters())
    for param in source.parameters():
        param.grad = torch.ones_like(param)
    live.step()
    whole = {name: value.full_tensor().detach() for name, value in source.encoder.named_parameters()}
    moments = [live.state[param]["exp_avg"].full_tensor() for param in source.encoder.parameters()]
    uri = str(tmp_path / "a")
    cloudckpt.save(uri, model={"net": source}, optimizer=live)
    mesh = init_device_mesh("cpu", (2,))
    tp = parallelize_module(Net().encoder, mesh, {"0": ColwiseParallel(), "1": ColwiseParallel()})
    other = fully_shard(Net("body"))
    for model, rename in (
        (fully_shard(Net().encoder), {"model.net.encoder": "model"}),
        (tp, {"model.net.encoder": "model"}),
        (other.body, {"model.net.encoder": "model"}),
        (other, {"model.net.encoder": "model.body", "model.net.head": "model.head"}),
    ):
        cloudckpt.load(uri, model=model, rename=rename)
        part = model if model is not other else model.body
        for name, param in part.named_parameters():
            assert_same(param.full_tensor().detach(), whole[name])
    cloudckpt.save({"net": source, "optim": get_optimizer_state_dict(source, live)}, f"{uri}-dict")
    for model in (fully_shard(Net()), parallelize_module(Net(), mesh, {"encoder.0": ColwiseParallel()})):
        optimizer = torch.optim.AdamW(model.parameters())
        pairs = {"net": "model", "optim": "optimizer"}
        cloudckpt.load(f"{uri}-dict", model=model, optimizer=optimizer, rename=pairs)
        for param, moment in zip(model.encoder.parameters(), moments, strict=True):
            held = optimizer.state[param]["exp_avg"]
            assert_same(held.full_tensor() if isinstance(held, DTensor) else held, moment)
    assert local(next(iter(tp.parameters()))).numel() < whole["0.weight"].numel()
    part = f"model.net.encoder.{dist.get_rank()}"
    for unlike in ({part: "model.0"}, lambda name: name.replace(part, "model.0")):
        reader = cloudckpt.ObjectStoreReader(uri, rename=unlike)
        for call in (
            lambda given=unlike: cloudckpt.load({"model": tp[:1].state_dict()}, uri, rename=given),
            lambda given=reader: cloudckpt.load({"model": tp[:1].state_dict()}, storage_reader=given),
        ):
            with pytest.raises(StateDictMismatchError, match="the ranks pass different `rename`"):
                call()
    with pytest.raises(StateDictMismatchError, match="changes no name"):
        cloudckpt.load(uri, model=tp, rename={"nothing": "model"})


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_advised_rename_confuses_no_layers(tmp_path: Path, num_layers: int) -> None:
    """If this fails, a map that swaps layers of the same shapes is advised, and the load succeeds by it."""

    def make(*, wraps: Callable[[nn.Module], nn.Module]) -> nn.Module:
        layers = [nn.ModuleDict({"q": wraps(nn.Linear(4, 4)), "k": wraps(nn.Linear(4, 4))}) for _ in range(num_layers)]
        return nn.ModuleDict({"layers": nn.ModuleList(layers)})

    saved, wrapped = make(wraps=lambda module: module), make(wraps=lambda module: nn.ModuleDict({"base": module}))
    cloudckpt.save(tmp_path / "step-1", model=saved, random_state=False)
    with pytest.raises(StateDictMismatchError, match="pass rename=") as caught:
        cloudckpt.load(tmp_path / "step-1", model=wrapped)
    (advised,) = re.findall(r"rename=(\{.*?\})", str(caught.value))
    assert "fit equally well" not in str(caught.value)
    cloudckpt.load(tmp_path / "step-1", model=wrapped, rename=ast.literal_eval(advised))
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name.replace("base.", "")])
