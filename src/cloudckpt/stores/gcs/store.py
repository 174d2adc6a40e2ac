"""Google Cloud Storage as a `Store`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from cloudckpt._workers import run_all
from cloudckpt.errors import ObjectNotFoundError, StoreError, TransientStoreError, UnsupportedOperationError
from cloudckpt.options import GIB
from cloudckpt.stores.base import (
    Capabilities,
    FoundPart,
    Limits,
    ObjectInfo,
    Part,
    RequestRunner,
    UploadedPart,
    UploadInfo,
    Views,
    run_once,
    sort_parts,
)
from cloudckpt.stores.gcs import uploads
from cloudckpt.stores.gcs.session import LISTING, MAX_HELPERS, GCSClient, GCSSession, is_googles, parse_storage_options
from cloudckpt.stores.gcs.uploads import Upload, parse_temporary_name
from cloudckpt.stores.http_body import decode_crc32c
from cloudckpt.stores.http_clients import ClientKey, require_sdk
from cloudckpt.stores.http_store import HTTPStore

_MAX_BYTES = 5 * 1024 * GIB  # https://cloud.google.com/storage/quotas
_OBJECTS = "kind,nextPageToken,items(name,size,timeCreated,generation)"
_NAMES = "kind,nextPageToken,items/name"
_PARTS = "kind,nextPageToken,items(name,size,generation,crc32c)"
_PREFIXES = "kind,nextPageToken,prefixes"
_PAGE_OF_NAMES = 100

_log = logging.getLogger("cloudckpt")
_aborted: set[str] = set()
"""The ids of the uploads that this process aborted, so that a late part is not kept."""
keeping_buckets: set[str] = set()
"""The buckets that have refused this process the removal of parts."""


class GCSStore(HTTPStore):
    """Objects under ``gs://bucket/prefix``.

    Google's library repeats no request. One whose token or credentials were refused is sent again with others
    (`GCSSession.call`). Credentials come from `storage_options` or from the application-default credentials; they are
    in no message and no ``repr``. `timeout_s` bounds each wait without progress. A store may be pickled.

    The parts of an upload are temporary objects beside its key. Listings leave them out, and no key may have such a
    name.
    """

    capabilities = Capabilities(
        conditional_create=True, multipart=True, verifies_crc32c=True, listed_parts="any_upload", copies_within="gs"
    )
    limits = Limits(
        min_part_bytes=1,
        max_part_bytes=_MAX_BYTES,
        max_parts=uploads.MAX_SOURCES**3,
        max_put_bytes=_MAX_BYTES,
    )
    session: GCSSession
    condition = "ifGenerationMatch=0"

    def __init__(
        self, bucket: str, prefix: str, *, storage_options: Mapping[str, Any], timeout_s: float, connections: int
    ) -> None:
        require_sdk("google.cloud.storage", store="gs://", extra="gcs")
        config = parse_storage_options(storage_options)
        key = ClientKey(config=config, timeout_s=timeout_s, connections=connections)
        super().__init__(prefix, GCSSession(bucket, key))
        if bucket in keeping_buckets:
            # Objects are then smaller, and put whole. Not within a save, which has laid its objects out.
            self.capabilities = dataclasses.replace(
                self.capabilities, multipart=False, listed_parts="none", copies_within=""
            )

    def is_genuine(self, endpoint_url: str) -> bool:
        return is_googles(endpoint_url)

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        """Make one request, with ``ifGenerationMatch=0`` if `if_absent`."""
        if if_absent:
            self.refuse_ignored_condition(key)
        name, storage_class = self.name_of(key, "put"), self.session.client_key.config.storage_class
        uploads.insert(
            self.session, "put", name, views, crc32c=crc32c, storage_class=storage_class, if_absent=if_absent
        )

    def create_multipart(self, key: str) -> str:
        """Draw an id. Sends nothing."""
        name = self.name_of(key, "create_multipart")
        upload_id = uploads.new_upload_id()
        longest = Upload(name=name, upload_id=upload_id).part_name(1, nonce=uploads.new_nonce())
        if len(longest.encode()) > uploads.MAX_NAME_BYTES:
            problem = "the key is too long for an upload in parts, whose names are longer. Use a shorter prefix or key."
            raise self.session.error(UnsupportedOperationError, "create_multipart", name, problem)
        return upload_id

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        """Create a temporary object beside the key."""
        upload = self._open_upload(key, upload_id, "upload_part")
        nonce = uploads.new_nonce()
        stored = uploads.insert(
            self.session,
            "upload_part",
            upload.part_name(part.number, nonce=nonce),
            views,
            crc32c=crc32c,
            storage_class=uploads.TEMPORARY_CLASS,
        )
        if upload_id in _aborted:  # meanwhile
            uploads.remove(self.session, "upload_part", stored.name, generation=stored.generation)
            self._open_upload(key, upload_id, "upload_part")
        return UploadedPart(part=part, token=uploads.make_token(nonce, stored.generation), crc32c=crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Have the service compose exactly the generations in `parts`, then remove the temporary objects."""
        upload = self._open_upload(key, upload_id, "complete_multipart")
        pieces = [uploads.parse_token(self.session, upload, done) for done in sort_parts(self, key, list(parts))]
        uploads.compose_parts(self.session, upload, pieces)
        try:
            self._remove_temporaries("complete_multipart", upload)
        except TransientStoreError:
            raise  # a repetition continues from here
        except StoreError as error:
            # No right to delete, or a retention policy: the object is whole, and no repetition would change that.
            if self.session.bucket not in keeping_buckets:
                keeping_buckets.add(self.session.bucket)
                _log.warning(
                    "%s is complete, but its parts stay and are paid for, and so may those of other objects of this "
                    "save: %s. Later saves of this process to this bucket use no parts",
                    self.url(key),
                    error,
                )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Remove every temporary object of the upload."""
        name = self.name_of(key, "abort_multipart")
        if uploads.is_upload_id(upload_id):  # no upload has another id
            _aborted.add(upload_id)
            self._remove_temporaries("abort_multipart", Upload(name=name, upload_id=upload_id))

    def head(self, key: str) -> ObjectInfo:
        name, bucket = self.name_of(key, "head"), self.session.bucket
        blob = self.session.call("head", "objects.get", name, lambda client: client.load(bucket, name))
        return self._info_of("head", "objects.get", blob)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for blobs, _ in self._pages("list", prefix=self._root + prefix, fields=_OBJECTS):
            for blob in blobs:
                # Some tools mark directories by empty objects.
                if blob.name != self._root and parse_temporary_name(blob.name) is None:
                    yield self._info_of("list", "objects.list", blob)

    def list_directories(self) -> Iterator[str]:
        """List the directories, and look into each, several at once: temporary objects alone make none.

        A listing with a delimiter does not say what a prefix holds.
        """
        for _, prefixes in self._pages("list_directories", prefix=self._root, fields=_PREFIXES, delimiter="/"):
            non_empty: set[str] = set()
            _run_side_by_side(prefixes, functools.partial(self._note_if_not_empty, non_empty))
            yield from (prefix[len(self._root) :].rstrip("/") for prefix in prefixes if prefix in non_empty)

    def delete_object(self, name: str) -> None:
        uploads.remove(self.session, "delete", name)

    def delete_row(self, names: Sequence[str]) -> None:
        """Make a request for each name, several at once."""
        _run_side_by_side(names, functools.partial(uploads.remove, self.session, "delete"))

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        """List the uploads with at least one part. Before its first part, an upload leaves no trace."""
        wanted = self._root + prefix
        started: dict[Upload, datetime] = {}
        for blobs, _ in self._pages("list_uploads", prefix=wanted, fields=_OBJECTS):
            for blob in blobs:
                upload = parse_temporary_name(blob.name)
                if upload is not None and upload.name.startswith(wanted):
                    modified_at = self._info_of("list_uploads", "objects.list", blob).modified_at
                    started[upload] = min(started.get(upload, modified_at), modified_at)
        for upload, started_at in started.items():
            yield UploadInfo(key=upload.name[len(self._root) :], upload_id=upload.upload_id, started_at=started_at)

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        """List the parts. A part is an object that is never replaced, so any upload can be completed with it."""
        upload = self._open_upload(key, upload_id, "list_parts")
        for blobs, _ in self._pages("list_parts", prefix=upload.prefix, fields=_PARTS):
            for blob in blobs:
                number_and_nonce = upload.parse_part(blob.name)
                if number_and_nonce is not None:
                    number, nonce = number_and_nonce
                    facts = uploads.facts_of(blob)
                    stored = uploads.describe(self.session, "list_parts", "objects.list", blob.name, facts)
                    token = uploads.make_token(nonce, stored.generation, upload)
                    yield FoundPart(
                        number=number, size_bytes=stored.size_bytes, token=token, crc32c=stored.crc32c, md5=None
                    )

    def copy_from(self, source_url: str, target_key: str, *, run: RequestRunner = run_once) -> int | None:
        """Have the service rewrite the object. A large one takes several calls, each from where the last ended."""
        target = self.name_of(target_key, "copy_from")
        bucket, _, source = source_url.removeprefix("gs://").partition("/")
        # A missing object is the source, so errors are about it.
        source_session = GCSSession(bucket, self.session.client_key)
        token: str | None = None

        def rewrite(client: GCSClient) -> tuple[str | None, Any]:
            old, new = client.bucket(bucket).blob(source), client.blob(self.session.bucket, target)
            return new.rewrite(old, token=token, **client.each_call)[0], new.crc32c

        while True:
            token, crc32c = run(functools.partial(source_session.call, "copy_from", "objects.rewrite", source, rewrite))
            if token is None:
                return decode_crc32c(crc32c)

    def name_of(self, key: str, operation: str) -> str:
        name = super().name_of(key, operation)
        if parse_temporary_name(name) is not None:
            problem = (
                "this is the name of a temporary object of an upload. Choose another key; abort_multipart removes it."
            )
            raise self.session.error(StoreError, operation, name, problem)
        return name

    def _open_upload(self, key: str, upload_id: str, operation: str) -> Upload:
        name = self.name_of(key, operation)
        if upload_id in _aborted or not uploads.is_upload_id(upload_id):
            problem = f"the multipart upload {upload_id} was completed or aborted. Upload the object anew."
            raise self.session.error(ObjectNotFoundError, operation, name, problem)
        return Upload(name=name, upload_id=upload_id)

    def _remove_temporaries(self, operation: str, upload: Upload) -> None:
        pages = self._pages(operation, prefix=upload.prefix, fields=_NAMES)
        names = [blob.name for blobs, _ in pages for blob in blobs]
        _run_side_by_side(names, functools.partial(uploads.remove, self.session, operation))

    def _note_if_not_empty(self, non_empty: set[str], prefix: str) -> None:
        for blobs, _ in self._pages("list_directories", prefix=prefix, fields=_NAMES, page_size=_PAGE_OF_NAMES):
            if any(parse_temporary_name(blob.name) is None for blob in blobs):
                non_empty.add(prefix)
                return

    def _info_of(self, operation: str, api: str, blob: Any) -> ObjectInfo:
        """Describe the library's object. The time is of its creation: a change of class would make it look fresh."""
        try:
            size_bytes, created_at = blob.size, blob.time_created
        except (AttributeError, TypeError, ValueError):
            size_bytes = created_at = None
        if not isinstance(blob.name, str) or size_bytes is None or created_at is None:
            raise self.session.foreign_answer(operation, api, str(blob.name))
        key, version = blob.name[len(self._root) :], str(blob.generation or "")
        return ObjectInfo(key=key, size_bytes=size_bytes, modified_at=created_at, version=version)

    def _pages(self, operation: str, *, prefix: str, **arguments: Any) -> Iterator[tuple[Sequence[Any], Sequence[str]]]:
        """Yield the library's objects of each page, and its prefixes."""
        token: str | None = None

        def ask(client: GCSClient) -> tuple[Any, Sequence[Any], Sequence[str]]:
            bucket = client.bucket(self.session.bucket)
            # One listing for each page: the library's iterator ends without an error after a page has failed.
            blobs = client.storage.list_blobs(bucket, prefix=prefix, page_token=token, **arguments, **client.each_call)
            page = next(blobs.pages)
            # Read here, where the library's failure to parse an odd answer is not taken for a fault of cloudckpt.
            return page.raw_page, list(page), list(page.prefixes)

        while True:
            raw, blobs, prefixes = self.session.call(operation, "objects.list", prefix, ask)
            # Other JSON than a listing would be taken for an empty one.
            if raw.get("kind") != LISTING:
                raise self.session.foreign_answer(operation, "objects.list", prefix)
            self.session.check_names(operation, prefix=prefix, names=[*(blob.name for blob in blobs), *prefixes])
            yield blobs, prefixes
            next_token = raw.get("nextPageToken")
            if next_token is None:
                return
            self.session.check_goes_on(operation, prefix=prefix, token=next_token, last_token=token)
            token = next_token


def _run_side_by_side(names: Sequence[str], work: Callable[[str], None]) -> None:
    """Run `work` on each name, several at once. Raises the first error after all requests have ended."""
    run_all(names, work, num_threads=MAX_HELPERS, name="cloudckpt-gcs")  # requests have timeouts of their own
