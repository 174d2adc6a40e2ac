"""From an HTTP response's body straight into the caller's memory, for the stores that speak HTTP."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

from cloudckpt.errors import (
    InterruptedReadError,
    ShortObjectError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores._body import num_bytes
from cloudckpt.stores._http_receiving import receive, socket_under

if TYPE_CHECKING:
    from cloudckpt.stores.base import Views

_MOST_AT_ONCE_BYTES = 1024 * 1024
_BETWEEN = "Is a proxy or a load balancer between? Try again; if it goes on, use another store or way to it."
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


class Session(Protocol):
    """What words and types a store's errors get."""

    def error(self, cls: type[StoreError], operation: str, key: str, what: str, **attributes: Any) -> StoreError:
        """An error of our own about `key`."""

    def translate(self, error: Exception, operation: str, api: str, key: str) -> StoreError | None:
        """What to raise for `error`; ``None`` where it is not the store's."""


class BodyReader:
    """The body of one response, read on the HTTP connection itself.

    `body` is urllib3's response, or botocore's body around it, both of which would copy every byte on its way.
    `received_bytes` counts what has arrived, but for a piece of at most 1 MiB that was under way when an error was
    raised.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        # botocore's body → urllib3's response → http.client's. All of them read into memory, the last
        # without copies.
        self._raw = getattr(body, "_raw_stream", body)
        self._source = getattr(self._raw, "_original_response", None) or body
        self.received_bytes = 0

    def fill(self, views: Views) -> bool:
        """Fill `views` one after the other; false where the body ends before they are full."""
        connection = socket_under(self._source)
        if connection is None:
            return self._fill_through_response(views)
        awaited_bytes, received_before_bytes = self._source.length, self.received_bytes
        try:
            receive(self._source, connection, views)
        finally:
            self.received_bytes += awaited_bytes - self._source.length
        return self.received_bytes - received_before_bytes == num_bytes(views)

    def _fill_through_response(self, views: Views) -> bool:
        for view in views:
            start = 0
            while start < view.nbytes:
                count = self._source.readinto(view[start : start + _MOST_AT_ONCE_BYTES])
                if not count:
                    return False
                start += count
                self.received_bytes += count
        return True

    def close(self, *, reuse: bool) -> None:
        """Give the connection back, to be used again only if the body was read to its end."""
        if not reuse or not self._at_end():
            self._body.close()
        release = getattr(self._raw, "release_conn", None)
        if release is not None:
            release()

    def _at_end(self) -> bool:
        # A chunked body ends in a chunk of its own, which has to be read too.
        closed = getattr(self._source, "isclosed", None)
        if closed is not None and closed():
            return True
        try:
            return not self._source.readinto(memoryview(bytearray(1)))
        except Exception:  # noqa: BLE001  # all that was wanted is there; the connection is of no more use
            return False


def fill_from(session: Session, key: str, reader: BodyReader, views: Views, *, operation: str, api: str) -> None:
    """Fill `views` from the body; raises `InterruptedReadError` where it breaks off after its first byte."""
    what = "the answer ended early"
    try:
        if reader.fill(views):
            return
    except Exception as error:
        translated = session.translate(error, operation, api, key)
        if translated is None:
            raise
        if reader.received_bytes == 0:
            raise translated from None
        what = f"the answer broke off ({type(error).__name__})"
    raise session.error(
        InterruptedReadError,
        operation,
        key,
        f"{what} after {reader.received_bytes:,} of {num_bytes(views):,} bytes. Try again from there.",
        received_bytes=reader.received_bytes,
    )


def check_range(
    session: Session,
    key: str,
    *,
    content_range: str | None,
    length_bytes: int | None,
    offset_bytes: int,
    end_bytes: int,
) -> None:
    """That the body is bytes ``[offset_bytes, end_bytes)`` of the object, and nothing else.

    Raises `ShortObjectError` where the answer says that the object ends before, and `TransientStoreError` where it
    contradicts the request or itself.
    """
    if content_range is None:
        # The whole object, by a store that does not know ranges or takes this one for all of it.
        begin, end, object_bytes = 0, length_bytes, length_bytes
    else:
        match = _CONTENT_RANGE.fullmatch(content_range.strip())
        if match is None:
            raise _odd_range(session, key, content_range, offset_bytes, end_bytes)
        begin, end = int(match[1]), int(match[2]) + 1
        object_bytes = None if match[3] == "*" else int(match[3])
        due = end_bytes if object_bytes is None else min(end_bytes, object_bytes)
        is_whole = length_bytes is None or length_bytes == max(end - begin, 0)
        if (begin, end) != (offset_bytes, due) or not is_whole:
            raise _odd_range(session, key, content_range, offset_bytes, end_bytes)
    if object_bytes is not None and object_bytes < end_bytes:
        raise session.error(
            ShortObjectError,
            "read_into",
            key,
            f"the object ends at byte {object_bytes:,}; bytes {offset_bytes:,} to {end_bytes:,} were asked for.",
        )
    if (begin, end) != (offset_bytes, end_bytes):
        raise session.error(
            UnsupportedOperationError,
            "read_into",
            key,
            f"bytes {offset_bytes:,} to {end_bytes:,} were asked for, and the answer holds the whole object. The "
            "store, or a proxy before it, does not serve ranges.",
        )


def check_size(session: Session, key: str, *, content_range: str | None, size_bytes: int | None, max_bytes: int) -> int:
    """The size of the whole object about to be read, which may be at most `max_bytes`."""
    if size_bytes is None or content_range is not None:
        what = f"the whole object was asked for, and the answer has {size_bytes} bytes (Content-Range: {content_range})"
        raise session.error(TransientStoreError, "read", key, f"{what}. {_BETWEEN}")
    if size_bytes > max_bytes:
        what = f"the object has {size_bytes:,} bytes; at most {max_bytes:,} are expected here."
        raise session.error(StoreError, "read", key, what)
    return size_bytes


def object_size(
    session: Session, operation: str, key: str, *, content_range: str | None, length_bytes: int | None
) -> int:
    """The size of the object whose first byte was asked for, as the answer says it."""
    match = _CONTENT_RANGE.fullmatch((content_range or "").strip())
    if match is not None and match[3] != "*":
        return int(match[3])
    if content_range is not None or length_bytes is None:
        what = f"the answer does not say how large the object is (Content-Range: {content_range}). {_BETWEEN}"
        raise session.error(TransientStoreError, operation, key, what)
    return length_bytes


def _odd_range(session: Session, key: str, content_range: str, offset_bytes: int, end_bytes: int) -> StoreError:
    return session.error(
        TransientStoreError,
        "read_into",
        key,
        f"bytes {offset_bytes:,} to {end_bytes:,} were asked for, and the answer holds others "
        f"(Content-Range: {content_range:.100}). {_BETWEEN}",
    )
