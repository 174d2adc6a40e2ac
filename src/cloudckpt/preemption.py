"""Being told to stop: to end what is being saved, and to save once more, before a scheduler kills the job."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from cloudckpt._api.saving import last_seconds
from cloudckpt._background.groups import Twins
from cloudckpt._background.handle import AsyncSave
from cloudckpt._background.in_flight import latest
from cloudckpt._threads import Thread
from cloudckpt.errors import InvalidOptionError, RankLostError

_log = logging.getLogger("cloudckpt")

Fate: TypeAlias = Literal["none", "committed", "failed", "cancelled", "no time", "unfinished"]
"""What became of a save. ``"none"``: there was none to make. ``"no time"``: it was not begun, because it would not have
ended in time. ``"unfinished"``: it was cancelled too late, or could not be, and had not ended at the deadline."""

_LONGEST_FAREWELL_S = 2.0
_FAREWELL = 0.1
"""Of the deadline, and at most so many seconds: left for a save that is cancelled to remove what it wrote."""
_SLACK = 1.2
"""How much longer than the last one a save may take before it is thought to come too late."""
_TWINS = Twins()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionReport:
    """What `Preemption.finish` did."""

    in_flight: Fate
    """Of the background save that was running."""
    last: Fate
    """Of the one that `finish` was to make."""
    error: BaseException | None
    """Why the save in flight failed, where the last one was committed all the same."""
    remaining_s: float
    """Until the deadline, on return."""


class Preemption:
    """Whether this job has been told to stop, and what is left to do. `on_sigterm` makes it; for the main thread."""

    def __init__(self, *, deadline_s: float, timeout_s: float) -> None:
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._ends_at_s: float | None = None
        self._has_agreed = False
        self._group: dist.ProcessGroup | None = None

    @property
    def requested(self) -> bool:
        """Whether this rank has got the signal, or knows from `agreed` that another has."""
        return self._ends_at_s is not None

    @property
    def remaining_s(self) -> float:
        """Until the deadline, which the first signal has set; all of it where none has come. Never less than 0."""
        ends_at_s = self._ends_at_s
        return self._deadline_s if ends_at_s is None else max(0.0, ends_at_s - time.monotonic())

    def note(self) -> None:
        """Have it that the signal came now; only the first counts. Takes no lock, so a signal's handler may call it."""
        if self._ends_at_s is None:
            self._ends_at_s = time.monotonic() + self._deadline_s

    def agreed(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Whether any rank was told to stop: the same answer on all ranks, which must all call it, equally often.

        One number is reduced over a gloo group of the same ranks, made on the first call. From then on `remaining_s` is
        that of the rank that was told first. Raises `RankLostError` where the ranks' connection breaks, or one of them
        has not come within `timeout_s`.
        """
        if self._has_agreed:
            return True
        self._group = _group_like(process_group, self._timeout_s)
        mine_s = self.remaining_s if self.requested else math.inf
        least_s = self._least(mine_s, within_s=self._timeout_s)
        if least_s == math.inf:
            return False
        self._settle(least_s)
        return True

    def finish(
        self, save: Callable[[], object] | None = None, *, in_flight: Literal["finish", "cancel"] = "finish"
    ) -> PreemptionReport:
        """Bring the background save in flight to its end, and call `save` if the time that is left allows it.

        On all ranks, each of which has got True from `agreed`, or calls this at the same point. The save in flight is
        waited for, but cancelled shortly before the deadline; with ``"cancel"`` at once, unless its commit has begun.
        `save` is called on all ranks or on none: where the last save of this process was not so slow that another one
        would come too late. What it returns, if it is the handle of `async_save`, is waited for, and cancelled in the
        same way; a synchronous save ends when it ends.

        Raises what `save` raises; and why the save in flight failed, unless `save` has made up for it. Raises
        `RankLostError` where not all ranks come to the decision in time.
        """
        if in_flight not in ("finish", "cancel"):
            raise InvalidOptionError(f"in_flight must be 'finish' or 'cancel', not {in_flight!r}")
        self.note()
        if self._group is None:
            self._group = _group_like(None, self._timeout_s)
        if not self._has_agreed:
            self._settle(self._least(self.remaining_s, within_s=max(self.remaining_s, self._farewell_s)))
        handle = latest()
        fate = self._ended(handle, at_once=in_flight == "cancel")
        error = handle.exception(0) if handle is not None and fate == "failed" else None
        last: Fate = "none"
        if save is not None:
            last = self._last(save)
        if error is not None and last != "committed":
            raise error
        report = PreemptionReport(in_flight=fate, last=last, error=error, remaining_s=self.remaining_s)
        _log.info("told to stop: the save in flight: %s, the last one: %s", report.in_flight, report.last)
        return report

    def _last(self, save: Callable[[], object]) -> Fate:
        spare_s = self.remaining_s - self._farewell_s - _SLACK * last_seconds()
        if self._least(spare_s, within_s=max(self.remaining_s, self._farewell_s)) < 0:
            return "no time"
        made: Any = save()
        if not isinstance(made, AsyncSave):
            return "committed"
        fate = self._ended(made, at_once=False)
        if fate == "failed":
            made.result(0)
        return fate

    def _ended(self, handle: AsyncSave | None, *, at_once: bool) -> Fate:
        """What became of a save by the deadline."""
        if handle is None:
            return "none"
        if not at_once:
            handle.committed.wait(max(0.0, self.remaining_s - self._farewell_s))
        if not handle.done():
            # It may wait for other ranks, and nothing here may wait longer than until the deadline.
            Thread(handle.cancel, name="cloudckpt-cancel", daemon=True).start()
            handle.committed.wait(self.remaining_s)
        if not handle.done():
            return "unfinished"
        if handle.cancelled():
            return "cancelled"
        return "committed" if handle.exception(0) is None else "failed"

    def _settle(self, least_s: float) -> None:
        """All ranks know: the first deadline is that of all."""
        ends_at_s = time.monotonic() + least_s
        self._ends_at_s = ends_at_s if self._ends_at_s is None else min(ends_at_s, self._ends_at_s)
        self._has_agreed = True

    @property
    def _farewell_s(self) -> float:
        return min(_LONGEST_FAREWELL_S, _FAREWELL * self._deadline_s)

    def _least(self, value: float, *, within_s: float) -> float:
        """The least that any rank has."""
        if self._group is None:
            return value
        values = torch.tensor([value], dtype=torch.float64, device="cpu")
        try:
            work = dist.all_reduce(values, dist.ReduceOp.MIN, group=self._group, async_op=True)
            assert work is not None  # noqa: S101  # this rank is one of the group
            work.wait(dt.timedelta(seconds=within_s))
        except RuntimeError as error:
            raise RankLostError(
                f"not all ranks came within {within_s:g} s to agree on whether to stop: {error}", uri="", ranks=()
            ) from None
        return float(values[0])


@contextlib.contextmanager
def on_sigterm(*, deadline_s: float = 25.0, timeout_s: float = 1800.0) -> Iterator[Preemption]:
    """Take SIGTERM for a request to stop, which the training loop answers: see `Preemption`.

    `deadline_s` is how long after the signal the job may still run: less than what the scheduler gives it until
    SIGKILL, 30 s mostly. `timeout_s` is the longest that a rank waits for the others in `Preemption.agreed`.

    The handler notes the time and nothing else, and then calls the one that was there before, if that is a function;
    at the end of the context that one is back. Further signals change nothing. The process is not ended: that is for
    the loop to do. Raises `RuntimeError` outside of the main thread, in which alone Python handles signals.
    """
    for name, value in (("deadline_s", deadline_s), ("timeout_s", timeout_s)):
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise InvalidOptionError(f"{name} must be positive and finite, not {value!r}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "on_sigterm was entered in a thread: Python handles signals in the main thread alone, so enter it there"
        )
    preemption = Preemption(deadline_s=deadline_s, timeout_s=timeout_s)
    before = signal.getsignal(signal.SIGTERM)

    def noted(number: int, frame: FrameType | None) -> None:
        preemption.note()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, noted)
    try:
        yield preemption
    finally:
        if signal.getsignal(signal.SIGTERM) is noted:
            # None: it was not Python that installed it, so Python cannot bring it back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _group_like(process_group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup | None:
    """A gloo group of the same ranks for this alone; None where this rank is alone. Collective on its first call."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    source = process_group if process_group is not None else dist.group.WORLD
    if source is None or dist.get_world_size(source) <= 1:
        return None
    return _TWINS.of(source, timeout_s=timeout_s)
