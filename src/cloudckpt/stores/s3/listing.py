"""Listings, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudckpt.stores.s3.session import S3Session


def object_pages(session: S3Session, operation: str, **members: Any) -> Iterator[dict[str, Any]]:
    """The answers to ListObjectsV2, up to the last."""
    markers: dict[str, Any] = {}
    while True:
        page = session.call(operation, "ListObjectsV2", None, **members, **markers)
        # Any other XML than a listing is parsed as one that is empty: nothing would seem to be there.
        is_truncated = session.required(page, "IsTruncated", operation, "ListObjectsV2", members["Prefix"])
        yield page
        if not is_truncated:
            return
        token = session.required(page, "NextContinuationToken", operation, "ListObjectsV2", members["Prefix"])
        markers = {"ContinuationToken": token}


def upload_pages(session: S3Session, operation: str, *, prefix: str) -> Iterator[dict[str, Any]]:
    """The answers to ListMultipartUploads, up to the last."""
    markers: dict[str, Any] = {}
    while True:
        page = session.call(operation, "ListMultipartUploads", None, Prefix=prefix, **markers)
        is_truncated = session.required(page, "IsTruncated", operation, "ListMultipartUploads", prefix)
        yield page
        if not is_truncated:
            return
        markers = {
            marker: session.required(page, f"Next{marker}", operation, "ListMultipartUploads", prefix)
            for marker in ("KeyMarker", "UploadIdMarker")
        }
