"""How a snapshot was made, for the next one: mostly, the state dict lies where it lay."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cloudckpt._stage.copying import Work
from cloudckpt._stage.laying import LaidOut
from cloudckpt._stage.memory import Block

_dtype: Callable[[torch.Tensor], torch.dtype] = operator.attrgetter("dtype")


class Kept:
    """The tensors of a snapshot on the CPU, and the work that filled them, to fill them again.

    It holds nothing of the state dict. What it says holds for tensors that `lie_there`, and once that is known, if they
    `are_alike`.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], laid_out: LaidOut, work: Work
    ) -> None:
        self.copies = laid_out.copies
        self.work = work
        self.num_bytes = sum(segment.num_bytes for segment in laid_out.segments)
        self.blocks: Sequence[Block] = list(laid_out.blocks)
        small = {segment.view for segment in laid_out.segments if segment.small is not None}
        self._others = [view for view in range(len(tensors)) if view not in small]
        self._addresses = list(addresses)
        self._sizes = _sizes(tensors)
        self._dtypes = _dtypes(tensors)
        self._forms = self._forms_of_others(tensors)
        self._addresses_of_copies = _addresses(self.copies)
        self._forms_of_copies = self._forms_of_others(self.copies)

    def lie_there(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        """Whether the work may be begun.

        So it is if the tensors are as many as they were, and begin where they began, and all that is copied as memory
        is what it was. The others are copied as tensors, which harms nobody whatever they are now.
        """
        with contextlib.suppress(RuntimeError):  # of tensors that have no shape, or no strides
            return self._addresses == addresses and self._forms == self._forms_of_others(tensors)
        return False

    def are_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the copies hold, or are going to hold, what the tensors do.

        So it is if both have the dtypes and shapes that they had: whoever saves the copies could make them others. It
        may be asked while the work is being done.
        """
        with contextlib.suppress(RuntimeError):
            return (
                self._sizes == _sizes(tensors) == _sizes(self.copies)
                and self._dtypes == _dtypes(tensors)
                and self._addresses_of_copies == _addresses(self.copies)
                and self._forms_of_copies == self._forms_of_others(self.copies)
            )
        return False

    def _forms_of_others(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        """Of those that are copied as memory."""
        return [_form(tensors[view]) for view in self._others]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that makes it what it is, but for its address."""
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device


def _sizes(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    return list(map(torch.Tensor.size, tensors))


def _dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    return list(map(_dtype, tensors))


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
