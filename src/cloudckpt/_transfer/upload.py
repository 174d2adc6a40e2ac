"""Objects to a store, as parallel parts, whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from typing_extensions import Self

from cloudckpt._manifest.receipts import ObjectReceipt
from cloudckpt._plan.packing import parts_of
from cloudckpt._transfer.checksum import combined, tile_crc32cs
from cloudckpt._transfer.retry import Retrier
from cloudckpt._workers import Workers
from cloudckpt.errors import ObjectNotFoundError, ShortObjectError, StoreError, UnsupportedOperationError
from cloudckpt.stores.base import Part, Store, UploadedPart, Views

_log = logging.getLogger("cloudckpt")


class Body(Protocol):
    """The bytes of one object, wherever they lie."""

    @property
    def size_bytes(self) -> int: ...

    def open(self, begin: int, end: int) -> AbstractContextManager[Views]:
        """Views of bytes ``[begin, end)``, valid while the context is open."""


@dataclass(slots=True, kw_only=True)
class _Object:
    key: str
    body: Body
    parts: list[Part]
    upload_id: str | None
    crc32cs: dict[int, list[int]] = field(default_factory=dict)
    uploaded: dict[int, UploadedPart] = field(default_factory=dict)


class UploadSession:
    """Uploads objects over one pool of connections; the first failure ends all of it.

    Used as a context: left with an error, it waits for the calls in flight, aborts every unfinished multipart upload
    and removes every object that it wrote. Nothing that it did not finish ever becomes visible.
    """

    def __init__(
        self,
        store: Store,
        retrier: Retrier,
        *,
        cleaner: Retrier,
        connections: int,
        part_bytes: int,
        tile_bytes: int,
        on_part: Callable[[str, int], None],
        on_completing: Callable[[str], None],
        on_object: Callable[[str, int], None],
    ) -> None:
        self._store = store
        self._retrier = retrier
        self._cleaner = cleaner
        self._part_bytes = part_bytes
        self._tile_bytes = tile_bytes
        self._on_part = on_part
        self._on_completing = on_completing
        self._on_object = on_object
        self._workers = Workers(connections, name="cloudckpt-upload")
        # Bodies are made as they are submitted: waiting here keeps what is resolved but not sent small.
        self._slots = threading.BoundedSemaphore(2 * connections)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._open: dict[str, _Object] = {}
        self._receipts: dict[str, ObjectReceipt] = {}
        self._started_keys: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        self._workers.join()
        if self._failure is not None:
            self._remove_everything()

    def submit(self, key: str, body: Body) -> None:
        """Upload `body` to the fresh key `key`; returns once its last part has found a place in the queue.

        Raises the session's first failure, as does `finish`.
        """
        limits = self._store.limits
        whole = body.size_bytes <= min(self._part_bytes, limits.max_put_bytes)
        if whole or not self._store.capabilities.multipart:
            parts = [Part(number=1, offset_bytes=0, size_bytes=body.size_bytes)]
            upload_id = None
        else:
            parts = self._parts_of(key, body.size_bytes)
            upload_id = self._retrier.call(lambda: self._store.create_multipart(key))
        target = _Object(key=key, body=body, parts=parts, upload_id=upload_id)
        with self._lock:
            self._open[key] = target
            self._started_keys.append(key)
        for part in parts:
            self._slots.acquire()
            if self._failure is not None:
                self._slots.release()
                raise self._failure
            self._workers.submit(functools.partial(self._run, target, part))

    def _parts_of(self, key: str, size_bytes: int) -> list[Part]:
        limits = self._store.limits
        try:
            return parts_of(size_bytes, part_bytes=self._part_bytes, tile_bytes=self._tile_bytes, limits=limits)
        except ValueError as error:
            url = self._store.url(key)
            raise UnsupportedOperationError(f"cannot upload {url}: {error}", key=url, operation="put") from error

    def finish(self) -> list[ObjectReceipt]:
        """Wait for every object submitted, and return their receipts in the order of submission."""
        self._workers.join()
        if self._failure is not None:
            raise self._failure
        return [self._receipts[key] for key in self._started_keys]

    def _run(self, target: _Object, part: Part) -> None:
        try:
            if self._failure is None:
                self._upload(target, part)
        except BaseException as error:  # noqa: BLE001  # it is raised again by finish()
            self._fail(error)
        finally:
            self._slots.release()

    def _upload(self, target: _Object, part: Part) -> None:
        store, upload_id = self._store, target.upload_id
        with target.body.open(part.offset_bytes, part.offset_bytes + part.size_bytes) as views:
            values = tile_crc32cs(views, self._tile_bytes)
            whole = combined(values, tile_bytes=self._tile_bytes, size_bytes=part.size_bytes)
            if upload_id is None:
                self._retrier.call(lambda: store.put(target.key, views, crc32c=whole))
            else:
                uploaded = self._retrier.call(
                    lambda: store.upload_part(target.key, upload_id, part, views, crc32c=whole)
                )
        with self._lock:
            target.crc32cs[part.number] = values
            if upload_id is not None:
                target.uploaded[part.number] = uploaded
            is_last = len(target.crc32cs) == len(target.parts)
        self._on_part(target.key, part.size_bytes)
        if is_last:
            self._complete(target)

    def _complete(self, target: _Object) -> None:
        size_bytes = target.body.size_bytes
        upload_id = target.upload_id
        if upload_id is not None:
            parts = [target.uploaded[part.number] for part in target.parts]
            self._on_completing(target.key)
            self._retrier.call(lambda: self._complete_once(target.key, upload_id, parts, size_bytes))
            stored_bytes = self._retrier.call(lambda: self._store.head(target.key)).size_bytes
            if stored_bytes != size_bytes:
                raise ShortObjectError(
                    f"{self._store.url(target.key)} has {stored_bytes} bytes after {size_bytes} were uploaded and "
                    "confirmed: the store is not reliable, so nothing was committed",
                    key=self._store.url(target.key),
                    operation="complete_multipart",
                )
        values = tuple(value for part in target.parts for value in target.crc32cs[part.number])
        with self._lock:
            del self._open[target.key]
            self._receipts[target.key] = ObjectReceipt(key=target.key, size_bytes=size_bytes, tile_crc32cs=values)
        self._on_object(target.key, size_bytes)

    def _complete_once(self, key: str, upload_id: str, parts: list[UploadedPart], size_bytes: int) -> None:
        try:
            self._store.complete_multipart(key, upload_id, parts)
        except ObjectNotFoundError:
            # The upload is gone: an earlier try completed it and only the answer was lost. The key is fresh, so what
            # lies there can only be ours.
            if self._store.head(key).size_bytes != size_bytes:
                raise

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
        self._retrier.stop()

    def _remove_everything(self) -> None:
        """After a failure, with no call in flight. What cannot be removed is left to gc, and said."""
        for target in self._open.values():
            if target.upload_id is not None:
                with _logged("abort", self._store.url(target.key)):
                    self._cleaner.call(functools.partial(self._store.abort_multipart, target.key, target.upload_id))
        with _logged("remove", self._store.uri):
            self._cleaner.call(lambda: self._store.delete(self._started_keys))


@contextlib.contextmanager
def _logged(verb: str, where: str) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        _log.warning("could not %s %s, gc will: %s", verb, where, error)
