"""Run functions on some ranks, so that each rank gets the result or the failure. The waits are in `collectives`."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._torch_compat import DistWrapper
from cloudckpt.dcp.ranks.collectives import find_guarded_group, guarded_collectives
from cloudckpt.dcp.ranks.failures import failure_of, raise_own_interrupt
from cloudckpt.errors import CorruptCheckpointError

_T = TypeVar("_T")


def rank_in(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> int:
    """Return the rank of this process in the group that saves or loads."""
    return dist.get_rank(process_group) if not no_dist and dist.is_available() and dist.is_initialized() else 0


def num_ranks_of(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> int:
    """Return the number of ranks in the group that saves or loads."""
    return dist.get_world_size(process_group) if not no_dist and dist.is_available() and dist.is_initialized() else 1


class RankCalls:
    """Runs functions on rank 0 or on all ranks, and returns the result, or raises the failure, on all ranks.

    Errors say `doing` and then `root`, as in "loading a checkpoint under s3://…". Both are the same on all ranks.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        no_dist: bool,
        root: str,
        timeout_s: float,
        doing: str = "finding a checkpoint under",
    ) -> None:
        self.rank = rank_in(process_group, no_dist=no_dist)
        self._process_group, self._no_dist = process_group, no_dist
        self._doing, self._root, self._timeout_s = doing, root, timeout_s
        self._is_alone = num_ranks_of(process_group, no_dist=no_dist) == 1
        self.is_guarded = not no_dist and find_guarded_group(process_group) is not None
        """True if the ranks call one another as `CollectiveCall` does."""

    def broadcast(self, step: str, find: Callable[[], _T]) -> _T:
        """Run `find` on the coordinator. Returns its result, or raises its failure, on every rank."""
        return self._run(lambda ranks: ranks.broadcast(step, find))

    def all_gather(self, step: str, find: Callable[[], _T]) -> list[_T]:
        """Run `find` on every rank. Returns the results of all ranks, in their order, on every rank."""
        return self._run(lambda ranks: ranks.all_gather(step, find))

    def _run(self, call: Callable[[DistWrapper], _T]) -> _T:
        try:
            with guarded_collectives(
                self._process_group,
                doing=self._doing,
                uri=self._root,
                timeout_s=self._timeout_s,
                no_dist=self._no_dist,
            ) as ranks:
                return call(ranks)
        except CheckpointException as error:
            raise_own_interrupt(error, self.rank)
            raise self._failure_of(error) from None

    def make_failure(self, error: CorruptCheckpointError) -> CheckpointException:
        """Wrap `error`, which all ranks have found, in the exception that a failed load raises."""
        failures: Any = {self.rank: (error, traceback.StackSummary())}
        return self._failure_of(CheckpointException("find", failures))

    def _failure_of(self, error: CheckpointException) -> CheckpointException:
        return failure_of(error, subject=f"{self._doing} {self._root}", is_alone=self._is_alone)
