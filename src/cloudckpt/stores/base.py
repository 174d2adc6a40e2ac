"""The protocol of a store.

For every store and every method:

- A store has a root, which is one URI. Keys are relative to the root, ``/``-separated, never absolute and never with
  ``..``. Any other key could lead out of the root, so the store refuses it with `StoreError` (`check_key`).
- All methods are safe to call from many threads. They raise `StoreError` or a subclass, and nothing else
  (`cloudckpt.errors`).
- A call repeats a request only at another address or with other credentials, if the service asks for that. Its callers
  decide about retries (`cloudckpt.io.client`). Only `Store.copy_from`, which can make many requests, gets a function
  that retries each of them.
- Byte ranges are half-open.
- Bodies are sequences of C-contiguous memory views of the format ``B``, so that nothing has to be joined or copied
  before it is sent.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar

from awscrt import checksums

from cloudckpt.errors import ChecksumRefusedError, StoreError, UnsupportedOperationError

Views = Sequence[memoryview]
# A copy is faster than the checksum of memory that is in no cache, and each call gives up the interpreter's lock.
_JOINED_BYTES = 512 * 1024
_crc32c: Any = checksums.crc32c  # annotated with bytes, but takes any buffer
_T = TypeVar("_T")
_LARGE_COPY_BYTES = 256 * 1024


class ObjectTooLargeError(StoreError):
    """The object has more bytes than the caller reads."""


class RequestRunner(Protocol):
    """Runs a request, and perhaps again if it fails."""

    def __call__(self, request: Callable[[], _T], /) -> _T:
        """Return the result of `request`, or raise its last failure."""


def run_once(request: Callable[[], _T], /) -> _T:
    """Run a request one time: a `RequestRunner` without retries."""
    return request()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a store. A store declares only what a test shows."""

    conditional_create: bool
    """``put(if_absent=True)`` is atomic: of two callers exactly one succeeds."""
    multipart: bool
    """Multipart uploads exist; until one is completed, its key has no object."""
    verifies_crc32c: bool
    """The store refuses bytes that do not match the CRC32C sent with them."""
    listed_parts: Literal["none", "same_upload", "any_upload"] = "none"
    """The uploads that can be completed with the parts that `list_parts` returns."""
    parallel_parts: bool = True
    """Parts of one object can be written at the same time. If False, only those of different objects can."""
    is_near: bool = False
    """The store answers without a network, sooner than a thread starts."""
    is_private: bool = False
    """No other process sees the objects."""
    has_hidden_uploads: bool = False
    """Unfinished uploads are hidden files of cloudckpt beside their keys. One closed folder fails their listing."""
    copies_within: str = ""
    """The service that copies between its stores (`Store.copy_from`); empty if the store cannot be asked to copy."""
    copies_ranges: bool = False
    """This service also copies ranges of objects into parts of uploads (`Store.copy_part`)."""
    observed: str = field(default="", compare=False)
    """The behaviour, seen by a probe, that denies `conditional_create`; empty if no probe was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes of uploads that a store accepts."""

    min_part_bytes: int
    """The smallest part, except for the last."""
    max_part_bytes: int
    max_parts: int
    max_put_bytes: int
    """The largest object of a single put."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object, as a listing or `Store.head` describes it."""

    key: str
    size_bytes: int
    modified_at: datetime
    """The time of the write by the store's clock; timezone-aware."""
    changed_at: datetime | None = None
    """The time at which the object appeared, if the store knows it: a copied file can keep its time of writing."""
    version: str = ""
    """A text that changes with every write (an ETag, a generation); empty if the store has none."""
    has_time: bool = True
    """False if the store reports no time of the write: `modified_at` is then the time of the answer."""

    @property
    def write_id(self) -> str:
        """A text that identifies the write, as far as the store can tell."""
        return f"{self.size_bytes} {self.version or (self.modified_at.isoformat() if self.has_time else '')}"

    def is_same_write(self, other: ObjectInfo) -> bool:
        """Return True if nothing was written between two listings, as far as the store shows it."""
        if bool(self.version) == bool(other.version):
            return self.write_id == other.write_id
        return (self.size_bytes, self.modified_at) == (other.size_bytes, other.modified_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """One unfinished multipart upload."""

    key: str
    upload_id: str
    started_at: datetime
    size_bytes: int = 0
    """Bytes that were written, on a store of files; 0 on others, which do not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The byte range of one part in its object. Numbers start at 1; parts follow each other without gaps."""

    number: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPart:
    """A part that the store has accepted."""

    part: Part
    token: str
    """The text that completes the upload with this part (an ETag on S3)."""
    crc32c: int | None
    """None for a part that the service has copied without a checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPart:
    """A part of an unfinished upload, as the store describes it. Only a checksum shows which bytes it has."""

    number: int
    size_bytes: int
    token: str
    """See `UploadedPart`."""
    crc32c: int | None
    md5: str | None
    """The MD5 in hexadecimal. A store may report another text, which matches no part."""


class Store(abc.ABC):
    """A folder of objects. The module's docstring has the rules for every method."""

    capabilities: Capabilities
    """The declared abilities, known without a request. `probe` finds the abilities of the server that answers."""
    limits: Limits

    def probe(self) -> Capabilities:
        """Return the abilities of the server that answers.

        These can differ from the declared ones at an S3 endpoint that is not Amazon's, or on a file system without hard
        links. There, the call tries them out on small objects of its own, and removes these. The result holds for the
        life of the process. The call needs the permission to write, so only a save makes it. Raises `StoreError` if the
        store does not answer.
        """
        return self.capabilities

    @property
    @abc.abstractmethod
    def uri(self) -> str:
        """The root, without a trailing slash and without credentials."""

    def url(self, key: str) -> str:
        """Return the full address of `key`, for messages."""
        return f"{self.uri}/{key}" if key else self.uri

    def error(self, cls: type[StoreError], operation: str, key: str, problem: str) -> StoreError:
        """Return an error about `key`. `problem` says what is wrong, and what to do about it."""
        url = self.url(key)
        return cls(f"{url}: {problem}", key=url, operation=operation)

    @abc.abstractmethod
    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        """Create the object at `key` whole, or not at all, and durably.

        With `if_absent`, raises `ObjectExistsError` if an object exists at `key` already, and leaves it untouched.
        """

    @abc.abstractmethod
    def create_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id. No object appears at `key` until the upload is completed."""

    @abc.abstractmethod
    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        """Upload one part. May be called again for the same part; the last call counts."""

    @abc.abstractmethod
    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Make the object of `parts`, joined in the order of their numbers, visible, durably."""

    @abc.abstractmethod
    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop the upload and its parts. An upload that is gone already is no error."""

    @abc.abstractmethod
    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        """Fill `views`, one after the other, with the object's bytes from `offset_bytes` on.

        Raises `ShortObjectError` if the object ends too early, `InterruptedReadError` if the answer broke off.
        """

    @abc.abstractmethod
    def read(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. Raises `ObjectTooLargeError` if it has more than `max_bytes`."""

    @abc.abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size and time of the object at `key`."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with `prefix` (a plain string prefix), in no promised order."""

    @abc.abstractmethod
    def list_directories(self) -> Iterator[str]:
        """Yield the distinct first segments, without ``/``, of all keys that have more than one segment."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects. A key without an object is no error.

        Neighbouring `keys` of one folder may be removed in any order. All other objects are removed in the order of
        `keys`.
        """

    @abc.abstractmethod
    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        """Yield every unfinished multipart upload whose key starts with `prefix`."""

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written; None if the store has no limit or does not report it."""
        return None

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        """Yield every part of the unfinished upload; several of one number if all can be used.

        `complete_multipart` accepts these parts, for the upload that `Capabilities.listed_parts` names. An upload that
        was completed or aborted has no parts; a store may also raise `ObjectNotFoundError`.
        """
        problem = f"this store cannot list the parts of the unfinished upload {upload_id!r}. Upload the object anew."
        raise self.error(UnsupportedOperationError, "list_parts", key, problem)

    def copy_from(self, source_url: str, target_key: str, *, run: RequestRunner = run_once) -> int | None:
        """Have the service copy the object at `source_url`, a `url` of another store of its kind, to `target_key`.

        No byte passes through this process. Returns the CRC32C that the service has computed from the bytes of the
        copy; None if it reports none. One endpoint and one set of credentials must reach both. `run` makes each
        request, so that only a failed request is made again. Raises `UnsupportedOperationError` if this store cannot
        copy from `source_url`.
        """
        problem = f"this store cannot have the service copy {source_url}. Read it and write it."
        raise self.error(UnsupportedOperationError, "copy_from", target_key, problem)

    def copy_part(self, key: str, upload_id: str, part: Part, *, source_url: str, source_begin: int) -> FoundPart:
        """Have the service make a part of an upload from the object at `source_url`, from byte `source_begin` on.

        The rest is as for `copy_from` and `upload_part`. Only the checksums of the result show which bytes were copied.
        """
        problem = f"this store cannot have the service copy a range of {source_url}. Read it and write it."
        raise self.error(UnsupportedOperationError, "copy_part", key, problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call to a store."""

    operation: str
    """The name of the method of `Store`."""
    key: str
    """The key; for a listing its prefix, for a copy its target; empty for calls about the whole store."""
    num_bytes: int = 0
    """Size of the body that the call sends or fills; 0 if there is none."""
    part_number: int | None = None
    """Number of the part that the call uploads or copies, from 1 on; None if it does neither."""
    offset_bytes: int | None = None
    """The begin of the range that the call reads."""


class ForwardingStore(Store):
    """Passes each call to `inner`, and has the capabilities and limits of `inner`.

    A subclass overrides `around` to see every call, or single methods.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.limits = inner.limits

    def around(self, call: Call, action: Callable[[], _T]) -> _T:  # for subclasses
        """Run `action`, which makes `call` on `inner`, and return its result."""
        return action()

    def around_listing(self, call: Call, action: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        """Yield the entries from `action`, which makes `call` on `inner`. Listings make requests between entries."""
        return self.around(call, action)

    def probe(self) -> Capabilities:
        return self.around(Call(operation="probe", key=""), self.inner.probe)

    @property
    def uri(self) -> str:
        return self.inner.uri

    def url(self, key: str) -> str:
        return self.inner.url(key)

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        call = Call(operation="put", key=key, num_bytes=num_bytes(views))
        self.around(call, lambda: self.inner.put(key, views, crc32c=crc32c, if_absent=if_absent))

    def create_multipart(self, key: str) -> str:
        return self.around(Call(operation="create_multipart", key=key), lambda: self.inner.create_multipart(key))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        call = Call(operation="upload_part", key=key, num_bytes=part.size_bytes, part_number=part.number)
        return self.around(call, lambda: self.inner.upload_part(key, upload_id, part, views, crc32c=crc32c))

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        call = Call(operation="complete_multipart", key=key)
        self.around(call, lambda: self.inner.complete_multipart(key, upload_id, parts))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        call = Call(operation="abort_multipart", key=key)
        self.around(call, lambda: self.inner.abort_multipart(key, upload_id))

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        call = Call(operation="read_into", key=key, num_bytes=num_bytes(views), offset_bytes=offset_bytes)
        self.around(call, lambda: self.inner.read_into(key, offset_bytes, views))

    def read(self, key: str, *, max_bytes: int) -> bytes:
        return self.around(Call(operation="read", key=key), lambda: self.inner.read(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo:
        return self.around(Call(operation="head", key=key), lambda: self.inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.around_listing(Call(operation="list", key=prefix), lambda: self.inner.list(prefix))

    def list_directories(self) -> Iterator[str]:
        return self.around_listing(Call(operation="list_directories", key=""), self.inner.list_directories)

    def delete(self, keys: Iterable[str]) -> None:
        self.around(Call(operation="delete", key=""), lambda: self.inner.delete(keys))

    def free_bytes(self) -> int | None:
        return self.around(Call(operation="free_bytes", key=""), self.inner.free_bytes)

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        return self.around_listing(Call(operation="list_uploads", key=prefix), lambda: self.inner.list_uploads(prefix))

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        call = Call(operation="list_parts", key=key)
        return self.around_listing(call, lambda: self.inner.list_parts(key, upload_id))

    def copy_from(self, source_url: str, target_key: str, *, run: RequestRunner = run_once) -> int | None:
        call = Call(operation="copy_from", key=target_key)
        return self.around(call, lambda: self.inner.copy_from(source_url, target_key, run=run))

    def copy_part(self, key: str, upload_id: str, part: Part, *, source_url: str, source_begin: int) -> FoundPart:
        call = Call(operation="copy_part", key=key, part_number=part.number)
        copy = functools.partial(self.inner.copy_part, source_url=source_url, source_begin=source_begin)
        return self.around(call, lambda: copy(key, upload_id, part))


def num_bytes(views: Views) -> int:
    """Return the total size of `views`."""
    return sum(view.nbytes for view in views)


def copy_into(views: Views, body: memoryview) -> None:
    """Fill `views`, one after the other, with the first bytes of `body`."""
    begin = 0
    for view in views:
        source = body[begin : begin + view.nbytes]
        if source.nbytes != view.nbytes:  # numpy fills a whole view with one byte
            raise ValueError(f"{body.nbytes} bytes are too few for views of {num_bytes(views)}")
        if view.nbytes < _LARGE_COPY_BYTES:
            view[:] = source
        else:  # other threads run meanwhile
            import numpy as np  # a program that only lists checkpoints starts sooner without it

            np.copyto(np.frombuffer(view, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
        begin += view.nbytes


def crc32c_of(views: Views, previous: int = 0) -> int:
    """Return the CRC32C of the bytes of `views`, one after the other, continuing from `previous`."""
    for view in views:
        previous = _crc32c(view, previous)
    return previous


def compute_tile_crc32cs(views: Views, tile_bytes: int) -> list[int]:
    """Return the CRC32C of each tile of the joined bytes of `views`; the last tile may be shorter."""
    if len(views) == 1:  # nearly always; little Python runs between the checksums, so threads hardly wait for the GIL
        view = views[0]
        return [_crc32c(view[begin : begin + tile_bytes], 0) for begin in range(0, view.nbytes, tile_bytes)]
    values: list[int] = []
    for tile in batches(views, max_bytes=tile_bytes, max_views=len(views)):
        value, batch_bytes = 0, tile_bytes if len(tile) == 1 else _JOINED_BYTES
        for pieces in batches(tile, max_bytes=batch_bytes, max_views=len(tile)):
            value = _crc32c(join_views(pieces), value)
        values.append(value)
    return values


def combine_tile_crc32cs(values: Sequence[int], *, tile_bytes: int, size_bytes: int) -> int:
    """Return the CRC32C of `size_bytes` bytes whose tiles have `values`."""
    whole = 0
    for index, value in enumerate(values):
        own_bytes = min(tile_bytes, size_bytes - index * tile_bytes)
        whole = checksums.combine_crc32c(whole, value, own_bytes) if index else value
    return whole


def batches(views: Views, *, max_bytes: int, max_views: int) -> Iterator[list[memoryview]]:
    """Yield the same bytes in order, in groups of at most `max_bytes` and `max_views`, without empty views."""
    group: list[memoryview] = []
    free_bytes = max_bytes
    for view in views:
        remaining, remaining_bytes = view, view.nbytes
        while remaining_bytes >= free_bytes:
            group.append(remaining[:free_bytes])
            yield group
            remaining, remaining_bytes = remaining[free_bytes:], remaining_bytes - free_bytes
            group, free_bytes = [], max_bytes
        if remaining_bytes:
            group.append(remaining)
            free_bytes -= remaining_bytes
            if len(group) == max_views:
                yield group
                group, free_bytes = [], max_bytes
    if group:
        yield group


def join_views(views: Views) -> memoryview | bytes:
    """Return the bytes of `views` as one view: a single view itself, several views as a copy."""
    return views[0] if len(views) == 1 else b"".join(views)


def skip_bytes(views: Views, num_bytes_done: int) -> list[memoryview]:
    """Return `views` without their first `num_bytes_done` bytes."""
    for index, view in enumerate(views):
        if num_bytes_done < view.nbytes:
            return [view[num_bytes_done:], *views[index + 1 :]]
        num_bytes_done -= view.nbytes
    return []


def check_key(store: Store, key: str, operation: str) -> None:
    """Raise `StoreError` for a key that is empty, absolute, or could lead out of the root."""
    segments = key.split("/")
    if "" in segments or "." in segments or ".." in segments or "\0" in key:
        raise StoreError(
            f"{key!r} is not a key under {store.uri}: keys have no empty, '.' or '..' segments and no NUL.",
            key=f"{store.uri}/{key}",
            operation=operation,
        )


def check_size(store: Store, key: str, size_bytes: int, *, max_bytes: int) -> None:
    """Raise `ObjectTooLargeError` if an object to read has more than `max_bytes`."""
    if size_bytes > max_bytes:
        problem = f"the object has {size_bytes:,} bytes, more than the {max_bytes:,} allowed."
        raise store.error(ObjectTooLargeError, "read", key, problem)


def check_crc32c(store: Store, key: str, operation: str, *, expected: int, actual: int) -> None:
    """Raise `ChecksumRefusedError` unless the two checksums agree."""
    if expected != actual:
        raise store.error(
            ChecksumRefusedError,
            operation,
            key,
            f"the bytes to write have the CRC32C {actual:08x}, not the {expected:08x} that came with them. They "
            "changed in memory (a tensor modified during its save?); nothing was written.",
        )


def sort_parts(store: Store, key: str, parts: list[UploadedPart]) -> list[UploadedPart]:
    """Sort `parts` by number. Raises `StoreError` unless the numbers are 1, 2, … and no byte is missing."""
    ordered = sorted(parts, key=lambda uploaded: uploaded.part.number)
    end_bytes = 0
    for number, uploaded in enumerate(ordered, start=1):
        if uploaded.part.number != number or uploaded.part.offset_bytes != end_bytes:
            problem = (
                f"the parts of the upload do not follow each other (at part {uploaded.part.number}, byte "
                f"{uploaded.part.offset_bytes}, where part {number} should begin at byte {end_bytes}). Nothing was "
                "completed."
            )
            raise store.error(StoreError, "complete_multipart", key, problem)
        end_bytes += uploaded.part.size_bytes
    return ordered
