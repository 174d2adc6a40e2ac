"""Every error that cloudckpt raises.

Classes follow what a handler would do, not where the error came from::

    CloudckptError
    ├── InvalidURIError (ValueError)        fix the URI
    ├── InvalidOptionError (ValueError)     fix the option
    ├── MissingDependencyError (ImportError) install the extra that the message names
    ├── StoreError                          one call to a store failed; has .key and .operation
    │   ├── ObjectNotFoundError             nothing lies at the key
    │   ├── ObjectExistsError               create-if-absent found something there
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
        ├── RankLostError (TimeoutError)    a rank died, hangs or never came: .ranks; restart, load what is committed
        ├── SaveInFlightError               a background save still runs: wait for its handle, or cancel it
        ├── SaveCancelledError              `AsyncSave.cancel` ended the save: .ranks; save again if it was wrong
        ├── UploadProcessError              the process that uploads was lost: save again
        ├── GarbageLeftError                gc could not remove everything: .report says what is left
        ├── IncompleteSaveError             what was written is not what was planned
        ├── CorruptCheckpointError          bytes differ from what was saved: load an older one
        │   └── InvalidManifestError        the manifest itself is damaged or not ours
        ├── UnsupportedFormatError          written by a newer cloudckpt: upgrade
        ├── UnsupportedValueError           the state dict holds what the format cannot
        ├── StateDictMismatchError          what is asked for is not what was saved
        ├── NoConditionalCommitError        the store cannot create-if-absent
        └── UnsafePickleError               reading it would run code: consent with allow_pickle=True

All of them survive pickling, because ``torch.distributed`` carries them from rank to rank.
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

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
    "UploadProcessError",
]


_LONG_WORD = re.compile(r"\S{1001,}")
MAX_MESSAGE_CHARS = 4000


def bounded(text: str) -> str:
    """Return `text` in bounds and without control characters.

    Messages name tensors, keys and extensions, which come out of manifests: anybody may have put anything there, of any
    length. Long words and long texts lose their middle, so that what failed and what to do next stay.
    """
    return printable(_cut(_LONG_WORD.sub(lambda word: _cut(word[0], 300), text), MAX_MESSAGE_CHARS))


def printable(text: str) -> str:
    """Return `text` without what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} … [{len(text) - 2 * half:,} characters] … {text[-half:]}"


def _rebuild(cls: type[CloudckptError], message: str, attributes: dict[str, Any]) -> CloudckptError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(attributes)
    return error


class CloudckptError(Exception):
    """Base of every error here. The message says what failed, on what, and what to do next."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))

    @property
    def failures(self) -> Mapping[int, tuple[BaseException, traceback.StackSummary]]:
        """Of a whole save or load: what each rank met, by rank, and where. Empty for the failure of a single call."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call cls(*args), which breaks every subclass with keywords of its own.
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class InvalidURIError(CloudckptError, ValueError):
    """The URI cannot name a checkpoint."""


class InvalidOptionError(CloudckptError, ValueError):
    """An option has a value that cannot work."""


class MissingDependencyError(CloudckptError, ImportError):
    """The store needs a package that is not installed."""


class StoreError(CloudckptError):
    """One call to a store failed.

    ``key`` is the full address of the object (never with credentials) and ``operation`` the call. ``had_no_effect``
    where it is known that the call changed nothing: a disk was full before the object appeared, say.
    """

    had_no_effect: bool = False

    def __init__(self, message: str, *, key: str, operation: str) -> None:
        super().__init__(message)
        self.key = key
        self.operation = operation


class ObjectNotFoundError(StoreError):
    """Nothing lies at the key."""


class ObjectExistsError(StoreError):
    """Create-if-absent found an object at the key."""


class BucketNotFoundError(StoreError):
    """The bucket does not exist."""


class AccessDeniedError(StoreError):
    """The credentials are known, but may not do this."""

    unlisted: tuple[str, ...] = ()
    """Of a listing that has given all else: the key prefixes, each with its slash, that could not be looked into."""


class CredentialsError(StoreError):
    """There are no credentials, or the store does not know them, or they have expired."""


class ShortObjectError(StoreError):
    """The object ends before the range that was asked for."""


class ChecksumRefusedError(StoreError):
    """The store found other bytes than the checksum that came with them says."""


class UnsupportedOperationError(StoreError):
    """The store has no such operation."""


class TransientStoreError(StoreError):
    """The call failed in a way that a later call may not."""


class ThrottledError(TransientStoreError):
    """The store asks for fewer requests."""


class InterruptedReadError(TransientStoreError):
    """A response body broke off. The first ``received_bytes`` bytes did arrive."""

    def __init__(self, message: str, *, key: str, operation: str, received_bytes: int) -> None:
        super().__init__(message, key=key, operation=operation)
        self.received_bytes = received_bytes


class StoreTimeoutError(TransientStoreError, TimeoutError):
    """The store made no progress within the configured time."""


class CheckpointError(CloudckptError):
    """Something about one checkpoint. ``uri`` names it."""

    def __init__(self, message: str, *, uri: str) -> None:
        super().__init__(message)
        self.uri = uri


class CheckpointExistsError(CheckpointError):
    """A checkpoint is committed at the URI already; it was left untouched."""


class CheckpointNotFoundError(CheckpointError):
    """No checkpoint is committed at the URI."""


class CheckpointChangedError(CheckpointError):
    """The checkpoint was overwritten or removed while it was being read."""


class CommitUnknownError(CheckpointError):
    """The answer to the commit was lost and could not be found out. Nothing was removed."""


class RankLostError(CheckpointError, TimeoutError):
    """Other ranks died, hang, left, never came, or came to make another call. ``ranks`` are theirs in the group.

    ``ranks`` is empty where it could not be found out which. What this rank wrote is still there: a rank that was
    lost may have committed it. ``ranks`` is this rank alone where it was the others that went on without it.
    """

    def __init__(self, message: str, *, uri: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, uri=uri)
        self.ranks = ranks


class SaveInFlightError(CheckpointError):
    """Another background save, of this process or of another rank, still runs. ``uri`` is where that one goes; nothing
    was begun.
    """


class SaveCancelledError(CheckpointError):
    """The save was cancelled before its commit. ``ranks`` are those that did it; nothing of it is visible."""

    def __init__(self, message: str, *, uri: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, uri=uri)
        self.ranks = ranks


class UploadProcessError(CheckpointError):
    """The process that uploads (`Options.async_mode`) ended or hung, before any commit; or it could not be started."""


class GarbageLeftError(CheckpointError):
    """`cloudckpt.gc` could not look at everything, or not remove all that it found. ``report`` is its whole report."""

    def __init__(self, message: str, *, uri: str, report: Any = None) -> None:
        super().__init__(message, uri=uri)
        self.report = report


class IncompleteSaveError(CheckpointError):
    """What the ranks wrote is not what was planned, so nothing was committed."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are not the bytes that were saved. ``problems`` has every one that was found, a sentence each."""

    def __init__(self, message: str, *, uri: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message, uri=uri)
        self.problems = tuple(map(bounded, problems)) or (str(self),)


class InvalidManifestError(CorruptCheckpointError):
    """The manifest is truncated, damaged, or not a cloudckpt manifest."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint was written in a newer major version of the format, through an extension not known here, or by
    torch's own writer and, as it seems, in a newer version.
    """


class UnsupportedValueError(CheckpointError):
    """The state dict holds a value that the format cannot store, or a tensor without memory to load into; or what was
    saved is whole, and no such object can be made of it here.
    """


class StateDictMismatchError(CheckpointError):
    """The state dict does not fit: it has entries that the checkpoint lacks, or has in another shape, or as a tensor
    where a value is wanted, or the reverse; or ranks that save have different things under one name.
    """


class NoConditionalCommitError(CheckpointError):
    """The store cannot create an object only if it is absent, so overwrites cannot be prevented."""


class UnsafePickleError(CheckpointError):
    """Reading would unpickle bytes from the store, which can run any code."""


def portable(error: Exception) -> Exception:
    """`error` itself if it survives pickling, else a `CloudckptError` with its text.

    ``torch.distributed`` pickles exceptions; one that does not come back leaves the other ranks hanging.
    """
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    except Exception:  # noqa: BLE001  # whatever it is, it does not travel
        return CloudckptError(f"{type(error).__name__}: {error}")
    return error
