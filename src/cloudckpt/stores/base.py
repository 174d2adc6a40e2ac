"""What the rest of cloudckpt needs of a store, and nothing more.

A store is rooted at one URI; keys are relative to it, ``/``-separated, never absolute and never with ``..``. Any other
key is refused with `StoreError` (`cloudckpt.stores._body.check_key`), since it could lead out of the root.
All methods are safe to call from many threads. They raise `StoreError` subclasses and nothing else
(see `cloudckpt.errors`); each call makes one attempt, and `cloudckpt._transfer` decides about retries. A call that may
take many requests, and be long under way (`Store.copy_from`), is given how each of them is to be tried.
Byte ranges are half-open. Bodies are sequences of ``B``-format, C-contiguous memory views, so that nothing has to
be joined or copied before it is sent.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol, TypeVar

from cloudckpt.errors import UnsupportedOperationError

Views = Sequence[memoryview]
_T = TypeVar("_T")


class Tried(Protocol):
    """Runs a request, and perhaps again where it fails."""

    def __call__(self, request: Callable[[], _T], /) -> _T:
        """What `request` returns; its failure where it is given up."""


def once(request: Callable[[], _T], /) -> _T:
    """A `Tried` that never runs a request again."""
    return request()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store does; a capability is declared only where a test shows it."""

    conditional_create: bool
    """``put(if_absent=True)`` is atomic: of two callers exactly one succeeds."""
    multipart: bool
    """Multipart uploads exist; until one is completed, nothing lies at its key."""
    verifies_crc32c: bool
    """The store refuses bytes that do not match the CRC32C sent with them."""
    listed_parts: Literal["none", "same_upload", "any_upload"] = "none"
    """Whether `list_parts` says what an unfinished upload holds, and which uploads can be completed with it."""
    observed: str = field(default="", compare=False)
    """What a probe saw that denies `conditional_create`, as a sentence for messages; empty where nothing was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes within which a store accepts uploads."""

    min_part_bytes: int
    """Smallest part, but for the last."""
    max_part_bytes: int
    max_parts: int
    max_put_bytes: int
    """Largest object of a single put."""
    max_single_copy_bytes: int = 1 << 62
    """Largest object that `Store.copy_from` has copied by a single request. Larger ones take other requests, which a
    service may refuse though it takes the single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object in a listing."""

    key: str
    size_bytes: int
    modified_at: datetime
    """When the store says it was written; timezone-aware."""
    changed_at: datetime | None = None
    """When it came to lie there, where the store tells that apart: a file can be copied with its time of writing."""
    version: str = ""
    """Changes with every write where the store has such a thing (an ETag, a generation); empty elsewhere."""

    def is_same_write(self, other: ObjectInfo) -> bool:
        """Return whether nothing was written between two looks, as far as the store can tell."""
        if self.version and other.version:
            return (self.size_bytes, self.version) == (other.size_bytes, other.version)
        return (self.size_bytes, self.modified_at) == (other.size_bytes, other.modified_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """One unfinished multipart upload."""

    key: str
    upload_id: str
    started_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where one part lies in its object. Numbers start at 1; parts follow each other without gaps."""

    number: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPart:
    """A part that the store has taken."""

    part: Part
    token: str
    """What the store wants to see again at completion (an ETag on S3)."""
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPart:
    """A part that an unfinished upload holds, as the store describes it. Its checksum, if any, says what it is."""

    number: int
    size_bytes: int
    token: str
    """As in `UploadedPart`."""
    crc32c: int | None
    md5: str | None
    """In hexadecimal. What stands here may be something else, and then matches no part."""


class Store(abc.ABC):
    """One place that holds objects. See the module's text for what holds for every method."""

    capabilities: Capabilities
    """What it does if it is what it says it is. Known without asking; `probe` asks."""
    limits: Limits

    def probe(self) -> Capabilities:
        """What the store that answers really does.

        Where that is not known beforehand (an S3 endpoint that is not Amazon's, a file system without hard links), it
        is tried out on small objects of the call's own, which are removed again; the answer is kept for the life of
        the process. Needs the permission to write, so only whoever is about to write asks. Raises `StoreError` where
        the store could not be asked.
        """
        return self.capabilities

    @property
    @abc.abstractmethod
    def uri(self) -> str:
        """The root, without a trailing slash and without credentials."""

    def url(self, key: str) -> str:
        """The full address of `key`, for messages."""
        return f"{self.uri}/{key}" if key else self.uri

    @abc.abstractmethod
    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        """Create the object at `key` whole, or not at all, and durably.

        With `if_absent`, raises `ObjectExistsError` where an object lies at `key` already, and leaves it untouched.
        """

    @abc.abstractmethod
    def create_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id. Nothing lies at `key` until it is completed."""

    @abc.abstractmethod
    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        """Upload one part. May be called again for the same part; the last call counts."""

    @abc.abstractmethod
    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Make the object of `parts`, given in any order and joined in that of their numbers, visible, durably."""

    @abc.abstractmethod
    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop the upload and its parts. An upload that is gone already is no error."""

    @abc.abstractmethod
    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        """Fill `views`, one after the other, with the object's bytes from `offset_bytes` on.

        Raises `ShortObjectError` where the object ends too early, `InterruptedReadError` where the answer broke off.
        """

    @abc.abstractmethod
    def read(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object; `StoreError` where it is larger than `max_bytes`."""

    @abc.abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size and time of the object at `key`."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix` (a plain string prefix), in no promised order."""

    @abc.abstractmethod
    def list_directories(self) -> Iterator[str]:
        """The distinct first segments, without ``/``, of all keys that have more than one segment."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects, in the order given. A key at which nothing lies is no error."""

    @abc.abstractmethod
    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        """Every unfinished multipart upload whose key starts with `prefix`."""

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        """Every part that the unfinished upload holds, whoever sent it; several of one number where all can be used.

        `complete_multipart` accepts them: of this upload, or of any in this store, as `Capabilities.listed_parts` says.
        Nothing is listed for an upload that was completed or aborted; a store may also raise `ObjectNotFoundError`.
        """
        raise UnsupportedOperationError(
            f"{self.url(key)}: this store cannot say what the unfinished upload {upload_id!r} holds. "
            "Upload the object anew.",
            key=self.url(key),
            operation="list_parts",
        )

    @abc.abstractmethod
    def copy(self, source_key: str, target_key: str) -> None:
        """Copy one object within the store, without downloading it where the store can."""

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:  # noqa: ARG002  # for stores that can
        """Have the service copy the object at `source_url`, an `url` of another store of its kind, to `target_key`.

        No byte passes through here. The CRC32C of what came to lie at `target_key`, as the service has computed it from
        the bytes; None where it says none. The caller sees to it that one endpoint and one set of credentials reach
        both. Each request is run by `tried`, so that of a copy in many requests only the one that failed is made again.
        Raises `UnsupportedOperationError` where this store cannot copy from there.
        """
        raise UnsupportedOperationError(
            f"{self.url(target_key)}: this store cannot have {source_url} copied by the service. Read it and write it.",
            key=self.url(target_key),
            operation="copy_from",
        )
