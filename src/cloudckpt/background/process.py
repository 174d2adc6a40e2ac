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
import multiprocessing.connection
import multiprocessing.process
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from cloudckpt._this_process import is_forked
from cloudckpt._torch_compat import DistWrapper, forget_checkpoint_process, get_checkpoint_process
from cloudckpt.background.stager import StagedState, future_state_dict
from cloudckpt.dcp.ranks.collectives import CollectiveCall, as_checkpoint_exception
from cloudckpt.dcp.save_and_load import SavedMetadata, end_failed_save, end_save
from cloudckpt.dcp.storage_writer import ObjectStoreWriter
from cloudckpt.errors import InvalidOptionError, RankLostError, make_picklable
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Lifecycle
from cloudckpt.stores import open_store

_KILL_TIMEOUT_S = 10.0
"""The longest wait for the end of a killed process."""


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


class ProcessSave:
    """One save by the background processes of all ranks."""

    def __init__(
        self,
        writer: ObjectStoreWriter,
        *,
        planner: SavePlanner | None,
        ranks: DistWrapper,
        make_group: Callable[[], dist.ProcessGroup | None],
        no_dist: bool,
    ) -> None:
        self._writer = writer
        self._planner = planner
        self._ranks = ranks
        self._call = ranks if isinstance(ranks, CollectiveCall) else None
        self._make_group = make_group
        self._no_dist = no_dist
        self._uri = writer.checkpoint_id
        writer.is_alone = ranks.get_world_size() == 1
        self._is_stopped = False
        self._upload: Future[Any] = Future()

    def start(self, snapshot: StagedState) -> None:
        """Hand the staged state dict to the processes of all ranks, or to none of them.

        Raises ``CheckpointException`` on all ranks if the copy failed on one of them.
        """
        error = snapshot.completed.exception() if snapshot.completed.done() else None
        try:
            answers = self._ranks.all_gather_object((_sendable(error), _is_running()))
        except RankLostError as lost:
            raise end_failed_save(as_checkpoint_exception(lost), self._writer) from None
        failures: dict[int, Any] = {rank: (error, None) for rank, (error, _) in enumerate(answers) if error is not None}
        if failures:
            raise end_failed_save(CheckpointException("stage", failures), self._writer)
        if not all(is_running for _, is_running in answers):
            end_process()  # torch starts the processes of all ranks together
        if self._call is not None:
            self._call.set_on_cancel(self._stop)
        response = state_dict_saver.async_save(
            {},
            storage_writer=self._remote_writer(),
            planner=self._planner,
            process_group=self._make_group(),  # all ranks are there
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=_StagedStateStager(snapshot),
            no_dist=self._no_dist,
        )
        self._upload = response.upload_completion if isinstance(response, AsyncSaveResponse) else response

    def result(self) -> SavedMetadata:
        """Wait for the processes of all ranks. Raises ``CheckpointException`` if the save failed on any of them."""
        own_error: BaseException | None = None
        metadata = None
        try:
            metadata = self._upload.result()
        except CheckpointException as error:  # torch raises it on all ranks
            own_error = error
        except BaseException as error:  # this rank's alone, which the others have to learn
            own_error = self._explain(error)
            if self._call is not None:
                self._call.cancel()  # their processes may wait for this one
        if self._call is not None:
            self._call.set_on_cancel(None)
        try:
            with contextlib.nullcontext() if self._call is None else self._call.ending():
                outcomes = dict(enumerate(self._ranks.all_gather_object(_sendable(own_error))))
        except CheckpointException as error:
            end_process()
            raise end_failed_save(error, self._writer) from None
        failures = {rank: error for rank, error in outcomes.items() if error is not None}
        if not all(isinstance(error, CheckpointException) for error in failures.values()):
            end_process()  # the processes' group has lost a member, or is in the middle of a collective
        lost = {rank: error for rank, error in failures.items() if isinstance(error, RankLostError)}
        if lost or (failures and not isinstance(own_error, CheckpointException)):
            causes: dict[int, Any] = {rank: (error, None) for rank, error in (lost or failures).items()}
            raise end_failed_save(CheckpointException("save", causes), self._writer)
        if isinstance(own_error, CheckpointException):
            raise end_failed_save(own_error, self._writer)
        assert metadata is not None  # noqa: S101  # this rank has not failed
        return end_save(metadata, self._writer)

    def _remote_writer(self) -> ObjectStoreWriter:
        # The training process reports the beginning and the end; the other process reports the steps between.
        writer = copy.copy(self._writer)
        writer.lifecycle = Lifecycle(
            "save", dataclasses.replace(writer.options, on_event=None), via=writer.lifecycle.via
        )
        return writer

    def _stop(self, _ranks: object) -> None:
        """End this rank's process, which may wait for a lost process of another rank."""
        process = _process()
        if process is not None and not _has_ended(process):
            self._is_stopped = True
            process.kill()

    def _explain(self, error: BaseException) -> BaseException:
        """Return the failure of this rank, if its process ended or was interrupted."""
        if self._is_stopped:
            return RuntimeError("this rank's process was ended, because the save failed on another rank")
        process = _process()
        if process is None or not _has_ended(process):
            if isinstance(error, Exception):
                return error
            how = f"was interrupted ({type(error).__name__})"
        else:
            process.join(_KILL_TIMEOUT_S)
            how = _how_it_ended(process.exitcode)
        return RankLostError(
            f"the background process of rank {self._ranks.rank} {how} while it saved {self._uri}, which may be "
            "committed or not. Look (cloudckpt.latest) before you save there again; the next save starts a new process",
            uri=self._uri,
            ranks=(self._ranks.rank,),
        )


def end_process() -> None:
    """End torch's background process of this rank; the next save by process starts another one.

    Nothing of an unfinished save is visible, so this is safe at any moment.
    """
    process = _process()
    forget_checkpoint_process()
    if process is not None:
        process.kill()
        process.join(_KILL_TIMEOUT_S)


def _process() -> multiprocessing.process.BaseProcess | None:
    """Return torch's background process of this rank."""
    process: multiprocessing.process.BaseProcess | None = None if is_forked() else get_checkpoint_process()
    return process


def _is_running() -> bool:
    process = _process()
    return process is not None and not _has_ended(process)


def _has_ended(process: multiprocessing.process.BaseProcess) -> bool:
    """Return True if the process has ended. Unlike `is_alive`, this can be called by several threads at once."""
    return bool(multiprocessing.connection.wait([process.sentinel], 0))


class _StagedStateStager(AsyncStager):
    """A stager that returns a copy which another stager has made or is making."""

    _should_synchronize_after_execute = False

    def __init__(self, snapshot: StagedState) -> None:
        self._snapshot = snapshot

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:  # noqa: ARG002  # torch's signature
        snapshot = self._snapshot
        if snapshot.completed.done() and snapshot.completed.exception() is None:
            return snapshot.state_dict
        return future_state_dict(snapshot)

    def synchronize_staging(self) -> None:
        """Do nothing: the caller waits for the copy."""

    def close(self) -> None:
        """Do nothing: the stager belongs to its owner."""


def _sendable(error: BaseException | None) -> BaseException | None:
    return make_picklable(error) if isinstance(error, Exception) else error


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
