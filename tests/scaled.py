"""A tensor that consists of others, as those of torchao do, and what its shards and its metadata are like."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing

if TYPE_CHECKING:
    from typing_extensions import Self

aten = torch.ops.aten
_EACH = (aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default)


class Rounding(enum.Enum):
    """In the metadata, and so saved by its name."""

    NEAREST = 1
    DOWN = 2


class Limits(NamedTuple):
    """In the metadata, too."""

    low: float = float("-inf")
    high: float = 127.0


@dataclass(frozen=True)
class Recipe:
    """In the metadata, too."""

    rounding: Rounding = Rounding.NEAREST
    limits: Limits = field(default_factory=Limits)
    output: torch.dtype = torch.bfloat16
    sizes: tuple[int, ...] = (1, 2)


class Scaled(Tensor):
    """``data * scale``, with a scale for each block of ``block`` elements."""

    data_: Tensor
    scale: Tensor
    block: list[int]
    recipe: Any

    @staticmethod
    def __new__(cls, data_: Tensor, scale: Tensor, block: list[int], recipe: Any) -> Self:
        made = Tensor._make_wrapper_subclass(cls, data_.shape, dtype=torch.float32, device=data_.device)
        made.data_, made.scale, made.block, made.recipe = data_, scale, block, recipe
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # of a tensor
        return f"Scaled({list(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], {"block": self.block, "recipe": self.recipe, "device": self.device}

    @classmethod
    def __tensor_unflatten__(cls, parts: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        if context["device"] != parts["data_"].device:
            raise ValueError("another device")
        return cls(parts["data_"], parts["scale"], context["block"], context["recipe"])

    def dequantize(self) -> Tensor:  # type: ignore[override]  # of a tensor
        """The plain tensor."""
        scale = self.scale
        for dim, length in enumerate(self.block):
            scale = scale.repeat_interleave(length, dim)
        return self.data_ * scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = args[0]
        if func is aten.slice.Tensor:
            dim, begin, end = (*args[1:], 0, None, None)[:3]
            end = min(value.shape[dim], value.shape[dim] if end is None else end)
            block, scale = list(value.block), value.scale
            if scale.shape[dim] > 1:
                if begin % block[dim] or end % block[dim]:
                    raise ValueError("within a block")
                scale = scale.narrow(dim, begin // block[dim], (end - begin) // block[dim])
            data = value.data_.narrow(dim, begin, end - begin)
            made = Scaled(data, scale, [min(pair) for pair in zip(block, data.shape, strict=True)], value.recipe)
        elif func is aten.copy_.default:
            value.data_.copy_(args[1].data_)
            value.scale.copy_(args[1].scale)
            return value
        elif func is aten.is_pinned.default:
            return False
        elif func is aten.view.default:
            made = Scaled(value.data_, value.scale, value.block, value.recipe)
        elif func in _EACH:
            parts = [func(part, *args[1:], **kwargs) for part in (value.data_, value.scale)]
            made = Scaled(*parts, value.block, value.recipe)
        else:
            raise NotImplementedError(str(func))
        return return_and_correct_aliasing(func, args, kwargs, made)


ALLOWED = [Scaled, Recipe, Rounding, Limits]
"""The classes that a reader has to allow."""


def make_scaled(rows: int = 8, columns: int = 6, *, block: tuple[int, int] | None = None, recipe: Any = None) -> Scaled:
    """A tensor whose elements all differ, with a scale for each row unless `block` says otherwise."""
    block = block or (1, columns)
    grid = rows // block[0], columns // block[1]
    data = torch.arange(rows * columns, dtype=torch.int16).view(rows, columns)
    scale = torch.arange(1, grid[0] * grid[1] + 1, dtype=torch.float32).view(grid) / 8
    return Scaled(data, scale, list(block), recipe if recipe is not None else Recipe())


def make_blank(like: Scaled) -> Scaled:
    """The same with zeros."""
    return Scaled(torch.zeros_like(like.data_), torch.zeros_like(like.scale), list(like.block), like.recipe)


def shard(whole: Scaled, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """The shard of a 1-D mesh's rank, as ``torch.chunk`` cuts it."""
    num_ranks, rank = mesh.size(), mesh.get_local_rank()
    length = -(-whole.shape[dim] // num_ranks)
    begin = min(rank * length, whole.shape[dim])
    local = whole.narrow(dim, begin, min(length, whole.shape[dim] - begin))
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())


def assert_same_scaled(actual: Tensor, expected: Scaled) -> None:
    """All bits and all metadata are the same."""
    assert type(actual) is Scaled
    assert torch.equal(actual.data_, expected.data_)
    assert torch.equal(actual.scale, expected.scale)
    assert (actual.shape, actual.block, actual.recipe) == (expected.shape, expected.block, expected.recipe)
