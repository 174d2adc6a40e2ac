"""Objects in this process's memory: the reference implementation of a store, readable as the specification."""

from __future__ import annotations

import functools
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from cloudckpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import Options
from cloudckpt.stores.base import (
    Capabilities,
    FoundPart,
    Limits,
    ObjectInfo,
    Part,
    RequestRunner,
    Store,
    UploadedPart,
    UploadInfo,
    Views,
    check_crc32c,
    check_key,
    check_size,
    copy_into,
    crc32c_of,
    num_bytes,
    run_once,
    sort_parts,
)
from cloudckpt.uri import Location

_LIMITS = Limits(min_part_bytes=1, max_part_bytes=1 << 32, max_parts=10_000, max_put_bytes=1 << 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryObject:
    body: bytes
    modified_at: datetime
    version: str = field(default_factory=lambda: uuid.uuid4().hex)

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size_bytes=len(self.body), modified_at=self.modified_at, version=self.version)


@dataclass(slots=True, kw_only=True)
class _Upload:
    key: str
    started_at: datetime
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """The objects of all stores of one name. Every access holds `lock`, which makes each call atomic."""

    pid: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: dict[str, _MemoryObject] = field(default_factory=dict)
    uploads: dict[str, _Upload] = field(default_factory=dict)


BUCKETS: dict[str, _Bucket] = {}


class MemoryStore(Store):
    """``memory://name/prefix``: all stores of one name in one process see the same objects.

    The objects stay in the process. So each call of a store that was pickled to another process, or is used after a
    fork, raises `UnsupportedOperationError`: no other process could see what it saves.
    """

    def __init__(self, name: str, prefix: str = "", *, limits: Limits = _LIMITS, pid: int | None = None) -> None:
        self._name = name
        self._prefix = f"{prefix}/" if prefix else ""
        self._shared = BUCKETS.setdefault(name, _Bucket(pid=os.getpid()))
        self._pid = self._shared.pid if pid is None else pid  # a pickled store is of the process that it comes from
        self.limits = limits
        self.capabilities = Capabilities(
            conditional_create=True,
            multipart=True,
            verifies_crc32c=True,
            listed_parts="same_upload",
            is_near=True,
            is_private=True,
            copies_within="memory",
            copies_ranges=True,
        )

    @classmethod
    def at(cls, location: Location, _options: Options) -> MemoryStore:
        """Return the store at `location`."""
        return cls(location.authority, location.path)

    @staticmethod
    def now() -> datetime:
        """Return the time for an object that is written now. Tests replace it."""
        return datetime.now(tz=timezone.utc)

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(MemoryStore, limits=self.limits, pid=self._pid)
        return make, (self._name, self._prefix.removesuffix("/"))

    @property
    def uri(self) -> str:
        return f"memory://{self._name}/{self._prefix}".removesuffix("/")

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        check_key(self, key, "put")
        self._check_size("put", key, num_bytes(views), self.limits.max_put_bytes)
        body = b"".join(views)
        check_crc32c(self, key, "put", expected=crc32c, actual=crc32c_of([memoryview(body)]))
        bucket = self._bucket("put")
        with bucket.lock:
            if if_absent and self._prefix + key in bucket.objects:
                raise self.error(ObjectExistsError, "put", key, "an object exists here already.")
            bucket.objects[self._prefix + key] = _MemoryObject(body=body, modified_at=self.now())

    def create_multipart(self, key: str) -> str:
        check_key(self, key, "create_multipart")
        bucket = self._bucket("create_multipart")
        upload_id = uuid.uuid4().hex
        with bucket.lock:
            bucket.uploads[upload_id] = _Upload(key=self._prefix + key, started_at=self.now())
        return upload_id

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        self._check_size("upload_part", key, num_bytes(views), self.limits.max_part_bytes)
        if num_bytes(views) != part.size_bytes or not 1 <= part.number <= self.limits.max_parts:
            problem = (
                f"part {part.number} has {num_bytes(views)} bytes where {part.size_bytes} were announced, or a number "
                f"outside 1…{self.limits.max_parts}."
            )
            raise self.error(StoreError, "upload_part", key, problem)
        body = b"".join(views)
        check_crc32c(self, key, "upload_part", expected=crc32c, actual=crc32c_of([memoryview(body)]))
        bucket = self._bucket("upload_part")
        with bucket.lock:
            self._upload(bucket, "upload_part", key, upload_id).parts[part.number] = body
        return UploadedPart(part=part, token=_token(body), crc32c=crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        ordered = sort_parts(self, key, list(parts))
        bucket = self._bucket("complete_multipart")
        with bucket.lock:
            upload = self._upload(bucket, "complete_multipart", key, upload_id)
            for uploaded in ordered:
                body = upload.parts.get(uploaded.part.number)
                if body is None or _token(body) != uploaded.token:
                    problem = f"part {uploaded.part.number} is not the one that was uploaded."
                    raise self.error(StoreError, "complete_multipart", key, problem)
                if len(body) < self.limits.min_part_bytes and uploaded is not ordered[-1]:
                    problem = (
                        f"part {uploaded.part.number} has {len(body)} bytes, fewer than the "
                        f"{self.limits.min_part_bytes} that all parts but the last must have."
                    )
                    raise self.error(StoreError, "complete_multipart", key, problem)
            body = b"".join(upload.parts[uploaded.part.number] for uploaded in ordered)
            bucket.objects[upload.key] = _MemoryObject(body=body, modified_at=self.now())
            del bucket.uploads[upload_id]

    def abort_multipart(self, key: str, upload_id: str) -> None:  # the id says it all here
        bucket = self._bucket("abort_multipart")
        with bucket.lock:
            bucket.uploads.pop(upload_id, None)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        body = memoryview(self._object("read_into", key).body)
        if offset_bytes + num_bytes(views) > len(body):
            wanted = f"the range from {offset_bytes} to {offset_bytes + num_bytes(views)}"
            problem = f"the object has {len(body)} bytes, too few for {wanted}."
            raise self.error(ShortObjectError, "read_into", key, problem)
        copy_into(views, body[offset_bytes:])

    def read(self, key: str, *, max_bytes: int) -> bytes:
        body = self._object("read", key).body
        check_size(self, key, len(body), max_bytes=max_bytes)
        return body

    def head(self, key: str) -> ObjectInfo:
        return self._object("head", key).info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        bucket = self._bucket("list")
        with bucket.lock:
            objects = list(bucket.objects.items())
        for full_key, stored in objects:
            if full_key.startswith(self._prefix + prefix):
                yield stored.info(full_key[len(self._prefix) :])

    def list_directories(self) -> Iterator[str]:
        yield from {info.key.split("/")[0] for info in self.list() if "/" in info.key}

    def delete(self, keys: Iterable[str]) -> None:
        bucket = self._bucket("delete")
        for key in keys:
            with bucket.lock:
                bucket.objects.pop(self._prefix + key, None)

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        bucket = self._bucket("list_uploads")
        with bucket.lock:
            uploads = list(bucket.uploads.items())
        for upload_id, upload in uploads:
            if upload.key.startswith(self._prefix + prefix):
                key = upload.key[len(self._prefix) :]
                yield UploadInfo(key=key, upload_id=upload_id, started_at=upload.started_at)

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        bucket = self._bucket("list_parts")
        with bucket.lock:
            parts = sorted(self._upload(bucket, "list_parts", key, upload_id).parts.items())
        for number, body in parts:
            yield _describe_part(number, body)

    def copy_from(self, source_url: str, target_key: str, *, run: RequestRunner = run_once) -> int | None:
        check_key(self, target_key, "copy_from")
        name, _, key = source_url.removeprefix("memory://").partition("/")
        body = MemoryStore(name)._object("copy_from", key).body  # noqa: SLF001  # its own class
        bucket = self._bucket("copy_from")
        with bucket.lock:
            bucket.objects[self._prefix + target_key] = _MemoryObject(body=body, modified_at=self.now())
        return crc32c_of([memoryview(body)])

    def copy_part(self, key: str, upload_id: str, part: Part, *, source_url: str, source_begin: int) -> FoundPart:
        name, _, source = source_url.removeprefix("memory://").partition("/")
        body = MemoryStore(name)._object("copy_part", source).body  # noqa: SLF001  # its own class
        piece = body[source_begin : source_begin + part.size_bytes]
        if len(piece) != part.size_bytes:
            problem = f"{source_url} has {len(body)} bytes, too few for {part.size_bytes} from byte {source_begin} on."
            raise self.error(StoreError, "copy_part", key, problem)
        bucket = self._bucket("copy_part")
        with bucket.lock:
            self._upload(bucket, "copy_part", key, upload_id).parts[part.number] = piece
        return _describe_part(part.number, piece)

    def _bucket(self, operation: str) -> _Bucket:
        if self._pid != os.getpid():
            problem = (
                f"this is in the memory of process {self._pid}, and this is process {os.getpid()} (an async save by "
                "PROCESS?). Use a path or another store for work that spans processes."
            )
            raise self.error(UnsupportedOperationError, operation, "", problem)
        return self._shared

    def _object(self, operation: str, key: str) -> _MemoryObject:
        check_key(self, key, operation)
        bucket = self._bucket(operation)
        with bucket.lock:
            stored = bucket.objects.get(self._prefix + key)
        if stored is None:
            raise self.error(ObjectNotFoundError, operation, key, "there is no object here.")
        return stored

    def _upload(self, bucket: _Bucket, operation: str, key: str, upload_id: str) -> _Upload:
        upload = bucket.uploads.get(upload_id)
        if upload is None or upload.key != self._prefix + key:
            problem = f"there is no upload {upload_id!r} here: it was completed or aborted."
            raise self.error(ObjectNotFoundError, operation, key, problem)
        return upload

    def _check_size(self, operation: str, key: str, size_bytes: int, max_bytes: int) -> None:
        if size_bytes > max_bytes:
            raise self.error(StoreError, operation, key, f"{size_bytes} bytes are more than the {max_bytes} allowed.")


def _describe_part(number: int, body: bytes) -> FoundPart:
    crc32c = crc32c_of([memoryview(body)])
    return FoundPart(number=number, size_bytes=len(body), token=_token(body), crc32c=crc32c, md5=None)


def _token(body: bytes) -> str:
    return f"{crc32c_of([memoryview(body)]):08x}-{len(body)}"
