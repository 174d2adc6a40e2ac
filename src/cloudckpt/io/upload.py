"""Upload objects as parallel parts. An object becomes visible whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from typing_extensions import Self

from cloudckpt._messages import gc_advice
from cloudckpt._workers import WorkQueue, requests_per_connection
from cloudckpt.errors import ObjectNotFoundError, ShortObjectError, StoreError, UnsupportedOperationError
from cloudckpt.format.model import ObjectRef
from cloudckpt.io.body import Body
from cloudckpt.io.client import Retries, StoreClient
from cloudckpt.io.download import find_size
from cloudckpt.io.leftovers import Leftover, Resumption, ReusableParts
from cloudckpt.io.reads import spread_over_connections
from cloudckpt.stores.base import Limits, Part, UploadedPart, Views, combine_tile_crc32cs, compute_tile_crc32cs
from cloudckpt.telemetry.timeline import Recorder, now_ns

_log = logging.getLogger("cloudckpt")

_SMALL_PART_BYTES = 16 * 1024 * 1024
_MIN_FITTED_PART_BYTES = 64 * 1024


@dataclass(slots=True, kw_only=True)
class ObjectUpload:
    """The upload of one object, from `UploadSession.submit` or `begin` to its receipt."""

    key: str
    """The new key that the object was submitted for."""
    data_key: str
    """The key of the data. It differs from `key` only if the upload of an earlier attempt is continued."""
    body: Body
    parts: list[Part]
    upload_id: str | None
    num_reused_bytes: int = 0
    """The size of the parts that an earlier attempt has sent. If it is not 0, a failed upload is sent anew, whole."""
    is_assembled: bool = False
    """The service has copied some parts. A failed upload is sent anew, whole."""
    is_abandoned: bool = False
    """True once another upload of the object has begun. No thread sends a further part of this one."""
    crc32cs: dict[int, list[int]] = field(default_factory=dict)
    """The checksums of the tiles of each part that the store has, by the part's number."""
    uploaded: dict[int, UploadedPart] = field(default_factory=dict)


class UploadSession:
    """Uploads the objects of one save on one rank, in threads. The first failure ends the whole session.

    The session is a context. At its end it waits for the calls in flight. After a failure, it also aborts every
    unfinished multipart upload, and removes every object that it wrote. An object that is not complete never becomes
    visible.

    Args:
        client: Client of the store.
        part_bytes: Size of a part, unless `submit` is given another one.
        tile_bytes: Size of a tile.
        resumable: Abort and remove nothing after a failure, so that a later session finds the parts.
        daemon: Let the interpreter end although the context is open.
        on_part: Called with the key and the size of each part that the store has.
        on_completing: Called with the key of a multipart upload before it is completed.
        on_object: Called with the key and the size of each object that is complete.

    """

    def __init__(
        self,
        client: StoreClient,
        *,
        part_bytes: int,
        tile_bytes: int,
        resumable: bool,
        daemon: bool,
        on_part: Callable[[str, int], None],
        on_completing: Callable[[str], None],
        on_object: Callable[[str, int], None],
    ) -> None:
        self._client, self._store = client, client.store
        self._cleaner = client.unstopped_copy()
        self._part_bytes = part_bytes
        self._tile_bytes = tile_bytes
        self._hedger = hedger = client.hedger
        self._resumable = resumable
        self._resumption = Resumption(client, tile_bytes=tile_bytes)
        self._on_part = on_part
        self._on_completing = on_completing
        self._on_object = on_object
        self._daemon = daemon
        self.tasks = WorkQueue(
            hedger.connections_now,
            name="cloudckpt-upload",
            max_waiting=hedger.connections_now() if self._store.capabilities.parallel_parts else 1,
            daemon=daemon,
        )
        self._context = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._open: dict[str, ObjectUpload] = {}
        self.num_reused_bytes = 0
        """Bytes that were on the store already, so that the session did not send them."""
        self._receipts: dict[str, ObjectRef] = {}
        self._started_keys: list[str] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._hedger.watching(daemon=self._daemon))
            stack.enter_context(self.tasks)
            self._context = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        self._context.close()
        if self._failure is not None and not self._resumable:
            self._remove_everything()

    def submit(
        self,
        key: str,
        body: Body,
        leftovers: Sequence[Leftover] = (),
        *,
        part_bytes: int | None = None,
        in_memory: bool = False,
    ) -> None:
        """Upload `body` to the new key `key`. Returns once its last part has a place in the queue.

        Raises the session's first failure, as `receipts` does.

        Args:
            key: The key. If leftovers are used, the receipt names another key.
            body: The bytes.
            leftovers: Objects and uploads of an earlier attempt. Their bytes that are the same are not sent again.
            part_bytes: Size of the parts; by default the session's.
            in_memory: The body is in this host's memory. If the store writes the parts of an object in turn, one thread
                can send them in turn.

        """
        reused = self._resumption.find_finished(body, leftovers)
        if reused is not None:
            with self._lock:
                self._started_keys.append(key)
                self._receipts[key] = reused
                self.num_reused_bytes += reused.size_bytes
            return
        part_bytes = self._resumption.find_earlier_part_bytes(leftovers) or part_bytes or self._part_bytes
        parts = self._plan_parts(key, body.size_bytes, part_bytes)
        reusable = None if parts is None else self._resumption.find_unfinished(body, parts, leftovers)
        upload = (
            self._new_upload(key, body, parts)
            if parts is None or reusable is None
            else self._continue_upload(key, body, parts, reusable)
        )
        with self._lock:
            self._started_keys.append(key)
            self._open[key] = upload
        missing: list[Part | None] = [part for part in upload.parts if part.number not in upload.crc32cs]
        # Callers make each body as they submit it. Waiting here bounds the memory of bodies that are not sent yet.
        self._enqueue(upload, missing or [None], in_turn=in_memory and not self._store.capabilities.parallel_parts)

    def begin(self, key: str, body: Body) -> ObjectUpload:
        """Begin an object of unknown size at the new key `key`. `append` sends parts, and `finish` completes it."""
        upload = ObjectUpload(key=key, data_key=key, body=body, parts=[], upload_id=None)
        with self._lock:
            self._started_keys.append(key)
            self._open[key] = upload
        return upload

    def append(self, upload: ObjectUpload, part: Part) -> None:
        """Upload a part of a multipart object that others follow. Raises the session's first failure."""
        if upload.upload_id is None:
            try:
                upload.upload_id = self._client.create_multipart(upload.key)
            except BaseException as error:
                self._fail(error)
                raise
        self._enqueue(upload, [part])

    def finish(self, upload: ObjectUpload, parts: list[Part], *, missing: Sequence[Part]) -> None:
        """Upload the `missing` parts, at least one, and then complete the object of all `parts`."""
        upload.parts = parts
        self._enqueue(upload, missing)

    def join_parts(
        self, key: str, body: Body, upload_id: str, parts: list[Part], copied: Sequence[UploadedPart]
    ) -> ObjectUpload:
        """Upload those of all `parts` that the service has not copied, at least one, and then complete the object."""
        upload = self.begin(key, body)
        upload.upload_id, upload.is_assembled = upload_id, True
        upload.uploaded = {done.part.number: done for done in copied}
        upload.crc32cs = {number: [] for number in upload.uploaded}
        self.finish(upload, parts, missing=[part for part in parts if part.number not in upload.uploaded])
        return upload

    def _enqueue(self, upload: ObjectUpload, parts: Sequence[Part | None], *, in_turn: bool = False) -> None:
        # Parts in turn have one thread, and leave the other threads to other objects.
        for group in [parts] if in_turn else [[part] for part in parts]:
            self.tasks.submit(functools.partial(self._send_parts, upload, group))
            if self._failure is not None:
                raise self._failure

    def _plan_parts(self, key: str, size_bytes: int, part_bytes: int) -> list[Part] | None:
        """Return the parts of an upload; None for an object that is put whole."""
        limits = self._store.limits
        if size_bytes <= min(part_bytes, limits.max_put_bytes) or not self._store.capabilities.multipart:
            return None
        try:
            return plan_parts(size_bytes, part_bytes=part_bytes, tile_bytes=self._tile_bytes, limits=limits)
        except ValueError as error:
            raise self._store.error(UnsupportedOperationError, "put", key, f"cannot be uploaded: {error}") from error

    def _new_upload(self, key: str, body: Body, parts: list[Part] | None) -> ObjectUpload:
        upload_id = None
        if parts is None:
            parts = [Part(number=1, offset_bytes=0, size_bytes=body.size_bytes)]
        else:
            upload_id = self._client.create_multipart(key)
        return ObjectUpload(key=key, data_key=key, body=body, parts=parts, upload_id=upload_id)

    def _continue_upload(self, key: str, body: Body, parts: list[Part], reusable: ReusableParts) -> ObjectUpload:
        """Continue the upload of an earlier attempt. If parts complete any upload, begin a new one with its parts."""
        data_key, upload_id = reusable.key, reusable.upload_id
        if self._store.capabilities.listed_parts == "any_upload":
            data_key, upload_id = key, self._client.create_multipart(key)
        return ObjectUpload(
            key=key,
            data_key=data_key,
            body=body,
            parts=parts,
            upload_id=upload_id,
            num_reused_bytes=reusable.num_bytes,
            crc32cs=reusable.crc32cs,
            uploaded=reusable.uploaded,
        )

    def receipts(self) -> list[ObjectRef]:
        """Return the receipts of all objects in the order of submission, after ``tasks.join()``."""
        if self._failure is not None:
            raise self._failure
        return [self._receipts[key] for key in self._started_keys]

    def _send_parts(self, upload: ObjectUpload, parts: Sequence[Part | None]) -> None:
        """Send `parts` in turn, and complete the object after its last part. None as the only part completes it."""
        store, client, upload_id = self._store, self._client, upload.upload_id
        for part in parts:
            if self._failure is not None or upload.is_abandoned:
                return
            try:
                if part is not None:
                    with _open_part(
                        upload.body, part, key=upload.data_key, tile_bytes=self._tile_bytes, recorder=client.recorder
                    ) as (views, tile_crc32cs, part_crc32c):
                        retries = Retries(client)
                        while True:  # not `StoreClient.call`: one frame less in the traceback of a failed part
                            with retries:
                                if upload_id is None:
                                    store.put(upload.data_key, views, crc32c=part_crc32c)
                                else:
                                    upload.uploaded[part.number] = self._hedger.upload_part(
                                        store, upload.data_key, upload_id, part, views, crc32c=part_crc32c
                                    )
                                break
                    with self._lock:
                        upload.crc32cs[part.number] = tile_crc32cs
                        is_last = len(upload.crc32cs) == len(upload.parts)
                    self._on_part(upload.data_key, part.size_bytes)
                if part is None or is_last:
                    self._complete(upload)
            except BaseException as error:  # noqa: BLE001  # receipts() raises it
                if (upload.num_reused_bytes or upload.is_assembled) and isinstance(error, StoreError):
                    self._send_anew(upload, error)
                else:
                    self._fail(_explained_error(error))

    def _send_anew(self, upload: ObjectUpload, error: StoreError) -> None:
        """Send the whole object to its own key, in the thread of its first part that failed."""
        with self._lock:
            if upload.is_abandoned or self._failure is not None:
                return
            upload.is_abandoned = True
        _log.info("sending %s anew, for %s cannot be completed: %s", upload.key, upload.data_key, error)
        if upload.is_assembled:
            self._abort(upload)
        try:
            new_upload = self._new_upload(upload.key, upload.body, upload.parts)
        except BaseException as failure:  # noqa: BLE001  # receipts() raises it
            self._fail(failure)
            return
        with self._lock:
            self._open[upload.key] = new_upload
        self._send_parts(new_upload, new_upload.parts)

    def _complete(self, upload: ObjectUpload) -> None:
        size_bytes = upload.body.size_bytes
        if upload.upload_id is not None:
            self._on_completing(upload.data_key)
            self._client.call(self._complete_once, upload, upload.upload_id)
            self._check_stored(upload)
        tile_crc32cs = tuple(value for part in upload.parts for value in upload.crc32cs[part.number])
        receipt = ObjectRef(
            key=upload.data_key, size_bytes=size_bytes, tile_bytes=self._tile_bytes, tile_crc32cs=tile_crc32cs
        )
        with self._lock:
            del self._open[upload.key]
            self._receipts[upload.key] = receipt
            self.num_reused_bytes += upload.num_reused_bytes
        self._on_object(upload.data_key, size_bytes)

    def _complete_once(self, upload: ObjectUpload, upload_id: str) -> None:
        parts = [upload.uploaded[part.number] for part in upload.parts]
        try:
            self._hedger.complete_multipart(self._store, upload.data_key, upload_id, parts)
        except ObjectNotFoundError:
            # The upload is gone: an earlier try has completed it, and its answer was lost. No other process writes to a
            # new key, so the object there is this one. But another process may have completed an upload that this one
            # continues.
            if self._resumable and not self._resumption.is_at(upload.data_key, upload.body):
                raise
            if self._store.head(upload.data_key).size_bytes != upload.body.size_bytes:
                raise

    def _check_stored(self, upload: ObjectUpload) -> None:
        store, key, size_bytes = self._store, upload.data_key, upload.body.size_bytes
        stored_bytes = find_size(self._client, key=key, size_bytes=size_bytes)
        if stored_bytes is None:
            raise store.error(ObjectNotFoundError, "complete_multipart", key, "no object is there after its upload.")
        if stored_bytes != size_bytes:
            problem = (
                f"the object has {stored_bytes} bytes after {size_bytes} were uploaded and confirmed: the store is not "
                "reliable, so nothing was committed"
            )
            raise store.error(ShortObjectError, "complete_multipart", key, problem)
        if upload.num_reused_bytes and not self._resumption.is_at(key, upload.body):
            raise store.error(StoreError, "complete_multipart", key, "the object is not what was sent")

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
        self._client.stop()

    def _remove_everything(self) -> None:
        """Remove all that was sent, after a failure, with no call in flight. Log the keys that remain for gc."""
        for upload in self._open.values():
            self._abort(upload)
        with logging_store_errors("remove what a failed save wrote", uri=self._store.uri):
            self._cleaner.delete(self._started_keys)

    def _abort(self, upload: ObjectUpload) -> None:
        if upload.upload_id is not None:
            with logging_store_errors("abort an upload", uri=self._store.uri):
                self._cleaner.abort_multipart(upload.key, upload.upload_id)


def _explained_error(error: BaseException) -> BaseException:
    if not isinstance(error, ObjectNotFoundError):
        return error
    why = "Something removed it during the save (a gc that spares too little, a lifecycle rule?): save again"
    return ObjectNotFoundError(f"{error} {why}", key=error.key, operation=error.operation)


@contextlib.contextmanager
def logging_store_errors(action: str, *, uri: str) -> Iterator[None]:
    """Log a `StoreError` of a clean-up at `uri` in this context, and do not raise it. `action` follows "could not"."""
    try:
        yield
    except StoreError as error:
        _log.warning("could not %s: %s. %s", action, error, gc_advice(uri))


@contextlib.contextmanager
def _open_part(
    body: Body, part: Part, *, key: str, tile_bytes: int, recorder: Recorder
) -> Iterator[tuple[Views, list[int], int]]:
    """Yield the views of a part, the CRC32C of each of its tiles, and the part's CRC32C. `key` is for the timeline."""
    begun_ns = now_ns()
    with body.open(part.offset_bytes, part.offset_bytes + part.size_bytes) as views:
        recorder.span("stage", begun_ns, key=key, part=part.number, size=part.size_bytes)
        checksum_begun_ns = now_ns()
        tile_crc32cs = compute_tile_crc32cs(views, tile_bytes)
        part_crc32c = combine_tile_crc32cs(tile_crc32cs, tile_bytes=tile_bytes, size_bytes=part.size_bytes)
        recorder.span("checksum", checksum_begun_ns, key=key, part=part.number, size=part.size_bytes)
        recorder.add_time_since("stage", begun_ns)
        yield views, tile_crc32cs, part_crc32c


def choose_part_bytes(num_bytes: int, *, connections: int, max_bytes: int, buffer_bytes: int | None) -> int:
    """Return the part size, at most `max_bytes`, for a save that writes `num_bytes`.

    Parts are as large as possible, since each costs the client some CPU, but every connection has a few. If parts are
    copied to buffers of `buffer_bytes` in all, every connection has a buffer.
    """
    if buffer_bytes is not None:
        max_bytes = min(max_bytes, buffer_bytes // connections)
    return spread_over_connections(
        num_bytes,
        connections=connections,
        requests_per_connection=requests_per_connection(),
        min_bytes=_SMALL_PART_BYTES,
        max_bytes=max_bytes,
    )


def fit_part_bytes(budget_bytes: int, *, connections: int, max_bytes: int, tile_bytes: int) -> int:
    """Return the size of parts, in whole tiles, with which one part for each connection fits into `budget_bytes`."""
    share_bytes = max(budget_bytes // connections, min(_MIN_FITTED_PART_BYTES, budget_bytes))
    return max(min(max_bytes, share_bytes) // tile_bytes, 1) * tile_bytes


def plan_parts(size_bytes: int, *, part_bytes: int, tile_bytes: int, limits: Limits) -> list[Part]:
    """Split an object into parts of whole tiles and of about `part_bytes` that the store accepts.

    Raises `ValueError` if no such split exists, because the object or the tiles are too large for the store.
    """

    def up_to_tiles(num_bytes: int) -> int:
        return -(-num_bytes // tile_bytes) * tile_bytes

    chosen_bytes = max(
        up_to_tiles(min(part_bytes, limits.max_part_bytes)),
        up_to_tiles(limits.min_part_bytes),
        up_to_tiles(-(-size_bytes // limits.max_parts)),
    )
    if chosen_bytes > limits.max_part_bytes:
        chosen_bytes = limits.max_part_bytes // tile_bytes * tile_bytes
    too_small = chosen_bytes < min(size_bytes, limits.min_part_bytes)
    if not chosen_bytes or too_small or -(-size_bytes // chosen_bytes) > limits.max_parts:
        raise ValueError(
            f"an object of {size_bytes} bytes does not fit into {limits.max_parts} parts of {limits.min_part_bytes} "
            f"to {limits.max_part_bytes} bytes, in whole tiles of {tile_bytes}"
        )
    return [
        Part(number=number, offset_bytes=offset, size_bytes=min(chosen_bytes, size_bytes - offset))
        for number, offset in enumerate(range(0, size_bytes, chosen_bytes), start=1)
    ]
