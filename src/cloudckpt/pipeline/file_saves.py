"""Save files as one checkpoint. Each is a tensor of bytes, which one rank writes as a stream; one rank commits all.

The ranks talk only through the store: a rank that has written a file leaves a receipt, and the rank that commits
collects the receipts (``docs/design/029-torch-checkpointing.md``).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import TracebackType

import msgspec
import torch.distributed as dist
from typing_extensions import Buffer

from cloudckpt._messages import name_ranks, quote_names
from cloudckpt._workers import run_all
from cloudckpt.commit.attempts import RECEIPT_SUFFIX, new_attempt_id, new_save_id, receipt_key
from cloudckpt.commit.log import read_log
from cloudckpt.errors import CheckpointChangedError, IncompleteSaveError, InvalidOptionError
from cloudckpt.format.build import Content
from cloudckpt.format.model import Chunk, ObjectRef, StoredTensor
from cloudckpt.format.safetensors import HeaderEntry, lay_out
from cloudckpt.format.validation import MAX_BYTES
from cloudckpt.io.upload import ObjectUpload, UploadSession, fit_part_bytes, logging_store_errors, plan_parts
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.draft import Draft, exists_error, require_no_resume
from cloudckpt.stores.base import Part, crc32c_of

_log = logging.getLogger("cloudckpt")

_MAX_RECEIPT_BYTES = 2**31
_RANDOM_BITS = 48
_CRC_DIGITS = 8


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """One data object of a file. Its bytes from `begin` on are the file's."""

    key: str
    size_bytes: int
    begin: int
    tile_crc32cs: list[int]


class FileReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a rank has written."""

    path: str
    rank: int
    save: int
    """Number of the save at this place, counted by the rank's storage from 1."""
    index: int
    """Number of the file in this rank's save, from 0."""
    number: int
    """The number of the next commit, when the rank began."""
    tile_bytes: int
    objects: list[FileObject]

    @property
    def size_bytes(self) -> int:
        return sum(file_object.size_bytes - file_object.begin for file_object in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The rank of a process in its job. All ranks of a job have the same `attempt`, and no other job has it."""

    attempt: str = field(default_factory=new_attempt_id)
    rank: int = 0
    num_ranks: int = 1


def join_job(name: str) -> Membership | None:
    """Return the membership of this rank in the default process group; None if it is alone. Waits for no other rank.

    The ranks agree on the attempt through the group's store, under `name` and the number of the restart: torchrun keeps
    the store when it restarts the ranks.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None or dist.get_world_size() == 1:
        return None
    key = f"cloudckpt/files/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
    attempt: bytes = group.get_group_store().compare_set(key, "", new_attempt_id())
    return Membership(attempt=attempt.decode(), rank=dist.get_rank(), num_ranks=dist.get_world_size())


def has_receipts(context: Context, membership: Membership) -> bool:
    """Return True if a rank of this job has written a file there that is not committed."""
    return bool(_list_receipts(context, membership.attempt))


def _list_receipts(context: Context, attempt: str) -> list[str]:
    infos = context.client.list(f"data/{attempt}/")
    return [info.key for info in infos if info.key.endswith(RECEIPT_SUFFIX)]


_RECEIPT_DECODER = msgspec.json.Decoder(FileReceipt)


class FilesJob:
    """One save of files at one location, on one rank. `begin`, `open` each file, and on rank 0 `commit_files`.

    `save` counts the job's saves at this location.
    """

    def __init__(self, context: Context, membership: Membership, *, save: int) -> None:
        require_no_resume(context.options)
        if context.options.extensions:
            raise InvalidOptionError("Options(extensions=…) does not apply to files. Remove it")
        self._context = context
        self._draft = Draft(context, save_id=new_save_id(), attempt=membership.attempt)
        self._attempt = membership.attempt
        self._save = save
        self._num_ranks = membership.num_ranks
        # The numbers begin at random: another process of this rank may have written under the same attempt.
        self._numbers = itertools.count(secrets.randbits(_RANDOM_BITS))
        self._indices = itertools.count()
        self._lock = threading.Lock()
        self.has_files = False

    def begin(self) -> None:
        """Find the number of the commit, before any byte moves. Raises `CheckpointExistsError`."""
        context = self._context
        if context.rank == 0:
            self._draft.begin(overwrite=False)
            return
        log = read_log(context.client)
        if log.current_number is not None:
            raise exists_error(context.uri)
        self._draft.number = log.highest_number + 1

    def open(self, path: str) -> FileWriter:
        """Begin a file."""
        self.has_files = True
        return FileWriter(self._context, path, new_key=self._new_key, on_done=self._leave_receipt)

    def _new_key(self) -> str:
        with self._lock:
            return self._draft.key(next(self._numbers))

    def _leave_receipt(self, path: str, objects: list[FileObject]) -> None:
        context = self._context
        with self._lock:
            index, number = next(self._indices), next(self._numbers)
        receipt = FileReceipt(
            path=path,
            rank=context.rank,
            save=self._save,
            index=index,
            number=self._draft.number,
            tile_bytes=context.options.advanced.tile_bytes,
            objects=objects,
        )
        document = msgspec.json.encode(receipt)
        views = [memoryview(b"%08x" % crc32c_of([memoryview(document)]) + document)]
        key = receipt_key(self._attempt, context.rank, number)
        context.client.call(context.store.put, key, views, crc32c=crc32c_of(views))

    def commit_files(self, planned_paths: Collection[str] = ()) -> None:
        """Commit the files of all ranks, which must have written all of theirs.

        Raises `IncompleteSaveError` if a file of `planned_paths` is missing, or if the receipts contradict each other.
        """
        context = self._context
        receipts_by_key: dict[str, FileReceipt] = {}

        def look() -> list[str]:
            self._read_receipts(receipts_by_key)
            return self._find_problems(receipts_by_key.values(), planned_paths)

        problems = context.client.confirm(
            look,
            unconfirmed=tuple,
            changing=lambda: CheckpointChangedError(f"{context.uri} changes all the time", uri=context.uri),
        )
        if problems:
            raise IncompleteSaveError(
                f"nothing was committed at {context.uri}: {'; '.join(problems)}. Save again, to another place or after "
                f"`cloudckpt gc {context.uri}`",
                uri=context.uri,
            )
        receipts = [receipt for receipt in receipts_by_key.values() if receipt.save == self._save]
        try:
            self._draft.commit(_content_of(receipts, self._num_ranks))
            num_bytes = sum(receipt.size_bytes for receipt in receipts)
            _log.info(
                "saved %s: %d bytes in %d files of %d ranks", context.uri, num_bytes, len(receipts), self._num_ranks
            )
        finally:  # whatever the outcome, no other commit can use the receipts
            with logging_store_errors("remove receipts", uri=context.uri):
                context.client.unstopped_copy().delete(sorted(receipts_by_key))

    def _read_receipts(self, receipts_by_key: dict[str, FileReceipt]) -> None:
        """Add the receipts of all ranks to `receipts_by_key`."""
        context = self._context
        keys = [key for key in _list_receipts(context, self._attempt) if key not in receipts_by_key]

        def read(key: str) -> None:
            data = memoryview(context.client.call(context.store.read, key, max_bytes=_MAX_RECEIPT_BYTES))
            document = data[_CRC_DIGITS:]
            if bytes(data[:_CRC_DIGITS]) != b"%08x" % crc32c_of([document]):
                raise IncompleteSaveError(
                    f"{context.client.url(key)} is damaged, so nothing was committed. Save again", uri=context.uri
                )
            receipts_by_key[key] = _RECEIPT_DECODER.decode(document)

        run_all(keys, read, num_threads=context.max_connections, name="cloudckpt-receipts", on_failure=context.stop)

    def _find_problems(self, receipts_of_job: Collection[FileReceipt], planned_paths: Collection[str]) -> list[str]:
        receipts = [receipt for receipt in receipts_of_job if receipt.save == self._save]
        paths = Counter(receipt.path for receipt in receipts)
        by_rank: dict[int, list[int]] = {}
        for receipt in receipts:
            by_rank.setdefault(receipt.rank, []).append(receipt.index)
        unlisted = [rank for rank, indices in by_rank.items() if sorted(indices) != list(range(len(indices)))]
        in_other_tries = sorted({receipt.rank for receipt in receipts_of_job} - by_rank.keys())
        late = sorted({receipt.rank for receipt in receipts if receipt.number != self._draft.number})
        checks = (
            (sorted(set(planned_paths) - paths.keys()), "these files were planned, and no rank has written them: {}"),
            ([path for path, count in paths.items() if count > 1], "two saves at once, or two ranks, have written {}"),
            (unlisted, "the store does not list all that was written by {}"),
            (in_other_tries, "only another try to save there has files of {}"),
            (late, "gc, a deletion or another save came between this rank's begin and that of {}"),
            ([] if receipts else ["none"], "no rank has written a file"),
        )
        return [
            text.format(name_ranks(names) if isinstance(names[0], int) else quote_names(names))
            for names, text in checks
            if names
        ]


def _content_of(receipts: Collection[FileReceipt], num_ranks: int) -> Content:
    """Return the content of a save of files: each is a tensor of bytes, in as many chunks as it has objects."""
    objects: list[list[ObjectRef]] = [[] for _ in range(num_ranks)]
    tensors: dict[str, StoredTensor] = {}
    num_objects = 0
    for receipt in sorted(receipts, key=lambda receipt: receipt.rank):
        chunks: list[Chunk] = []
        offset = 0
        for file_object in receipt.objects:
            length = file_object.size_bytes - file_object.begin
            chunks.append(Chunk((offset,), (length,), num_objects, file_object.begin, file_object.size_bytes))
            objects[receipt.rank].append(
                ObjectRef(
                    key=file_object.key,
                    size_bytes=file_object.size_bytes,
                    tile_bytes=receipt.tile_bytes,
                    tile_crc32cs=tuple(file_object.tile_crc32cs),
                )
            )
            offset += length
            num_objects += 1
        tensors[receipt.path] = StoredTensor(dtype="uint8", shape=(receipt.size_bytes,), chunks=chunks)
    return Content(objects=objects, tensors=tensors)


class _UnsentParts:
    """The bytes of an object that are not sent yet (see `cloudckpt.io.body.Body`), by the offset of their part."""

    def __init__(self, free: list[bytearray]) -> None:
        self.size_bytes = 0
        self._parts: dict[int, bytearray] = {}
        self._free = free

    def add(self, begin: int, buffer: bytearray) -> None:
        self._parts[begin] = buffer

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Lend the view of a part. Its buffer is free afterwards."""
        buffer = self._parts.pop(begin)
        with memoryview(buffer) as whole:
            yield [whole[: end - begin]]
        self._free.append(buffer)


class FileWriter(io.RawIOBase):
    """A file that is uploaded in parts beside the writing, to as many objects as it takes. For one thread at a time.

    The header of a safetensors file has the size, which is known only at the end. Until then, the first part of an
    object is kept in memory. All parts in memory take at most ``Options.staging_bytes``, if the store accepts parts
    of that size. `close` completes the file. A ``with`` block that fails and the destructor abort it.
    """

    _session: UploadSession | None = None

    def __init__(
        self,
        context: Context,
        path: str,
        *,
        new_key: Callable[[], str],
        on_done: Callable[[str, list[FileObject]], None],
    ) -> None:
        super().__init__()
        self._path = path
        self._new_key = new_key
        self._on_done = on_done
        options, advanced, store = context.options, context.options.advanced, context.store
        self._header_bytes = len(_lay_out(path, MAX_BYTES, offset=MAX_BYTES))
        held_bytes = fit_part_bytes(
            options.staging_bytes,
            # In memory are the parts that wait, those that are being sent, the first one and the one being filled.
            connections=2 * context.max_connections + 2,
            max_bytes=advanced.part_bytes,
            tile_bytes=advanced.tile_bytes,
        )
        part_bytes = max(held_bytes, 2 * self._header_bytes)
        parts = plan_parts(
            max(advanced.object_bytes, part_bytes),
            part_bytes=part_bytes,
            tile_bytes=advanced.tile_bytes,
            limits=store.limits,
        )
        self._part_bytes = parts[0].size_bytes
        self._max_parts = len(parts) if store.capabilities.multipart else 1
        self._free: list[bytearray] = []
        self._session = context.new_uploads(
            client=context.client.unstopped_copy(),
            part_bytes=self._part_bytes,
            tile_bytes=advanced.tile_bytes,
            daemon=True,  # the file may never be closed
        )
        self._uploads = self._session.__enter__()
        self._begin_object(0)

    def _begin_object(self, offset: int) -> None:
        self._offset = offset
        self._body = _UnsentParts(self._free)
        self._upload: ObjectUpload = self._uploads.begin(self._new_key(), self._body)
        self._parts: list[Part] = []
        self._first_buffer = self._buffer = self._take_buffer()
        self._filled_bytes = self._header_bytes

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        """Append `data`. Waits while too many parts are being sent."""
        if self._session is None:
            raise ValueError(f"{self._path} is closed")
        with memoryview(data) as data_view, data_view.cast("B") as view:
            offset = 0
            while offset < len(view):
                if self._filled_bytes == self._part_bytes:
                    self._end_part()
                num_bytes = min(self._part_bytes - self._filled_bytes, len(view) - offset)
                self._buffer[self._filled_bytes : self._filled_bytes + num_bytes] = view[offset : offset + num_bytes]
                self._filled_bytes += num_bytes
                offset += num_bytes
            return offset

    def _end_part(self) -> None:
        """Send the part that is full, unless it is the first. More bytes follow."""
        if len(self._parts) + 1 == self._max_parts:
            self._end_object(is_last=False)
            return
        part = self._new_part()
        if part.number > 1:
            self._body.add(part.offset_bytes, self._buffer)
            self._uploads.append(self._upload, part)
        self._buffer, self._filled_bytes = self._take_buffer(), 0

    def _take_buffer(self) -> bytearray:
        return self._free.pop() if self._free else bytearray(self._part_bytes)

    def _new_part(self) -> Part:
        offset = len(self._parts) * self._part_bytes
        part = Part(number=len(self._parts) + 1, offset_bytes=offset, size_bytes=self._filled_bytes)
        self._parts.append(part)
        return part

    def _end_object(self, *, is_last: bool) -> None:
        last, first = self._new_part(), self._parts[0]
        self._body.size_bytes = last.offset_bytes + last.size_bytes
        num_bytes = self._body.size_bytes - self._header_bytes
        is_whole = is_last and not self._offset
        header = _lay_out(
            self._path, num_bytes, offset=None if is_whole else self._offset, header_bytes=self._header_bytes
        )
        self._first_buffer[: len(header)] = header
        self._body.add(last.offset_bytes, self._buffer)
        self._body.add(first.offset_bytes, self._first_buffer)
        if last is not first:
            self._uploads.append(self._upload, last)
        self._uploads.finish(self._upload, self._parts, missing=[first])
        if not is_last:
            self._begin_object(self._offset + num_bytes)

    def close(self) -> None:
        """Complete the file, and leave its receipt. Raises the first failure."""
        super().close()
        if self._session is None:
            return
        try:
            self._end_object(is_last=True)
            self._uploads.tasks.join()
            receipts = self._uploads.receipts()
        except BaseException as error:
            self._abort(error)
            raise
        self._session.__exit__(None, None, None)
        self._session = None
        objects = [
            FileObject(
                key=receipt.key,
                size_bytes=receipt.size_bytes,
                begin=self._header_bytes,
                tile_crc32cs=list(receipt.tile_crc32cs),
            )
            for receipt in receipts
        ]
        self._on_done(self._path, objects)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abort(error)
        self.close()

    # The default argument keeps the function: at the process's end, the module's names may be deleted before the file.
    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Python may call this in any thread, also in one that `_abort` would wait for.
        if self._session is not None and not _is_finalizing():
            abort, error = self._session.__exit__, ResourceWarning("the file was not closed")
            thread = threading.Thread(target=abort, args=(type(error), error, None), name="cloudckpt-abort")
            with contextlib.suppress(RuntimeError):  # the process ends: `gc` removes the objects
                thread.start()

    def _abort(self, error: BaseException) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(type(error), error, error.__traceback__)


def _lay_out(path: str, num_bytes: int, *, offset: int | None, header_bytes: int = 0) -> bytes:
    """Return the header of an object that holds `num_bytes` of a file; the whole file if `offset` is None."""
    offsets = None if offset is None else (offset,)
    entry = HeaderEntry(fqn=path, dtype="uint8", shape=(num_bytes,), offsets=offsets, num_bytes=num_bytes)
    return lay_out([entry], header_bytes=header_bytes).header
