"""GetObject, straight into the caller's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloudckpt.errors import ShortObjectError, StoreError, TransientStoreError
from cloudckpt.stores._body import num_bytes
from cloudckpt.stores._http_reading import BodyReader, check_range, check_size, fill_from, object_size

if TYPE_CHECKING:
    from datetime import datetime

    from cloudckpt.stores.base import Views
    from cloudckpt.stores.s3.session import S3Session


def read_range(session: S3Session, key: str, offset_bytes: int, views: Views) -> None:
    """Fill `views` from `offset_bytes` of the object at `key`."""
    size_bytes = num_bytes(views)
    if size_bytes == 0:
        return
    end_bytes = offset_bytes + size_bytes
    answer = session.call("read_into", "GetObject", key, Range=f"bytes={offset_bytes}-{end_bytes - 1}")
    reader = BodyReader(answer["Body"])
    done = False
    try:
        check_range(
            session,
            key,
            content_range=answer.get("ContentRange"),
            length_bytes=answer.get("ContentLength"),
            offset_bytes=offset_bytes,
            end_bytes=end_bytes,
        )
        fill_from(session, key, reader, views, operation="read_into", api="GetObject")
        done = True
    finally:
        reader.close(reuse=done)


def read_object(session: S3Session, key: str, *, max_bytes: int) -> bytes:
    """The whole object at `key`; `StoreError` where it is larger than `max_bytes`."""
    answer = session.call("read", "GetObject", key)
    reader = BodyReader(answer["Body"])
    done = False
    try:
        size_bytes = check_size(
            session,
            key,
            content_range=answer.get("ContentRange"),
            size_bytes=answer.get("ContentLength"),
            max_bytes=max_bytes,
        )
        content = bytearray(size_bytes)
        fill_from(session, key, reader, [memoryview(content)], operation="read", api="GetObject")
        done = True
        return bytes(content)
    finally:
        reader.close(reuse=done)


def measure(session: S3Session, operation: str, key: str) -> tuple[int, datetime, str]:
    """Size, time and ETag of the object at `key`.

    By HeadObject; where that fails, by GetObject. An answer to HEAD has no body: it does not tell a missing bucket from
    a missing key, nor an expired token from a denied permission, nor S3 from anybody else.
    """
    try:
        answer = session.call(operation, "HeadObject", key)
        size_bytes = session.required(answer, "ContentLength", operation, "HeadObject", key)
    except TransientStoreError:
        raise
    except StoreError:
        answer, size_bytes = _measure_by_get(session, operation, key)
    modified_at = session.required(answer, "LastModified", operation, "HeadObject", key)
    return size_bytes, modified_at, str(answer.get("ETag") or "")


def _measure_by_get(session: S3Session, operation: str, key: str) -> tuple[dict[str, Any], int]:
    try:
        answer = session.call(operation, "GetObject", key, Range="bytes=0-0")
    except ShortObjectError as error:  # it has just appeared, and is empty
        raise TransientStoreError(str(error), key=error.key, operation=operation) from None
    answer["Body"].close()
    return answer, object_size(
        session, operation, key, content_range=answer.get("ContentRange"), length_bytes=answer.get("ContentLength")
    )
