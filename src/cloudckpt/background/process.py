"""Saves by torch's background process, one for each rank.

torch starts the process with the first such save, keeps it for later ones, and runs its own ``save`` there, on a
process group of these processes alone. This module adds what torch leaves out: a rank that cannot save stops the others
before any of them begins, the loss of one process ends the save on all ranks, and a later save starts new processes.
See ``docs/design/018-saves-by-process.md``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import multiprocessing.connection
import multiprocessing.process
import pickle
import signal
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt._this_process import is_forked
from cloudckpt._torch_compat import DistWrapper, forget_checkpoint_process, get_checkpoint_process
from cloudckpt.dcp.collectives import CollectiveCall
from cloudckpt.dcp.protocol import SavedMetadata, end_failed_save, end_save
from cloudckpt.dcp.writer import ObjectStoreWriter
from cloudckpt.errors import InvalidOptionError, RankLostError, portable
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Lifecycle
from cloudckpt.stores.open import open_store

_END_S = 10.0
"""The longest wait for a process that was killed."""


def require_process_support(writer: ObjectStoreWriter, *, no_dist: bool) -> None:
    """Raise `InvalidOptionError` if torch's background process cannot save with `writer`."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidOptionError(
            "AsyncCheckpointerType.PROCESS needs torch.distributed: call torch.distributed.init_process_group first, "
            "or save with AsyncCheckpointerType.THREAD"
        )
    if no_dist and dist.get_world_size() > 1:
        raise InvalidOptionError(
            "AsyncCheckpointerType.PROCESS needs all ranks, because their processes start together: save without "
            "no_dist, or with AsyncCheckpointerType.THREAD"
        )
    if open_store(writer.checkpoint_id, writer.options).capabilities.is_private:
        raise InvalidOptionError(
            f"AsyncCheckpointerType.PROCESS cannot save to {writer.checkpoint_id}, which is memory of this process: "
            "save there with AsyncCheckpointerType.THREAD"
        )
    names = [name for name in Options.__slots__ if not _is_picklable(getattr(writer.options, name))]
    if names or not _is_picklable(writer):
        raise InvalidOptionError(
            f"Options: AsyncCheckpointerType.PROCESS pickles all options, and cannot pickle "
            f"{', '.join(names) or 'the extensions'}. Define them at the top level of a module, or save with "
            "AsyncCheckpointerType.THREAD"
        )


def save_by_process(
    state_dict: dict[str, Any],
    writer: ObjectStoreWriter,
    *,
    planner: SavePlanner | None,
    ranks: DistWrapper,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    refusal: BaseException | None,
) -> SavedMetadata:
    """Save `state_dict`, a copy that does not change, by the processes of all ranks. Returns once it is committed.

    If a rank has a `refusal`, no process begins. Raises ``CheckpointException`` on all ranks if the save failed on one.
    """
    call = ranks if isinstance(ranks, CollectiveCall) else None
    save = _ProcessSave(writer, call, ranks.rank)
    try:
        with contextlib.nullcontext() if call is None else call.ended():
            if not all(ranks.all_gather("stage", functools.partial(_is_running, refusal))):
                end_process()  # torch starts the processes of all ranks together
            save.has_begun = True
            ranks.all_gather("save", lambda: save.run(state_dict, planner, process_group, no_dist=no_dist))
    except CheckpointException as error:
        if save.has_begun:
            end_process()  # its process group has lost a member, or is in the middle of a collective
        lost: Any = {rank: each for rank, each in error.failures.items() if isinstance(each[0], RankLostError)}
        raise end_failed_save(CheckpointException("save", lost) if lost else error, writer) from None
    if save.failure is not None:
        raise end_failed_save(save.failure, writer)
    assert save.metadata is not None  # noqa: S101  # the save has not failed
    return end_save(save.metadata, writer)


class _ProcessSave:
    """One save by the process of this rank."""

    def __init__(self, writer: ObjectStoreWriter, call: CollectiveCall | None, rank: int) -> None:
        self._writer = writer
        self._call = call
        self._rank = rank
        self._is_stopped = False
        self.has_begun = False
        self.metadata: Metadata | None = None
        self.failure: CheckpointException | None = None
        """The failure that DCP has raised in the processes of all ranks."""

    def run(
        self,
        state_dict: dict[str, Any],
        planner: SavePlanner | None,
        process_group: dist.ProcessGroup | None,
        *,
        no_dist: bool,
    ) -> None:
        """Have torch save `state_dict`, and wait for it. Raises what the other ranks do not know of."""
        # The training process reports the beginning and the end; the other process reports the steps between.
        writer = copy.copy(self._writer)
        writer.lifecycle = Lifecycle("save", dataclasses.replace(writer.options, on_event=None))
        if self._call is not None:
            self._call.set_on_cancel(self._stop)
        try:
            response = state_dict_saver.async_save(
                state_dict,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=_Staged(),
                no_dist=no_dist,
            )
            self.metadata = (response if isinstance(response, Future) else response.upload_completion).result()
        except CheckpointException as error:
            self.failure = error
        except BaseException as error:
            explained = self._explained(error)
            if self._call is not None:
                self._call.cancel()  # the processes of other ranks may wait for this one
            raise explained from None
        finally:
            if self._call is not None:
                self._call.set_on_cancel(None)

    def _stop(self, _ranks: object) -> None:
        """End this rank's process, which may wait for one that is gone."""
        process = _process()
        if process is not None and not _has_ended(process):
            self._is_stopped = True
            process.kill()

    def _explained(self, error: BaseException) -> BaseException:
        """Return the failure of this rank, also if its process ended or was interrupted."""
        if self._is_stopped:
            return RuntimeError("this rank's process was ended, because the save failed on another rank")
        process = _process()
        if process is None or not _has_ended(process):
            if isinstance(error, Exception):
                return portable(error)
            how = f"was interrupted ({type(error).__name__})"
        else:
            process.join(_END_S)
            how = _how_it_ended(process.exitcode)
        uri = self._writer.checkpoint_id
        return RankLostError(
            f"the background process of rank {self._rank} {how} while it saved {uri}, which may be "
            "committed or not. Look (cloudckpt.latest) before you save there again; the next save starts a new process",
            uri=uri,
            ranks=(self._rank,),
        )


def end_process() -> None:
    """End torch's background process of this rank; the next save by process starts another one.

    Nothing of an unfinished save is visible, so this is safe at any moment.
    """
    process = _process()
    forget_checkpoint_process()
    if process is not None:
        process.kill()
        process.join(_END_S)


def _process() -> multiprocessing.process.BaseProcess | None:
    """Torch's background process of this rank."""
    process: multiprocessing.process.BaseProcess | None = None if is_forked() else get_checkpoint_process()
    return process


def _is_running(refusal: BaseException | None) -> bool:
    """Return whether this rank has a process. Raises the `refusal`, if it cannot save."""
    if refusal is not None:
        raise refusal
    process = _process()
    return process is not None and not _has_ended(process)


def _has_ended(process: multiprocessing.process.BaseProcess) -> bool:
    """True if the process has ended. Other than `is_alive`, it can be called from several threads at once."""
    return bool(multiprocessing.connection.wait([process.sentinel], 0))


class _Staged(AsyncStager):
    """Gives torch a state dict that is staged already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        """Do nothing: torch asks for it only where `_synchronize_after_execute` is true."""

    def close(self) -> None:
        """Do nothing: it holds nothing."""


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # the value's own code can raise anything
        return False
    return True


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code} (its stderr says more)"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
