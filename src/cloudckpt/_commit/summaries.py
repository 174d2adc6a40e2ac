"""What manifests say in short, without all that they name in memory."""

from __future__ import annotations

import threading

from cloudckpt._commit.fence import MAX_FENCE_BYTES, is_fence
from cloudckpt._commit.resolve import Log, manifest_key, read_document
from cloudckpt._manifest.codec import decode
from cloudckpt._manifest.summary import Summary, summary_of
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import InvalidManifestError, ObjectNotFoundError
from cloudckpt.stores.base import Store

_LARGE_BYTES = 32 * 1024 * 1024


class Summaries:
    """For several threads, which read small manifests at once, and large ones one after the other.

    With `check`, of manifests that say nothing that contradicts itself in any place.
    """

    def __init__(self, retrier: Retrier, *, check: bool = False) -> None:
        self._retrier, self._check = retrier, check
        self._one_large = threading.Lock()

    def read(self, store: Store, log: Log) -> Summary | None:
        """Of the manifest that counts; None where it has vanished since. Raises what `summary_of` raises."""
        number = log.counting
        assert number is not None  # noqa: S101  # asked for only then
        size_bytes = max((entry.size_bytes for entry in log.entries if entry.number == number), default=0)
        try:
            if size_bytes <= _LARGE_BYTES:
                return self._retrier.confirmed(lambda: self._read(store, number), InvalidManifestError)
            with self._one_large:  # or so many would take gigabytes together
                return self._retrier.confirmed(lambda: self._read(store, number), InvalidManifestError)
        except ObjectNotFoundError:
            return None

    def _read(self, store: Store, number: int) -> Summary | None:
        document, key = read_document(store, number, self._retrier), manifest_key(number)
        if is_fence(document) and len(document) <= MAX_FENCE_BYTES:
            return None
        if self._check:
            decode(document, uri=store.url(key))
        return summary_of(document, uri=store.url(key))
