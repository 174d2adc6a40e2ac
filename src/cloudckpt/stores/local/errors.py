"""The table of the errors of a file system."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from cloudckpt.errors import (
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
    from collections.abc import Iterator, Mapping

ERRNO_TABLE: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOENT: (ObjectNotFoundError, "There is no such object."),
    errno.EEXIST: (ObjectExistsError, "An object exists there already."),
    errno.ENOTDIR: (
        StoreError,
        "A file is where a directory is needed: choose another path.",
    ),
    # A refusal: nothing was written, and a commit that meets it is known not to have happened.
    errno.EISDIR: (
        UnsupportedOperationError,
        "A directory is where a file is needed: remove it, or choose another path.",
    ),
    errno.ELOOP: (StoreError, "Symbolic links form a loop, or one is where none may be followed."),
    errno.ENAMETOOLONG: (StoreError, "The path is longer than the file system allows: choose a shorter one."),
    errno.EINVAL: (StoreError, "The file system refuses the name or the operation."),
    errno.EILSEQ: (StoreError, "The file system refuses the name: choose one in plain characters."),
    errno.EACCES: (AccessDeniedError, "Grant this user access to the directory, or choose another path."),
    errno.EPERM: (AccessDeniedError, "Grant this user access to the directory, or choose another path."),
    errno.EROFS: (AccessDeniedError, "The file system is mounted read-only: choose another path."),
    errno.ENOSPC: (StoreError, "The file system is full: free some space, then save again."),
    errno.EDQUOT: (StoreError, "This user's quota is used up: free some space, then save again."),
    errno.EFBIG: (StoreError, "The file is larger than the file system or a limit (ulimit -f) allows."),
    errno.EIO: (StoreError, "The device failed: look at the kernel's log, and save elsewhere."),
    errno.ENXIO: (StoreError, "It is no regular file, or its device is gone."),
    errno.ENODEV: (StoreError, "The device is gone: mount it again."),
    errno.ENOTCONN: (StoreError, "The file system's server is gone: mount it again."),
    errno.EMLINK: (StoreError, "The file system allows no further link."),
    errno.EXDEV: (StoreError, "The path crosses from one file system into another."),
    errno.EOPNOTSUPP: (UnsupportedOperationError, "The file system has no such operation."),
    errno.ENOSYS: (UnsupportedOperationError, "The file system has no such operation."),
    errno.ENOMEM: (TransientStoreError, "The kernel has no memory left for it."),
    errno.EMFILE: (TransientStoreError, "This process has too many open files (see ulimit -n)."),
    errno.ENFILE: (TransientStoreError, "The system has too many open files."),
    errno.EAGAIN: (TransientStoreError, "The file system is busy."),
    errno.EBUSY: (TransientStoreError, "The file system is busy."),
    errno.EINTR: (TransientStoreError, "A signal interrupted it."),
    errno.ENOLCK: (TransientStoreError, "The file system has no locks left."),
    errno.ESTALE: (TransientStoreError, "The file was replaced on the server meanwhile."),
    errno.EREMOTEIO: (TransientStoreError, "The file system's server failed."),
    errno.ENETDOWN: (TransientStoreError, "The network to the file system's server is down."),
    errno.ENETUNREACH: (TransientStoreError, "The file system's server cannot be reached."),
    errno.EHOSTDOWN: (TransientStoreError, "The file system's server is down."),
    errno.EHOSTUNREACH: (TransientStoreError, "The file system's server cannot be reached."),
    errno.ECONNREFUSED: (TransientStoreError, "The file system's server does not answer."),
    errno.ECONNRESET: (TransientStoreError, "The connection to the file system's server broke off."),
    errno.ECONNABORTED: (TransientStoreError, "The connection to the file system's server broke off."),
    errno.EPIPE: (TransientStoreError, "The connection to the file system's server broke off."),
    errno.ETIMEDOUT: (StoreTimeoutError, "The file system's server did not answer in time."),
}


def translate(error: OSError, *, key: str, operation: str) -> StoreError:
    """Return `error` as a `StoreError`. `key` is the full path of the object."""
    kind, advice = ERRNO_TABLE.get(error.errno or 0, (StoreError, ""))
    reason = error.strerror or type(error).__name__
    # The path that failed may be a directory above the object, or below the listed one: the user has to look at it.
    failed = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else key
    is_another = key.startswith(f"{failed}/") or failed.startswith(f"{key.rstrip('/')}/")
    where = f" (at {failed.rstrip('/')})" if is_another else ""
    return kind(f"{operation} {key}: {reason}{where}. {advice}".rstrip(), key=key, operation=operation)


def raise_denied(denied: Mapping[str, OSError], *, key: str, operation: str) -> None:
    """Raise the error at the end of a listing, if it was `denied` a look into some directories."""
    if denied:
        first, *others = sorted(denied)
        error = translate(denied[first], key=key, operation=operation)
        if others:
            error.args = (f"{error} Directories that could not be looked into: {len(denied):,}.",)
        if isinstance(error, AccessDeniedError):
            error.unlisted = (first, *others)
        raise error from denied[first]


@contextlib.contextmanager
def translated(key: str, operation: str, *, had_no_effect: bool = False) -> Iterator[None]:
    """Translate an `OSError` of the block. `had_no_effect` if others can see nothing of what was done."""
    try:
        yield
    except CloudckptError:  # StoreTimeoutError is an OSError too
        raise
    except OSError as error:
        failure = translate(error, key=key, operation=operation)
        failure.had_no_effect = had_no_effect
        raise failure from error
