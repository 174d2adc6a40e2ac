"""S3 and its compatibles as a `Store`."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from awscrt.checksums import combine_crc32c

from cloudckpt._messages import gc_advice
from cloudckpt.errors import (
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import GIB, MIB
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
from cloudckpt.stores.http_body import ViewsBody, decode_crc32c, encode_crc32c
from cloudckpt.stores.http_clients import ClientKey, require_sdk
from cloudckpt.stores.http_store import HTTPStore, size_of_range
from cloudckpt.stores.s3.errors import translate_code
from cloudckpt.stores.s3.session import (
    S3Session,
    check_directory_options,
    is_amazons,
    is_directory_bucket,
    parse_storage_options,
)

_log = logging.getLogger("cloudckpt")

_MD5 = re.compile(r"[0-9a-f]{32}")
CHECKED_PART_BYTES = 256 * MIB
"""The service answers a copy after it was made: one of a few GiB can take longer than any timeout."""
_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "CommonPrefixes": ("Prefix",),
    "Contents": ("Key", "Size", "LastModified"),
    "Parts": ("PartNumber", "Size", "ETag"),
    "Uploads": ("Key", "UploadId", "Initiated"),
}
"""The lists in the pages of listings, and the members that each of their entries has."""


class S3Store(HTTPStore):
    """Objects under ``s3://bucket/prefix``.

    boto3 repeats no request. One that was redirected, or refused for its signature or credentials, is sent again, twice
    at most (`S3Session.send`). Credentials come from `storage_options` or from the ordinary AWS configuration; they are
    in no message and no ``repr``. `timeout_s` bounds each wait without progress. A store may be pickled.
    """

    capabilities = Capabilities(
        conditional_create=True,
        multipart=True,
        verifies_crc32c=True,
        listed_parts="same_upload",
        copies_within="s3",
        copies_ranges=True,
    )
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
    limits = Limits(
        min_part_bytes=5 * MIB,
        max_part_bytes=5 * GIB,
        max_parts=10_000,
        max_put_bytes=5 * GIB,
    )
    session: S3Session
    condition = "If-None-Match: *"

    def __init__(
        self, bucket: str, prefix: str, *, storage_options: Mapping[str, Any], timeout_s: float, connections: int
    ) -> None:
        require_sdk("boto3", store="s3://", extra="s3")
        config = parse_storage_options(storage_options)
        if is_directory_bucket(bucket):
            check_directory_options(bucket, config)
        key = ClientKey(config=config, timeout_s=timeout_s, connections=connections)
        super().__init__(prefix, S3Session(bucket, key))

    def is_genuine(self, endpoint_url: str) -> bool:
        return is_amazons(endpoint_url)

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        """Make one PutObject, with ``If-None-Match: *`` if `if_absent`."""
        if if_absent:
            self.refuse_ignored_condition(key)
        name, body = self.name_of(key, "put"), ViewsBody(views)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        checksum = encode_crc32c(crc32c)
        with self.session.translation("put", "PutObject", name):
            self.session.send(
                "PutObject", name, Body=body, ContentLength=len(body), ChecksumCRC32C=checksum, **condition
            )

    def create_multipart(self, key: str) -> str:
        """Begin an upload with CRC32C as the parts' checksum."""
        name, api = self.name_of(key, "create_multipart"), "CreateMultipartUpload"
        answer = self.session.call("create_multipart", api, name, ChecksumAlgorithm="CRC32C")
        return str(self.session.require(answer, "UploadId", "create_multipart", api, name))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        name, body = self.name_of(key, "upload_part"), ViewsBody(views)
        with self.session.translation("upload_part", "UploadPart", name):
            answer = self.session.send(
                "UploadPart",
                name,
                UploadId=upload_id,
                PartNumber=part.number,
                Body=body,
                ContentLength=len(body),
                ChecksumCRC32C=encode_crc32c(crc32c),
            )
        token = self.session.require(answer, "ETag", "upload_part", "UploadPart", name)
        return UploadedPart(part=part, token=token, crc32c=crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Complete the upload, with the checksum of each part that has one."""
        listed = [
            {"PartNumber": done.part.number, "ETag": done.token}
            | ({} if done.crc32c is None else {"ChecksumCRC32C": encode_crc32c(done.crc32c)})
            for done in sort_parts(self, key, list(parts))
        ]
        self.session.call(
            "complete_multipart",
            "CompleteMultipartUpload",
            self.name_of(key, "complete_multipart"),
            UploadId=upload_id,
            MultipartUpload={"Parts": listed},
        )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        name = self.name_of(key, "abort_multipart")
        with contextlib.suppress(ObjectNotFoundError):
            self.session.call("abort_multipart", "AbortMultipartUpload", name, UploadId=upload_id)

    def head(self, key: str) -> ObjectInfo:
        """Make a HeadObject; if it fails, a GetObject, whose answer has a body that says why."""
        size_bytes, modified_at, version = _measure(self.session, "head", self.name_of(key, "head"))
        return ObjectInfo(key=key, size_bytes=size_bytes, modified_at=modified_at, version=version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for item in _list_objects(self.session, "list", prefix=self._root + prefix):
            if item["Key"] != self._root:  # some tools mark directories by empty objects
                yield ObjectInfo(
                    key=item["Key"][len(self._root) :],
                    size_bytes=item["Size"],
                    modified_at=item["LastModified"],
                    version=str(item.get("ETag") or ""),
                )

    def list_directories(self) -> Iterator[str]:
        members = {"Prefix": self._root, "Delimiter": "/"}
        for page in _pages(self.session, "list_directories", "ListObjectsV2", None, members):
            for item in page.get("CommonPrefixes", []):
                yield item["Prefix"][len(self._root) :].rstrip("/")

    def delete_object(self, name: str) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            self.session.call("delete", "DeleteObject", name)

    def delete_row(self, names: Sequence[str]) -> None:
        """Make one DeleteObjects; if the store does not offer it, a DeleteObject for each name."""
        deletion = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = self.session.call("delete", "DeleteObjects", None, Delete=deletion)
        except StoreError as error:
            # Not offered; or not with a checksum's header, in whose place some stores want Content-MD5.
            if type(error) not in (StoreError, UnsupportedOperationError):
                raise
            for name in names:
                self.delete_object(name)
            return
        for failed in answer.get("Errors", []):
            code, detail, name = (failed.get(field, "") for field in ("Code", "Message", "Key"))
            failure = translate_code(code, detail, self.session.failed_request("delete", "DeleteObjects", name))
            if not isinstance(failure, ObjectNotFoundError):
                raise failure

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        wanted = self._root + prefix
        listed = wanted[: wanted.rfind("/") + 1] if is_directory_bucket(self.session.bucket) else wanted
        for page in _pages(self.session, "list_uploads", "ListMultipartUploads", None, {"Prefix": listed}):
            for item in page.get("Uploads", []):
                if item["Key"].startswith(wanted):
                    key = item["Key"][len(self._root) :]
                    yield UploadInfo(key=key, upload_id=item["UploadId"], started_at=item["Initiated"])

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        """List the parts. The MD5 is the ETag, which is something else under SSE-KMS."""
        name = self.name_of(key, "list_parts")
        for page in _pages(self.session, "list_parts", "ListParts", name, {"UploadId": upload_id}):
            for item in page.get("Parts", []):
                yield _describe_part(item["PartNumber"], item["Size"], item)

    def copy_from(self, source_url: str, target_key: str, *, run: RequestRunner = run_once) -> int | None:
        """Make a CopyObject; above 256 MiB, an UploadPartCopy for each part."""
        session, target = self.session, self.name_of(target_key, "copy_from")
        place = self._find_place(source_url)
        if place is None:
            return super().copy_from(source_url, target_key)
        source = S3Session(place["Bucket"], session.client_key)
        size_bytes, _, _ = run(lambda: _measure(source, "copy_from", place["Key"]))
        if size_bytes > CHECKED_PART_BYTES:
            return self._copy_in_parts(source_url, target_key, size_bytes=size_bytes, run=run)
        answer = run(
            lambda: session.call("copy_from", "CopyObject", target, CopySource=place, ChecksumAlgorithm="CRC32C")
        )
        result = session.require(answer, "CopyObjectResult", "copy_from", "CopyObject", target)
        return decode_crc32c(result.get("ChecksumCRC32C"))

    def copy_part(self, key: str, upload_id: str, part: Part, *, source_url: str, source_begin: int) -> FoundPart:
        """Make an UploadPartCopy. The MD5 is the ETag, as in `list_parts`."""
        session, target, place = self.session, self.name_of(key, "copy_part"), self._find_place(source_url)
        if place is None:
            return super().copy_part(key, upload_id, part, source_url=source_url, source_begin=source_begin)
        members = {"UploadId": upload_id, "PartNumber": part.number}
        members["CopySourceRange"] = f"bytes={source_begin}-{source_begin + part.size_bytes - 1}"
        answer = session.call("copy_part", "UploadPartCopy", target, CopySource=place, **members)
        result = session.require(answer, "CopyPartResult", "copy_part", "UploadPartCopy", target)
        session.require(result, "ETag", "copy_part", "UploadPartCopy", target)
        return _describe_part(part.number, part.size_bytes, result)

    def _find_place(self, source_url: str) -> dict[str, str] | None:
        """Return the bucket and key of a source of copies; None if this store's bucket cannot copy from there."""
        bucket, _, key = source_url.removeprefix("s3://").partition("/")
        if bucket.startswith("arn:") or is_directory_bucket(bucket) or is_directory_bucket(self.session.bucket):
            return None
        return {"Bucket": bucket, "Key": key}

    def _copy_in_parts(self, source_url: str, key: str, *, size_bytes: int, run: RequestRunner) -> int | None:
        """Copy an object part by part; return the CRC32C of the copy if the service reports it.

        Returns None too if the upload is gone at its end, because an answer to its completion may have been lost.
        """
        upload_id = run(lambda: self.create_multipart(key))
        done: list[UploadedPart] = []
        crc32c, is_known = 0, True
        try:
            for number, begin in enumerate(range(0, size_bytes, CHECKED_PART_BYTES), start=1):
                size = min(CHECKED_PART_BYTES, size_bytes - begin)
                part = Part(number=number, offset_bytes=begin, size_bytes=size)
                copy = functools.partial(self.copy_part, source_url=source_url, source_begin=begin)
                found = run(functools.partial(copy, key, upload_id, part))
                done.append(UploadedPart(part=part, token=found.token, crc32c=found.crc32c))
                is_known = is_known and found.crc32c is not None
                crc32c = combine_crc32c(crc32c, found.crc32c or 0, size)
            try:
                run(lambda: self.complete_multipart(key, upload_id, done))
            except ObjectNotFoundError:
                return None
        except BaseException:
            try:
                self.abort_multipart(key, upload_id)
            except StoreError as error:  # the first error is raised
                _log.warning("could not abort a failed copy to %s: %s. %s", self.url(key), error, gc_advice(self.uri))
            raise
        return crc32c if is_known else None


def _describe_part(number: int, size_bytes: int, item: Mapping[str, Any]) -> FoundPart:
    tag = item["ETag"].strip('"')
    return FoundPart(
        number=number,
        size_bytes=size_bytes,
        token=item["ETag"],
        crc32c=decode_crc32c(item.get("ChecksumCRC32C")),
        md5=tag if _MD5.fullmatch(tag) else None,
    )


def _measure(session: S3Session, operation: str, key: str) -> tuple[int, datetime, str]:
    """Return size, time and ETag of an object.

    A HeadObject that fails is asked again by GetObject. An answer to HEAD has no body: it does not tell a missing
    bucket from a missing key, nor an expired token from a denied permission, nor S3 from another server.
    """
    try:
        answer = session.call(operation, "HeadObject", key)
        size_bytes = session.require(answer, "ContentLength", operation, "HeadObject", key)
    except TransientStoreError:
        raise
    except StoreError:
        try:
            answer = session.call(operation, "GetObject", key, Range="bytes=0-0")
        except ShortObjectError as error:  # it has just appeared, and is empty
            raise TransientStoreError(str(error), key=error.key, operation=operation) from None
        answer["Body"].close()
        content_range, length_bytes = answer.get("ContentRange"), answer.get("ContentLength")
        size_bytes = size_of_range(session, operation, key, content_range, length_bytes)
    modified_at = session.require(answer, "LastModified", operation, "HeadObject", key)
    return size_bytes, modified_at, str(answer.get("ETag") or "")


def _list_objects(session: S3Session, operation: str, *, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield every object whose key starts with `prefix`, as ListObjectsV2 describes it."""
    directory = prefix[: prefix.rfind("/") + 1]
    if directory == prefix or not is_directory_bucket(session.bucket):
        for page in _pages(session, operation, "ListObjectsV2", None, {"Prefix": prefix}):
            yield from page.get("Contents", [])
        return
    # Directory buckets list whole directories only. The listing enters those that match: a checkpoint's manifests are
    # beside a directory with all its data.
    matching = []
    for page in _pages(session, operation, "ListObjectsV2", None, {"Prefix": directory, "Delimiter": "/"}):
        yield from (item for item in page.get("Contents", []) if item["Key"].startswith(prefix))
        matching += [item["Prefix"] for item in page.get("CommonPrefixes", []) if item["Prefix"].startswith(prefix)]
    for folder in matching:
        yield from _list_objects(session, operation, prefix=folder)


def _pages(
    session: S3Session, operation: str, api: str, key: str | None, members: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the pages of a listing. Raises `StoreError` for a page of another listing."""
    where = members["Prefix"] if key is None else key
    markers = {
        "ListObjectsV2": {"ContinuationToken": "NextContinuationToken"},
        "ListMultipartUploads": {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
        "ListParts": {"PartNumberMarker": "NextPartNumberMarker"},
    }[api]
    if api == "ListMultipartUploads" and is_directory_bucket(session.bucket):
        del markers["UploadIdMarker"]  # a directory bucket's KeyMarker is no key, and is enough
    last: dict[str, Any] = {}
    while True:
        page = session.call(operation, api, key, **members, **last)
        is_truncated = session.require(page, "IsTruncated", operation, api, where)
        _check_page(session, operation, where, page, members)
        if api == "ListObjectsV2":
            names = [item.get("Key") for item in page.get("Contents", [])]
            names += [item.get("Prefix") for item in page.get("CommonPrefixes", [])]
            session.check_names(operation, prefix=where, names=names)
        yield page
        if not is_truncated:
            return
        following = {name: session.require(page, member, operation, api, where) for name, member in markers.items()}
        session.check_goes_on(operation, prefix=where, token=following, last_token=last)
        last = following


def _check_page(session: S3Session, operation: str, key: str, page: dict[str, Any], members: Mapping[str, str]) -> None:
    """Raise `TransientStoreError` for a page that answers another request, or from which something was lost."""
    echoed = {name: page[name] for name in members if page.get(name) is not None}
    others = [name for name, echo in echoed.items() if _normalize(echo) != _normalize(members[name])]
    entries = [(entry, names) for kind, names in _ENTRIES.items() for entry in page.get(kind, [])]
    if others:
        problem = f"it is about another {others[0]} ({echoed[others[0]]!a:.200})"
    elif any(name not in entry for entry, names in entries for name in names):
        problem = "an entry of it lacks a member that S3's have"
    elif page.get("KeyCount", 0) > len(entries):
        problem = f"it says that it has {page['KeyCount']:,} entries, and has {len(entries):,}"
    else:
        return
    problem = (
        f"the answer is a listing that was not asked for: {problem}. Is there a proxy or a cache in between? Try again."
    )
    raise session.error(TransientStoreError, operation, key, problem)


def _normalize(text: str) -> str:
    # Stores differ in which members of an answer they encode, and how. botocore decodes an answer that says it is.
    return unquote(unquote(text)).replace("+", " ")
