"""From errors to exit codes and messages."""

from __future__ import annotations

import errno
from collections.abc import Collection

from cloudckpt.cli._ending import INTERRUPTED, TERMINATED
from cloudckpt.cli._text import plain_line
from cloudckpt.cli._wording import as_typed
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    CredentialsError,
    GarbageLeftError,
    InvalidOptionError,
    InvalidURIError,
    MissingDependencyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    TransientStoreError,
    UnsafePickleError,
    UnsupportedFormatError,
    UnsupportedValueError,
)

__all__ = [
    "DENIED",
    "DONE",
    "EXISTS",
    "INTERRUPTED",
    "NO",
    "NOT_FOUND",
    "PIPE_CLOSED",
    "TERMINATED",
    "TOO_OLD",
    "UNEXPECTED",
    "UNREACHABLE",
    "WRONG_USAGE",
    "exit_code_of",
    "interrupt_of",
    "message_of",
]

DONE = 0
NO = 1
"""The answer is no: damage was found, two things differ, a check failed, something could not be removed."""
WRONG_USAGE = 2
NOT_FOUND = 3
DENIED = 4
UNREACHABLE = 5
EXISTS = 6
TOO_OLD = 7
"""Of this cloudckpt: it cannot read what is there, or lacks an extension."""
UNEXPECTED = 70
PIPE_CLOSED = 141
"""Whoever read the output had enough."""

_CODES: tuple[tuple[int, tuple[type[CloudckptError], ...]], ...] = (
    (
        WRONG_USAGE,
        (InvalidURIError, InvalidOptionError, MissingDependencyError, UnsafePickleError, UnsupportedValueError),
    ),
    (NOT_FOUND, (CheckpointNotFoundError, BucketNotFoundError, ObjectNotFoundError)),
    (DENIED, (AccessDeniedError, CredentialsError)),
    (TOO_OLD, (UnsupportedFormatError,)),
    (EXISTS, (CheckpointExistsError, ObjectExistsError)),
    (UNREACHABLE, (TransientStoreError, CheckpointChangedError)),
    (NO, (CorruptCheckpointError, GarbageLeftError, ShortObjectError)),
)

_NO_PLACE = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
"""What a file system says of a path that leads nowhere, whatever may be done there."""


def exit_code_of(error: BaseException) -> int | None:
    """With what a command ends that raised `error`; None for what Typer handles itself."""
    error = _cause_of(error)
    if (interrupt := interrupt_of(error)) is not None:
        return INTERRUPTED if isinstance(interrupt, KeyboardInterrupt) else TERMINATED
    if isinstance(error, StoreError) and getattr(error.__cause__, "errno", None) in _NO_PLACE:
        return WRONG_USAGE
    for code, classes in _CODES:
        if isinstance(error, classes):
            return code
    return UNEXPECTED if isinstance(error, (CloudckptError, OSError)) or not _is_typers(error) else None


def interrupt_of(error: BaseException) -> KeyboardInterrupt | SystemExit | None:
    """Ctrl-C or SIGTERM, where it came into a commit: that is told as an error, because the commit may have arrived."""
    interrupt = _cause_of(error).__cause__
    return interrupt if isinstance(interrupt, (KeyboardInterrupt, SystemExit)) else None


def message_of(error: BaseException, *, flags: Collection[str] = ()) -> str:
    """What is said of `error` on stderr by a command that has the options `flags`."""
    error = _cause_of(error)
    text = plain_line(" ".join(str(error).splitlines()))  # what is told lies in the bucket, and could fake lines
    if isinstance(error, CloudckptError):
        return f"Error: {as_typed(text, flags=flags)}"
    return f"Error: {type(error).__name__}: {text} (cloudckpt --verbose … shows where)"


def _cause_of(error: BaseException) -> BaseException:
    """What it is about: torch wraps errors, by ranks, and a command is the only one."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and len(failures) == 1:
        ((cause, _trace),) = failures.values()
        return cause if isinstance(cause, CloudckptError) else error
    return error


def _is_typers(error: BaseException) -> bool:
    """Whether it is one of those by which Typer, or Click below it, says that the usage is wrong, or ends a command."""
    return any(kind.__module__.partition(".")[0] in ("click", "typer") for kind in type(error).__mro__)
