"""What an endpoint that is not the service's own really does, found out on one small object.

Many servers speak S3, some speak GCS's JSON API, and some of them take the condition of a put without a word and
overwrite all the same. That shows only when it is tried. Whatever is not seen to be refused here counts as not refused.
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import TYPE_CHECKING

from cloudckpt._forks import in_child
from cloudckpt.errors import (
    AccessDeniedError,
    ChecksumRefusedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.base import Capabilities

if TYPE_CHECKING:
    from cloudckpt.stores.base import Store

_log = logging.getLogger("cloudckpt")

KEY_PREFIX = ".cloudckpt-probe-"
"""How the keys of probes begin: no manifest's, no checkpoint's and no data's key does."""
_WORDS = b"cloudckpt was finding out what this store does. Nothing needs this object: delete it. ("
_FIRST = _WORDS + b"first)\n"
_SECOND = _WORDS + b"second, which must not be here)\n"
_DAMAGED = _WORDS + b"damaged, which must not be here)\n"
_MOST_READ_BYTES = 1024 * 1024
_NUM_REMOVALS = 2

_found: dict[tuple[str, str], Capabilities] = {}
_locks: dict[tuple[str, str], threading.Lock] = {}
_lock = threading.Lock()


@in_child
def _after_fork() -> None:
    # What was found holds for the child too; a lock may be held by a thread that does not exist there.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _locks.clear()


def found(endpoint: str, bucket: str) -> Capabilities | None:
    """What this process has found out about the bucket; ``None`` where it has not asked."""
    return _found.get((endpoint, bucket))


def refuse_where_ignored(store: Store, key: str, *, endpoint: str, bucket: str) -> None:
    """Raise `UnsupportedOperationError`, for a conditional put where this process has found conditions ignored."""
    known = found(endpoint, bucket)
    if known is not None and not known.conditional_create:
        raise UnsupportedOperationError(
            f"{store.url(key)}: create-if-absent cannot be had here: {known.observed}. Use another store.",
            key=store.url(key),
            operation="put",
        )


def probe(store: Store, *, endpoint: str, bucket: str, condition: str) -> Capabilities:
    """What the bucket at `endpoint` does, tried out once per process on an object under the root of `store`.

    `condition` is what the store sends for create-if-absent, for the log.

    Five requests, or six. The object is removed again, whatever came of it. Raises `StoreError` where the store could
    not be asked, and remembers nothing then: after a `TransientStoreError` try again, which takes a new name.
    """
    with _lock:
        lock = _locks.setdefault((endpoint, bucket), threading.Lock())
    with lock:
        known = found(endpoint, bucket)
        if known is None:
            known = _found[endpoint, bucket] = _try_out(
                store, place=f"{endpoint} (bucket {bucket!r})", condition=condition
            )
    return known


def _try_out(store: Store, *, place: str, condition: str) -> Capabilities:
    # Named anew for each try: a request whose answer was lost may still arrive.
    trial = _Trial(store, f"{KEY_PREFIX}{secrets.token_hex(8)}")
    try:
        lack = trial.lack_of_condition()
        verifies_crc32c = trial.refuses_damage()
    finally:
        trial.clean_up()
    _log.info(
        "%s: create-if-absent (%s) %s; bytes that do not match their CRC32C are %s",
        place,
        condition,
        f"does not work: it {lack}" if lack else "works",
        "refused" if verifies_crc32c else "accepted",
    )
    return Capabilities(
        conditional_create=not lack,
        multipart=True,
        verifies_crc32c=verifies_crc32c,
        observed=f"{place} {lack}" if lack else "",
    )


class _Trial:
    """The questions about one object, in the order of its methods."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._url = store.url(key)
        self._may_exist = False

    def lack_of_condition(self) -> str:
        """What the store does instead of create-if-absent; empty where it does just that."""
        try:
            self._put(_FIRST, if_absent=True)
        except ObjectExistsError as error:
            # A proxy on the way sent it twice; or the store refuses every such put.
            self._may_exist = True
            raise TransientStoreError(
                f"{self._url}: the store says that an object lies at this key, which was drawn at random for this "
                "request. Try again; if it goes on, the store cannot create-if-absent: use another one, or "
                "Options(commit='unconditional').",
                key=error.key,
                operation="probe",
            ) from None
        except StoreError as error:
            if not _may_mean_the_condition(error):
                raise
            self._put(_FIRST)  # raises where it was something else that was refused
            return f"refuses the condition: {error}"
        try:
            self._put(_SECOND, if_absent=True)
        except ObjectExistsError:
            return self._lack_of_truth()
        except StoreError as error:
            if not _may_mean_the_condition(error):
                raise
            return f"does not say that an object exists already: {error}"
        return "ignores the condition: a second create-if-absent at one key succeeded, where 412 was due"

    def refuses_damage(self) -> bool:
        """Whether bytes are refused that do not match the CRC32C sent with them. Never fails: only tests go by it."""
        try:
            self._put(_DAMAGED, damage=1)
        except ChecksumRefusedError:
            return True
        except StoreError as error:
            _log.info("%s: whether wrong checksums are refused could not be told: %s", self._url, error)
        return False

    def clean_up(self) -> None:
        """Remove the object, where there may be one."""
        for tries_left in reversed(range(_NUM_REMOVALS if self._may_exist else 0)):
            try:
                self._store.delete([self._key])
            except StoreError as error:
                if tries_left and isinstance(error, TransientStoreError):
                    continue
                # The bucket may be one that is only ever added to.
                _log.warning("could not remove %s, which nothing needs any more: %s", self._url, error)
            return

    def _lack_of_truth(self) -> str:
        """What a refused put did nevertheless; empty where it did nothing."""
        try:
            content = self._store.read(self._key, max_bytes=_MOST_READ_BYTES)
        except AccessDeniedError:
            _log.info("%s: whether a refused put leaves it as it was was not checked: reading is denied", self._url)
            return ""
        except ObjectNotFoundError:
            return "says that it created an object, and does not find it right afterwards"
        return "" if content == _FIRST else "says that an object exists already (412), and overwrites it all the same"

    def _put(self, content: bytes, *, if_absent: bool = False, damage: int = 0) -> None:
        existed_perhaps, self._may_exist = self._may_exist, True
        view = memoryview(content)
        try:
            self._store.put(self._key, [view], crc32c=crc32c_of([view]) ^ damage, if_absent=if_absent)
        except TransientStoreError:
            raise  # it may have arrived all the same
        except StoreError:
            self._may_exist = existed_perhaps
            raise


def _may_mean_the_condition(error: StoreError) -> bool:
    """Whether a put may have been refused because of its condition: not for the network, a permission or a bucket."""
    return type(error) in (StoreError, UnsupportedOperationError)
