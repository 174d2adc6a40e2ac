"""Failures of a whole save or load, as the caller gets them."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt.errors import CloudckptError, SaveCancelledError, bounded

_MAX_RANKS = 16  # named in a message

Failures = Mapping[int, tuple[BaseException, traceback.StackSummary]]


class _Failure(CheckpointException):
    """torch's `CheckpointException`, with a text that one can read.

    Its class is also the nearest one that the ranks' causes have in common, so that ``except CheckpointExistsError``
    works.
    """

    step: str
    what: str

    def __str__(self) -> str:
        ranks = sorted(self.failures)
        lines = [f"{self.what} failed at step {self.step!r} on {_ranks_text(ranks)}:"]
        for rank in ranks:
            error, trace = self.failures[rank]
            lines.append(f"[rank {rank}] {type(error).__name__}: {bounded(str(error))}")
            if not isinstance(error, CloudckptError) and trace is not None:
                lines.append("".join(trace.format()).rstrip())  # not one of ours: where it came from matters
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.what, self.step, dict(self.failures))


def failure_of(
    error: CheckpointException, *, what: str, local_cause: Exception | None = None, local_rank: int = 0
) -> CheckpointException:
    """`error`, readable, and an instance of its cause's class.

    `local_cause` is what this rank really saw where torch handed on only its text. Neither the result nor what it was
    made of holds on to the tensors that were being saved or loaded.
    """
    failures = dict(error.failures)
    if local_cause is not None and local_rank in failures:
        failures[local_rank] = (local_cause, failures[local_rank][1])
    _let_go([error, *(cause for cause, _ in failures.values())])
    return _rebuild(what, str(error.args[0]), failures)


def carried(error: CheckpointException, *, what: str) -> CheckpointException:
    """`error` under another name, to be a rank's failure in a later call."""
    return _rebuild(what, str(error.args[0]), dict(error.failures))


def causes_of(error: CheckpointException) -> list[BaseException]:
    """What each failing rank raised."""
    return [cause for cause, _ in error.failures.values()]


def raise_own_interrupt(error: CheckpointException, rank: int) -> None:
    """A Ctrl-C or an exit on this rank stays one; only for the other ranks is it a failure."""
    cause, _ = error.failures.get(rank, (None, None))
    if isinstance(cause, (KeyboardInterrupt, SystemExit)):
        raise cause


def rank_in(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> int:
    """The rank of this process in the group that saves or loads."""
    return 0 if no_dist or not dist.is_available() or not dist.is_initialized() else dist.get_rank(process_group)


def _let_go(errors: Iterable[BaseException]) -> None:
    # A traceback holds the frames of its calls and of all their callers, and with them the whole state dict, or the
    # copy that a background save made of it; and torch keeps an error in one of those frames. Python would free that
    # cycle only once it happens to look for cycles. What the traceback says is in the failures as text.
    waiting, seen = list(errors), set[int]()
    while waiting:
        error = waiting.pop()
        # An interrupt is raised once more as it came.
        if id(error) not in seen and isinstance(error, (Exception, CheckpointException)):
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)  # of several ranks, torch's frame has an error of its own
            error.__traceback__ = None
            waiting += [linked for linked in (error.__cause__, error.__context__) if linked is not None]


def _rebuild(what: str, step: str, failures: dict[int, Any]) -> CheckpointException:
    ours = [cause for cause, _ in failures.values() if isinstance(cause, CloudckptError)]
    cancelled = [cause for cause in ours if isinstance(cause, SaveCancelledError)]
    # Whatever else failed is no reason to look further: somebody wanted it to end.
    common: Any = SaveCancelledError if cancelled else _nearest_common([type(cause) for cause in ours])
    kind = _class_for(common)
    # Not through __init__: the cause's class and torch's have different ones.
    failure = kind.__new__(kind, step, failures)
    failure.args = (step, failures)
    if ours:
        failure.__dict__.update((cancelled or ours)[0].__dict__)
    if cancelled:
        failure.__dict__["ranks"] = tuple(sorted({rank for cause in cancelled for rank in cause.ranks}))
    failure.step, failure.what, failure._failures = step, what, failures  # noqa: SLF001  # torch's __init__ sets it
    return failure


def _nearest_common(classes: Sequence[type[CloudckptError]]) -> type[CloudckptError]:
    """What a handler can rely on where ranks failed in ways that differ only in detail."""
    first = next(iter(classes), CloudckptError)
    return next(
        kind
        for kind in first.__mro__  # a cause may be the failure of an earlier save, whose class was made here
        if issubclass(kind, CloudckptError)
        and not issubclass(kind, _Failure)
        and all(issubclass(other, kind) for other in classes)
    )


@functools.cache
def _class_for(cause: type[CloudckptError]) -> type[_Failure]:
    return type(cause.__name__, (_Failure, cause), {"__module__": cause.__module__})


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    return f"{len(ranks)} ranks ({shown}{', …' if len(ranks) > _MAX_RANKS else ''})"
