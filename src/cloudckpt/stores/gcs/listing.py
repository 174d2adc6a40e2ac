"""Listings, page by page, and what they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudckpt._workers import each_done
from cloudckpt.stores._http_listing import check_goes_on, check_names
from cloudckpt.stores.base import ObjectInfo, UploadInfo
from cloudckpt.stores.gcs import naming
from cloudckpt.stores.gcs.client import MOST_HELPERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from cloudckpt.stores.gcs.client import GCSClient
    from cloudckpt.stores.gcs.session import GCSSession

_OBJECTS = "kind,nextPageToken,items(name,size,timeCreated,generation)"
_NAMES = "kind,nextPageToken,items/name"
_PARTS = "kind,nextPageToken,items(name,size,generation,crc32c)"
_PREFIXES = "kind,nextPageToken,prefixes"
_KIND = "storage#objects"
_PAGE_OF_NAMES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    kind: object
    blobs: list[Any]
    """The library's objects."""
    prefixes: list[str]
    next_token: str | None


def objects(session: GCSSession, operation: str, *, prefix: str) -> Iterator[ObjectInfo]:
    """Every object whose name starts with `prefix`, temporary ones among them; its key is its whole name."""
    for page in _pages(session, operation, prefix=prefix, fields=_OBJECTS):
        for blob in page.blobs:
            yield info_of(session, operation, "objects.list", blob)


def names(session: GCSSession, operation: str, *, prefix: str, page_size: int | None = None) -> Iterator[str]:
    """The names alone."""
    for page in _pages(session, operation, prefix=prefix, fields=_NAMES, page_size=page_size):
        for blob in page.blobs:
            yield blob.name


def info_of(session: GCSSession, operation: str, api: str, blob: Any) -> ObjectInfo:
    """What the library's object says; its key is its whole name.

    The time is not that of the last update: a change of the class would make an old object look fresh.
    """
    try:
        size_bytes, created_at = blob.size, blob.time_created
    except (AttributeError, TypeError, ValueError):
        size_bytes = created_at = None
    if not isinstance(blob.name, str) or size_bytes is None or created_at is None:
        raise session.not_gcs(operation, api, str(blob.name))
    version = str(blob.generation or "")
    return ObjectInfo(key=blob.name, size_bytes=size_bytes, modified_at=created_at, version=version)


def uploads(session: GCSSession, operation: str, *, root: str, prefix: str) -> Iterator[UploadInfo]:
    """Every upload with at least one temporary object; the oldest says when it began."""
    started: dict[naming.Temporary, datetime] = {}
    for info in objects(session, operation, prefix=root + prefix):
        found = naming.parse(info.key)
        if found is not None and found.name.startswith(root + prefix):
            started[found] = min(started.get(found, info.modified_at), info.modified_at)
    for upload, started_at in started.items():
        yield UploadInfo(key=upload.name[len(root) :], upload_id=upload.upload_id, started_at=started_at)


def parts(session: GCSSession, operation: str, *, name: str, upload_id: str) -> Iterator[tuple[int, str, Any]]:
    """Number, try and the library's object of every part of the upload to `name`."""
    prefix = naming.prefix_of(name, upload_id)
    for page in _pages(session, operation, prefix=prefix, fields=_PARTS):
        for blob in page.blobs:
            found = naming.parse_part(blob.name, prefix=prefix)
            if found is not None:
                yield *found, blob


def directories(session: GCSSession, operation: str, *, root: str) -> Iterator[str]:
    """The first segments of all names under `root`, but those under which temporary objects alone lie.

    A listing with a delimiter does not say what lies under a prefix, so each is looked into, several at once.
    """
    for page in _pages(session, operation, prefix=root, fields=_PREFIXES, delimiter="/"):
        holding: set[str] = set()

        def look(prefix: str, holding: set[str] = holding) -> None:
            if _holds_objects(session, operation, prefix):
                holding.add(prefix)

        for _ in each_done(
            page.prefixes, look, num_threads=MOST_HELPERS, name="cloudckpt-gcs", on_failure=lambda: None
        ):
            pass
        yield from (prefix[len(root) :].rstrip("/") for prefix in page.prefixes if prefix in holding)


def _holds_objects(session: GCSSession, operation: str, prefix: str) -> bool:
    found = names(session, operation, prefix=prefix, page_size=_PAGE_OF_NAMES)
    return any(naming.parse(name) is None for name in found)


def _pages(session: GCSSession, operation: str, *, prefix: str, **arguments: Any) -> Iterator[_Page]:
    token: str | None = None
    while True:
        page = session.call(operation, "objects.list", prefix, _asking(session, prefix, token, arguments))
        # Other JSON than a listing would be taken for one that is empty: nothing would seem to be there.
        if page.kind != _KIND:
            raise session.not_gcs(operation, "objects.list", prefix)
        check_names(session, operation, prefix=prefix, names=[*(blob.name for blob in page.blobs), *page.prefixes])
        yield page
        if page.next_token is None:
            return
        check_goes_on(session, operation, prefix=prefix, token=page.next_token, last_token=token)
        token = page.next_token


def _asking(session: GCSSession, prefix: str, token: str | None, arguments: dict[str, Any]) -> Any:
    def ask(client: GCSClient) -> _Page:
        # One listing for each page: the library's iterator ends without a word once a page has failed.
        iterator = client.storage.list_blobs(
            client.bucket(session.bucket), prefix=prefix, page_token=token, **arguments, **client.each_call
        )
        page = next(iterator.pages)
        # Read here, where the library's stumbling over an odd answer is told from a fault of ours.
        return _Page(
            kind=page.raw_page.get("kind"),
            blobs=list(page),
            prefixes=list(page.prefixes),
            next_token=iterator.next_page_token,
        )

    return ask
