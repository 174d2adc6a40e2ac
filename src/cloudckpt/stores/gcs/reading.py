"""Downloads, straight into the caller's memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cloudckpt.stores._body import num_bytes
from cloudckpt.stores._http_errors import ForeignAnswerError, foreign_words
from cloudckpt.stores._http_reading import BodyReader, check_range, check_size, fill_from
from cloudckpt.stores.gcs.translate import has_gcss_headers
from cloudckpt.stores.gcs.uploading import check_answer

if TYPE_CHECKING:
    from cloudckpt.stores.base import Views
    from cloudckpt.stores.gcs.client import GCSClient
    from cloudckpt.stores.gcs.session import GCSSession

_API = "objects.get"
_PARTIAL = 206
_LENGTH = re.compile(r"[0-9]{1,18}")


def read_range(session: GCSSession, name: str, offset_bytes: int, views: Views) -> None:
    """Fill `views` from `offset_bytes` of the object `name`."""
    size_bytes = num_bytes(views)
    if size_bytes == 0:
        return
    end_bytes = offset_bytes + size_bytes
    response = _get(session, "read_into", name, {"Range": f"bytes={offset_bytes}-{end_bytes - 1}"})
    reader = BodyReader(response.raw)
    done = False
    try:
        check_range(
            session,
            name,
            content_range=response.headers.get("Content-Range"),
            length_bytes=_length_bytes(response),
            offset_bytes=offset_bytes,
            end_bytes=end_bytes,
        )
        fill_from(session, name, reader, views, operation="read_into", api=_API)
        done = True
    finally:
        reader.close(reuse=done)


def read_object(session: GCSSession, name: str, *, max_bytes: int) -> bytes:
    """The whole object `name`; `StoreError` where it is larger than `max_bytes`."""
    response = _get(session, "read", name, {})
    reader = BodyReader(response.raw)
    done = False
    try:
        size_bytes = check_size(
            session,
            name,
            content_range=response.headers.get("Content-Range"),
            size_bytes=_length_bytes(response),
            max_bytes=max_bytes,
        )
        content = bytearray(size_bytes)
        fill_from(session, name, reader, [memoryview(content)], operation="read", api=_API)
        done = True
        return bytes(content)
    finally:
        reader.close(reuse=done)


def _get(session: GCSSession, operation: str, name: str, headers: dict[str, str]) -> Any:
    def ask(client: GCSClient) -> Any:
        response = client.http.get(
            client.object_url(session.bucket, name),
            params=client.query(alt="media"),
            # As they lie: decompressed bytes would be others, and more, than the range has.
            headers={"Accept-Encoding": "identity", **headers},
            timeout=client.timeout_s,
            stream=True,
            allow_redirects=False,
        )
        check_answer(response)
        if not _is_gcss(response):
            words = foreign_words("GCS's", response.status_code, response.headers.get("Content-Type"), None)
            response.close()
            raise ForeignAnswerError(words)
        return response

    return session.call(operation, _API, name, ask)


def _is_gcss(response: Any) -> bool:
    """Whether the body is an object's. A web page can have a length, an ETag and ranges, too."""
    if has_gcss_headers(response.headers):
        return True
    proof = "Content-Range" if response.status_code == _PARTIAL else "ETag"
    return proof in response.headers and not response.headers.get("Content-Type", "").startswith("text/html")


def _length_bytes(response: Any) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if _LENGTH.fullmatch(length) else None
