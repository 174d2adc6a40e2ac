"""React to SIGTERM: finish the background save and make a last one before the scheduler kills the job."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from cloudckpt._display import with_short_repr
from cloudckpt._this_process import OfThisProcess
from cloudckpt.background.handle import AsyncSave
from cloudckpt.background.in_flight import find_unreported
from cloudckpt.background.runner import GlooGroupCache
from cloudckpt.dcp.save_and_load import last_save
from cloudckpt.errors import InvalidOptionError, RankLostError
from cloudckpt.manager.policies import SaveFailure

_log = logging.getLogger("cloudckpt")

SaveOutcome: TypeAlias = Literal["none", "committed", "failed", "cancelled", "no time", "unfinished"]
"""Outcome of a save. ``"none"``: no save was made, such as of a step that is not due. ``"no time"``: the save was not
started, since it would not have ended before the deadline. ``"unfinished"``: it had not ended at the deadline, although
it was cancelled."""

MAX_CLEANUP_S = 2.0
CLEANUP_FRACTION = 0.1
"""Fraction of the deadline, at most `MAX_CLEANUP_S`, in which a cancelled save removes what it wrote."""
_SLACK = 1.2
"""Expected duration of the last save, relative to that of the save before."""
_preemption_groups = GlooGroupCache()


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionReport:
    """Result of `Preemption.finish`."""

    in_flight: SaveOutcome
    """Outcome of the background save that was running: ``"none"`` if there was no save, ``"committed"``, ``"failed"``,
    ``"cancelled"``, or ``"unfinished"`` if it had not ended at the deadline although it was cancelled."""
    last: SaveOutcome
    """Outcome of the save that `finish` was asked to make. ``"no time"``: it was not started, because it would not have
    ended before the deadline."""
    error: BaseException | None
    """Failure of the save in flight, if the last save was committed nevertheless."""
    remaining_s: float
    """Seconds from the return to the deadline."""


class Preemption(OfThisProcess):
    """A request to stop this job, as SIGTERM makes it. Use it in the main thread.

    Example::

        with cloudckpt.on_sigterm() as preemption:
            if preemption.agreed():
                report = preemption.finish()

    """

    def __init__(self, *, deadline_s: float, timeout_s: float) -> None:
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._ends_at_s: float | None = None
        self._has_agreed = False
        self._group: dist.ProcessGroup | None = None

    @property
    def requested(self) -> bool:
        """True if this rank got the signal, or learned from `agreed` that another rank got it."""
        return self._ends_at_s is not None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, which the first signal sets, at least 0. Without a signal: ``deadline_s``."""
        ends_at_s = self._ends_at_s
        return self._deadline_s if ends_at_s is None else max(0.0, ends_at_s - time.monotonic())

    def note(self) -> None:
        """Record that the signal came now. Only the first call counts. Takes no lock: for signal handlers."""
        if self._ends_at_s is None:
            self._ends_at_s = time.monotonic() + self._deadline_s

    def agreed(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return True on all ranks if any rank was asked to stop.

        All ranks must make this call equally often. It reduces one number over a gloo group of the same ranks, which
        the first call makes. After True, `remaining_s` counts from the first signal on any rank.

        Args:
            process_group: Group of the ranks; None for all.

        Returns:
            The same answer on all ranks.

        Raises:
            RankLostError: The connection of the ranks broke, or a rank did not call it within ``timeout_s``.

        """
        if self._has_agreed:
            return True
        self._group = _make_gloo_group(process_group, self._timeout_s)
        mine_s = self.remaining_s if self.requested else math.inf
        least_s = self._reduce_min(mine_s, within_s=self._timeout_s)
        if least_s == math.inf:
            return False
        self._set_deadline(least_s)
        return True

    def finish(
        self, save: Callable[[], object] | None = None, *, in_flight: Literal["finish", "cancel"] = "finish"
    ) -> PreemptionReport:
        """Wait for the background save in flight, then call `save` if there is enough time.

        All ranks call it, each after True from `agreed`, or at the same point of the program.

        Args:
            save: Makes the last save. It is called on all ranks or on none, depending on how long the last save took.
                If it returns the handle of `async_save`, `finish` waits for it, and cancels it shortly before the
                deadline. A synchronous save is not interrupted. `save` may return the result of
                `CheckpointManager.save`.
            in_flight: ``"finish"`` waits for the save in flight and cancels it shortly before the deadline.
                ``"cancel"`` cancels it at once, unless its commit has begun.

        Returns:
            The outcome of both saves.

        Raises:
            CheckpointException: `save` failed, or the save in flight failed and no `save` was committed after it.
            RankLostError: Not all ranks agreed in time.
            InvalidOptionError: `in_flight` is another word.

        """
        if in_flight not in ("finish", "cancel"):
            raise InvalidOptionError(f"in_flight must be 'finish' or 'cancel', not {in_flight!r}")
        self.note()
        if self._group is None:
            self._group = _make_gloo_group(None, self._timeout_s)
        if not self._has_agreed:
            self._set_deadline(self._reduce_min(self.remaining_s, within_s=max(self.remaining_s, self._cleanup_s)))
        handle = find_unreported()
        fate = self._wait_for(handle, at_once=in_flight == "cancel")
        error = handle.exception(0) if handle is not None and fate == "failed" else None
        last: SaveOutcome = "none"
        if save is not None:
            last = self._make_last_save(save)
        if error is not None and last != "committed":
            raise error
        report = PreemptionReport(in_flight=fate, last=last, error=error, remaining_s=self.remaining_s)
        _log.info("asked to stop: the save in flight: %s, the last one: %s", report.in_flight, report.last)
        return report

    def _make_last_save(self, save: Callable[[], object]) -> SaveOutcome:
        num_saves, last_save_s = last_save()
        spare_s = self.remaining_s - self._cleanup_s - _SLACK * last_save_s
        if self._reduce_min(spare_s, within_s=max(self.remaining_s, self._cleanup_s)) < 0:
            return "no time"
        before = find_unreported()
        made: Any = save()
        if made is None and (begun := find_unreported()) is not before:
            made = begun  # `save` has not returned it
        if isinstance(made, SaveFailure):
            raise made.error
        if made is None and last_save()[0] == num_saves:
            _log.warning("no last save was made: a manager's save of a step that is not due needs force=True")
            return "none"
        if not isinstance(made, AsyncSave):
            return "committed"
        fate = self._wait_for(made, at_once=False)
        if fate == "failed":
            made.result(0)
        return fate

    def _wait_for(self, handle: AsyncSave | None, *, at_once: bool) -> SaveOutcome:
        """Wait for a save until the deadline, and cancel it if need be."""
        if handle is None:
            return "none"
        if not at_once:
            handle.committed.wait(max(0.0, self.remaining_s - self._cleanup_s))
        if not handle.done():
            # `cancel` may wait for other ranks, for longer than until the deadline.
            threading.Thread(target=handle.cancel, name="cloudckpt-cancel", daemon=True).start()
            handle.committed.wait(self.remaining_s)
        if not handle.done():
            return "unfinished"
        if handle.cancelled():
            return "cancelled"
        return "committed" if handle.exception(0) is None else "failed"

    def _set_deadline(self, least_s: float) -> None:
        """Set the earliest deadline of all ranks."""
        ends_at_s = time.monotonic() + least_s
        self._ends_at_s = ends_at_s if self._ends_at_s is None else min(ends_at_s, self._ends_at_s)
        self._has_agreed = True

    @property
    def _cleanup_s(self) -> float:
        return min(MAX_CLEANUP_S, CLEANUP_FRACTION * self._deadline_s)

    def _reduce_min(self, value: float, *, within_s: float) -> float:
        """Return the minimum of `value` over all ranks."""
        if self._group is None:
            return value
        values = torch.tensor([value], dtype=torch.float64, device="cpu")
        try:
            work = dist.all_reduce(values, dist.ReduceOp.MIN, group=self._group, async_op=True)
            if work is not None:  # None on a rank outside of the group
                work.wait(dt.timedelta(seconds=within_s))
        except RuntimeError as error:
            raise RankLostError(
                f"not all ranks agreed within {within_s:g} s on whether to stop: {error}", uri="", ranks=()
            ) from None
        return float(values[0])


@contextlib.contextmanager
def on_sigterm(*, deadline_s: float = 25.0, timeout_s: float = 1800.0) -> Iterator[Preemption]:
    """Turn SIGTERM into a request to stop, which the training loop answers through `Preemption`.

    The handler notes the time and calls the handler that was installed before, which is restored at the end of the
    context. Further signals change nothing. The training loop ends the process. In a process that is forked within the
    context, the signal does what it did before, until that process enters a context of its own.

    Args:
        deadline_s: Time from the signal for which the job may still run. It must be shorter than the scheduler's time
            from SIGTERM to SIGKILL, which is usually 30 s.
        timeout_s: Maximum time that a rank waits for the others in `Preemption.agreed`.

    Yields:
        The request, which the loop asks at each step.

    Raises:
        InvalidOptionError: An argument is not positive and finite.
        RuntimeError: The caller is not the main thread. Python handles signals only there.

    Example::

        with cloudckpt.on_sigterm(deadline_s=25) as preemption:
            for step in range(100, 103):
                train_on()
                if preemption.agreed():
                    preemption.finish(lambda: cloudckpt.save(f"s3://bucket/run/step-{step}", model=model))
                    break

    """
    for name, value in (("deadline_s", deadline_s), ("timeout_s", timeout_s)):
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise InvalidOptionError(f"on_sigterm: {name} must be positive and finite, not {value!r}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("on_sigterm must be entered in the main thread, because Python handles signals only there")
    preemption = Preemption(deadline_s=deadline_s, timeout_s=timeout_s)
    # None stands for a handler that was not installed by Python, and that Python cannot restore.
    before: Any = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    handler = _Handler(preemption, before)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield preemption
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, before)


class _Handler:
    """The handler of SIGTERM of one context of `on_sigterm`."""

    def __init__(self, preemption: Preemption, before: Any) -> None:
        self._process = os.getpid()
        self.before = before
        """The handler that was installed before."""
        self._preemption = preemption

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_forked = os.getpid() != self._process
        if is_forked:  # called by a handler of the program, which the fork has kept
            signal.signal(signal.SIGTERM, self.before)
        else:
            self._preemption.note()
        if callable(self.before):
            self.before(number, frame)
        elif is_forked:
            os.kill(os.getpid(), number)


_forking = threading.local()


def _block_during_fork() -> None:
    # A signal that reaches a child before Python has prepared it is forgotten by Python. Blocked, it waits.
    if isinstance(signal.getsignal(signal.SIGTERM), _Handler):
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_after_fork() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _restore_in_child() -> None:
    """Let SIGTERM do what it did before: a forked child has no training loop that could answer."""
    handler: Any = signal.getsignal(signal.SIGTERM)
    while isinstance(handler, _Handler):
        handler = handler.before
        signal.signal(signal.SIGTERM, handler)
    _unblock_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_during_fork, after_in_parent=_unblock_after_fork, after_in_child=_restore_in_child
    )


def _make_gloo_group(process_group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks, or None for a single rank. Collective on the first call."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    source = process_group if process_group is not None else dist.group.WORLD
    if source is None or dist.get_world_size(source) <= 1:
        return None
    return _preemption_groups.group_like(source, timeout_s=timeout_s)
