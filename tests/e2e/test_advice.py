"""Advice of errors, followed as a user would: it names what the call that failed takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.kit.wrapped import WrappedStore
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.errors import StateDictMismatchError, StoreTimeoutError
from cloudckpt.options import AdvancedOptions, Options

_numbers = itertools.count()


def a_place() -> str:
    return f"memory://advice/{next(_numbers)}"


class Config:
    """A class that only a pickle can store."""


def adam(model: nn.Module, *, has_stepped: bool) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters())
    if has_stepped:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer.state_dict()


STATE = {"model": nn.Linear(2, 2).state_dict(), "count": torch.tensor([300])}
LOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rename": (STATE, {"net": nn.Linear(2, 2).state_dict()}),
    "partial": (STATE, {**STATE, "added": 1}),
    "cast": (STATE, {"count": torch.zeros(1, dtype=torch.int8)}),
    "pickle": ({"config": Config()}, {"config": None}),
    "state": ({"o": adam(nn.Linear(2, 1), has_stepped=True)}, {"o": adam(nn.Linear(2, 1), has_stepped=False)}),
}


TORCHS_OWN = {"rename", "partial"}  # without `enable`, torch's own planner raises them, with its own text


@pytest.fixture
def is_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param:
        cloudckpt.enable()
    yield request.param
    cloudckpt.disable()


def follow(error: CheckpointException, uri: str) -> dict[str, Any]:
    """Do what the advice says. Returns the keywords that it says to pass."""
    (cause,) = {str(one): one for one, _ in error.failures.values()}.values()
    assert not re.search("pass (rename|strict|overwrite|allow_pickle|options)=", str(cause))  # no call of torch has it
    (kind, code) = re.findall(r"(call|pass) ((?:cloudckpt|storage|planner)\S*\(.*?\))(?: to |$)", str(cause))[-1]
    names = {"cloudckpt": cloudckpt, "DefaultLoadPlanner": DefaultLoadPlanner}
    code = code.replace("…", repr(uri))
    if kind == "call":
        eval(code, names)  # noqa: S307  # text of our own
        return {}
    keyword, _, value = code.partition("=")
    return {keyword: eval(value, names)}  # noqa: S307  # text of our own


@pytest.mark.filterwarnings("ignore:.*unpickling it could run any code")
@pytest.mark.parametrize(
    ("case", "is_enabled"),
    [*((case, True) for case in LOADS), *((case, False) for case in sorted(LOADS.keys() - TORCHS_OWN))],
    indirect=["is_enabled"],
)
def test_load_through_torch_succeeds_as_advised(case: str, is_enabled: bool) -> None:  # noqa: FBT001  # a fixture
    """If this fails, a user of torch's load is told to pass an argument that it does not have."""
    saved, target = LOADS[case]
    uri = a_place()
    cloudckpt.save(saved, uri)

    def load(**keywords: Any) -> None:
        if not is_enabled:
            keywords.setdefault("storage_reader", cloudckpt.ObjectStoreReader(uri))
        dcp.load(dict(target), checkpoint_id=uri, **keywords)

    with pytest.raises(CheckpointException) as caught:
        load()
    load(**follow(caught.value, uri))


@pytest.mark.parametrize("is_enabled", [True, False], indirect=True)
def test_save_through_torch_succeeds_as_advised(is_enabled: bool) -> None:  # noqa: FBT001  # a fixture
    """If this fails, a user of torch's save is told to pass an argument that it does not have."""
    uri = a_place()

    def save(**keywords: Any) -> None:
        if not is_enabled:
            keywords.setdefault("storage_writer", cloudckpt.ObjectStoreWriter(uri))
        dcp.save(STATE, checkpoint_id=uri, **keywords)

    save()
    with pytest.raises(CheckpointException) as caught:
        save()
    save(**follow(caught.value, uri))


def test_load_of_another_shape_keeps_the_rest_as_advised() -> None:
    """If this fails, nobody learns how to load a model whose head has another size."""
    uri, model = a_place(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 5))
    cloudckpt.save(uri, model=saved)
    head = model[1].weight.clone()
    with pytest.raises(StateDictMismatchError) as caught:
        cloudckpt.load(uri, model=model)
    message = str(caught.value)
    assert "'model.1.weight' was saved with shape (5, 2), and has shape (3, 2) here" in message
    (keywords,) = re.findall(r"with (strict=False, rename=.*)$", message)
    cloudckpt.load(uri, model=model, **eval(f"dict({keywords})"))  # noqa: S307  # text of our own
    assert torch.equal(model[0].weight, saved[0].weight)
    assert torch.equal(model[1].weight, head)


def test_manager_says_which_arguments_are_its_own() -> None:
    """If this fails, restore is said to take what the manager's constructor takes."""
    root = a_place()
    with cloudckpt.CheckpointManager(root, async_=False) as manager:
        manager.save(1, STATE, force=True)
        with pytest.raises(StateDictMismatchError, match=r"give the CheckpointManager options="):
            manager.restore({"count": torch.zeros(1, dtype=torch.int8)}, step=1)


@pytest.mark.parametrize("async_", [True, False])
def test_failed_save_of_a_manager_names_its_arguments(*, async_: bool) -> None:
    """If this fails, a user of the manager passes options to `save`, which does not take them, or not overwrite."""

    class Slow(WrappedStore):
        def put(self, key: str, *_: Any, **__: Any) -> Any:
            raise StoreTimeoutError("no answer", key=key, operation="put")

    slow = Options(retries=0, advanced=AdvancedOptions(wrap_store=Slow))
    told: list[tuple[int, Options | None, str]] = [
        (2, slow, r"give the CheckpointManager options=cloudckpt\.Options\(timeout_s=…\)"),
        (1, None, r"pass overwrite=True"),
    ]
    for step, options, advice in told:
        root = a_place()
        cloudckpt.save(STATE, f"{root}/step-1")
        manager = cloudckpt.CheckpointManager(root, async_=async_, options=options)
        with pytest.raises(CheckpointException, match=advice), manager:
            manager.save(step, STATE)
