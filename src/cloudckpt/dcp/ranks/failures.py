"""The error that a failed save or load raises on every rank, in torch's class and in that of its causes."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._messages import limit_text, name_ranks
from cloudckpt.errors import CheckpointError, CloudckptError, RankLostError, SaveCancelledError

_CALL = re.compile("[a-z]+ing (?:[a-z]+ )*(.+)", re.DOTALL)
"""The subject of a call, such as "pulling from <URI>". A background save is none: it ends in a later call."""


class SaveOrLoadError(CheckpointException):
    """torch's `CheckpointException`, with a readable text.

    The class of each instance also inherits from the nearest common class of the ranks' causes (`_class_for`). So
    ``except CheckpointExistsError`` works.
    """

    step: str
    subject: str
    is_alone: bool
    """True if this process saved or loaded without others, so that messages need not name its rank."""

    @property
    def message(self) -> str:
        """The texts of the failing ranks. A text that several ranks have appears once."""
        return str(self)

    def __str__(self) -> str:
        ranks_by_text: dict[str, list[int]] = {}
        for rank in sorted(self.failures):
            error, trace = self.failures[rank]
            text = limit_text(str(error))
            if type(error).__name__ != type(self).__name__:  # which Python shows before the text
                text = f"{type(error).__name__}: {text}"
            if not isinstance(error, CloudckptError) and trace is not None:
                text += "\n" + "".join(trace.format()).rstrip()  # an error of other code: show where it was raised
            ranks_by_text.setdefault(text, []).append(rank)
        causes = causes_of(self)
        how = "failed" if self.is_alone else f"failed on {name_ranks(self.failures)}"
        if all(isinstance(cause, SaveOrLoadError) for cause in causes):
            how = "did not begin, because an earlier save failed"
        if len(ranks_by_text) > 1:
            lines = (f"[{name_ranks(ranks)}] {text}" for text, ranks in ranks_by_text.items())
            return "\n".join([f"{self.subject} {how}:", *lines])
        (text,) = ranks_by_text
        call = _CALL.fullmatch(self.subject)
        names_it = self.is_alone and isinstance(causes[0], CheckpointError) and call is not None and call[1] in text
        # The error of a lost rank names the save or load that it failed.
        return text if names_it or isinstance(causes[0], RankLostError) else f"{self.subject} {how}: {text}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # args have the tracebacks of the ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.subject, self.step, dict(self.failures), self.is_alone)


def failure_of(error: CheckpointException, *, subject: str, is_alone: bool) -> CheckpointException:
    """Return `error` as a readable instance of its causes' class.

    Neither the result nor its causes hold a reference to the tensors of the save or load.
    """
    release_frames([error, *causes_of(error)])
    return _rebuild(subject, str(error.args[0]), dict(error.failures), is_alone)


def causes_of(error: BaseException) -> list[BaseException]:
    """Return the errors of the failing ranks of a ``CheckpointException``; nothing for any other error."""
    return [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []


@contextlib.contextmanager
def raising_own_interrupt(rank: int) -> Iterator[None]:
    """Raise this rank's own Ctrl-C or exit in place of the failure that the other ranks raise."""
    try:
        yield
    except CheckpointException as error:
        raise_own_interrupt(error, rank)
        raise


def raise_own_interrupt(error: CheckpointException, rank: int) -> None:
    cause, _ = error.failures.get(rank, (None, None))
    if isinstance(cause, (KeyboardInterrupt, SystemExit)):
        raise cause


def release_frames(errors: Iterable[BaseException]) -> None:
    # A traceback holds the frames of its calls and of all their callers, and with them the state dict or the copy of
    # a background save; torch keeps an error in one of those frames. Python frees such a cycle only when its collector
    # runs. The failures keep the tracebacks as text.
    waiting, handled = list(errors), set[int]()
    while waiting:
        error = waiting.pop()
        # An interrupt keeps its traceback.
        if id(error) not in handled and isinstance(error, (Exception, CheckpointException)):
            handled.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            waiting += [linked for linked in (error.__cause__, error.__context__) if linked is not None]


def _rebuild(subject: str, step: str, failures: dict[int, Any], is_alone: bool) -> CheckpointException:
    ours = [cause for cause, _ in failures.values() if isinstance(cause, CloudckptError)]
    cancelled = [cause for cause in ours if isinstance(cause, SaveCancelledError)]
    # If a rank was cancelled, the save was: other ranks failed because of it.
    common: Any = SaveCancelledError if cancelled else _nearest_common([type(cause) for cause in ours])
    kind = _class_for(common)
    # Not through __init__: the cause's class and torch's have different ones.
    failure = kind.__new__(kind, step, failures)
    failure.args = (step, failures)
    if ours:
        failure.__dict__.update((cancelled or ours)[0].__dict__)
    if cancelled:
        failure.__dict__["ranks"] = tuple(sorted({rank for cause in cancelled for rank in cause.ranks}))
    failure.__dict__.update(step=step, subject=subject, is_alone=is_alone)
    failure.__dict__["_failures"] = failures  # as torch's __init__ does
    return failure


def _nearest_common(classes: Sequence[type[CloudckptError]]) -> type[CloudckptError]:
    """Return the most specific class of cloudckpt that all `classes` inherit from."""
    first = next(iter(classes), CloudckptError)
    return next(
        kind
        for kind in first.__mro__  # a cause may be the failure of an earlier save, whose class was made here
        if issubclass(kind, CloudckptError)
        and not issubclass(kind, SaveOrLoadError)
        and all(issubclass(other, kind) for other in classes)
    )


@functools.cache
def _class_for(cause: type[CloudckptError]) -> type[SaveOrLoadError]:
    return type(cause.__name__, (SaveOrLoadError, cause), {"__module__": cause.__module__})
