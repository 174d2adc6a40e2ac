"""Runs that are resumed from live objects go on as if nothing had happened, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.kit.models import Parallelism, Training, assert_same, build, local
from tests.kit.ranks import on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_map_only

import cloudckpt
from cloudckpt.errors import InvalidOptionError, RankLostError, StateDictMismatchError

NUM_RANKS: dict[Parallelism, int] = {
    "none": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp1_mesh": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "fsdp_tp": 4,
}


class Factored(torch.optim.Optimizer):
    """Scales gradients by sums over rows and columns, as Adafactor does: a state of other shapes than the parameter's.

    torch's own Adafactor takes no DTensors.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for param in self.param_groups[0]["params"]:
            square = param.grad.square() + 1e-6
            state = self.state[param]
            for name, dim in (("row", -1), ("column", 0)):
                mean = square.mean(dim, keepdim=True)
                if isinstance(mean, DTensor) and any(placement.is_partial() for placement in mean.placements):
                    mean = mean.redistribute(placements=[Replicate()])
                state[name] = 0.9 * state[name] + 0.1 * mean if name in state else mean
            param.sub_(self.param_groups[0]["lr"] * param.grad / (state["row"] * state["column"]).sqrt())


class Moments(NamedTuple):
    """A tuple as functional optimizers have it."""

    mean: Any
    count: int


class Nested(torch.optim.Optimizer):
    """Keeps its moments in lists, dicts and tuples, as LBFGS and Shampoo do. The list grows after the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            past = [*state.get("past", []), param.grad.clone()][-3:]
            block = state.get("block", {"moments": Moments([(torch.zeros_like(param), 1)], 0), "name": "mean"})
            ((mean, _),), count = block["moments"].mean, block["moments"].count
            mean.lerp_(past[0], 0.1)
            state.update(past=past, block={**block, "moments": Moments([(mean, 1)], count + 1)})
            param.sub_(sum(past) + mean, alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "factored": Factored,
    "nested": Nested,
}
CASES = [*((parallelism, "adamw") for parallelism in NUM_RANKS), ("none", "momentum"), ("none", "adafactor")]
CASES += [("fsdp2", "momentum"), ("fsdp2", "factored"), ("fsdp1", "momentum"), ("none", "nested"), ("fsdp2", "nested")]


class Run:
    """A training run with everything that it needs to go on."""

    def __init__(self, parallelism: Parallelism, optimizer: str, *, seed: int, compiled: bool = False) -> None:
        self.model = build(parallelism, seed=seed, compiled=compiled).model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.noise = torch.Generator().manual_seed(seed)

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extra": {"noise": self.noise},
        }

    def train(self, begin: int, end: int) -> list[torch.Tensor]:
        """Take the steps in the half-open range, with data, dropout and noise of random generators."""
        training = Training(model=self.model, optimizer=self.optimizer)
        losses = []
        for number in range(begin, end):
            losses.append(training.step(number + torch.randint(1000, ()).item()))  # as all ranks draw it
            with torch.no_grad():
                for param in self.model.parameters():
                    local(param).mul_(1 + 0.01 * torch.rand((), generator=self.noise))
            self.scheduler.step()
        return losses

    def state(self) -> dict[str, Any]:
        params = {name: local(param).detach().clone() for name, param in self.model.named_parameters()}
        state = [
            copy.deepcopy(tree_map_only(DTensor, local, self.optimizer.state[param]))
            for param in self.model.parameters()
            if param in self.optimizer.state
        ]
        return {"params": params, "state": state, "scheduler": self.scheduler.state_dict()}


def resume(root: str, parallelism: Parallelism, optimizer: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # FSDP1's own use of its deprecated calls
    undisturbed = Run(parallelism, optimizer, seed=1)
    with cloudckpt.CheckpointManager(root, no_dist=parallelism == "none") as manager:
        undisturbed.train(0, 3)
        manager.save(2, **undisturbed.objects())
        expected = undisturbed.train(3, 6)
        manager.wait()
        resumed = Run(parallelism, optimizer, seed=2)
        restored = manager.restore(**resumed.objects())
        assert restored is not None
        assert restored.step == 2
        assert_same(resumed.train(3, 6), expected)
        assert_same(resumed.state(), undisturbed.state())
        manager.restore(**resumed.objects())  # into an optimizer that has state
        assert_same(resumed.train(3, 6), expected)


@pytest.mark.multirank
@pytest.mark.parametrize(("parallelism", "optimizer"), CASES)
def test_a_resumed_run_equals_an_undisturbed_one(parallelism: Parallelism, optimizer: str, tmp_path: Path) -> None:
    """If this fails, a run that was resumed has lost some of its state."""
    num_ranks = NUM_RANKS[parallelism]
    run_ranks(resume, str(tmp_path), parallelism, optimizer, world_size=num_ranks, process_group=num_ranks > 1)


class Sampler:
    """A stateful data loader, as far as a checkpoint is concerned."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        if self.position < -1:
            raise KeyError("shuffle")
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.position < 0:
            raise KeyError("shuffle")
        self.position = state["position"]


def save_positions(uri: str) -> None:
    with pytest.raises(cloudckpt.CloudckptError, match=r"on rank 1: .*'scheduler' raised KeyError: 'shuffle'"):
        cloudckpt.save(uri, scheduler=Sampler(-2 * dist.get_rank()))
    cloudckpt.save(uri, dataloader=Sampler(7 + dist.get_rank()), scheduler={"warm": Sampler()})


def load_positions(uri: str) -> None:
    if dist.get_world_size() != 2:
        with pytest.raises(StateDictMismatchError, match="was saved with 2 ranks"):
            cloudckpt.load(uri, dataloader=Sampler())
        return
    for wrong in (3, Sampler()) if dist.get_rank() else (Sampler(), Sampler()):
        try:
            cloudckpt.load(uri, dataloader=wrong)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001  # torch's is no Exception
            assert wrong == 3 or dist.get_rank() == 0, error  # noqa: PT017
            continue
        assert wrong.position == 7 + dist.get_rank()
    for objects in ({"dataloader": Sampler(-dist.get_rank())}, {"scheduler": {"warm": Sampler(-dist.get_rank())}}):
        with pytest.raises(cloudckpt.CloudckptError, match=r"rank 1: .*'(dataloader.rank-1|scheduler.warm)'.*shuffle"):
            cloudckpt.load(uri, **objects)  # type: ignore[arg-type]


@pytest.mark.multirank
def test_each_rank_has_a_data_loader_of_its_own(tmp_path: Path) -> None:
    """If this fails, ranks read each other's data; or a job of other ranks skips some; or a wrong argument on one rank
    makes all later calls fail; or the other ranks train on after one could not load its objects.
    """
    run_ranks(save_positions, str(tmp_path / "a"), world_size=2)
    for num_ranks in (1, 2, 3):
        run_ranks(load_positions, str(tmp_path / "a"), world_size=num_ranks)


@on_ranks(2)
def test_scalar_dtensors_get_moments_of_their_type(uri: str) -> None:
    """If this fails, a scalar DTensor gets plain moments."""
    mesh = init_device_mesh("cpu", (2,))
    scale = torch.rand(())
    model, narrow = (
        nn.ParameterDict({name: distribute_tensor(value, mesh, [Replicate()]) for name, value in values.items()})
        for values in ({"scale": scale, "wide": torch.rand(4)}, {"scale": scale, "wide": torch.rand(2)})
    )
    optimizer = torch.optim.AdamW(model.parameters())
    (model["scale"] * model["wide"].sum()).square().backward()
    optimizer.step()
    cloudckpt.save(uri, model=model, optimizer=optimizer)
    loaded = torch.optim.AdamW(model.parameters())
    cloudckpt.load(uri, model=model, optimizer=loaded)
    for name, value in optimizer.state[model["scale"]].items():
        found = loaded.state[model["scale"]][name]
        assert type(found) is type(value), name
        assert_same(local(found), local(value))
    message = r"'model.wide' was saved with shape \(4,\), and has shape \(2,\) here"
    with pytest.raises(StateDictMismatchError, match=message):
        cloudckpt.load(uri, model=narrow, optimizer=torch.optim.AdamW(narrow.parameters()))


@on_ranks(2)
def test_lists_of_a_sharded_lbfgs_are_loaded_after_one_step(uri: str) -> None:
    """If this fails, no load can resume LBFGS, whose lists grow."""
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def build_lbfgs(num_steps: int) -> tuple[nn.Module, torch.optim.LBFGS]:
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.LBFGS(model.parameters(), history_size=5, max_iter=3)
        for _ in range(num_steps):
            step(model, optimizer)
        return model, optimizer

    def step(model: nn.Module, optimizer: torch.optim.LBFGS) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = build_lbfgs(3)
    cloudckpt.save(uri, model=model, optimizer=optimizer)
    fresh, fresh_optimizer = build_lbfgs(0)
    with pytest.raises(StateDictMismatchError, match=r"'weight'.*Take one step before the load"):
        cloudckpt.load(uri, model=fresh, optimizer=fresh_optimizer)
    loaded, loaded_optimizer = build_lbfgs(1)
    cloudckpt.load(uri, model=loaded, optimizer=loaded_optimizer)
    step(model, optimizer)
    step(loaded, loaded_optimizer)
    for expected, param in zip(model.parameters(), loaded.parameters(), strict=True):
        assert_same(local(param), local(expected))


@on_ranks(2)
def test_optimizers_of_a_part_of_an_fsdp1_module_are_refused(uri: str) -> None:
    """If this fails, two optimizers of one FSDP1 module, or one of two modules, fail in torch."""
    model = build("fsdp1", seed=1).model
    parts = [[param for name, param in model.named_parameters() if ("up" in name) == is_up] for is_up in (True, False)]
    optimizers = [torch.optim.AdamW(parts[0]), torch.optim.SGD(parts[1])]
    with pytest.raises(InvalidOptionError, match=r"some parameters of one FSDP module.*'down.weight'.*of their own"):
        cloudckpt.save(uri, model=model, optimizer=optimizers)
    head = nn.Linear(2, 2)
    for models in ({"a": model, "b": head}, {"b": head, "a": model}):
        both = torch.optim.AdamW([param for one in models.values() for param in one.parameters()])
        with pytest.raises(InvalidOptionError, match=r"AdamW\) updates an FSDP module together with param"):
            cloudckpt.save(uri, model=models, optimizer=both)


@on_ranks(2)
def test_containers_in_the_optimizer_of_fsdp1_are_refused(uri: str) -> None:
    """If this fails, the ranks of FSDP1 save a list of one of them."""
    model = build("fsdp1", seed=1).model
    optimizer = torch.optim.SGD(model.parameters())
    param = next(model.parameters())
    optimizer.state[param].update(past=[torch.zeros_like(param)], block={"m": torch.zeros(1)})
    with pytest.raises(InvalidOptionError, match=r"tensors within 'block', 'past', which torch's first FSDP cannot"):
        cloudckpt.save(uri, model=model, optimizer=optimizer)


@on_ranks(2)
def test_stages_with_other_numbers_of_groups_keep_their_settings(uri: str) -> None:
    """If this fails, a pipeline stage with another number of groups keeps its first learning rate."""
    rank = dist.get_rank()
    model = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2, bias=rank == 0)})
    groups = [[param for param in model.parameters() if param.dim() == dim] for dim in (2, 1)][: 2 - rank]
    saved, loaded = (torch.optim.AdamW([{"params": group} for group in groups], lr=lr) for lr in (0.5, 0.1))
    cloudckpt.save(uri, model=model, optimizer=saved)
    cloudckpt.load(uri, model=model, optimizer=loaded)
    assert [group["lr"] for group in loaded.param_groups] == [0.5] * (2 - rank)
    saved.param_groups[0]["lr"] = rank + 2.0
    with torch.device("meta"):  # tensors of collectives are on the CPU, whatever the default is
        cloudckpt.save(f"{uri}-named", model=model, optimizer={f"stage{rank}": saved})
        cloudckpt.load(f"{uri}-named", model=model, optimizer={f"stage{rank}": loaded}, strict=True, random_state=True)
    assert loaded.param_groups[0]["lr"] == rank + 2.0


@on_ranks(2)
def test_an_optimizer_that_one_rank_alone_passes_is_refused(uri: str) -> None:
    """If this fails, an optimizer that one rank alone passes leaves those of the other ranks fresh."""
    training = build("ddp", seed=1)
    cloudckpt.save(uri, model=training.model, optimizer=training.optimizer)
    given = training.optimizer if dist.get_rank() == 0 else None
    with pytest.raises(RankLostError, match="loading model"):
        cloudckpt.load(uri, model=training.model, optimizer=given)


def resave(source: str, target: str, parallelism: Parallelism) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    run = Run(parallelism, "adamw", seed=dist.get_world_size() if dist.is_initialized() else 9)
    if source:
        cloudckpt.load(source, **run.objects())
    else:
        run.train(0, 2)
    cloudckpt.save(target, **run.objects(), random_state=False)


@pytest.mark.multirank
def test_another_number_of_ranks_gets_the_same_state(tmp_path: Path) -> None:
    """If this fails, a change of the number of GPUs, or of the kind of parallelism, changes the training's state."""
    steps: list[tuple[Parallelism, int]] = [("fsdp2", 1), ("fsdp2", 2), ("fsdp1", 4), ("ddp", 2), ("fsdp2", 4)]
    uris = [""]
    for position, (parallelism, num_ranks) in enumerate(steps):
        uris.append(str(tmp_path / f"{position}"))
        run_ranks(resave, uris[-2], uris[-1], parallelism, world_size=num_ranks)
    first = cloudckpt.read(uris[1])
    assert first["optimizer"]["state"]["up.weight"]["step"] == 2
    for uri in uris[2:]:
        assert_same(cloudckpt.read(uri), first)


def test_a_save_or_load_leaves_no_trace_in_a_fresh_optimizer(tmp_path: Path) -> None:
    """If this fails, saving before the first step changes the training, or runs the hooks of the optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the optimizer took a step"))
    before = model.weight.detach().clone()
    cloudckpt.save(str(tmp_path / "fresh"), model=model, optimizer=optimizer, no_dist=True)
    assert not optimizer.state
    cloudckpt.load(str(tmp_path / "fresh"), model=model, optimizer=optimizer, no_dist=True)
    assert not optimizer.state
    assert_same(model.weight.detach(), before)


def test_state_keeps_its_dtypes_and_types_at_every_depth(tmp_path: Path) -> None:
    """If this fails, statistics of a model in bfloat16 are rounded to its dtype by a restore, or text is no text."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    state = {
        "exp_avg": torch.rand(2, 3),
        "block": {"factor": torch.rand(3), "index": torch.tensor([70001]), 7: {"count": torch.tensor(3)}},
        "history": [torch.rand(2, 3), [torch.rand(1, dtype=torch.float64)], {"m": torch.rand(2)}],
        "twins": [torch.rand(2, 3), torch.rand(2, 3)],
        "pair": (1.5, "text"),
        "moments": Moments((torch.rand(2, 3), [torch.rand(3)]), 3),
        "queue": deque([1, 2], maxlen=2),
        "array": np.arange(3),
        "name": "text",
        "nothing": [],
    }
    saved, fresh = (torch.optim.SGD(model.parameters()) for _ in range(2))
    saved.state[model.weight] = state
    cloudckpt.save(str(tmp_path / "a"), model=model, optimizer=saved, no_dist=True)
    for _ in ("fresh", "with state"):
        cloudckpt.load(str(tmp_path / "a"), model=model, optimizer=fresh, no_dist=True)
        loaded = dict(fresh.state[model.weight])
        assert loaded["queue"].maxlen == 2
        assert loaded.pop("array").tolist() == [0, 1, 2]
        assert_same(loaded, {name: value for name, value in state.items() if name != "array"})


@pytest.mark.parametrize("way", ["load", "restore", "read"])
def test_training_goes_on_after_a_load_in_inference_mode(tmp_path: Path, way: str) -> None:
    """If this fails, the first step after the load fails with torch's error about tensors of inference mode."""
    saved, resumed = (Run("none", "nested", seed=seed) for seed in (1, 2))
    saved.train(0, 2)
    kept = {"list": [torch.ones(2)], "value": deque([torch.ones(2)])}
    with cloudckpt.CheckpointManager(tmp_path, no_dist=True) as manager:
        with torch.inference_mode():
            manager.save(1, **{**saved.objects(), "extra": {"noise": saved.noise, **kept}})
            manager.wait()
        expected = saved.train(2, 4)
        extra = {"noise": resumed.noise}
        objects = {**resumed.objects(), "extra": extra}
        with torch.inference_mode():
            if way == "restore":
                manager.restore(**objects)
            elif way == "load":
                cloudckpt.load(str(tmp_path / "step-1"), **objects, random_state=True, no_dist=True)
            else:
                extra = cloudckpt.read(str(tmp_path / "step-1"))["extra"]
    if way != "read":
        assert_same(resumed.train(2, 4), expected)
    assert not any(tensor.is_inference() for tensor in (extra["list"][0], extra["value"][0]))


def test_a_model_of_inference_mode_is_loaded(tmp_path: Path) -> None:
    """If this fails, a model that was built in inference mode keeps its fresh weights, or the load fails."""
    saved = nn.BatchNorm1d(3)
    saved.running_mean.fill_(2)
    cloudckpt.save(str(tmp_path / "a"), model=saved, no_dist=True)
    with torch.inference_mode():
        model = nn.BatchNorm1d(3)
        cloudckpt.load(str(tmp_path / "a"), model=model, no_dist=True)
    assert_same(model.running_mean, saved.running_mean)
