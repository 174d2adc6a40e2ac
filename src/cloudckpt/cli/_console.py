"""Output of the commands: results to stdout, all else to stderr, values as people read them; exit codes; signals."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import logging.handlers
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from cloudckpt._messages import plain_line
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
from cloudckpt.telemetry.progress import has_terminal, new_bar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.status import Status

    from cloudckpt.options import Options

_shown: list[Status] = []
"""The status line of the running command, if it is shown: a process has one terminal."""
_MAX_WARNINGS = 1000
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
    "format": "--format",
    "from_first": "--from-first",
    "include": "--include",
    "overwrite": "--overwrite",
    "skip_non_tensors": "--skip-non-tensors",
}
"""The flags of commands by the option of an error's hint."""
_BAD_PATH = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
"""The errors of a file system about a path that cannot name anything."""


class Console:
    """The output of one command. With `as_json`, stdout gets one JSON document and nothing else."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, is_verbose: bool = False) -> None:
        self.as_json, self.quiet, self.is_verbose = as_json, quiet, is_verbose

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show that the command works, while it prints nothing. Only on a terminal's stderr, and not beside a log."""
        if self.quiet or self.as_json or self.is_verbose or not has_terminal():
            yield
            return
        from rich import console, status

        shown = status.Status(plain_line(text), console=console.Console(stderr=True))
        _shown.append(shown)
        try:
            with shown:
                yield
        finally:
            _shown.remove(shown)

    def document(self, value: Any) -> None:
        """Print the result as one JSON document. Dataclasses in it become objects."""
        _echo(json.dumps(value, indent=2, default=dataclasses.asdict))

    def line(self, text: str = "") -> None:
        """Print a line of the result."""
        _echo(plain_line(text))

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """Print a table of the result, each row as one line; the columns in `right` are numbers."""
        from rich.cells import cell_len  # some characters take two columns, some none

        lines = [[plain_line(cell) for cell in row] for row in (titles, *rows)]
        texts = []
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = []
            for title, cell, width in zip(titles, line, widths, strict=True):
                space = " " * (width - cell_len(cell))
                cells.append(space + cell if title in right else cell + space)
            texts.append("  ".join(cells).rstrip())
        _echo("\n".join(texts))

    def say(self, text: str) -> None:
        """Print a remark, unless the command is to be quiet."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a remark that matters even to a quiet command."""
        _echo(plain_line(text), err=True)

    @property
    def is_interactive(self) -> bool:
        """True if there is a user to ask."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirm(self, question: str) -> bool:
        """Ask the user, whose default answer is no."""
        with _without_status():
            return typer.confirm(plain_line(question), err=True)

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """Show a bar on stderr, if that is a terminal. Yields a function of the bytes done and the bytes in total."""
        if self.quiet or not has_terminal():
            yield lambda _done_bytes, _total_bytes: None
            return
        with _without_status(), new_bar(transient=True) as bar:
            task = bar.add_task(plain_line(text), total=None)
            yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)

    @contextlib.contextmanager
    def telling_warnings(self) -> Iterator[None]:
        """Print the warnings of the library's log at the end, unless the command prints its log."""
        handler = logging.handlers.BufferingHandler(_MAX_WARNINGS)
        handler.setLevel(logging.WARNING)
        log = logging.getLogger("cloudckpt")
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            for record in [] if self.is_verbose else handler.buffer:
                self.warn(f"Warning: {record.getMessage()}")


@contextlib.contextmanager
def _without_status() -> Iterator[None]:
    for shown in _shown:
        shown.stop()
    try:
        yield
    finally:
        for shown in _shown:
            shown.start()


def _echo(text: str, *, err: bool = False) -> None:
    with _without_status():
        typer.echo(text, err=err)


def describe_report(report: DataclassInstance, seconds: float) -> dict[str, Any]:
    """Return the members of a library's report for ``--json``, with `seconds` in place of its own durations."""
    members = dataclasses.asdict(report)
    return {name: members[name] for name in members if not name.endswith("_s")} | {"seconds": seconds}


def age(moment: datetime) -> str:
    """Return the time since `moment` in its largest unit: ``3 h``."""
    return duration(datetime.now(timezone.utc) - moment)


def duration(delta: timedelta) -> str:
    """Return a time in its largest unit: ``3 h``."""
    seconds = max(delta.total_seconds(), 0.0)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)} {unit}"
    return f"{int(seconds)} s"


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
    is_cloudckpt_error = isinstance(error, CloudckptError)
    is_typers = any(kind.__module__.partition(".")[0] in ("click", "typer") for kind in type(error).__mro__)
    return UNEXPECTED if is_cloudckpt_error or (isinstance(error, Exception) and not is_typers) else None


def _interrupt_of(error: BaseException) -> KeyboardInterrupt | SystemExit | None:
    """Return the Ctrl-C or SIGTERM that interrupted a commit, which is an error because the commit may have arrived."""
    interrupt = _single_cause(error).__cause__
    return interrupt if isinstance(interrupt, (KeyboardInterrupt, SystemExit)) else None


def message_of(error: BaseException, *, flags: Collection[str] = ()) -> str:
    """Return one line for stderr. The hint of `error` names its flag, if the command has it among its `flags`."""
    error = _single_cause(error)
    text = str(error)
    if isinstance(error, CloudckptError) and (hint := error.hint) is not None and not error.failures:
        text = error.with_advice(hint.as_flags(_FLAGS)) if _FLAGS.get(hint.option) in flags else text
    text = plain_line(" ".join(text.splitlines()))  # names come from the bucket, and could fake lines
    if isinstance(error, CloudckptError):
        return f"Error: {text}"
    return f"Error: {type(error).__name__}: {text} (cloudckpt --verbose … shows where)"


def usage_message(error: BaseException) -> str | None:
    """Return one line for an error in the use of a command, or the help if Typer asks for it; None for others."""
    context, format_message = (getattr(error, name, None) for name in ("ctx", "format_message"))
    if format_message is None:
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error)
    command = "cloudckpt" if context is None else context.command_path
    message = " ".join(format_message().split()).replace(": Value error, ", ": ")  # Typer's words for a wrong choice
    flags = () if context is None else [flag for param in context.command.params for flag in param.opts]
    if message.startswith("Got unexpected extra argument") and "--name" in flags:
        message += ": --name PATTERN chooses what is shown"
    return f"Error: {plain_line(message)} ({command} --help shows how to use it)"


@contextlib.contextmanager
def advising_all(uri: str, options: Options) -> Iterator[None]:
    """Name ``--all`` in the error about a folder of checkpoints in place of a checkpoint."""
    from cloudckpt.inspect.catalog import list_checkpoints

    try:
        yield
    except CheckpointNotFoundError as error:
        with contextlib.suppress(CloudckptError):
            if list_checkpoints(uri, options=options):
                error.args = (error.with_advice("For all checkpoints there, pass --all"),)
        raise


def _single_cause(error: BaseException) -> BaseException:
    """Return the error of the only rank, if a save or load has wrapped it; otherwise `error` itself."""
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
    sys.unraisablehook = _send_lost_signal_again


def _send_lost_signal_again(lost: sys.UnraisableHookArgs) -> None:
    """Deliver a signal once more if Python dropped its exception, as it does in the callback of a weak reference."""
    for exception, number, handler in (
        (KeyboardInterrupt, signal.SIGINT, _on_sigint),
        (SystemExit, signal.SIGTERM, _on_sigterm),
    ):
        if lost.exc_type is exception and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)
            # Delivered now, the signal would end only this function, which Python calls in the same place.
            main_thread = threading.get_ident()
            again = threading.Timer(0.01, signal.pthread_kill, [main_thread, number])
            again.daemon = True
            again.start()
            return
    sys.__unraisablehook__(lost)


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
