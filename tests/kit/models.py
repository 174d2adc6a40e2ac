"""A small model under each kind of parallelism, and training that is the same to the bit wherever it is repeated."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Parallelism = Literal["none", "ddp", "fsdp1", "fsdp1_mesh", "fsdp2", "hsdp", "fsdp_tp"]
PARALLELISMS: tuple[Parallelism, ...] = get_args(Parallelism)
CPU = torch.device("cpu")
FEATURES = 6
HIDDEN = 10  # does not divide by 4: the ranks' shards differ in size
HIDDEN_TP = 16  # tensor parallelism wants it even


class MLP(nn.Module):
    """Two layers, a norm and a buffer, so that a state dict has parameters of several shapes and a counter."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, hidden)
        self.down = nn.Linear(hidden, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.norm(self.down(torch.relu(self.up(inputs)))) * self.scale
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, wrapped and perhaps compiled, with its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> Tensor:
        """Take the training step of this number on the data of this number; returns the loss."""
        generator = torch.Generator().manual_seed(number)
        inputs = torch.rand(4, FEATURES, generator=generator)
        targets = torch.rand(4, FEATURES, generator=generator)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def losses(self, start: int, stop: int) -> Tensor:
        """Losses of the steps in the half-open range."""
        return torch.stack([self.step(number) for number in range(start, stop)])

    def parameters(self) -> dict[str, Tensor]:
        """Copies of what this rank holds of each parameter."""
        return {name: local(parameter).detach().clone() for name, parameter in self.model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(parallelism: Parallelism, *, seed: int, compiled: bool = False, lr: float = 0.01) -> Training:
    """A fresh model of this seed and its optimizer, on all ranks of the default group."""
    torch.manual_seed(seed)
    model = _wrap(MLP(HIDDEN_TP if parallelism == "fsdp_tp" else HIDDEN), parallelism)
    if compiled:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=lr, foreach=False))


def _wrap(model: nn.Module, parallelism: Parallelism) -> nn.Module:
    if parallelism == "none":
        return model
    if parallelism == "ddp":
        return DistributedDataParallel(model)
    if parallelism == "fsdp1":
        return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    num_ranks = dist.get_world_size()
    if parallelism == "fsdp1_mesh":  # its state dict holds DTensors, where that of FSDP1 alone holds ShardedTensors
        mesh = init_device_mesh("cpu", (num_ranks,))
        return FullyShardedDataParallel(model, device_mesh=mesh, device_id=CPU, use_orig_params=True)
    if parallelism == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
        return model
    names = ("replicate", "shard") if parallelism == "hsdp" else ("data", "tensor")
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=names)
    if parallelism == "fsdp_tp":
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["data"]
    fully_shard(model, mesh=mesh)
    return model


class AppState:
    """Model and optimizer as one `Stateful`, as in PyTorch's tutorial."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> dict[str, Any]:
        return state_dict_of(self.training)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state(self.training, state_dict)


def state_dict_of(training: Training) -> dict[str, Any]:
    """The sharded state dicts of model and optimizer, under torch's canonical names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1's own use of its deprecated calls
        model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def set_state(training: Training, state_dict: dict[str, Any]) -> None:
    """Put loaded state back into model and optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Fail unless both are equal to the last bit, with their types and shapes."""
    assert type(actual) is type(expected) or isinstance(expected, Tensor), where
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for number, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}.{number}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert actual == expected, where
