"""Errors and signals: exit codes, and what stderr says."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Collection
from typing import NoReturn

from cloudckpt.cli._console import plain_line
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

DONE = 0
NO = 1
"""The answer is no: something is damaged, two checkpoints differ, a check failed, something could not be removed."""
WRONG_USAGE = 2
NOT_FOUND = 3
DENIED = 4
UNREACHABLE = 5
EXISTS = 6
TOO_OLD = 7
"""This cloudckpt cannot read the checkpoint, or lacks an extension."""
UNEXPECTED = 70
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 141
"""The reader of stdout has closed it."""
TERMINATED = 128 + signal.SIGTERM

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

_FLAGS = {
    "Options.timeout_s": "--timeout",
    "allow_pickle": "--unsafe-pickle",
    "overwrite": "--overwrite",
    "skip_non_tensors": "--skip-non-tensors",
}
"""The flags of commands by the option of an error's hint."""

_BAD_PATH = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
"""The errors of a file system about a path that cannot name anything."""


def exit_code_of(error: BaseException) -> int | None:
    """Return the exit code for `error`, or None if Typer or Python handles it."""
    error = _single_cause(error)
    interrupt = _interrupt_of(error)
    if interrupt is not None:
        return INTERRUPTED if isinstance(interrupt, KeyboardInterrupt) else TERMINATED
    if isinstance(error, StoreError) and getattr(error.__cause__, "errno", None) in _BAD_PATH:
        return WRONG_USAGE
    for code, classes in _CODES:
        if isinstance(error, classes):
            return code
    is_ours = isinstance(error, CloudckptError)
    is_typers = any(kind.__module__.partition(".")[0] in ("click", "typer") for kind in type(error).__mro__)
    return UNEXPECTED if is_ours or (isinstance(error, Exception) and not is_typers) else None


def _interrupt_of(error: BaseException) -> KeyboardInterrupt | SystemExit | None:
    """Return the Ctrl-C or SIGTERM that hit a commit, which is an error because the commit may have arrived."""
    interrupt = _single_cause(error).__cause__
    return interrupt if isinstance(interrupt, (KeyboardInterrupt, SystemExit)) else None


def message_of(error: BaseException, *, flags: Collection[str] = ()) -> str:
    """Return one line for stderr. The hint of `error` names its flag, if the command has it among its `flags`."""
    error = _single_cause(error)
    text = str(error)
    if isinstance(error, CloudckptError) and error.hint is not None and not error.failures:
        flag = _FLAGS.get(error.hint.option)
        if flag is not None and flag in flags:
            text = error.with_advice(error.hint.as_flag(flag))
    text = plain_line(" ".join(text.splitlines()))  # names come from the bucket, and could fake lines
    if isinstance(error, CloudckptError):
        return f"Error: {text}"
    return f"Error: {type(error).__name__}: {text} (cloudckpt --verbose … shows where)"


def usage_message(error: BaseException) -> str | None:
    """Return one line for an error in the use of a command, or the help where Typer wants that; None for others."""
    context, format_message = (getattr(error, name, None) for name in ("ctx", "format_message"))
    if format_message is None:
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error)
    command = "cloudckpt" if context is None else context.command_path
    return f"Error: {plain_line(' '.join(format_message().split()))} ({command} --help shows how to use it)"


def _single_cause(error: BaseException) -> BaseException:
    """Return the error itself where a save or load has wrapped that of its only rank."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and len(failures) == 1:
        ((cause, _trace),) = failures.values()
        return cause if isinstance(cause, CloudckptError) else error
    return error


def handle_signals() -> None:
    """Make SIGTERM end the command as Ctrl-C does: it removes what it was writing. A second Ctrl-C ends it at once.

    Leaves Ctrl-C alone if the caller ignores it (``nohup``, a shell's background job).
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_sigint)


def _on_sigint(_number: int, _frame: object) -> NoReturn:
    signal.signal(signal.SIGINT, _exit_at_once)
    raise KeyboardInterrupt


def _on_sigterm(_number: int, _frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is _on_sigint:
        signal.signal(signal.SIGINT, _exit_at_once)
    sys.exit(TERMINATED)


def _exit_at_once(_number: int, _frame: object) -> NoReturn:
    # sys.stderr may be in the middle of a write, and would refuse another one.
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a bar or a spinner has hidden the cursor
    os.write(2, b"Interrupted again: ended without cleaning up. Run `cloudckpt gc URI` to remove what is left.\n")
    os._exit(INTERRUPTED)
