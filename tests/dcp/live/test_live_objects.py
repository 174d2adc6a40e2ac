"""Live objects of one process: what is saved of them, what a load gives back, and which loads are refused."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import cloudckpt
from cloudckpt._torch_compat import fqns_of
from cloudckpt.dcp.live import optimizers as live_optimizers
from cloudckpt.dcp.live.objects import LiveObjects
from cloudckpt.errors import CheckpointNotFoundError, InvalidOptionError, StateDictMismatchError

_names = iter(range(1000))


def new_uri() -> str:
    return f"memory://live-objects/{next(_names)}"


def trained(model: nn.Module, *optimizers: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.rand(3, 4)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.down = nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.frozen(self.down(self.up(inputs)))
        return outputs


def of_groups(model: nn.Module) -> Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return AdamW([{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": torch.tensor(0.2)}])


def make_two() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("make_model", "make_optimizer"),
    [
        (make_two, of_groups),
        (Tied, lambda model: Adam([param for param in model.parameters() if param.requires_grad])),
        (Tied, lambda model: AdamW(model.parameters())),
        (lambda: torch.compile(make_two(), backend="eager"), lambda model: SGD(model.parameters(), momentum=0.9)),
        (make_two, lambda model: [AdamW(model[0].parameters()), SGD(model[1].parameters(), momentum=0.9)]),
        (make_two, lambda model: {"a": AdamW(model[0].parameters()), "b": SGD(model[1].parameters(), momentum=0.9)}),
    ],
    ids=["groups", "tied-and-frozen", "frozen-in-optimizer", "compiled", "list-of-optimizers", "dict-of-optimizers"],
)
def test_an_optimizer_comes_back_whole(
    make_model: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], Any]
) -> None:
    """If this fails, a restore leaves some of an optimizer's state behind."""

    def all_of(optimizer: Any) -> list[Optimizer]:
        values = optimizer.values() if isinstance(optimizer, dict) else optimizer
        return [values] if isinstance(values, Optimizer) else list(values)

    uri = new_uri()
    model, fresh = make_model(), make_model()
    optimizer = make_optimizer(model)
    trained(model, *all_of(optimizer))
    cloudckpt.save(uri, model=model, optimizer=optimizer, no_dist=True)
    loaded = make_optimizer(fresh)
    cloudckpt.load(uri, model=fresh, optimizer=loaded, no_dist=True)
    assert_same(fresh.state_dict(), model.state_dict())
    for one, other in zip(all_of(loaded), all_of(optimizer), strict=True):
        assert_same(one.state_dict(), other.state_dict())
    cloudckpt.load(uri, model=fresh, optimizer=loaded, no_dist=True)  # into the state that is there by now
    for one, other in zip(all_of(loaded), all_of(optimizer), strict=True):
        assert_same(one.state_dict(), other.state_dict())


class Warmup:
    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / 5)


def make_sequence(optimizer: Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [LinearLR(optimizer), LambdaLR(optimizer, Warmup()), CosineAnnealingLR(optimizer, 4)]
    return SequentialLR(optimizer, parts, [2, 5])


@pytest.mark.parametrize(
    ("make_optimizer", "make_scheduler"),
    [
        (lambda params: torch.optim.LBFGS(params, max_iter=3), None),
        (torch.optim.Muon, None),
        (lambda params: Adam(params, lr=torch.tensor(0.01), fused=True), make_sequence),
        (lambda params: SGD(params, 0.1, momentum=0.9), lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9)),
        (AdamW, lambda optimizer: ReduceLROnPlateau(optimizer, patience=0)),
    ],
    ids=["lbfgs", "muon", "fused-tensor-lr-sequential", "one-cycle", "plateau"],
)
@pytest.mark.parametrize(("num_saved", "num_held"), [(3, 0), (0, 2)])
def test_training_goes_on_bit_by_bit(
    make_optimizer: Callable[[Any], Optimizer], make_scheduler: Any, num_saved: int, num_held: int
) -> None:
    """If this fails, an optimizer, a scheduler, an average or a scaler of torch's resumes as another one."""

    def make_run(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Dropout(0.2), nn.Linear(6, 4, bias=False))
        optimizer = make_optimizer(model.parameters())
        objects = {"model": {"net": model, "ema": AveragedModel(model)}, "optimizer": optimizer}
        objects["extra"] = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)}
        return {**objects, "scheduler": make_scheduler(optimizer) if make_scheduler else None}

    def train(run: dict[str, Any], num_steps: int) -> list[Any]:
        model, optimizer, scaler = run["model"]["net"], run["optimizer"], run["extra"]["scaler"]
        losses = []
        for _ in range(num_steps):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.ones(3, 4)).square().mean()
                (loss if isinstance(optimizer, torch.optim.LBFGS) else scaler.scale(loss)).backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                losses.append(optimizer.step(closure))
            else:
                losses.append(closure())
                scaler.step(optimizer)
                scaler.update()
            if run["scheduler"] is not None:
                metrics = [losses[-1].item()] if isinstance(run["scheduler"], ReduceLROnPlateau) else []
                run["scheduler"].step(*metrics)
            run["model"]["ema"].update_parameters(model)
        return [losses, optimizer.state_dict(), run["model"]["ema"].state_dict(), scaler.state_dict()]

    uri = new_uri()
    undisturbed, resumed = make_run(1), make_run(2)
    train(undisturbed, num_saved)
    cloudckpt.save(uri, **undisturbed, no_dist=True)
    expected = train(undisturbed, 3)
    train(resumed, num_held)
    cloudckpt.load(uri, **resumed, random_state=True, no_dist=True)
    assert_same(train(resumed, 3), expected)


def test_the_layout_is_that_of_torch() -> None:
    """If this fails, checkpoints of live objects and of torch's get_state_dict do not load as one another."""
    ours, torchs, plain = new_uri(), new_uri(), new_uri()
    model = make_two()
    optimizer = AdamW(model.parameters())
    trained(model, optimizer)
    cloudckpt.save(ours, model=model, optimizer=optimizer, random_state=False, no_dist=True)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    cloudckpt.save({"model": of_model, "optimizer": of_optimizer}, torchs, no_dist=True)
    numbered = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    cloudckpt.save(numbered, plain, no_dist=True)
    as_text = new_uri()  # as torch's own planner saves the numbers
    dcp.save(numbered, storage_writer=cloudckpt.ObjectStoreWriter(as_text), no_dist=True)
    assert_same(cloudckpt.read(ours), cloudckpt.read(torchs))
    for uri in (torchs, plain, as_text):  # a plain state dict numbers the parameters
        fresh = make_two()
        loaded = AdamW(fresh.parameters())
        cloudckpt.load(uri, model=fresh, optimizer=loaded, no_dist=True)
        assert_same(loaded.state_dict(), optimizer.state_dict())
    fewer = AdamW([*fresh.parameters()][2:])
    with pytest.raises(StateDictMismatchError, match=r"by the numbers.*groups of \[4\].*groups of \[2\]"):
        cloudckpt.load(plain, model=fresh, optimizer=fewer, strict=False, no_dist=True)


def test_names_that_are_numbers_are_names() -> None:
    """If this fails, moments in a ParameterList go to other parameters where the optimizer has another order."""
    uri = new_uri()
    model = nn.ParameterList([torch.rand(3), torch.rand(3)])
    optimizer = AdamW(model.parameters())
    (model[0] * 2 + model[1]).sum().backward()
    optimizer.step()
    cloudckpt.save(uri, model=model, optimizer=optimizer, no_dist=True)
    fresh = nn.ParameterList([torch.rand(3), torch.rand(3)])
    loaded = AdamW([fresh[1], fresh[0]])
    cloudckpt.load(uri, model=fresh, optimizer=loaded, no_dist=True)
    assert_same(loaded.state[fresh[0]], optimizer.state[model[0]])


def test_an_optimizer_for_each_parameter_takes_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a load into thousands of optimizers that step within the backward pass takes minutes."""
    looked_up: list[str] = []

    def look_up(module: nn.Module, name: str) -> Any:
        looked_up.append(name)
        return fqns_of(module, name)

    monkeypatch.setattr(live_optimizers, "fqns_of", look_up)
    model, counts = make_two(), []
    for optimizers in ([AdamW(model.parameters())], [AdamW([param]) for param in model.parameters()]):
        trained(model, *optimizers)
        looked_up.clear()
        uri = new_uri()
        cloudckpt.save(uri, model=model, optimizer=optimizers, no_dist=True)
        cloudckpt.load(uri, model=model, optimizer=optimizers, no_dist=True)
        counts.append(len(looked_up))
    assert counts == [8, 8]  # once for each parameter and call


def test_keys_that_an_optimizer_class_adds_are_kept() -> None:
    """If this fails, an optimizer with a counter of its own, or with a hook, resumes without it."""
    model, uri = make_two(), new_uri()
    optimizer, loaded, other = (AdamW(model[0].parameters()) for _ in range(3))
    seen: list[Any] = []
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "ema": {"beta": 0.5, "mean": torch.ones(2)}})
    loaded.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["ema"]))
    cloudckpt.save(uri, model=model, optimizer=optimizer, no_dist=True)
    cloudckpt.load(uri, model=model, optimizer=loaded, no_dist=True)
    assert_same(seen, [{"beta": 0.5, "mean": torch.ones(2)}])
    for pair, reason in (
        ([optimizer, AdamW(model[1].parameters())], "have 'ema'"),
        ([loaded, other], "same parameters, '0.weight'"),
    ):
        with pytest.raises(InvalidOptionError, match=rf"{reason}.*in a dict"):
            cloudckpt.save(new_uri(), model=model, optimizer=pair, no_dist=True)


def test_parameters_that_the_saved_optimizer_did_not_have_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a part of the model is trained with fresh moments after a resume, and nobody is told."""
    uri = new_uri()
    model, fresh = make_two(), make_two()
    optimizer = AdamW(model[1].parameters())
    trained(model, optimizer)
    cloudckpt.save(uri, model=model, optimizer=optimizer, no_dist=True)
    loaded = AdamW([{"params": fresh[0].parameters(), "lr": 0.5}, {"params": fresh[1].parameters()}])
    for one in (loaded, [AdamW(fresh[1].parameters()), AdamW(fresh[0].parameters(), lr=0.5)]):
        cloudckpt.load(uri, model=fresh, optimizer=one, no_dist=True)
    assert one[1].param_groups[0]["lr"] == 0.5  # and not the setting of the group that was saved at its number
    assert "optimizer was saved without the parameters '0.weight', '0.bias': no state of these is loaded" in caplog.text
    assert [group["lr"] for group in loaded.param_groups] == [0.5, 0.001]
    assert_same(loaded.state[fresh[1].weight], optimizer.state[model[1].weight])


def test_moments_keep_their_dtype_in_an_optimizer_that_has_stepped_in_another() -> None:
    """If this fails, a model that goes on in bfloat16 rounds the moments of a run in float32 (G11)."""
    model, uri = make_two(), new_uri()
    optimizer = Adam(model.parameters())
    trained(model, optimizer)
    cloudckpt.save(uri, model=model, optimizer=optimizer)
    narrow = make_two().to(torch.bfloat16)
    stepped = Adam(narrow.parameters())
    narrow(torch.rand(3, 4, dtype=torch.bfloat16)).sum().backward()
    stepped.step()
    cloudckpt.load(uri, model=narrow, optimizer=stepped)
    for one, other in zip(model.parameters(), narrow.parameters(), strict=True):
        assert other.dtype is torch.bfloat16
        assert_same(stepped.state[other], optimizer.state[one])


def test_groups_of_which_one_has_a_setting_more_are_not_merged() -> None:
    """If this fails, parameters go on with the settings of another group, such as without its own scale."""
    model, uri = make_two(), new_uri()
    params = list(model.parameters())
    cloudckpt.save(uri, model=model, optimizer=SGD([{"params": params[:2]}, {"params": params[2:], "scale": 2.0}]))
    with pytest.raises(StateDictMismatchError, match="parameters of 2 saved groups with different settings"):
        cloudckpt.load(uri, model=model, optimizer=SGD(params))


def test_settings_that_one_saved_group_makes_equal_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, parameters without weight decay get it in a resume, and nobody is told; or each resume warns."""
    model, uri, uri_of_two = make_two(), new_uri(), new_uri()

    def two_groups() -> Optimizer:
        decay, no_decay = {"params": model[0].parameters()}, {"params": model[1].parameters(), "weight_decay": 0.0}
        return AdamW([decay, no_decay], weight_decay=0.5)

    cloudckpt.save(uri, model=model, optimizer=AdamW(model.parameters(), lr=0.2), no_dist=True)
    cloudckpt.save(uri_of_two, model=model, optimizer=two_groups(), no_dist=True)
    optimizer = two_groups()
    cloudckpt.load(uri_of_two, model=model, optimizer=optimizer, no_dist=True)
    assert "settings equal" not in caplog.text
    cloudckpt.load(uri, model=model, optimizer=optimizer, no_dist=True)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "made settings equal in which they differed: 'weight_decay' of groups [0, 1]. Set" in warning
    cloudckpt.load(uri, model=model, optimizer=optimizer, no_dist=True)  # they are equal by now
    assert caplog.text.count("settings equal") == 1


@pytest.mark.parametrize(
    ("saved", "held"),
    [(5, {}), ({"a": 1}, 5), ({"a": {"b": 2}}, {"a": 1}), ([1, {"x": 2}], {"y": {}}), ({"y": 1}, [1, {"x": 2}])],
)
def test_values_of_extra_take_the_form_that_was_saved(saved: Any, held: Any) -> None:
    """If this fails, a setting that was a number and is a dict by now cannot be restored, or keeps its fresh value."""
    uri, extra = new_uri(), {"setting": held}
    cloudckpt.save(uri, extra={"setting": saved, "more": "of it"})
    cloudckpt.load(uri, extra=extra)
    assert extra == {"setting": saved, "more": "of it"}


@pytest.mark.parametrize(
    ("saved", "held", "after", "named"),
    [
        (
            {"best_acc": 0.9},
            {"best_accuracy": 0.0},
            {"best_accuracy": 0.0, "best_acc": 0.9},
            r"no 'best_accuracy' under 'extra' \(did you mean 'best_acc'\?\)",
        ),
        (
            {"at": {"best_acc": 0.9}},
            {"at": {"best_accuracy": 0}},
            {"at": {"best_accuracy": 0, "best_acc": 0.9}},
            r"'at.best_accuracy'.*mean 'at.best_acc'\?",
        ),
        (
            {"metric": {"a": 1}},
            {"metrics": {"a": 0}},
            {"metrics": {"a": 0}, "metric": {"a": 1}},
            r"no 'metrics' .*mean 'metric'\?",
        ),
        ({"epoch": 5}, {"epoch": {"x": 1}}, {"epoch": {"x": 1}}, r"no 'epoch.x' under 'extra'[.:]"),
        (
            {"epoch": 5, "q": 3},
            {"epoch": 0, "q": 0, 7: [], "zz": None},
            {"epoch": 5, "q": 3, 7: [], "zz": None},
            r"no '7', 'zz' under 'extra'[.:]",
        ),
    ],
)
def test_values_of_extra_that_the_checkpoint_lacks_are_named(
    saved: Any, held: Any, after: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a misspelt name in extra goes on from its first value, and nobody is told."""
    uri, before = new_uri(), copy.deepcopy(held)
    cloudckpt.save(uri, extra=saved)
    for strict in (None, True):
        with pytest.raises(StateDictMismatchError, match=rf"{named}.*strict=False"):
            cloudckpt.load(uri, extra=held, strict=strict)
        assert held == before
    cloudckpt.load(uri, extra=held, strict=False)
    assert held == after
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [bool(re.search(named, one)) for one in messages].count(True) == 1


@pytest.mark.parametrize("strict", [None, True, False])
def test_extra_with_fewer_names_takes_all_that_was_saved(
    *, strict: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, an empty dict of extra is refused, or is not filled; or a value of another type is."""
    saved = {"m": {"a": 1, "b": [1, {}], "c": {}, "d": None, "e": (), "f": [], 3: 4}, "epoch": 5}
    for held in ({}, {"epoch": None}, {"m": {}, "none": {}}, {"m": {"a": 0, "c": {}, "d": 1, "e": 1, "f": 2, 3: 0}}):
        uri, expected = new_uri(), {**({"none": {}} if "none" in held else {}), **saved}
        cloudckpt.save(uri, extra=saved)
        cloudckpt.load(uri, extra=held, strict=strict)
        assert held == expected
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_dicts_in_extra_keep_their_classes() -> None:
    """If this fails, the first new key of a Counter in `extra` raises after a resume, and in no other run."""
    uri = new_uri()
    cloudckpt.save(uri, extra={"words": Counter("aab"), "nested": [{"by_length": defaultdict(list, {1: ["a"]})}]})
    extra: dict[str, Any] = {"words": Counter(), "nested": [{"by_length": defaultdict(list)}]}
    cloudckpt.load(uri, extra=extra)
    extra["words"]["c"] += 1
    extra["nested"][0]["by_length"][2].append("bb")
    assert extra == {"words": {"a": 2, "b": 1, "c": 1}, "nested": [{"by_length": {1: ["a"], 2: ["bb"]}}]}


def test_scaler_that_was_disabled_at_the_save_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a run that was begun on a CPU cannot go on on a GPU, and the advice does not help."""
    uri = new_uri()
    cloudckpt.save(uri, extra={"scaler": torch.amp.GradScaler("cpu", enabled=False), "epoch": 5})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    extra = {"scaler": scaler, "epoch": 0}
    with pytest.raises(StateDictMismatchError, match=r"'extra\.scaler'.*disabled.*Load without it.*strict=False"):
        cloudckpt.load(uri, extra=extra)
    assert extra["epoch"] == 0
    cloudckpt.load(uri, extra=extra, strict=False)
    assert (extra["epoch"], extra["scaler"], scaler.get_scale()) == (5, scaler, 8.0)
    assert "'extra.scaler'" in caplog.text
    assert "it stays as it is" in caplog.text
    without: dict[str, Any] = {"epoch": 0}
    cloudckpt.load(uri, extra=without)
    assert without["epoch"] == 5


def test_scaler_that_is_disabled_at_the_load_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a run without mixed precision drops the scale from all later steps, and nobody hears of it."""
    uri = new_uri()
    cloudckpt.save(uri, extra={"scaler": torch.amp.GradScaler("cpu"), "disabled": torch.amp.GradScaler(enabled=False)})
    extra = {name: torch.amp.GradScaler("cpu", enabled=False) for name in ("scaler", "disabled")}
    cloudckpt.load(uri, extra=extra)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"'extra.scaler' of {uri} behind: this GradScaler is disabled" in warning


def test_a_slip_in_a_rename_to_extra_is_an_error() -> None:
    """If this fails, a value goes on from its first one beside the saved one under a misspelt name."""
    uri = new_uri()
    cloudckpt.save(uri, extra={"epoch": 5})
    for strict in (None, True, False):
        with pytest.raises(StateDictMismatchError, match=r"no 'epoch'.*mean 'epok'.*rename"):
            cloudckpt.load(uri, extra={"epoch": 0}, rename={"extra.epoch": "extra.epok"}, strict=strict)
    extra = {"started": 1}
    cloudckpt.load(uri, extra=extra, rename={"extra.epoch": "extra.step"}, strict=False)
    assert extra == {"started": 1, "step": 5}, "no slip: what is lacking has another name altogether"


def test_moments_of_parameters_that_are_frozen_now_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a run that freezes a part of its model needs strict=False, or loses their state in silence."""
    model, fresh = make_two(), make_two()
    optimizer = AdamW(model.parameters())
    trained(model, optimizer)
    uri = new_uri()
    cloudckpt.save(uri, model=model, optimizer={"all": optimizer}, no_dist=True)
    fresh[0].requires_grad_(requires_grad=False)
    loaded = AdamW(fresh[1].parameters())
    cloudckpt.load(uri, model=fresh, optimizer={"all": loaded}, strict=True, random_state=True, no_dist=True)
    assert_same(loaded.state[fresh[1].weight], optimizer.state[model[1].weight])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"'optimizer.all.state.0.bias', 'optimizer.all.state.0.weight' of {uri} behind: these parameters" in warning
    fresh[0].requires_grad_(requires_grad=True)
    with pytest.raises(StateDictMismatchError, match=r"leaves behind.*optimizer.all.state.0.weight"):
        cloudckpt.load(uri, model=fresh, optimizer={"all": loaded}, no_dist=True)


class Sampler:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0, "shuffled": torch.zeros(0), "epochs": {}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make_all() -> dict[str, Any]:
    models = {"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)}
    optimizers = {name: AdamW(model.parameters(), lr=1.0) for name, model in models.items()}
    steps = MultiStepLR(optimizers["maker"], [3, 9])
    warm = LambdaLR(optimizers["judge"], lambda step: 1 / (1 + step))
    parts = SequentialLR(optimizers["judge"], [warm, MultiStepLR(optimizers["judge"], [5])], [2])
    return {
        "model": models,
        "optimizer": optimizers,
        "scheduler": {"steps": steps, "parts": parts},
        "dataloader": {"train": Sampler(), "test": Sampler()},
        "extra": {
            "epoch": 0,
            "noise": torch.Generator(),
            "draws": [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)],
            "deep": {"mean": torch.zeros(2), "net": nn.Linear(2, 2)},
        },
    }


def test_several_models_and_all_kinds_of_objects_come_back() -> None:
    """If this fails, a GAN, a scheduler with parts, a data loader or a generator does not resume."""
    saved, loaded, uri = make_all(), make_all(), new_uri()
    for model, optimizer in zip(saved["model"].values(), saved["optimizer"].values(), strict=True):
        trained(model, optimizer)
    for scheduler in [*saved["scheduler"].values()] * 4:
        scheduler.step()
    saved["dataloader"]["train"].state = {"position": 7, "shuffled": torch.arange(9), "epochs": {1: {"seen": [1, 2]}}}
    for generator in saved["extra"]["draws"]:
        generator.random()
    saved["extra"].update(epoch=5, noise=torch.Generator().manual_seed(9), more={"a": (1, None)})
    saved["extra"]["deep"]["mean"] += 1
    cloudckpt.save(uri, **saved, no_dist=True)
    expected = [torch.rand(3), torch.rand(3, generator=saved["extra"]["noise"])]
    mean = loaded["extra"]["deep"]["mean"]
    cloudckpt.load(uri, **loaded, random_state=True, no_dist=True)
    assert_same([torch.rand(3), torch.rand(3, generator=loaded["extra"]["noise"])], expected)
    for name in ("model", "optimizer", "scheduler", "dataloader"):
        for key, value in saved[name].items():
            assert_same(loaded[name][key].state_dict(), value.state_dict())
    draws = [[generator.random() for generator in each["extra"]["draws"]] for each in (loaded, saved)]
    assert_same(*draws)
    assert torch.equal(mean, torch.ones(2))
    for key in ("epoch", "more"):
        assert_same(loaded["extra"][key], saved["extra"][key])
    nets = [each["extra"]["deep"]["net"].state_dict() for each in (loaded, saved)]
    assert_same(*nets)


class Broken(Sampler):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("shuffle")


def test_an_object_whose_state_dict_fails_is_named() -> None:
    """If this fails, a bug in one of many objects ends a save or a load with a bare KeyError of some object."""
    uri = new_uri()
    cloudckpt.save(uri, scheduler=Sampler(), no_dist=True)
    broken: dict[str, Any] = {"scheduler": Broken()}
    calls: list[Callable[[], object]] = [
        lambda: cloudckpt.save(new_uri(), **broken, no_dist=True),
        lambda: cloudckpt.async_save(new_uri(), **broken, no_dist=True),
        lambda: cloudckpt.save(broken, new_uri(), no_dist=True),
        lambda: cloudckpt.load(broken, uri, no_dist=True),
    ]
    for call in calls:
        with pytest.raises(cloudckpt.CloudckptError, match=r"'scheduler' raised KeyError: 'shuffle' \(.*\.py:\d+\)"):
            call()


def test_an_error_of_an_object_is_no_damage_of_a_step() -> None:
    """If this fails, a restore goes back to an older step, because an object looks for some other checkpoint."""

    class Looking(Sampler):
        def state_dict(self) -> dict[str, Any]:
            raise CheckpointNotFoundError("no data set", uri="elsewhere")

    manager = cloudckpt.CheckpointManager(new_uri(), async_=False, no_dist=True)
    manager.save(1, {"sampler": Sampler()})
    with pytest.raises(cloudckpt.CloudckptError, match=r"'sampler' raised CheckpointNotFoundError: no data set"):
        manager.restore({"sampler": Looking()})


def test_models_under_keys_of_one_text_are_refused() -> None:
    """If this fails, one of two models overwrites the other in the checkpoint, and nobody is told."""
    nets = {0: nn.Linear(2, 2), "0": nn.Linear(2, 2)}
    with pytest.raises(InvalidOptionError, match="same text: 0, '0'"):
        cloudckpt.save(new_uri(), model=nets, no_dist=True)  # type: ignore[arg-type]


def test_a_group_of_schedulers_is_refused_for_one() -> None:
    """If this fails, a scheduler takes the states of several for its own: it begins anew, and nobody is told."""
    scheduler = CosineAnnealingLR(AdamW(nn.Linear(2, 2).parameters()), 9)
    for group in ([scheduler], {"warm": scheduler}, []):
        uri = new_uri()
        cloudckpt.save(uri, scheduler=group, no_dist=True)
        with pytest.raises(StateDictMismatchError, match=r"'scheduler' of .* is no state of a CosineAnnealingLR"):
            cloudckpt.load(uri, scheduler=scheduler, no_dist=True)


class Own(CosineAnnealingLR):
    """Converts the states of others."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"last_epoch": state_dict["last_epoch"]})


@pytest.mark.parametrize(
    ("saved", "live", "refused", "warned"),
    [
        (lambda o: StepLR(o, 3), lambda o: CosineAnnealingLR(o, 10), "'gamma', 'step_size', and .* 'T_max'", ""),
        (lambda o: StepLR(o, 3), lambda o: LambdaLR(o, lambda _: 1.0), "and LambdaLR has 'lr_lambdas' instead", ""),
        (lambda o: StepLR(o, 3), ReduceLROnPlateau, "'gamma', 'step_size', and ReduceLR", ""),
        (lambda o: StepLR(o, 3), lambda o: ExponentialLR(o, 0.5), "", "has 'step_size', which ExponentialLR ignores"),
        (lambda o: ExponentialLR(o, 0.5), lambda o: StepLR(o, 3), "", "was saved without 'step_size'. If it"),
        (lambda o: StepLR(o, 3), lambda o: Own(o, 10), "", ""),
        *((make, make, "", "") for make in (
            lambda o: StepLR(o, 3),
            ReduceLROnPlateau,
            lambda o: LambdaLR(o, lambda _: 1.0),
            lambda o: SequentialLR(o, [StepLR(o, 1), ExponentialLR(o, 0.5)], [2]),
            lambda o: ChainedScheduler([StepLR(o, 1), ExponentialLR(o, 0.5)]),
        )),
    ],
)  # fmt: skip
def test_the_state_of_another_class_of_schedulers_is_named(
    saved: Callable[[Any], Any], live: Callable[[Any], Any], refused: str, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, training goes on with the schedule of no run, and nobody is told; or a right load is refused."""
    uri, optimizer = new_uri(), SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    cloudckpt.save(uri, scheduler=saved(optimizer), no_dist=True)
    with pytest.raises(StateDictMismatchError, match=refused) if refused else contextlib.nullcontext():
        cloudckpt.load(uri, scheduler=live(optimizer), no_dist=True)
    assert warned in caplog.text
    assert bool(warned) == any(record.levelname == "WARNING" for record in caplog.records)


def test_a_scheduler_of_another_torch_is_loaded() -> None:
    """If this fails, no run goes on after an update of torch: versions add and remove names of schedulers."""
    uri, optimizer = new_uri(), SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=3)
    state = {**scheduler.state_dict(), "verbose": False, "old": 1, "_old": 2, "num_bad_epochs": 2}
    del state["default_min_lr"]
    cloudckpt.save({"scheduler": state}, uri, no_dist=True)
    cloudckpt.load(uri, scheduler=scheduler, no_dist=True)
    assert scheduler.num_bad_epochs == 2


class Calibrated(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("saved", [torch.arange(5), {"scales": [torch.ones(2)]}, "text", {}, None], ids=repr)
def test_extra_state_of_another_form_replaces_a_fresh_tensor(saved: Any) -> None:
    """If this fails, a layer that is empty before it is calibrated, as those of FP8 are, cannot be loaded fresh."""
    uri, module = new_uri(), Calibrated(torch.zeros(0, dtype=torch.uint8))
    cloudckpt.save(uri, model=Calibrated(saved), no_dist=True)
    cloudckpt.load(uri, model=module, no_dist=True)
    assert_same(module.extra, saved)


def test_names_in_groups_are_those_of_the_optimizer() -> None:
    """If this fails, an optimizer made with ``named_parameters()`` gets the names of a wrapper, or in another order,
    each for another parameter; or groups that differ in nothing else are refused.
    """
    uri, net = new_uri(), nn.Linear(4, 4)
    saved = AdamW([{"params": [(f"module.{name}", param)]} for name, param in net.named_parameters()], lr=0.5)
    trained(net, saved)
    cloudckpt.save(uri, model=net, optimizer=saved, no_dist=True)
    fresh = nn.Linear(4, 4)
    loaded = AdamW(reversed([*fresh.named_parameters()]))
    cloudckpt.load(uri, model=fresh, optimizer=loaded, no_dist=True)
    (group,) = loaded.param_groups
    assert group["param_names"] == ["bias", "weight"]
    assert group["lr"] == 0.5
    for name, param in fresh.named_parameters():
        assert_same(loaded.state[param], saved.state[net.get_parameter(name)])


def test_a_list_of_objects_is_refused_for_one() -> None:
    """If this fails, an object that keeps any names takes the states of several, and nobody is told."""
    uri, held = new_uri(), Sampler()
    cloudckpt.save(uri, extra={"seen": [Sampler(), Sampler()]}, no_dist=True)
    with pytest.raises(StateDictMismatchError, match=r"'extra\.seen' of .* has '0', '1', which is no state"):
        cloudckpt.load(uri, extra={"seen": held}, no_dist=True)
    held.state = {}
    cloudckpt.load(uri, extra={"seen": held}, no_dist=True)
    assert set(held.state) == {"0", "1"}


def test_saved_state_without_a_place_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a run goes on with a fresh optimizer, or without a part of its model, and nobody is told."""
    model = make_two()
    optimizer = AdamW(model.parameters())
    trained(model, optimizer)
    uri, root = new_uri(), new_uri()
    cloudckpt.save(uri, model=model, optimizer=optimizer, extra={"epoch": 1}, no_dist=True)
    fresh = AdamW(model.parameters())
    small, larger = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(*make_two(), nn.Linear(2, 2))
    nested = {"model": model.state_dict(), "optimizer": fresh.state_dict()}
    partly = copy.deepcopy(get_state_dict(model, optimizer)[1])
    partly["state"].pop("0.bias")
    for pattern, call in (
        (
            "param_groups.*12 entries of its state.*optimizer=optimizer",
            lambda: cloudckpt.load(nested, uri, no_dist=True),
        ),
        ("3 entries.*0.bias.step", lambda: cloudckpt.load({"optimizer": partly}, uri, no_dist=True)),
        ("leaves behind.*'model.1.weight', 'model.1.bias'", lambda: cloudckpt.load(uri, model=small, no_dist=True)),
        ("has no 'scheduler', only 'model', 'optimizer'", lambda: cloudckpt.load(uri, scheduler=fresh, no_dist=True)),
        ("objects do not fit.*model.2.weight.*strict=False", lambda: cloudckpt.load(uri, model=larger, no_dist=True)),
        (
            "'betas', and SGD has 'momentum'",
            lambda: cloudckpt.load(uri, model=model, optimizer=SGD(model.parameters()), no_dist=True),
        ),
        (
            r"leaves behind.*optimizer \(\d+ entries\).*extra.epoch",
            lambda: cloudckpt.load({"model": model.state_dict()}, uri, strict=True, no_dist=True),
        ),
    ):
        with pytest.raises(StateDictMismatchError, match=pattern):
            call()
    cloudckpt.load(nested, uri, strict=False, no_dist=True)
    assert "12 entries of its state" in caplog.text
    cloudckpt.load(uri, model=small, strict=False, no_dist=True)
    assert "leaves behind a part" in caplog.text
    cloudckpt.load(uri, model=larger, strict=False, no_dist=True)
    assert "lacks '2.weight', '2.bias', which the model keeps as they are" in caplog.text
    caplog.clear()
    assert cloudckpt.read(uri, include="optimizer.param_groups")["optimizer"]["param_groups"][0]["lr"] == 0.001
    assert "WARNING" not in caplog.text  # a part is read on purpose
    assert_same(small[0].weight.detach(), model[0].weight.detach())  # type: ignore[operator]
    cloudckpt.load({"model": model.state_dict()}, uri, no_dist=True)
    with pytest.raises(StateDictMismatchError) as caught:
        cloudckpt.load(nested, uri, no_dist=True)
    assert "12 entries of its state" in caught.value.message
    with cloudckpt.CheckpointManager(root, async_=False, no_dist=True) as manager:
        manager.save(1, model=model, optimizer=optimizer)
        with pytest.raises(StateDictMismatchError, match=r"leaves behind.*optimizer"):
            manager.restore(model=model)
        assert manager.restore(model=model, strict=False) is not None
        assert manager.restore(model=model, optimizer=fresh) is not None
        assert_same(fresh.state_dict(), optimizer.state_dict())
    newest = make_two()
    cloudckpt.load_latest(root, model=newest, no_dist=True)
    assert_same(newest[0].weight.detach(), model[0].weight.detach())


class StatefulLoader(torch.utils.data.DataLoader[int]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def test_a_loader_that_draws_from_the_generators_of_all_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a resume within an epoch goes on with other random numbers, and nobody is told."""
    own = StatefulLoader([1], generator=torch.Generator())
    for loaders, num_warnings in ((own, 0), ({"train": own, "test": StatefulLoader([1])}, 1)):
        manager = cloudckpt.CheckpointManager(new_uri(), async_=False, no_dist=True)
        for step in range(2):
            manager.save(step, dataloader=loaders)
        assert caplog.text.count("StatefulLoader has no generator of its own") == num_warnings


@pytest.mark.parametrize(
    ("pattern", "objects"),
    [
        ("needs model=", {"optimizer": SGD(make_two().parameters())}),
        ("not in the model that was passed", {"model": make_two(), "optimizer": SGD(make_two().parameters())}),
        ("must be a torch.optim.Optimizer.*not an int", {"model": make_two(), "optimizer": 3}),
        ("pass the optimizer itself", {"model": make_two(), "optimizer": SGD(make_two().parameters()).state_dict()}),
        ("model must be a torch.nn.Module or a dict", {"model": "model"}),
        ("extra must be a dict", {"extra": [1]}),
        ("StatefulDataLoader", {"dataloader": torch.utils.data.DataLoader([1])}),
        ("scheduler is an int, which has no state_dict", {"scheduler": 3}),
        ("optimizer=…, several in a dict", {"extra": {"deep": {"sgd": SGD(make_two().parameters())}}}),
    ],
)
def test_objects_that_cannot_be_saved_are_named(pattern: str, objects: dict[str, Any]) -> None:
    """If this fails, a wrong argument ends in an error from deep inside torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((InvalidOptionError, cloudckpt.CloudckptError), match=pattern):
            cloudckpt.save(new_uri(), **objects, no_dist=True)


def test_a_state_dict_and_objects_together_are_refused() -> None:
    """If this fails, one of the two is silently not saved."""
    with pytest.raises(TypeError, match="not both"):
        cloudckpt.save({"a": 1}, new_uri(), model=make_two(), no_dist=True)
    with pytest.raises(TypeError, match=r"live objects: model=…"):
        cloudckpt.save(new_uri(), no_dist=True)


def test_a_default_device_changes_nothing() -> None:
    """If this fails, after torch.set_default_device("cuda") counters of an optimizer and random states lie there."""
    uri, model, fresh = new_uri(), make_two(), make_two()
    optimizer, loaded = AdamW(model.parameters()), AdamW(fresh.parameters())
    trained(model, optimizer)
    extra: dict[str, Any] = {}
    with torch.device("meta"):  # as a device that is not the tensors'
        cloudckpt.save(uri, model=model, optimizer=optimizer, extra={"a": [np.ones(2), model[0].bias]}, no_dist=True)
        expected = random.random(), np.random.random()  # noqa: NPY002  # the generator of the process
        cloudckpt.load(uri, model=fresh, optimizer=loaded, extra=extra, random_state=True, no_dist=True)
        assert (random.random(), np.random.random()) == expected  # noqa: NPY002
        assert cloudckpt.read(uri)["model"]["0.bias"].device.type == "cpu"
    assert_same(extra["a"][1], model[0].bias.detach())
    assert_same(loaded.state_dict(), optimizer.state_dict())


def test_a_module_without_parameters_may_be_among_the_models() -> None:
    """If this fails, a loss beside the model fails each save, in words about a process group."""
    uri, saved, loaded = new_uri(), make_two(), make_two()
    for model, call in ((saved, cloudckpt.save), (loaded, cloudckpt.load)):
        call(uri, model={"net": model, "loss": nn.MSELoss()}, optimizer=AdamW(model.parameters()), no_dist=True)
    assert_same(loaded.state_dict(), saved.state_dict())


def test_a_model_without_memory_is_refused() -> None:
    """If this fails, a load into a model on the meta device fills nothing, and says that it is done."""
    uri = new_uri()
    cloudckpt.save(uri, model=nn.BatchNorm1d(2), no_dist=True)
    model = nn.BatchNorm1d(2)
    model.running_mean = torch.zeros(2, device="meta")
    with pytest.raises(InvalidOptionError, match=r"'running_mean'.*meta device.*to_empty"):
        cloudckpt.load(uri, model=model, no_dist=True)


def test_a_part_of_the_parameters_may_be_loaded_with_their_state() -> None:
    """If this fails, a stage of a pipeline cannot load its part; or it can, without the state of what it loads."""
    model = make_two()
    optimizer = AdamW(model.parameters())
    trained(model, optimizer)
    uri = new_uri()
    cloudckpt.save(uri, model=model, optimizer=optimizer, no_dist=True)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    stage = {
        "model": {name: value for name, value in of_model.items() if name.startswith("0.")},
        "optimizer": {**of_optimizer, "state": {n: s for n, s in of_optimizer["state"].items() if n.startswith("0.")}},
    }
    cloudckpt.load(stage, uri, no_dist=True)
    stage["optimizer"]["state"].pop("0.bias")
    with pytest.raises(StateDictMismatchError, match=r"3 entries.*0\.bias"):
        cloudckpt.load(stage, uri, no_dist=True)


class PositionedLoader(DataLoader[int]):
    """A data loader with the state of torchdata's, which is not installed here: position and sampler's position."""

    yielded = 3
    finished = False

    def state_dict(self) -> dict[str, Any]:
        sampler = {"sampler_state": {"yielded": self.yielded}}
        return {"_sampler_iter_yielded": 1, "_sampler_iter_state": sampler, "_iterator_finished": self.finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state.keys() == self.state_dict().keys()  # what is saved beside it is not the loader's
        self.yielded = state["_sampler_iter_state"]["sampler_state"]["yielded"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


def loader_of(num_samples: int = 8, **settings: Any) -> PositionedLoader:
    """Make a loader of one rank of two. The settings of a sampler are those of a `DistributedSampler`."""
    data = range(num_samples)
    of_sampler = {key: settings.pop(key) for key in ("seed", "rank", "num_replicas", "shuffle") if key in settings}
    sampler = DistributedSampler(data, **{"num_replicas": 2, "rank": 0, **of_sampler})  # type: ignore[arg-type]
    return PositionedLoader(data, **{"batch_size": 2, "sampler": sampler, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: loader_of(10), "with samples=8, and this job has samples=10"),
        (lambda: loader_of(seed=5), r"with seed=0.* has seed=5"),
        (lambda: loader_of(num_replicas=4, rank=3), r"num_replicas=2, rank=0, .* num_replicas=4, rank=3"),
        (lambda: loader_of(shuffle=False), r"shuffle=True.*shuffle=False"),
        (lambda: loader_of(num_workers=2), r"workers=0.*workers=2"),
        (lambda: loader_of(sampler=None), r"sampler=DistributedSampler.*sampler=SequentialSampler"),
        (lambda: loader_of(batch_size=4), None),  # the sampler counts samples
    ],
)
def test_loader_made_in_another_way_is_refused(other: Callable[[], Any], named: str | None) -> None:
    """If this fails, a job with more data, other ranks or another seed trains on other batches without a word."""
    uri = new_uri()
    cloudckpt.save(uri, dataloader={"train": loader_of()})
    if named is None:
        cloudckpt.load(uri, dataloader={"train": other()})
        return
    with pytest.raises(StateDictMismatchError, match=rf"'dataloader.rank-0.train' of {uri} was saved .*{named}.*other"):
        cloudckpt.load(uri, dataloader={"train": other()})


def test_batches_of_a_stream_keep_their_size() -> None:
    """If this fails, a loader that skips as many batches as were seen skips other samples."""
    uri = new_uri()
    cloudckpt.save(uri, dataloader=PositionedLoader(Stream(), batch_size=2))
    cloudckpt.load(uri, dataloader=PositionedLoader(Stream(), batch_size=2))
    with pytest.raises(StateDictMismatchError, match=r"batch_size=2, .*batch_size=4"):
        cloudckpt.load(uri, dataloader=PositionedLoader(Stream(), batch_size=4))


def fail(*_: Any) -> Any:
    raise RuntimeError("not known")


class OwnSampler(torch.utils.data.Sampler[int]):
    """A sampler of a user's, which saves the seed that the process draws."""

    data_source = None

    def __init__(self, seed: int, *, at_once: bool = True) -> None:
        self.seed, self.at_once, self.restored = seed, at_once, seed

    def __iter__(self) -> Iterator[int]:
        self.seed = self.restored
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.seed)).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state["drawn"]
        self.seed = self.restored if self.at_once else self.seed


class OwnLoader(PositionedLoader):
    """A loader of a user's, which restores the seed of its sampler."""

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.sampler.seed}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.seed = state["drawn"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "warns"),
    [
        (OwnSampler, False),
        (lambda seed: OwnSampler(seed, at_once=False), True),  # restored by the next epoch, which cannot be known
        (lambda seed: OwnLoader(range(8), sampler=DistributedSampler(range(8), 2, 0, seed=seed)), False),
    ],
)
def test_loader_that_restores_its_own_seed_is_not_refused(
    make: Callable[[int], Any], caplog: pytest.LogCaptureFixture, *, warns: bool
) -> None:
    """If this fails, a sampler whose seed each process draws cannot be resumed."""
    uri, resumed = new_uri(), make(5)
    cloudckpt.save(uri, dataloader=make(3))
    cloudckpt.load(uri, dataloader=resumed)
    sampler = getattr(resumed, "sampler", resumed)
    list(sampler)
    assert sampler.seed == 3
    assert ("was saved with seed=3, and its sampler now has seed=5" in caplog.text) is warns


@pytest.mark.parametrize("name", ["__len__", "epoch", "rank", "data_source", "sampler"])
def test_sampler_that_cannot_be_described_is_saved(name: str) -> None:
    """If this fails, a save fails since a class of the user's has no length or no seed to tell."""
    sampler = type("Odd", (OwnSampler,), {name: fail if name == "__len__" else property(fail, lambda *_: None)})
    loader = type("Wrapper", (PositionedLoader,), {"__init__": lambda *_: None})()  # without the attributes of torch's
    uri = new_uri()
    held = {"sampler": sampler(3), "wrapper": loader}
    cloudckpt.save(uri, dataloader=held)
    cloudckpt.load(uri, dataloader=held)
    cloudckpt.CheckpointManager(new_uri(), async_=False, no_dist=True).save(1, dataloader=held)


def test_stream_without_a_known_length_is_saved() -> None:
    """If this fails, a save fails with a stream that has no length, or a resume if that is the length of the rest."""
    lengths = iter([8, 5])
    for length in (fail, lambda _: next(lengths)):
        stream, uri = type("Odd", (Stream,), {"__len__": length}), new_uri()
        cloudckpt.save(uri, dataloader=PositionedLoader(stream()))
        cloudckpt.load(uri, dataloader=PositionedLoader(stream()))


@pytest.mark.parametrize("finished", [False, True])
def test_epoch_of_a_sampler_comes_back(*, finished: bool) -> None:
    """If this fails, a resume shuffles as in epoch 0, or skips the epoch after one that had ended."""
    uri, loader, resumed = new_uri(), loader_of(), loader_of()
    loader.sampler.set_epoch(3)  # type: ignore[attr-defined]
    loader.finished, resumed.yielded = finished, 99
    cloudckpt.save(uri, dataloader=loader)
    cloudckpt.load(uri, dataloader=resumed)
    assert list(resumed.sampler) == list(loader.sampler)
    assert resumed.yielded == (0 if finished else 3)


def test_loader_in_extra_of_several_ranks_is_refused() -> None:
    """If this fails, all ranks continue at the position of rank 0."""
    objects = LiveObjects(None, None, None, None, {"loader": loader_of()}, has_random_state=False)
    alone = objects.entries(rank=0, num_ranks=1, is_strict=True)["extra"]
    assert "loader" in alone.state_at("extra")
    with pytest.raises(InvalidOptionError, match=r"'loader'.* is a data loader.*each of the 2 ranks"):
        objects.entries(rank=0, num_ranks=2, is_strict=True)["extra"].state_at("extra")


@pytest.mark.parametrize("nested", [False, True])
def test_a_load_tells_the_settings_of_a_scheduler_that_it_changes(
    caplog: pytest.LogCaptureFixture, *, nested: bool
) -> None:
    """If this fails, a run that is lengthened in the script follows the schedule of the short one without a word."""
    optimizer, uri = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), new_uri()

    def make(num_steps: int) -> Any:
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [cosine], []) if nested else cosine

    saved = make(100)
    optimizer.step()
    saved.step()
    cloudckpt.save(uri, scheduler=saved)
    cloudckpt.load(uri, scheduler=make(100))
    assert "settings of" not in caplog.text
    cloudckpt.load(uri, scheduler=make(200))
    name = "SequentialLR" if nested else "CosineAnnealingLR"
    (told,) = [line for line in caplog.messages if f"the load changes settings of {name}: T_max: 200 -> 100" in line]
    assert "To train longer, see docs/recipes.md, 'Train longer than planned'" in told


def test_a_load_tells_the_settings_that_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, an lr that was edited in the script is replaced without a word, or Adam trains on as AdamW."""
    model, uri = nn.Linear(2, 2), "memory://settings/changed"
    cloudckpt.save(uri, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    with caplog.at_level("INFO", "cloudckpt"):
        cloudckpt.load(uri, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
        assert "settings of" not in caplog.text
        cloudckpt.load(uri, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=9.0))
    assert "the load changes settings of AdamW: lr: 9.0 -> 0.1" in caplog.text
    assert "the reverse" not in caplog.text
    cloudckpt.load(uri, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
    assert "the weight decay of this Adam is that of the optimizer that was saved" in caplog.text
