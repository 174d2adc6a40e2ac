"""Snapshots of state dicts in host memory that one snapshot passes on to the next."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from cloudckpt._collecting import rare_collections
from cloudckpt.tensors.copying import Staging, num_copy_threads
from cloudckpt.tensors.host_memory import SnapshotPool
from cloudckpt.tensors.snapshot_plan import SnapshotPlan, plan_snapshot
from cloudckpt.tensors.state_dict_tree import StateDictTree

_get_dtype = operator.attrgetter("dtype")


class CopyPlanCache:
    """The plan of the last snapshot, and what must not have changed for it to make the next one.

    It holds nothing of the state dict.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], plan: SnapshotPlan) -> None:
        self.plan = plan
        self._copied_as_memory = [number for number in range(len(tensors)) if number not in plan.batched]
        self._addresses = list(addresses)
        self._sizes = list(map(torch.Tensor.size, tensors))
        self._dtypes = list(map(_get_dtype, tensors))
        self._forms = self._find_forms(tensors)
        self._addresses_of_copies = list(map(torch.Tensor.data_ptr, plan.copies))
        self._forms_of_copies = self._find_forms(plan.copies)

    def can_begin(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        """Return True if the copying may begin: each tensor is where it was, and all memory that is copied is alike.

        The other tensors are copied as tensors, which does no harm whatever they are now.
        """
        with contextlib.suppress(RuntimeError):  # a tensor has no shape or no strides
            return self._addresses == addresses and self._forms == self._find_forms(tensors)
        return False

    def is_valid(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if the copies are going to hold what the tensors do. May be asked while they are made.

        The copies were lent, and somebody could have changed them too.
        """
        copies = self.plan.copies
        with contextlib.suppress(RuntimeError):
            return (
                self._sizes == list(map(torch.Tensor.size, tensors)) == list(map(torch.Tensor.size, copies))
                and self._dtypes == list(map(_get_dtype, tensors))
                and self._addresses_of_copies == list(map(torch.Tensor.data_ptr, copies))
                and self._forms_of_copies == self._find_forms(copies)
            )
        return False

    def _find_forms(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        """Describe the tensors that are copied as memory, but for their addresses."""
        of_memory = [tensors[number] for number in self._copied_as_memory]
        return [(t.dtype, t.size(), t.stride(), t.is_conj(), t.is_neg(), t.device) for t in of_memory]


class PinnedStager(AsyncStager):
    """Copies state dicts to host memory that is allocated once and used again for every later one.

    The memory grows when the state dict does, and is freed by `close`. It is pinned where CUDA is in use. Tensors
    that share memory share it in the copy. CPU tensors are copied with `num_threads` threads: by default as many as
    this rank has cores, but for a quarter where there are four or more.

    For torch's ``dcp.async_save(async_stager=…)`` and for `cloudckpt.async_save`. With `overlapped`, `stage` returns a
    future at once, and the state dict must not change until it is done. With `shared`, the memory is shared with
    torch's background process, which then copies nothing; without, that process gets a copy.

    A staged state dict is valid until `close`, or until `begin` is called again. Not safe for use from several
    threads at once, nor in a forked child.
    """

    def __init__(self, *, shared: bool = False, overlapped: bool = False, num_threads: int | None = None) -> None:
        self._pool = SnapshotPool(shared=shared)
        self._overlapped = overlapped
        self._num_threads = num_threads
        self._last: Staging | None = None
        self._cache: CopyPlanCache | None = None

    @property
    def num_bytes(self) -> int:
        """The host memory that it has, in bytes."""
        return self._pool.num_bytes

    def begin(self, state_dict: dict[str, Any]) -> Staging:
        """Start to copy `state_dict`, which must not change until the result is complete.

        It uses the memory of the previous snapshot again, even if somebody still refers to it. Raises
        `UnsupportedValueError`, naming the key, for what cannot be copied, and `MemoryError`.
        """
        return self._begin(state_dict, for_torch=False)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Return a copy of `state_dict` on the CPU (torch's protocol); with `overlapped`, a future of it.

        It leaves the memory alone in which tensors of an earlier copy are still in use, because that is being saved.
        """
        staging = self._begin(state_dict, for_torch=True)
        if self._overlapped:
            return _future_state_dict(staging)
        staging.completed.result()
        return staging.state_dict

    def synchronize_staging(self) -> None:
        """Wait until the last copy is complete (torch's protocol)."""
        if self._last is not None:
            self._last.completed.result()

    def close(self) -> None:
        """Free the memory, once the copying has ended. The stager can be used again, and begins anew."""
        self._await_last()
        self._cache = None
        self._pool.close()

    def _await_last(self) -> None:
        if self._last is not None:
            if self._last.completed.exception() is not None:
                self._cache = None  # the cause may be a copy that somebody changed
            self._last = None

    @torch.no_grad()
    @torch.inference_mode(mode=False)  # other threads write to the copies, and later snapshots do
    @rare_collections()
    def _begin(self, state_dict: dict[str, Any], *, for_torch: bool) -> Staging:
        self._await_last()
        cache, self._cache = self._cache, None
        tree = StateDictTree(state_dict)
        if not for_torch and cache is not None and cache.can_begin(tree.tensors, tree.addresses):
            staging = self._start(cache.plan, tree)
            if cache.is_valid(tree.tensors):
                self._cache = cache
                return staging
            staging.completed.exception()  # this copy is not used
        del cache  # the memory that it holds may be needed
        # torch serialises tuples with all of their storages, so those must not be the whole of the shared memory.
        whole = [not is_within for is_within in tree.is_in_tuple] if for_torch and self._pool.is_shared else None
        plan = plan_snapshot(
            tree.tensors, self._pool, num_threads=self._get_num_threads(), reuse_lent=not for_torch, whole=whole
        )
        has_gpus = any(tensor.is_cuda for tensor in tree.tensors)
        if has_gpus:
            self._pool.pin()
        staging = self._start(plan, tree)
        if not for_torch and not has_gpus:
            self._cache = CopyPlanCache(tree.tensors, tree.addresses, plan)
        return staging

    def _start(self, plan: SnapshotPlan, tree: StateDictTree) -> Staging:
        state_dict = tree.rebuild(plan.copies)
        self._last = staging = Staging(plan, tree.tensors, state_dict, num_threads=self._get_num_threads())
        staging.start()
        return staging

    def _get_num_threads(self) -> int:
        return self._num_threads or num_copy_threads()


def _future_state_dict(staging: Staging) -> Future[dict[str, Any]]:
    result: Future[dict[str, Any]] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled

    def pass_on(completed: Future[None]) -> None:
        error = completed.exception()
        if error is None:
            result.set_result(staging.state_dict)
        else:
            result.set_exception(error)

    staging.completed.add_done_callback(pass_on)
    return result
