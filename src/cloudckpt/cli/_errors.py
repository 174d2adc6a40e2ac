"""From errors to exit codes and messages."""

from __future__ import annotations

from cloudckpt.cli._text import plain
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
    TransientStoreError,
    UnsafePickleError,
    UnsupportedValueError,
)

DONE = 0
NO = 1
"""The answer is no: damage was found, two things differ, a check failed, something could not be removed."""
WRONG_USAGE = 2
NOT_FOUND = 3
DENIED = 4
UNREACHABLE = 5
EXISTS = 6
UNEXPECTED = 70
INTERRUPTED = 130

_CODES: tuple[tuple[int, tuple[type[CloudckptError], ...]], ...] = (
    (
        WRONG_USAGE,
        (InvalidURIError, InvalidOptionError, MissingDependencyError, UnsafePickleError, UnsupportedValueError),
    ),
    (NOT_FOUND, (CheckpointNotFoundError, BucketNotFoundError, ObjectNotFoundError)),
    (DENIED, (AccessDeniedError, CredentialsError)),
    (EXISTS, (CheckpointExistsError, ObjectExistsError)),
    (UNREACHABLE, (TransientStoreError, CheckpointChangedError)),
    (NO, (CorruptCheckpointError, GarbageLeftError, ShortObjectError)),
)


def exit_code_of(error: Exception) -> int | None:
    """With what a command ends that raised `error`; None for what Typer handles itself."""
    for code, classes in _CODES:
        if isinstance(error, classes):
            return code
    return UNEXPECTED if isinstance(error, (CloudckptError, OSError)) or not _is_typers(error) else None


def message_of(error: Exception) -> str:
    """What is said of `error` on stderr."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and len(failures) == 1:  # torch's, by ranks, and a command is the only one
        ((cause, _trace),) = failures.values()
        error = cause if isinstance(cause, CloudckptError) else error
    text = plain(str(error))
    if isinstance(error, CloudckptError):
        return f"Error: {text}"
    return f"Error: {type(error).__name__}: {text} (cloudckpt --verbose … shows where)"


def _is_typers(error: Exception) -> bool:
    """Whether it is one of those by which Typer, or Click below it, says that the usage is wrong, or ends a command."""
    return any(kind.__module__.partition(".")[0] in ("click", "typer") for kind in type(error).__mro__)
