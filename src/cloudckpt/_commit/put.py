"""Adding an entry to a checkpoint's log, and what is known of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from awscrt.checksums import crc32c

from cloudckpt._commit.fence import Fence, encode_fence, new_fence
from cloudckpt._commit.resolve import manifest_key, read_entry
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointError,
    ChecksumRefusedError,
    CommitUnknownError,
    CredentialsError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores.base import Store

# Errors that say that the object was not written. Any other may have come after it was, unless it says that it did not.
_REFUSALS = (
    AccessDeniedError,
    BucketNotFoundError,
    ChecksumRefusedError,
    CredentialsError,
    ObjectExistsError,
    UnsupportedOperationError,
)
_MOST_SWEEPS = 3
"""On a path, a deletion of the same checkpoint takes the hidden file of a put under way for an unfinished upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOutcome:
    """How a put ended, over all its tries."""

    error: StoreError | None
    """Of the last try; None where it succeeded."""
    may_have_arrived: bool
    """Some try ended in a way that does not tell. A refusal says nothing of the tries before it."""

    @property
    def is_taken(self) -> bool:
        """Whether something lies at the key: perhaps what an earlier try left."""
        return isinstance(self.error, ObjectExistsError)

    @property
    def is_refused(self) -> bool:
        """Every try ended with an answer that nothing was written. It need not be true: a proxy may have given it."""
        return self.error is not None and not (self.is_taken or self.may_have_arrived)


def put_entry(store: Store, number: int, document: bytes, *, conditional: bool, retrier: Retrier) -> PutOutcome:
    """Put `document` as the entry with that number; where `conditional`, only if there is none."""
    key, views, checksum = manifest_key(number), [memoryview(document)], crc32c(document)
    may_have_arrived = False

    num_swept = 0

    def put() -> None:
        nonlocal may_have_arrived, num_swept
        try:
            store.put(key, views, crc32c=checksum, if_absent=conditional)
        except _REFUSALS:
            raise
        except StoreError as error:
            may_have_arrived = may_have_arrived or not error.had_no_effect
            num_swept += isinstance(error, ObjectNotFoundError)
            if num_swept > _MOST_SWEEPS or not isinstance(error, ObjectNotFoundError):
                raise
            put()
        except Exception:  # of a `wrap_store`, say: nobody knows what it has done before
            may_have_arrived = True
            raise

    try:
        retrier.call(put)
    except StoreError as error:
        return PutOutcome(error=error, may_have_arrived=may_have_arrived)
    return PutOutcome(error=None, may_have_arrived=False)


def lay_fence(store: Store, number: int, *, keeps: int | None, retrier: Retrier) -> bool:
    """Whether this call has put a fence at `number`; False where another entry has it.

    Raises a `StoreError` if the store refused, and `CommitUnknownError` if it cannot be known: the fence may be there,
    or still appear.
    """
    fence = new_fence(keeps=keeps)
    outcome = put_entry(store, number, encode_fence(fence), conditional=True, retrier=retrier)
    if outcome.error is None:
        return True
    try:
        found = read_entry(store, number, retrier) or read_entry(store, number, retrier)
    except StoreError as error:
        raise _unknown(store, number, error) from error
    except CheckpointError:
        found = None
    if isinstance(found, Fence) and found.id == fence.id:
        return True
    if outcome.is_refused:
        raise outcome.error
    if not outcome.is_taken:
        raise _unknown(store, number, outcome.error) from outcome.error
    return False


def _unknown(store: Store, number: int, error: StoreError) -> CommitUnknownError:
    return CommitUnknownError(
        f"{store.url(manifest_key(number))} was sent, but whether it arrived could not be found out: "
        f"{str(error).rstrip('.')}. No data was removed. Try again when the store answers",
        uri=store.uri,
    )
