"""Snapshots of state dicts in host memory that is kept from one to the next."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from cloudckpt import _forks
from cloudckpt._collecting import rare_collections
from cloudckpt._stage.copying import Work, crew_for, num_threads_of_rank, work_for
from cloudckpt._stage.crew import Crew
from cloudckpt._stage.kept import Kept
from cloudckpt._stage.laying import lay_out
from cloudckpt._stage.leaves import Leaves
from cloudckpt._stage.memory import Pool
from cloudckpt._stage.staging import Staging
from cloudckpt._threads import Future
from cloudckpt._workers import num_cores_of_rank


class PinnedStager(AsyncStager):
    """Copies state dicts to host memory that is allocated once and used again for every later one.

    The memory grows when the state dict does, and is freed by `close`. It is pinned where CUDA is in use. Tensors
    that share memory share it in the copy. CPU tensors are copied with `num_threads` threads: by default as many as
    this rank has cores, but for a quarter where there are four or more.

    For torch's ``dcp.async_save(async_stager=…)`` and for `cloudckpt.async_save`. With `overlapped`, `stage` returns a
    future at once, and the state dict must not change until it is done. With `shared`, the memory is shared with
    torch's background process, which then copies nothing; without, that process gets a copy.

    A staged state dict is valid until `close`, or until `begin` is called again. Not safe for use from several
    threads at once.
    """

    def __init__(self, *, shared: bool = False, overlapped: bool = False, num_threads: int | None = None) -> None:
        self._pool = Pool(shared=shared)
        self._overlapped = overlapped
        self._num_threads = num_threads
        self._last: Staging | None = None
        self._crew: Crew | None = None
        self._kept: Kept | None = None
        self._is_parents = False
        _forks.watch(self)

    @property
    def num_bytes(self) -> int:
        """Of host memory that it has."""
        return self._pool.num_bytes

    def begin(self, state_dict: dict[str, Any]) -> Staging:
        """Start to copy `state_dict`, which must not change until the result is complete.

        The memory of the previous snapshot is used again, whoever still refers to it. Raises `UnsupportedValueError`,
        naming the key, for what cannot be copied, and `MemoryError`.
        """
        return self._begin(state_dict, is_torchs=False)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """A copy of `state_dict` on the CPU (torch's protocol); with `overlapped`, a future of it.

        Memory of tensors of an earlier copy that are still in use, because that is still being saved, is left alone.
        """
        staging = self._begin(state_dict, is_torchs=True)
        if self._overlapped:
            return _state_dict_of(staging)
        staging.completed.result()
        return staging.state_dict

    def synchronize_staging(self) -> None:
        """Wait until the last copy is complete (torch's protocol)."""
        if self._last is not None and self._crew is not None:
            self._crew.wait()
            if self._last.completed.done():  # else it was interrupted, as whoever began it knows
                self._last.completed.result()

    def close(self) -> None:
        """Free the memory, once the copy that is being made has ended. It can be used again, and begins anew."""
        self._wait_for_last()
        self._kept = None
        self._pool.close()

    def after_fork(self) -> None:
        """In a child, which has none of the threads."""
        self._last = self._crew = self._kept = None
        self._is_parents = True

    def _wait_for_last(self) -> None:
        if self._is_parents:
            self._pool.close()  # shared memory is still the parent's
            self._is_parents = False
        if self._crew is not None and self._last is not None:
            self._crew.wait()
            if self._last.completed.done() and self._last.completed.exception() is not None:
                self._kept = None  # or what failed once would fail for good
            self._last = self._crew = None

    @torch.no_grad()
    @torch.inference_mode(mode=False)  # other threads write to the copies, and later snapshots do
    @rare_collections()
    def _begin(self, state_dict: dict[str, Any], *, is_torchs: bool) -> Staging:
        self._wait_for_last()
        kept, self._kept = self._kept, None
        leaves = Leaves(state_dict)
        if not is_torchs and kept is not None and kept.lie_there(leaves.tensors, leaves.addresses):
            staging = self._again(kept, leaves)
            if staging is not None:
                return staging
            leaves = Leaves(state_dict)
        del kept  # the memory that it holds may be needed
        leaves = Leaves.of_memory(state_dict, leaves)
        # torch hands shared storages on to its process, which serialises tuples, and with them all of their storages.
        as_whole = [is_torchs and not is_within for is_within in leaves.are_within]
        laid_out = lay_out(leaves.tensors, self._pool, reuse_lent=not is_torchs, as_whole=as_whole)
        num_threads = self._threads()
        staging = Staging(
            state_dict=leaves.put_together(laid_out.copies),
            num_bytes=sum(segment.num_bytes for segment in laid_out.segments),
            blocks=laid_out.blocks,
            leaves_cores=num_threads < num_cores_of_rank() or not any(tensor.is_cpu for tensor in leaves.tensors),
        )
        if any(tensor.is_cuda for tensor in leaves.tensors):
            self._pool.pin()
        work = work_for(laid_out.segments, num_threads=num_threads)
        self._run(staging, work, leaves.tensors)
        if not is_torchs and not work.queues:
            self._kept = Kept(leaves.tensors, leaves.addresses, laid_out, work)
        return staging

    def _again(self, kept: Kept, leaves: Leaves) -> Staging | None:
        """The last snapshot once more, with the values that there are now; None where it would not be the same one."""
        staging = Staging(
            state_dict=leaves.put_together(kept.copies),
            num_bytes=kept.num_bytes,
            blocks=kept.blocks,
            leaves_cores=self._threads() < num_cores_of_rank(),
        )
        crew = self._run(staging, kept.work, leaves.tensors)
        if not kept.are_alike(leaves.tensors):
            crew.wait()
            error = staging.completed.exception()
            if error is not None and not isinstance(error, Exception):
                raise error  # an interrupt, of what was copied in this thread
            return None
        self._kept = kept
        return staging

    def _run(self, staging: Staging, work: Work, tensors: Sequence[torch.Tensor]) -> Crew:
        crew = crew_for(staging, work, tensors, num_threads=self._threads())
        self._last, self._crew = staging, crew
        crew.run()
        return crew

    def _threads(self) -> int:
        return self._num_threads or num_threads_of_rank()


def _state_dict_of(staging: Staging) -> Future[dict[str, Any]]:
    result: Future[dict[str, Any]] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled

    def pass_on(completed: concurrent.futures.Future[None]) -> None:
        error = completed.exception()
        if error is None:
            result.set_result(staging.state_dict)
        else:
            result.set_exception(error)

    staging.completed.add_done_callback(pass_on)
    return result
