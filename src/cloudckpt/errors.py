"""The errors to handle. cloudckpt also raises subclasses of them, and torch's ``CheckpointException`` with them.

Classes follow what a handler would do, not where the error came from::

    CloudckptError
    ├── InvalidURIError (ValueError)        fix the URI
    ├── InvalidOptionError (ValueError)     fix the option
    ├── MissingDependencyError (ImportError) install the extra that the message names
    ├── ForkedProcessError (RuntimeError)   start the process with "spawn" or "forkserver"
    ├── StoreError                          one call to a store failed; has .key and .operation
    │   ├── ObjectNotFoundError             no object has the key
    │   ├── ObjectExistsError               an object has the key already
    │   ├── BucketNotFoundError             create the bucket, or fix its name
    │   ├── AccessDeniedError               grant the permission that the message names
    │   ├── CredentialsError                find, renew or correct the credentials
    │   ├── ShortObjectError                the object ends before the range that was asked for
    │   ├── ChecksumRefusedError            the store saw other bytes than were sent
    │   ├── UnsupportedOperationError       this store cannot do that at all
    │   └── TransientStoreError             trying again may help
    │       ├── ThrottledError              … later, and slower
    │       ├── InterruptedReadError        … from the byte reached (.received_bytes)
    │       └── StoreTimeoutError (TimeoutError)
    └── CheckpointError                     has .uri
        ├── CheckpointExistsError           choose another URI, or pass overwrite=True
        ├── CheckpointNotFoundError         nothing is committed there
        ├── CheckpointChangedError          overwritten while it was read: load again
        ├── CommitUnknownError              the answer to the commit was lost: look before you save again
        ├── RankLostError (TimeoutError)    a rank died, stopped or never came: .ranks; restart, load what is committed
        ├── SaveInFlightError               a background save still runs: wait for its handle, or cancel it
        ├── SaveCancelledError              `AsyncSave.cancel` ended the save: .ranks; save again if it was wrong
        ├── GarbageLeftError                gc could not remove everything: .report says what is left
        ├── IncompleteSaveError             the ranks did not write what was planned
        │   └── RemovedObjectsError         what they wrote was removed before the commit
        ├── CorruptCheckpointError          bytes differ from what was saved: load an older one
        │   └── InvalidManifestError        the manifest itself is damaged or not cloudckpt's
        ├── UnsupportedFormatError          written by a newer cloudckpt: upgrade
        ├── UnsupportedValueError           the state dict holds what the format cannot
        ├── StateDictMismatchError          what is asked for is not what was saved
        ├── NoConditionalCommitError        the store cannot create-if-absent
        └── UnsafePickleError               reading it would run code: consent with allow_pickle=True

All of them survive pickling, because ``torch.distributed`` carries them from rank to rank.
"""

from __future__ import annotations

import ast
import contextlib
import pickle
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cloudckpt._messages import limit_text

__all__ = [
    "AccessDeniedError",
    "BucketNotFoundError",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ChecksumRefusedError",
    "CloudckptError",
    "CommitUnknownError",
    "CorruptCheckpointError",
    "CredentialsError",
    "ForkedProcessError",
    "GarbageLeftError",
    "IncompleteSaveError",
    "InterruptedReadError",
    "InvalidManifestError",
    "InvalidOptionError",
    "InvalidURIError",
    "MissingDependencyError",
    "NoConditionalCommitError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "RankLostError",
    "RemovedObjectsError",
    "SaveCancelledError",
    "SaveInFlightError",
    "ShortObjectError",
    "StateDictMismatchError",
    "StoreError",
    "StoreTimeoutError",
    "ThrottledError",
    "TransientStoreError",
    "UnsafePickleError",
    "UnsupportedFormatError",
    "UnsupportedOperationError",
    "UnsupportedValueError",
]


def changed_error(uri: str, *, doing: str, advice: str) -> CheckpointChangedError:
    """Return the error about a checkpoint that has changed while it was read, as `doing` says."""
    return CheckpointChangedError(f"{uri} was overwritten or removed while it was being {doing}. {advice}", uri=uri)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Hint:
    """Advice to pass one argument. The library shows it as Python code, the command line as one of its flags.

    ``advice`` is a sentence with ``{option}`` in place of the words that say how to pass it. ``option`` is the keyword
    of the call, or ``Options.`` and the name of a field. ``value`` is Python code. ``other`` is another way.
    """

    advice: str
    option: str
    value: str = "…"
    other: Hint | None = None

    def __str__(self) -> str:
        return self.as_python()

    def __repr__(self) -> str:
        return f"Hint({self.as_python()!r})"

    def as_python(self, via: str = "") -> str:
        """Return the advice for a caller of the library: ``pass overwrite=True``, ``call cloudckpt.enable(…)``.

        `via` is `CloudckptError.via`.
        """
        first, advice = "", self.advice
        if self.option == "overwrite" and via == UNRESTORED:
            first = _RESTORE_FIRST
        elif self.option == "overwrite" and via.startswith(RESTORED):
            advice = f"This {via}: continue with restored.step + 1, or {{option}} to replace the checkpoint."
        via = "manager" if via.startswith("manager ") else via
        head, dot, name = self.option.rpartition(".")
        code = f"options=cloudckpt.{head}({name}={self.value})" if dot else f"{name}={self.value}"
        form = _FORMS.get(f"{via} {code.partition('=')[0]}") or _FORMS.get(via, "pass {}")
        text = first + advice.format(option=form.format(code))
        return self._with_other(text, lambda other: other.as_python(via))

    def as_flags(self, flags: Mapping[str, str]) -> str:
        """Return the advice for a user of a command whose flags for the options are `flags`."""
        flag, texts = flags[self.option], [""]
        if self.value not in ("True", "…"):
            value = ast.literal_eval(self.value)
            texts = [f" {shlex.quote(str(one))}" for one in (value if isinstance(value, list) else [value])]
        text = self.advice.format(option="pass " + " ".join(f"{flag}{value}" for value in texts))
        return self._with_other(text, lambda other: other.as_flags(flags))

    def _with_other(self, text: str, say: Callable[[Hint], str]) -> str:
        return text if self.other is None else f"{text}, or {say(self.other)}"


_READER_FORM = "pass storage_reader=cloudckpt.ObjectStoreReader(…, {})"
_FORMS = {
    "enable": "call cloudckpt.enable({})",
    "enable rename": _READER_FORM,
    "reader": _READER_FORM,
    "writer": "pass storage_writer=cloudckpt.ObjectStoreWriter(…, {})",
    "manager allow_pickle": "give the CheckpointManager {}",
    "manager options": "give the CheckpointManager {}",
}
"""Words that say how to pass an argument, by `CloudckptError.via`, and by the keyword where needed."""
UNRESTORED = "manager without a restore"
RESTORED = "manager restored step "
"""The beginning of `CloudckptError.via` for a save of a step up to the one that a manager restored, which follows."""
_RESTORE_FIRST = "If this run has saved it, call manager.restore(…) before the first save. "
OVERWRITE_HINT = Hint(
    advice="Choose another URI (another root if another job saves here), or {option} to replace the checkpoint.",
    option="overwrite",
    value="True",
)
ALLOW_PICKLE_HINT = Hint(advice="If you trust who wrote it, {option}.", option="allow_pickle", value="True")


def _rebuild(cls: type[CloudckptError], message: str, attributes: dict[str, Any]) -> CloudckptError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(attributes)
    return error


class CloudckptError(Exception):
    """Base of all errors. The message says what failed, on what, and what to do next.

    ``hint`` is advice to pass an argument, if one helps. ``str()`` appends it to the message as Python code. ``via`` is
    the API that the user called, which decides how the argument is passed: "" for the functions of cloudckpt,
    ``enable``, ``writer`` or ``reader`` for torch's functions, ``manager``, `UNRESTORED` for one that has not
    restored, and `RESTORED` for one whose save is not above its restored step.
    """

    hint: Hint | None = None
    via: str = ""

    def __init__(self, message: str, *, hint: Hint | None = None) -> None:
        super().__init__(limit_text(message).removesuffix("."))  # messages are quoted in others
        if hint is not None:
            self.hint = hint

    @property
    def message(self) -> str:
        """Description of the failure, its object and its cause, without the hint."""
        return str(self.args[0])

    @property
    def failures(self) -> Mapping[int, tuple[BaseException, traceback.StackSummary]]:
        """Exception and traceback by rank. Empty unless the error is the failure of a whole save or load."""
        return {}

    def with_advice(self, advice: str) -> str:
        """Return the message, followed by an advice.

        Args:
            advice: One sentence or more.

        Returns:
            The text.

        """
        return f"{self.message}. {advice}".removesuffix(".")

    def __str__(self) -> str:
        return self.message if self.hint is None else self.with_advice(self.hint.as_python(self.via))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call cls(*args), which breaks every subclass with keywords of its own.
        return _rebuild, (type(self), self.message, dict(self.__dict__))


@contextlib.contextmanager
def raised_via(via: str) -> Iterator[None]:
    """Set `CloudckptError.via` on each error that leaves this context, and on its causes on all ranks."""
    try:
        yield
    except BaseException as error:
        failures = getattr(error, "failures", None) or {}
        for cause in (error, *(cause for cause, _ in failures.values())):
            if isinstance(cause, CloudckptError) and not cause.via:
                cause.via = via
        raise


class InvalidURIError(CloudckptError, ValueError):
    """The URI cannot name a checkpoint."""


class InvalidOptionError(CloudckptError, ValueError):
    """An option has a value that cannot work."""


class MissingDependencyError(CloudckptError, ImportError):
    """A package that the call needs is not installed."""


class ForkedProcessError(CloudckptError, RuntimeError):
    """The process was forked from one that has used cloudckpt, and lacks its threads and connections."""


class StoreError(CloudckptError):
    """One call to a store failed.

    ``key`` is the full address of the object, without credentials, and ``operation`` the call. ``had_no_effect`` is
    True if the call certainly changed nothing. ``is_unsent`` is True if this process made no request, because it lacked
    credentials (their service was busy) or a file descriptor.
    """

    had_no_effect: bool = False
    is_unsent: bool = False

    def __init__(self, message: str, *, key: str, operation: str) -> None:
        super().__init__(message)
        self.key = key
        self.operation = operation


class ObjectNotFoundError(StoreError):
    """No object has the key."""


class ObjectExistsError(StoreError):
    """Create-if-absent was refused: an object has the key already."""


class BucketNotFoundError(StoreError):
    """The bucket does not exist."""


class AccessDeniedError(StoreError):
    """The credentials are valid, and lack a permission."""


class CredentialsError(StoreError):
    """There are no credentials, or they are unknown to the store or expired."""


class ShortObjectError(StoreError):
    """The object ends before the requested range."""


class ChecksumRefusedError(StoreError):
    """The store received bytes that do not match the checksum sent with them."""


class UnsupportedOperationError(StoreError):
    """The store has no such operation."""


class TransientStoreError(StoreError):
    """The call failed, and a later one may succeed."""


class ThrottledError(TransientStoreError):
    """The store asks for fewer requests."""


class InterruptedReadError(TransientStoreError):
    """A response body ended early. Its first ``received_bytes`` bytes arrived."""

    def __init__(self, message: str, *, key: str, operation: str, received_bytes: int) -> None:
        super().__init__(message, key=key, operation=operation)
        self.received_bytes = received_bytes


class StoreTimeoutError(TransientStoreError, TimeoutError):
    """The store made no progress within the configured time."""

    hint = Hint(advice="To wait longer, {option}.", option="Options.timeout_s")


class CheckpointError(CloudckptError):
    """A failure that concerns one checkpoint, which ``uri`` names."""

    def __init__(self, message: str, *, uri: str, hint: Hint | None = None) -> None:
        super().__init__(message, hint=hint)
        self.uri = uri


class CheckpointExistsError(CheckpointError):
    """A checkpoint is committed at the URI already. It was not changed."""


class CheckpointNotFoundError(CheckpointError):
    """No checkpoint is committed at the URI."""


class CheckpointChangedError(CheckpointError):
    """The checkpoint was overwritten or removed while it was being read."""


class CommitUnknownError(CheckpointError):
    """The manifest of a save may exist, so its data was not removed.

    The store's answer to the commit was lost, the commit was interrupted, or another save's commit hides this one. The
    last is known for certain; the error is then a `CheckpointExistsError`, too. A deletion or gc raises it if the
    answer to its fence was lost.
    """


class RankLostError(CheckpointError, TimeoutError):
    """Other ranks died, were stopped, left, never came, or made another call.

    ``ranks`` are their numbers in the group: empty if they are unknown, and this rank alone if the others went on
    without it. A lost rank may have committed the save, so nothing that this rank wrote was removed.
    """

    def __init__(self, message: str, *, uri: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, uri=uri)
        self.ranks = ranks


class SaveInFlightError(CheckpointError):
    """Another background save, of this process or of another rank, still runs. Nothing was begun.

    ``uri`` is the place of that save.
    """


class SaveCancelledError(CheckpointError):
    """A rank cancelled the save before its commit. Readers see nothing of it.

    ``ranks`` are the ranks that cancelled.
    """

    def __init__(self, message: str, *, uri: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, uri=uri)
        self.ranks = ranks


class GarbageLeftError(CheckpointError):
    """`cloudckpt.gc` could not look at everything, or not remove all that it found.

    ``report`` is its whole report.
    """

    def __init__(self, message: str, *, uri: str, report: Any = None) -> None:
        super().__init__(message, uri=uri)
        self.report = report


class IncompleteSaveError(CheckpointError):
    """The ranks did not write all planned items, or their objects were damaged or removed. Nothing was committed."""


class RemovedObjectsError(IncompleteSaveError):
    """Objects that the save has written, or refers to, were removed or replaced. Nothing was committed."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes differ from the bytes that were saved. ``problems`` has a sentence for each difference found."""

    def __init__(self, message: str, *, uri: str, problems: Iterable[str] = (), hint: Hint | None = None) -> None:
        super().__init__(message, uri=uri, hint=hint)
        self.problems = tuple(map(limit_text, problems)) or (self.message,)


class InvalidManifestError(CorruptCheckpointError):
    """The manifest is truncated, damaged, or not a cloudckpt manifest."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint needs a newer cloudckpt, an extension that is not installed, or a newer torch."""


class UnsupportedValueError(CheckpointError):
    """The format cannot store a value of the state dict, or a tensor has no memory.

    In a load: this machine cannot rebuild a saved object, although its bytes are whole.
    """


class StateDictMismatchError(CheckpointError):
    """The state dict does not fit the checkpoint: an entry is missing there, or has another shape or kind.

    In a save: ranks have different entries under one name.
    """


class NoConditionalCommitError(CheckpointError):
    """The store cannot create an object only if it is absent, so overwrites cannot be prevented."""


class UnsafePickleError(CheckpointError):
    """A load would have to unpickle bytes from the store, which can run any code."""


def make_picklable(error: Exception) -> Exception:
    """Return `error` itself if it survives pickling, else a `CloudckptError` with its text.

    ``torch.distributed`` pickles exceptions, and one that cannot be unpickled leaves the other ranks hanging.
    """
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    except Exception:  # noqa: BLE001  # any failure means that it does not survive
        return CloudckptError(f"{type(error).__name__}: {error}")
    return error
