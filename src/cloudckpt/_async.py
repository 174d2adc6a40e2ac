"""Saves in the background: their handle, and their process group."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from cloudckpt._group import exists, failure_by_loss
from cloudckpt.errors import RankLostError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from cloudckpt._group import Call
    from cloudckpt._saved import SavedMetadata
    from cloudckpt.report import SaveReport

_T = TypeVar("_T")
_log = logging.getLogger("cloudckpt")

_lock = threading.Lock()
_running: AsyncSave | None = None
_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def _forget_after_fork() -> None:
    """A child has none of its parent's threads, so none of its saves will ever end there."""
    global _lock, _running  # noqa: PLW0603  # as above
    _lock = threading.Lock()
    _running = None
    _groups.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class AsyncSave:
    """A save that runs in the background."""

    def __init__(
        self,
        response: Future[Metadata] | AsyncSaveResponse,
        *,
        call: Call | None,
        on_success: Callable[[Metadata], SavedMetadata],
        on_failure: Callable[[CheckpointException], CheckpointException],
        stager: AsyncStager | None,
    ) -> None:
        self.staged: Future[None] = Future()
        """Done when the state dict has been copied: from here on the model may change."""
        self.committed: Future[SavedMetadata] = Future()
        """Done when the checkpoint exists; holds what `cloudckpt.save` returns, or its failure."""
        self._call = call
        self._on_success = on_success
        self._on_failure = on_failure
        self._stager = stager  # closed at the end, because nobody else knows of it
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.add_done_callback(self._staging_ended)
            upload: Future[Any] = response.upload_completion
        else:
            self.staged.set_result(None)
            upload = response
        with _lock:
            global _running  # noqa: PLW0603  # one save at a time, per process
            _running = self
        upload.add_done_callback(self._upload_ended)

    def result(self, timeout: float | None = None) -> SavedMetadata:
        """Wait until the checkpoint is committed. Raises what `cloudckpt.save` would, or `TimeoutError`."""
        return _waited(self.committed, self.committed.result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the failure, or None."""
        return _waited(self.committed, self.committed.exception, timeout)

    def done(self) -> bool:
        """Whether it has ended, in either way."""
        return self.committed.done()

    @property
    def report(self) -> SaveReport | None:
        """The report of this rank, once committed; None before, and for a save in another process."""
        if not self.committed.done() or self.committed.exception() is not None:
            return None
        return self.committed.result().report

    def _staging_ended(self, staging: Future[None]) -> None:
        error = staging.exception()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def _upload_ended(self, upload: Future[Any]) -> None:
        try:
            self._clean_up(upload.exception())
            try:
                result = self._on_success(upload.result())
            except (CheckpointException, RankLostError) as error:
                failure = self._on_failure(failure_by_loss(error) if isinstance(error, RankLostError) else error)
                _log.warning("a background save failed: %s", failure)  # also where nobody asks the handle
                self.committed.set_exception(failure)
            else:
                self.committed.set_result(result)
        except BaseException as error:  # noqa: BLE001  # whoever waits must learn of it
            self.committed.set_exception(error)

    def _clean_up(self, error: BaseException | None) -> None:
        """What goes wrong here changes nothing about the save."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_logged())
            if self._stager is not None:
                stack.callback(self._stager.close)
            if self._call is not None:
                has_left = not (error is None or isinstance(error, CheckpointException))
                stack.callback(self._call.end, has_left=has_left)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001  # it is logged, and the save is what counts
        _log.exception("cleaning up after a background save failed")


def _waited(future: Future[Any], ask: Callable[[float | None], _T], timeout: float | None) -> _T:
    try:
        return ask(timeout)
    except FutureTimeoutError as error:  # a class of its own before Python 3.11
        if future.done():
            raise  # the save's own failure
        raise TimeoutError(f"the save has not ended within {timeout} s; it goes on") from error


def wait_for_previous() -> None:
    """Until the background save in flight, if there is one, has ended. Its failure stays with its handle.

    Two saves on one process group at a time would mix up their collectives.
    """
    with _lock:
        previous = _running
    if previous is not None:
        wait([previous.committed])


def require_cpu_backend(process_group: dist.ProcessGroup | None) -> None:
    """Raise ``AssertionError``, as torch itself does, where the group has none."""
    if not dist.is_available() or not dist.is_initialized():
        return
    source = process_group if process_group is not None else dist.group.WORLD
    if source is not None and torch.device("cpu") not in source._device_types:  # noqa: SLF001  # as torch itself asks
        raise AssertionError(
            "A CPU backend must be enabled for async save; try initializing process group with 'cpu:gloo,cuda:nccl'"
        )


def background_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A gloo group of the same ranks, made once and used again. Collective on its first call."""
    if not dist.is_available() or not dist.is_initialized():
        return process_group
    default = dist.group.WORLD
    assert default is not None  # noqa: S101  # it is initialised
    source = process_group if process_group is not None else default
    for known, group in list(_groups.items()):
        if not (exists(known) and exists(group)):
            del _groups[known]
    if source in _groups:
        return _groups[source]
    _groups[source] = dist.new_group(
        dist.get_process_group_ranks(source), backend="gloo", use_local_synchronization=source is not default
    )
    return _groups[source]
