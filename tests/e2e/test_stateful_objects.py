"""Objects in a state dict whose state_dict() asks for less than was saved of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import cloudckpt
from cloudckpt.errors import StateDictMismatchError


class Holder:
    """An object whose state is a dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


FULL: dict[Any, Any] = {
    "epoch": 3,
    "loss": torch.tensor([1.0, 2.0]),
    "best": {"value": 0.5, "weights": {"w": torch.arange(3.0)}},
    "history": [torch.tensor([1]), torch.tensor([2])],
    "steps": [{"at": 1, "rows": torch.tensor([5])}, {"at": 2, "rows": torch.tensor([6])}],
    "by_number": {7: torch.tensor([7]), (1, 2): {"x": 1}},
    "pair": (torch.tensor([8]), {"x": (1,)}),
    "name": "run",
    "nothing": None,
    "values": [],
}
FRESH: dict[str, Callable[[], Any]] = {
    "empty": dict,
    "empty places": lambda: {"epoch": 0, "best": {}, "history": [], "steps": [], "by_number": {}, "pair": ()},
    "places with None": lambda: dict.fromkeys(FULL),
    "parts of places": lambda: {"loss": torch.zeros(2), "best": {"value": 0.0}, "by_number": {(1, 2): {}}},
    "parts of lists": lambda: {"history": [torch.tensor([0])], "steps": [{"at": 0}], "name": ""},
    "all": lambda: {**FULL, "epoch": 0, "loss": torch.zeros(2)},
}


def assert_equal(found: Any, expected: Any) -> None:
    """Compare nested states with tensors."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_equal(*pair)
    else:
        assert found == expected


def by_load(objects: dict[str, Any], root: str, **arguments: Any) -> None:
    cloudckpt.load(objects, f"{root}/step-1", no_dist=True, **arguments)


def by_latest(objects: dict[str, Any], root: str, **arguments: Any) -> None:
    cloudckpt.load_latest(objects, root, no_dist=True, **arguments)


def by_manager(objects: dict[str, Any], root: str, **arguments: Any) -> None:
    with cloudckpt.CheckpointManager(root, async_=False) as manager:
        assert manager.restore(objects, **arguments) is not None


@pytest.mark.parametrize("fresh", FRESH)
@pytest.mark.parametrize("load", [by_load, by_latest, by_manager])
@pytest.mark.parametrize("arguments", [{}, {"strict": True}], ids=str)
def test_a_fresh_object_gets_what_was_saved(
    load: Callable[..., None], fresh: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """If this fails, a sampler or a tracker that begins empty stays empty, and the restore reports success."""
    cloudckpt.save({"tracker": Holder(FULL), "w": torch.ones(2)}, tmp_path / "step-1", no_dist=True)
    tracker, w = Holder(FRESH[fresh]()), torch.zeros(2)
    own = tracker.state.get("loss")
    load({"tracker": tracker, "w": w}, str(tmp_path), **arguments)
    assert_equal(tracker.state, FULL)
    assert torch.equal(w, torch.ones(2))
    assert own is None or tracker.state["loss"] is own, "what the object asks for is filled in place"


def test_an_object_that_asks_for_nothing_is_filled_without_strictness(tmp_path: Path) -> None:
    """If this fails, strict=False leaves a fresh object empty; or it gives more to one that takes a part on purpose."""
    cloudckpt.save({"a": Holder(FULL), "b": Holder(FULL)}, tmp_path / "step-1", no_dist=True)
    empty, part = Holder({}), Holder({"epoch": 0, "best": {}})
    cloudckpt.load({"a": empty, "b": part}, tmp_path / "step-1", no_dist=True, strict=False)
    assert_equal(empty.state, FULL)
    assert_equal(part.state, {"epoch": 3, "best": FULL["best"]})


def test_a_checkpoint_of_torchs_writer_fills_a_fresh_object_too(tmp_path: Path) -> None:
    """If this fails, an object that begins empty stays empty when it comes from torch's writer."""
    dcp.save({"tracker": Holder(FULL)}, checkpoint_id=tmp_path / "a", no_dist=True)
    tracker = Holder({})
    cloudckpt.load({"tracker": tracker}, tmp_path / "a", allow_pickle=True)
    assert tracker.state["best"].keys() == FULL["best"].keys()
    assert torch.equal(tracker.state["loss"], FULL["loss"])


class AppState:
    """The object of PyTorch's tutorial; it asks for a part if it has no optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if self.optimizer is not None:
            state["optim"] = get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state
        optimizers = [] if self.optimizer is None else [self.optimizer]
        states = {} if self.optimizer is None else state["optim"]
        set_state_dict(self.model, optimizers, model_state_dict=state["model"], optim_state_dict=states)


def test_an_object_that_takes_a_part_is_given_the_rest_unless_it_is_left_on_purpose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, an object lacks a large part of its state after a load that reports success; or strict=False
    reads the optimizer for a wrapper that takes the model alone.
    """
    net = nn.Linear(512, 600)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(512)).sum().backward()
    optimizer.step()
    cloudckpt.save({"app": AppState(net, optimizer)}, tmp_path / "a", no_dist=True)
    other = nn.Linear(512, 600)
    part, whole = AppState(nn.Linear(512, 600), None), AppState(other, torch.optim.Adam(other.parameters()))
    sizes = cloudckpt.AdvancedOptions(request_bytes=2**20)
    options = cloudckpt.Options(read_bytes=2**20, advanced=sizes)
    report = cloudckpt.load({"app": part}, tmp_path / "a", no_dist=True, options=options, strict=False)
    assert torch.equal(part.model.weight, net.weight)
    assert "optim" not in part.loaded
    assert report.num_bytes_wanted < 2 * net.weight.nbytes
    (message,) = [record.message for record in caplog.records if "stays behind" in record.message]
    assert "'app.optim.state.weight.exp_avg'" in message
    caplog.clear()
    cloudckpt.load({"app": part}, tmp_path / "a", no_dist=True, options=options)
    assert torch.equal(part.loaded["optim"]["state"]["weight"]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    cloudckpt.load({"app": whole}, tmp_path / "a", no_dist=True, options=options)
    assert whole.optimizer is not None
    assert torch.equal(whole.optimizer.state[other.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    assert "stays behind" not in caplog.text


def test_a_module_that_lacks_parameters_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a model of half the layers takes its half of a checkpoint, and the load reports success."""
    saved, smaller = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    cloudckpt.save({"model": saved}, tmp_path / "a", no_dist=True)
    message = r"leaves behind 'model\.1\.weight', 'model\.1\.bias' .*strict=False"
    with pytest.raises(StateDictMismatchError, match=message):
        cloudckpt.load({"model": smaller}, tmp_path / "a", no_dist=True)
    cloudckpt.load({"model": smaller}, tmp_path / "a", no_dist=True, strict=False)
    assert torch.equal(smaller[0].weight, saved[0].weight)
    assert "'model.1.weight'" in caplog.text


def test_a_fresh_optimizer_in_a_state_dict_is_refused(tmp_path: Path) -> None:
    """If this fails, an optimizer by itself is given moments on the CPU and in another precision, or none at all."""
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1)).sum().backward()
    optimizer.step()
    cloudckpt.save({"optimizer": optimizer}, tmp_path / "b", no_dist=True)
    fresh = torch.optim.Adam(nn.Linear(1, 1, bias=False).parameters())
    with pytest.raises(StateDictMismatchError, match="not for 3 entries of its state"):
        cloudckpt.load({"optimizer": fresh}, tmp_path / "b", no_dist=True)


WRAPS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda tensor: {"w": tensor},
    "list": lambda tensor: [tensor, 1],
    "tuple": lambda tensor: (1, {"w": tensor}),
}
ASKS_FOR_NONE: dict[str, Callable[[], Any]] = {
    "empty": dict,
    "empty place": lambda: {"n": 0, "in": {}},
    "part": lambda: {"n": 0},
    "None": lambda: {"n": 0, "in": None},
}


@on_ranks(2)
def test_a_sharded_tensor_without_a_layout_is_refused(root: str) -> None:
    """If this fails, each rank is given the whole of a sharded tensor, or a part of an object stays behind unnoticed:
    in a state dict and in extra, for an object that asks for nothing and for one that asks for a part.
    """
    mesh, net = init_device_mesh("cpu", (2,)), nn.Linear(1, 1)

    def make(*, is_blank: bool) -> dict[str, Any]:
        whole = torch.zeros(8, dtype=torch.int64) if is_blank else torch.arange(8)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        return {name: {"n": 0 if is_blank else 3, "in": wrap(sharded)} for name, wrap in WRAPS.items()}

    full, blank = make(is_blank=False), make(is_blank=True)
    cloudckpt.save({**{name: Holder(one) for name, one in full.items()}, "plain": full}, f"{root}/a")
    cloudckpt.save(f"{root}/b", model=net, extra={"o": Holder(full), "plain": full})
    for make_fresh in ASKS_FOR_NONE.values():
        held = {name: Holder(make_fresh()) for name in WRAPS}
        with pytest.raises(
            StateDictMismatchError, match=r"'dict\.in\.w', 'list\.in\.0'.*'tuple\..*sharded.*strict=False"
        ):
            cloudckpt.load({**held}, f"{root}/a")
        cloudckpt.load({**held}, f"{root}/a", strict=False)
        assert not any(isinstance(one, torch.Tensor) for each in held.values() for one in each.state.values())
        fresh = {name: make_fresh() for name in WRAPS}
        names = r"'extra\.o\.dict\.in\.w'.*'extra\.plain\.dict\.in\.w'.*of its layout"
        with pytest.raises(StateDictMismatchError, match=names):
            cloudckpt.load(f"{root}/b", model=net, extra={"o": Holder(fresh), "plain": fresh})
    last = Holder(blank)
    cloudckpt.load(f"{root}/b", model=net, extra={"o": last, "plain": blank})
    assert all(str(last.state[name]["in"]) == str(one["in"]) for name, one in full.items())
    with pytest.raises(StateDictMismatchError, match=r"'plain\.tuple\.in' of .*hold parts, and a NoneType"):
        cloudckpt.load({"plain": {"tuple": {"n": 0, "in": None}}}, f"{root}/a")
    alone = Holder({})
    cloudckpt.load({"dict": alone}, f"{root}/a", no_dist=True)
    assert alone.state["in"]["w"].tolist() == list(range(8)), "one rank holds all parts"


@on_ranks(2)
def test_ranks_fill_what_none_of_them_asks_for(root: str) -> None:
    """If this fails, an object that begins empty stays empty on several ranks; or a stage of a pipeline is given the
    other stages' tensors; or a sharded tensor without a known layout is left behind without an error.
    """
    rank = dist.get_rank()
    full = {name: torch.full((2,), float(at)) for at, name in enumerate("abcd")}
    mine = {name: full[name] for name in ("ab" if rank == 0 else "cd")}
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    seen = {"loss": full["b"], "epoch": 3}
    saved = {"stage": Holder(mine), "tracker": Holder({"seen": seen}), "s": Holder({"w": sharded})}
    cloudckpt.save(saved, f"{root}/a")

    stage, tracker = Holder({name: torch.zeros(2) for name in mine}), Holder({"seen": {}})
    held = Holder({"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])})
    objects = {"stage": stage, "tracker": tracker, "s": held}
    cloudckpt.load(objects if rank else dict(reversed(objects.items())), f"{root}/a")
    assert_equal(stage.state, mine)
    assert_equal(tracker.state, {"seen": seen})
    assert isinstance(held.state["w"], DTensor)
    assert torch.equal(held.state["w"].to_local(), sharded.to_local())


class Collective(Holder):
    """An object whose methods are collectives, each with a tensor of another size, as in PyTorch's own tests."""

    def __init__(self, size: int) -> None:
        super().__init__({})
        self._size = size

    def state_dict(self) -> dict[str, Any]:
        self.meet()
        return {"size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.meet()
        assert state["size"] == self._size

    def meet(self) -> None:
        found = [torch.zeros(self._size) for _ in range(2)]
        dist.all_gather(found, torch.full((self._size,), float(self._size)))
        assert all(torch.equal(one, torch.full((self._size,), float(self._size))) for one in found)


@on_ranks(2)
def test_a_place_that_nothing_fills_keeps_what_it_held(root: str) -> None:
    """If this fails, an object gets a dict in the place of its list, as another rank's object asked for the entries."""
    full = {"rows": [1, {"t": torch.ones(2)}], "best": {"t": torch.ones(1)}, "none": (torch.ones(1),)}
    fresh = {"rows": [], "best": None, "none": ()}
    cloudckpt.save({"o": Holder(full)}, root)
    held = Holder(fresh if dist.get_rank() else full)
    cloudckpt.load({"o": held}, root)
    assert_equal(held.state, fresh if dist.get_rank() else full)


@on_ranks(2)
def test_objects_are_asked_and_filled_in_one_order_on_all_ranks(root: str) -> None:
    """If this fails, ranks whose dicts have another order hang in the collectives of their objects."""

    def ordered(objects: dict[str, Any]) -> dict[str, Any]:
        return objects if dist.get_rank() else dict(reversed(objects.items()))

    def made() -> dict[str, Any]:
        return ordered({name: Collective(size) for size, name in enumerate("abc", 1)})

    cloudckpt.save(made(), f"{root}/a")
    cloudckpt.async_save(made(), f"{root}/b").result()
    cloudckpt.load(made(), f"{root}/a")
    cloudckpt.load(made(), f"{root}/b")
    model = nn.Linear(1, 1)
    for name, objects in (("c", {"scheduler": made}), ("d", {"extra": lambda: {**made(), "deep": made()}})):
        live = {key: make() for key, make in objects.items()}
        cloudckpt.save(f"{root}/{name}", model=model, **live)
        cloudckpt.load(f"{root}/{name}", model=model, **live)


def test_a_model_under_an_empty_name_hides_no_other(tmp_path: Path) -> None:
    """If this fails, only the module under "" is saved and loaded, and nothing is said of the others."""
    saved = {"": nn.Linear(2, 2), "head": nn.Linear(2, 2)}
    cloudckpt.save(tmp_path / "a", model=saved, no_dist=True)
    loaded = {"": nn.Linear(2, 2), "head": nn.Linear(2, 2)}
    cloudckpt.load(tmp_path / "a", model=loaded, no_dist=True)
    for name, module in saved.items():
        assert torch.equal(loaded[name].weight, module.weight), name


def test_an_entry_under_an_empty_name_can_be_read(tmp_path: Path) -> None:
    """If this fails, a checkpoint that was saved with such a name can be loaded but not read."""
    saved = {"": torch.ones(1), "a": {"": torch.zeros(1)}}
    cloudckpt.save(saved, tmp_path / "a", no_dist=True)
    assert_equal(cloudckpt.read(tmp_path / "a"), saved)


@pytest.mark.parametrize(
    ("keyword", "empty"),
    [("extra", {}), *itertools.product(["optimizer", "scheduler", "dataloader"], [[], {}, ()])],
    ids=str,
)
def test_no_objects_are_saved_and_loaded(keyword: str, empty: Any, tmp_path: Path) -> None:
    """If this fails, a rank that has no optimizer, scheduler or data loader saves what it cannot load."""
    net, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    cloudckpt.save(tmp_path / "a", model=net, **{keyword: empty}, no_dist=True)
    cloudckpt.load(tmp_path / "a", model=loaded, **{keyword: empty}, no_dist=True)
    assert torch.equal(loaded.weight, net.weight)


class Falsy(Holder):
    """An object that is false, as an empty container is."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("keyword", ["scheduler", "dataloader", "state dict", "extra"])
def test_an_object_that_is_false_is_saved_and_loaded(keyword: str, tmp_path: Path) -> None:
    """If this fails, an object with a length of 0, such as an empty average of weights, is taken for none."""
    saved, loaded, net = Falsy({"a": 1}), Falsy({"a": 0}), nn.Linear(2, 2)
    for call, held in ((cloudckpt.save, saved), (cloudckpt.load, loaded)):
        if keyword == "state dict":
            call({"": held, "w": torch.ones(1)}, tmp_path / "a", no_dist=True)
        else:
            call(tmp_path / "a", model=net, **{keyword: {"": held} if keyword == "extra" else held}, no_dist=True)
    assert loaded.state == {"a": 1}


@pytest.mark.parametrize("fresh", [{}, {"seen": {}}], ids=str)
def test_torchs_load_refuses_an_object_that_would_stay_empty(
    fresh: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a fresh object gets nothing from torch's own load, which reports success."""
    state = {"tracker": Holder({"seen": {"loss": torch.ones(2)}}), "none": {}, "w": torch.ones(1)}
    cloudckpt.save(state, tmp_path / "a", no_dist=True)
    try:
        cloudckpt.enable()
        wanted = {"tracker": Holder(fresh), "none": {}, "w": torch.zeros(1)}
        with pytest.raises(CheckpointException, match=r"holds 'tracker\.seen\.loss', and 'tracker"):
            dcp.load(wanted, checkpoint_id=tmp_path / "a", no_dist=True)
        cloudckpt.enable(strict=False)
        dcp.load(wanted, checkpoint_id=tmp_path / "a", no_dist=True)
        assert "'tracker.seen.loss'" in caplog.text
        cloudckpt.enable()
        whole = Holder({"seen": {"loss": torch.zeros(2)}})
        dcp.load({"tracker": whole, "none": {}}, checkpoint_id=tmp_path / "a", no_dist=True)
        assert torch.equal(whole.state["seen"]["loss"], torch.ones(2))
    finally:
        cloudckpt.disable()
