"""The table of the errors of a file system."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from cloudckpt.errors import (
    TOO_MANY_FILES,
    AccessDeniedError,
    CloudckptError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreTimeoutError,
    TransientStoreError,
    UnsupportedOperationError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

ERRNO_TABLE: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOENT: (ObjectNotFoundError, "There is no such object."),
    errno.EEXIST: (ObjectExistsError, "An object exists there already."),
    errno.ENOTDIR: (
        StoreError,
        "A file is where a directory is needed: choose another path, or make a checkpoint of it (import).",
    ),
    # A refusal: nothing was written, and a commit that meets it is known not to have happened.
    errno.EISDIR: (
        UnsupportedOperationError,
        "A directory is where a file is needed: remove it, or choose another path.",
    ),
    errno.ENAMETOOLONG: (StoreError, "The path is longer than the file system allows: choose a shorter one."),
    errno.EACCES: (AccessDeniedError, "Grant this user access to the directory, or choose another path."),
    errno.EPERM: (AccessDeniedError, "Grant this user access to the directory, or choose another path."),
    errno.EROFS: (AccessDeniedError, "The file system is mounted read-only: choose another path."),
    errno.ENOSPC: (StoreError, "The file system is full: free some space, then save again."),
    errno.EDQUOT: (StoreError, "This user's quota is used up: free some space, then save again."),
    errno.EFBIG: (StoreError, "The file is larger than the file system or a limit (ulimit -f) allows."),
    errno.EIO: (StoreError, "The device failed: look at the kernel's log, and save elsewhere."),
    errno.EOPNOTSUPP: (UnsupportedOperationError, "The file system has no such operation."),
    errno.ENOSYS: (UnsupportedOperationError, "The file system has no such operation."),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), (TransientStoreError, TOO_MANY_FILES)),
    errno.ETIMEDOUT: (StoreTimeoutError, "The file system's server did not answer in time."),
    **dict.fromkeys(
        (errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOLCK),
        (TransientStoreError, "The system is busy."),
    ),
    **dict.fromkeys(
        (
            *(errno.ESTALE, errno.EREMOTEIO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
            *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE),
        ),
        (TransientStoreError, "The file system's server failed or cannot be reached."),
    ),
}
"""Any other number is a plain `StoreError`: another try does not help."""

REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMLINK, errno.ENAMETOOLONG),
        *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS),
    }
)
"""The errors with which ``link`` and ``rename`` say that they did nothing (link(2), rename(2)).

Any other may come after the deed: a server may have done what its answer was lost of.
"""


def translate(error: OSError, *, key: str, operation: str) -> StoreError:
    """Return `error` as a `StoreError`. `key` is the full path of the object."""
    kind, advice = ERRNO_TABLE.get(error.errno or 0, (StoreError, ""))
    reason = error.strerror or type(error).__name__
    # The path that failed may be a directory above the object, or below the listed one: the user has to look at it.
    failed = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else key
    is_another = key.startswith(f"{failed}/") or failed.startswith(f"{key.rstrip('/')}/")
    where = f" (at {failed.rstrip('/')})" if is_another else ""
    failure = kind(f"{operation} {key}: {reason}{where}. {advice}".rstrip(), key=key, operation=operation)
    failure.is_unsent = advice is TOO_MANY_FILES
    return failure


@contextlib.contextmanager
def translated(
    key: str, operation: str, *, had_no_effect: bool = False, refusals: Collection[int] = ()
) -> Iterator[None]:
    """Translate an `OSError` of the block.

    `had_no_effect` if others can see nothing of what was done; with one of the numbers in `refusals`, they cannot.
    """
    try:
        yield
    except CloudckptError:  # StoreTimeoutError is an OSError too
        raise
    except OSError as error:
        failure = translate(error, key=key, operation=operation)
        failure.had_no_effect = had_no_effect or error.errno in refusals
        raise failure from error
