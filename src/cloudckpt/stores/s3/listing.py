"""Listings, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cloudckpt.errors import TransientStoreError
from cloudckpt.stores._http_listing import check_goes_on, check_names
from cloudckpt.stores.s3.express import is_directory_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cloudckpt.stores.s3.session import S3Session


_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "CommonPrefixes": ("Prefix",),
    "Contents": ("Key", "Size", "LastModified"),
    "Parts": ("PartNumber", "Size", "ETag"),
    "Uploads": ("Key", "UploadId", "Initiated"),
}
"""The lists in the pages, and what S3 says of each of their entries."""


def list_objects(session: S3Session, operation: str, *, prefix: str) -> Iterator[dict[str, Any]]:
    """Every object whose key starts with `prefix`, as ListObjectsV2 describes it."""
    directory = prefix[: prefix.rfind("/") + 1]
    if directory == prefix or not is_directory_bucket(session.bucket):
        for page in _object_pages(session, operation, Prefix=prefix):
            yield from page.get("Contents", [])
        return
    # Directory buckets list whole directories alone. Of those in this one, only what matches is entered: a checkpoint's
    # manifests lie beside a directory with all its data.
    matching = []
    for page in _object_pages(session, operation, Prefix=directory, Delimiter="/"):
        yield from (item for item in page.get("Contents", []) if item["Key"].startswith(prefix))
        matching += [item["Prefix"] for item in page.get("CommonPrefixes", []) if item["Prefix"].startswith(prefix)]
    for found in matching:
        yield from list_objects(session, operation, prefix=found)


def list_prefixes(session: S3Session, operation: str, *, prefix: str) -> Iterator[str]:
    """The directories directly under `prefix`, which ends in ``/`` or is empty.

    In directory buckets those too in which there is nothing but an unfinished upload.
    """
    for page in _object_pages(session, operation, Prefix=prefix, Delimiter="/"):
        for item in page.get("CommonPrefixes", []):
            yield item["Prefix"]


def list_unfinished(session: S3Session, operation: str, *, prefix: str) -> Iterator[dict[str, Any]]:
    """Every unfinished upload whose key starts with `prefix`, as ListMultipartUploads describes it."""
    in_directories = is_directory_bucket(session.bucket)
    asked = prefix[: prefix.rfind("/") + 1] if in_directories else prefix
    # A directory bucket's KeyMarker is enough by itself: it is no key.
    markers = ("KeyMarker",) if in_directories else ("KeyMarker", "UploadIdMarker")
    for page in _upload_pages(session, operation, prefix=asked, markers=markers):
        yield from (item for item in page.get("Uploads", []) if item["Key"].startswith(prefix))


def list_parts(session: S3Session, operation: str, key: str, upload_id: str) -> Iterator[dict[str, Any]]:
    """Every part that the unfinished upload holds, as ListParts describes it."""
    last: dict[str, Any] = {}
    while True:
        page = session.call(operation, "ListParts", key, UploadId=upload_id, **last)
        _check_page(session, operation, key, page, UploadId=upload_id)
        is_truncated = session.required(page, "IsTruncated", operation, "ListParts", key)
        yield from page.get("Parts", [])
        if not is_truncated:
            return
        marker = session.required(page, "NextPartNumberMarker", operation, "ListParts", key)
        check_goes_on(session, operation, prefix=key, token=marker, last_token=last.get("PartNumberMarker"))
        last = {"PartNumberMarker": marker}


def _object_pages(session: S3Session, operation: str, **members: Any) -> Iterator[dict[str, Any]]:
    token: dict[str, Any] = {}
    while True:
        page = session.call(operation, "ListObjectsV2", None, **members, **token)
        is_truncated = session.required(page, "IsTruncated", operation, "ListObjectsV2", members["Prefix"])
        _check_page(session, operation, members["Prefix"], page, **members)
        names = [item.get("Key") for item in page.get("Contents", [])]
        names += [item.get("Prefix") for item in page.get("CommonPrefixes", [])]
        check_names(session, operation, prefix=members["Prefix"], names=names)
        yield page
        if not is_truncated:
            return
        next_token = session.required(page, "NextContinuationToken", operation, "ListObjectsV2", members["Prefix"])
        last_token = token.get("ContinuationToken")
        check_goes_on(session, operation, prefix=members["Prefix"], token=next_token, last_token=last_token)
        token = {"ContinuationToken": next_token}


def _upload_pages(
    session: S3Session, operation: str, *, prefix: str, markers: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    last: dict[str, Any] = {}
    while True:
        page = session.call(operation, "ListMultipartUploads", None, Prefix=prefix, **last)
        is_truncated = session.required(page, "IsTruncated", operation, "ListMultipartUploads", prefix)
        _check_page(session, operation, prefix, page, Prefix=prefix)
        yield page
        if not is_truncated:
            return
        following = {
            marker: session.required(page, f"Next{marker}", operation, "ListMultipartUploads", prefix)
            for marker in markers
        }
        check_goes_on(session, operation, prefix=prefix, token=following, last_token=last)
        last = following


def _check_page(session: S3Session, operation: str, key: str, page: dict[str, Any], **asked: str) -> None:
    """Raise `TransientStoreError` for a page that answers another request, or from which something was lost."""
    echoed = {name: page.get(name) for name in asked}
    others = [name for name, echo in echoed.items() if echo is not None and _folded(echo) != _folded(asked[name])]
    entries = [(found, names) for kind, names in _ENTRIES.items() for found in page.get(kind, [])]
    if others:
        what = f"it is about another {others[0]} ({echoed[others[0]]!a:.200})"
    elif any(name not in found for found, names in entries for name in names):
        what = "an entry of it lacks what S3 says of each"
    elif page.get("KeyCount", 0) > len(entries):
        what = f"it says that it has {page['KeyCount']:,} entries, and has {len(entries):,}"
    else:
        return
    what = f"the answer is a listing that was not asked for: {what}. Is a proxy or a cache between? Try again."
    raise session.error(TransientStoreError, operation, key, what)


def _folded(text: str) -> str:
    # Stores do not agree on what of an answer is encoded, nor how; botocore decodes what says that it is.
    return unquote(unquote(text)).replace("+", " ")
