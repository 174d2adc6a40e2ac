"""The items of a load plan, of which those for whole tensors take no time until somebody looks at them."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem


class LoadItems(Sequence[ReadItem]):
    """In place of torch's list of items: those for whole tensors stored as one chunk, and then `others`.

    Equal to a list of the same; can be pickled, and is smaller then.
    """

    __slots__ = ("_sizes", "fqns", "others")

    def __init__(self, fqns: list[str], sizes: list[torch.Size], others: list[ReadItem]) -> None:
        self.fqns = fqns
        self.others = others
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self.fqns) + len(self.others)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position < len(self.fqns):
            return whole_item(self.fqns[position], self._sizes[position])
        return self.others[position - len(self.fqns)]

    def __iter__(self) -> Iterator[ReadItem]:
        yield from map(whole_item, self.fqns, self._sizes)
        yield from self.others

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, LoadItems)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))


class GivesTensors(abc.ABC):
    """A planner whose tensors are filled as they are, and which need not be told of each."""

    @abc.abstractmethod
    def tensors_of(self, fqns: Sequence[str]) -> list[torch.Tensor]:
        """The plain tensors that `LoadItems.fqns` of its plan are for."""


def whole_item(fqn: str, size: Sequence[int]) -> ReadItem:
    """The read of a whole tensor that was stored as one chunk."""
    origin = torch.Size((0,) * len(size))
    index = MetadataIndex(fqn, origin, 0)
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=origin,
        storage_index=index,
        storage_offsets=origin,
        lengths=torch.Size(size),
    )
