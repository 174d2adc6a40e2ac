"""Each kind of container, with each kind of tensor, comes back as it was: on the same ranks, and on others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.kit.ranks import on_ranks, run_ranks
from tests.scaled import Scaled, make_blank, make_scaled, shard
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.errors import StateDictMismatchError


class Moments(NamedTuple):
    """A tuple as functional optimizers have it."""

    mean: Any
    count: Any


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda tensor, number: {"t": tensor, "n": number, "empty": {}},
    "keys": lambda tensor, number: {0: tensor, -1: number, (1, "a"): {None: tensor}, True: {}},
    "ordered": lambda tensor, number: OrderedDict(t=tensor, n=[number]),
    "list": lambda tensor, number: [tensor, number, [], [number], ()],
    "lists": lambda tensor, number: [[number], [[tensor], {}], {"m": [tensor]}],
    "tuple": lambda tensor, number: (tensor, number),
    "tuples": lambda tensor, number: ((number, "text"), ((tensor,), ()), [(tensor, {})]),
    "named": Moments,
    "read_only": lambda tensor, number: MappingProxyType(
        {
            "n": number,
            "t": tensor,
            "pair": Moments(number, [number]),
            "many": [Moments(number, ""), (1, Moments(None, 2))],
        }
    ),
    "deep": lambda tensor, number: {7: [Moments({"m": (number, tensor)}, [tensor, (1, 2)])]},
}


def sharded_tensor(whole: Tensor) -> ShardedTensor:
    parts, rank = whole.chunk(dist.get_world_size()), dist.get_rank()
    begin = sum(map(len, parts[:rank]))
    return init_from_local_shards([LocalShard.from_tensor_and_offsets(parts[rank], [begin, 0], rank)], *whole.size())


TENSORS: dict[str, Callable[[DeviceMesh, bool], Any]] = {
    "plain": lambda _, is_blank: rows(is_blank),
    "parameter": lambda _, is_blank: nn.Parameter(rows(is_blank)),
    "scalar": lambda _, is_blank: torch.tensor(0.0 if is_blank else 5.0),
    "replicated": lambda mesh, is_blank: distribute_tensor(rows(is_blank), mesh, [Replicate()]),
    "sharded": lambda mesh, is_blank: distribute_tensor(rows(is_blank), mesh, [Shard(0)]),
    "columns": lambda mesh, is_blank: distribute_tensor(rows(is_blank), mesh, [Shard(1)]),
    "sharded_tensor": lambda _, is_blank: sharded_tensor(rows(is_blank)),
    "wrapper": lambda _, is_blank: make_blank(make_scaled(4, 3)) if is_blank else make_scaled(4, 3),
    "sharded_wrapper": lambda mesh, is_blank: shard(make_blank(make_scaled()) if is_blank else make_scaled(), mesh),
}


def rows(is_blank: bool) -> Tensor:  # noqa: FBT001  # of the table
    """Eight rows, which no number of ranks but 2, 4 and 8 cuts evenly, of three columns, which none does."""
    return torch.zeros(8, 3) if is_blank else torch.arange(24.0).view(8, 3) + 1


def state(mesh: DeviceMesh, *, is_blank: bool) -> dict[str, Any]:
    return {
        f"{container}-{tensor}": wrap(make(mesh, is_blank), 0 if is_blank else 3)
        for container, wrap in CONTAINERS.items()
        for tensor, make in TENSORS.items()
    }


def described(value: Any) -> Any:
    """Equal for values of the same types, layouts and elements alone."""
    kind = type(value)
    if isinstance(value, DTensor):
        return kind, value.placements, described(value.to_local())
    if isinstance(value, ShardedTensor):
        return kind, [(one.metadata.shard_offsets, one.tensor.tolist()) for one in value.local_shards()]
    if isinstance(value, Scaled):
        return kind, value.data_.tolist(), value.scale.tolist()
    if isinstance(value, Tensor):
        return kind, value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return kind, [(type(key), key, described(one)) for key, one in value.items()]
    return (kind, [described(one) for one in value]) if isinstance(value, (list, tuple)) else (kind, value)


def load_and_compare(uri: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target, expected = state(mesh, is_blank=True), state(mesh, is_blank=False)
    with torch.no_grad():  # the targets are leaves that require gradients
        cloudckpt.load(target, uri)
    for name, value in expected.items():
        assert described(target[name]) == described(value), name
    del target, expected


def save_and_load(root: str) -> None:
    saved = state(init_device_mesh("cpu", (dist.get_world_size(),)), is_blank=False)
    cloudckpt.save(saved, f"{root}/sync")
    load_and_compare(f"{root}/sync")
    cloudckpt.async_save(saved, f"{root}/async").result()
    load_and_compare(f"{root}/async")


class Average:
    """An object that takes what it is given, as an average of weights may."""

    def __init__(self, mesh: DeviceMesh, *, is_blank: bool) -> None:
        sharded, columns, replicated = (TENSORS[name](mesh, is_blank) for name in ("sharded", "columns", "replicated"))
        quantized = [TENSORS["sharded_wrapper"](mesh, is_blank)]
        self.state = {"num": 0 if is_blank else 3, "by_name": {"w": sharded}, "pair": (columns, [replicated])}
        self.state["quantized"] = quantized

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@on_ranks(2)
def test_object_with_sharded_tensors_gets_shards(uri: str) -> None:
    """If this fails, an average of sharded weights becomes one of whole tensors, on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved, loaded = Average(mesh, is_blank=False), Average(mesh, is_blank=True)
    cloudckpt.save(uri, extra={"averages": [saved]})
    cloudckpt.load(uri, extra={"averages": [loaded]})
    assert described(loaded.state) == described(saved.state)


@pytest.mark.multirank
@pytest.mark.parametrize(("num_ranks", "others"), [(1, [2]), (2, [1, 4]), (4, [2])])
def test_every_container_of_every_tensor_comes_back_on_any_ranks(
    tmp_path: Path, num_ranks: int, others: list[int]
) -> None:
    """If this fails, a state that is shaped so loses the shards of all ranks but one, or its values, or its types."""
    run_ranks(save_and_load, str(tmp_path), world_size=num_ranks)
    for other in others:
        run_ranks(load_and_compare, f"{tmp_path}/sync", world_size=other)


class Frozen(Mapping[str, Any]):
    """A mapping of its own class, which takes no items."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_mapping_that_takes_no_items_is_named(tmp_path: Path) -> None:
    """If this fails, a load into such a mapping ends in Python's error, which names no entry."""
    cloudckpt.save({"a": Frozen({"t": torch.ones(1), "n": 3})}, tmp_path / "a", no_dist=True)
    target = {"a": Frozen({"t": torch.zeros(1), "n": 0})}
    with pytest.raises(StateDictMismatchError, match=r"'a\.n' of .*'Frozen'.*Load into a dict in its place"):
        cloudckpt.load(target, tmp_path / "a", no_dist=True)
    assert cloudckpt.read(tmp_path / "a") == {"a": {"t": torch.ones(1), "n": 3}}


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_keys_are_read_in_the_order_in_which_they_were_saved(tmp_path: Path) -> None:
    """If this fails, the dicts of a checkpoint come back with tensors before values."""
    saved = {"z": 1, "m": {"n": 3, "w": torch.ones(1), "b": {"q": 2, "c": torch.ones(1)}, "a": "x"}, "c": torch.ones(1)}
    cloudckpt.save(saved, tmp_path / "a", no_dist=True)
    assert str(cloudckpt.read(tmp_path / "a")) == str(saved)
