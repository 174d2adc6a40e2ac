"""Ranks that hold different values under one name: the checkpoint is one rank's state, or the save names them."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.models import Parallelism, assert_same, build, local
from tests.kit.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn.parallel import DistributedDataParallel

import cloudckpt
from cloudckpt.errors import StateDictMismatchError
from cloudckpt.options import MIB, Options

pytestmark = pytest.mark.multirank

WAIT_S = 120.0


def save_in(mode: str, *args: Any, options: Options | None = None, **kwargs: Any) -> None:
    """Save in one of the ways that there are, to the end."""
    chosen = options or Options()
    if mode == "sync":
        cloudckpt.save(*args, options=chosen, **kwargs)
    elif mode == "process":
        kind = AsyncCheckpointerType.PROCESS
        cloudckpt.async_save(*args, async_checkpointer_type=kind, options=chosen, **kwargs).result(WAIT_S)
    else:
        overlapped = Options(async_overlap=mode == "overlap", compare_replicas=chosen.compare_replicas)
        cloudckpt.async_save(*args, options=overlapped, **kwargs).result(WAIT_S)


def own_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that this rank alone has, though each rank has one of this shape, and its optimizer after a step."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    return model, optimizer


def refuse_models_of_each_rank(mode: str, root: str) -> None:
    model, optimizer = own_model()
    with pytest.raises(StateDictMismatchError, match=r"'model\.0\.weight' of rank 1 differs from that of rank 0"):
        save_in(mode, f"{root}/own", model=model, optimizer=optimizer)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    found = r"'optimizer\.state\.0\.weight\.exp_avg' of rank 1 differs from that of rank 0"
    with pytest.raises(StateDictMismatchError, match=found):
        save_in(mode, f"{root}/moments", model=model, optimizer=optimizer)


def save_models_of_each_rank(mode: str, root: str) -> dict[str, Any]:
    """Save as a state dict, of which nobody knows what it is, and as told. Returns this rank's state."""
    model, optimizer = own_model()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "rank": dist.get_rank()}
    save_in(mode, state, f"{root}/plain")
    options = Options(compare_replicas="never")
    save_in(mode, f"{root}/told", model=model, options=options)
    return state


@pytest.mark.parametrize("mode", ["sync", "async", "overlap", pytest.param("process", marks=pytest.mark.slow)])
def test_differing_models_of_ranks_are_refused(mode: str, tmp_path: Path) -> None:
    """If this fails, a script that forgot DDP saves a model that never existed, and hears of success."""
    run_ranks(functools.partial(refuse_models_of_each_rank, mode), str(tmp_path), world_size=2)
    assert not list(tmp_path.rglob("*.safetensors"))
    ours, _ = run_ranks(functools.partial(save_models_of_each_rank, mode), str(tmp_path), world_size=2)
    assert_same(cloudckpt.read(str(tmp_path / "plain")), ours)
    assert_same(cloudckpt.read(str(tmp_path / "told"))["model"], ours["model"])


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@on_ranks(2)
def test_batch_statistics_come_from_one_rank(mode: str, uri: str) -> None:
    """If this fails, models with batch normalisation cannot be saved under DDP, or are mixed."""
    # DDP leaves each rank the statistics of its own batches until the next forward pass.
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.BatchNorm1d(300)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 40) + dist.get_rank()).square().sum().backward()
    optimizer.step()
    save_in(mode, uri, model=model, optimizer=optimizer)
    stored, held = cloudckpt.read(uri)["model"], model.module.state_dict()
    assert_same(stored["0.weight"], held["0.weight"])
    assert torch.equal(stored["1.running_mean"], held["1.running_mean"]) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert_same(stored, dict(held))


class Scaled(torch.nn.Module):
    """A model with a parameter that has no dimensions, and with a counter of batches among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30)
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.5))


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@on_ranks(2)
def test_numbers_of_each_rank_are_refused(mode: str, root: str) -> None:
    """If this fails, ranks with other steps or learning rates are one checkpoint, and nobody knows whose it is."""
    model, rank = Scaled(), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert model.norm.num_batches_tracked is not None
    model.norm.num_batches_tracked += rank
    save_in(mode, f"{root}/agreed", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    with pytest.raises(StateDictMismatchError, match=r"'optimizer\.param_groups\.0\.lr' of rank 1 differs from"):
        save_in(mode, f"{root}/lr", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.state[model.linear.weight]["step"] += rank
    with pytest.raises(StateDictMismatchError, match=r"'optimizer\.state\.linear\.weight\.step' of rank 1 differs"):
        save_in(mode, f"{root}/step", model=model, optimizer=optimizer)
    model.logit_scale.data += rank
    with pytest.raises(StateDictMismatchError, match=r"'model\.logit_scale' of rank 1 differs from that of rank 0"):
        save_in(mode, f"{root}/scale", model=model)
    assert int(cloudckpt.read(f"{root}/agreed")["model"]["norm.num_batches_tracked"]) == 0


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@on_ranks(2)
def test_values_of_a_rank_in_extra_are_named_in_a_warning(mode: str, root: str) -> None:
    """If this fails, a restore gives all ranks the best loss of rank 0 instead of their own, and nobody is told."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]  # of this one
    logging.getLogger("cloudckpt").addHandler(handler)
    extra = {"epoch": 3, "best": {"loss": 0.5 + dist.get_rank()}, "names": ["a"]}
    for number in range(2):
        save_in(mode, f"{root}/{number}", extra=extra)
    logging.getLogger("cloudckpt").removeHandler(handler)
    named = [one for one in told if one.startswith("'extra.best.loss' of rank 1 differs from that of rank 0")]
    assert (len(named), len([one for one in told if "differs" in one])) == (dist.get_rank() == 0,) * 2
    assert cloudckpt.read(f"{root}/1")["extra"] == {"epoch": 3, "best": {"loss": 0.5}, "names": ["a"]}


def drift(parallelism: Parallelism, root: str) -> dict[str, Any]:
    """Change the replicas of the last two ranks; save live, and by a state dict. Returns what this rank holds."""
    training = build(parallelism, seed=1)
    training.losses(0, 1)
    cloudckpt.save(f"{root}/equal", model=training.model, optimizer=training.optimizer)
    if dist.get_rank() >= 2:
        with torch.no_grad():
            for parameter in training.model.parameters():
                local(parameter).add_(1)
    with pytest.raises(StateDictMismatchError, match=r"'model\.\w+\.weight' of ranks? \d.* differs from that of rank"):
        cloudckpt.save(f"{root}/drifted", model=training.model)
    state = training.model.state_dict()
    cloudckpt.save(state, f"{root}/drifted")
    return {name: local(value) for name, value in state.items()}


def load_as(parallelism: Parallelism, root: str) -> dict[str, Any]:
    training = build(parallelism, seed=2)
    state = training.model.state_dict()
    cloudckpt.load(state, f"{root}/drifted")
    return {name: local(value) for name, value in state.items()}


def test_shards_of_replicas_that_drifted_apart_are_those_of_one_replica(tmp_path: Path) -> None:
    """If this fails, a checkpoint of HSDP mixes shards of replicas that differ, without a word."""
    held = run_ranks(drift, "hsdp", str(tmp_path), world_size=4)
    loaded = run_ranks(load_as, "hsdp", str(tmp_path), world_size=4)
    for rank, found in enumerate(loaded):
        assert_same(found, held[rank % 2])


@on_ranks(2)
def test_a_background_save_compares_its_copy(uri: str) -> None:
    """If this fails, ranks are refused because of what training did after the copy."""
    state = {"model": torch.nn.Linear(700, 700)}
    handle = cloudckpt.async_save(uri, **state, options=Options(async_overlap=True))
    handle.staged.result(WAIT_S)
    with torch.no_grad():
        state["model"].weight.add_(dist.get_rank())
    handle.result(WAIT_S)


@on_ranks(2)
def test_the_whole_comparison_is_an_option_of_a_save(root: str) -> None:
    """If this fails, the option is ignored."""
    assert 4 * MIB < 1024 * 2048 * 4
    model = torch.nn.Linear(1024, 2048, bias=False)
    with torch.no_grad():
        model.weight[700, 700] += dist.get_rank()
    cloudckpt.save(f"{root}/sampled", model=model)
    with pytest.raises(StateDictMismatchError, match=r"'model\.weight' of rank 1"):
        cloudckpt.save(f"{root}/whole", model=model, options=Options(compare_replicas="whole"))


@on_ranks(2)
def test_a_save_by_torchs_call_is_the_state_of_one_rank(root: str) -> None:
    """If this fails, only our own functions keep ranks apart."""
    model, _ = own_model()
    cloudckpt.enable()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"file://{root}/torch")
    if dist.get_rank() == 0:
        assert_same(cloudckpt.read(f"{root}/torch")["model"], dict(model.state_dict()))
