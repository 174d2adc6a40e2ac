"""S3 and its compatibles as a `Store`."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

from cloudckpt.options import GIB, MIB
from cloudckpt.stores import _probe as probing
from cloudckpt.stores._body import check_key, in_order
from cloudckpt.stores._http_body import ViewsBody
from cloudckpt.stores.base import Capabilities, FoundPart, Limits, ObjectInfo, Store, UploadedPart, UploadInfo, once
from cloudckpt.stores.s3.client import ClientKey, is_amazons, require_boto3
from cloudckpt.stores.s3.config import parse_storage_options
from cloudckpt.stores.s3.copying import (
    CHECKED_PART_BYTES,
    abort_upload,
    copy_checked,
    copy_object,
    crc32c_of_answer,
)
from cloudckpt.stores.s3.deleting import delete_objects
from cloudckpt.stores.s3.express import check_options, is_directory_bucket
from cloudckpt.stores.s3.listing import list_objects, list_parts, list_prefixes, list_unfinished
from cloudckpt.stores.s3.reading import measure, read_object, read_range
from cloudckpt.stores.s3.session import S3Session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cloudckpt.stores.base import Part, Tried, Views

_CAPABILITIES = Capabilities(conditional_create=True, multipart=True, verifies_crc32c=True, listed_parts="same_upload")
_MD5 = re.compile(r"[0-9a-f]{32}")
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_LIMITS = Limits(
    min_part_bytes=5 * MIB,
    max_part_bytes=5 * GIB,
    max_parts=10_000,
    max_put_bytes=5 * GIB,
    max_single_copy_bytes=CHECKED_PART_BYTES,
)


class S3Store(Store):
    """Objects under ``s3://bucket/prefix``.

    Every request is made once, with no retries of boto3's own. Credentials come from `storage_options` or,
    as ever with AWS, from the environment, a profile or the machine's role; they are in no message and no
    ``repr``. `timeout_s` bounds each wait without progress. A store may be pickled, and used after a fork:
    the client is made anew there.
    """

    capabilities = _CAPABILITIES
    limits = _LIMITS

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        storage_options: Mapping[str, Any],
        timeout_s: float,
        connections: int,
    ) -> None:
        require_boto3()
        config = parse_storage_options(storage_options)
        if is_directory_bucket(bucket):
            check_options(bucket, config)
        self._session = S3Session(bucket, ClientKey(config=config, timeout_s=timeout_s, connections=connections))
        prefix = prefix.strip("/")
        self._root = f"{prefix}/" if prefix else ""

    def __repr__(self) -> str:
        return f"S3Store({self.uri!r})"

    @property
    def uri(self) -> str:
        """The root, without a trailing slash and without credentials."""
        return f"s3://{self._session.bucket}/{self._root}".rstrip("/")

    @property
    def session(self) -> S3Session:
        """For questions that are about the bucket, not about objects."""
        return self._session

    def probe(self) -> Capabilities:
        """As declared where the endpoint is Amazon's own; any other is tried out, once per process and bucket."""
        endpoint = self._session.endpoint_url("probe")
        if is_amazons(endpoint):
            return self.capabilities
        return probing.probe(self, endpoint=endpoint, bucket=self._session.bucket, condition="If-None-Match: *")

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        """PutObject, with ``If-None-Match: *`` where `if_absent`."""
        if if_absent:
            endpoint = self._session.endpoint_url("put")
            probing.refuse_where_ignored(self, key, endpoint=endpoint, bucket=self._session.bucket)
        body = ViewsBody(views)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        self._call(
            "put",
            "PutObject",
            key,
            Body=body,
            ContentLength=len(body),
            ChecksumCRC32C=_encoded(crc32c),
            **condition,
        )

    def create_multipart(self, key: str) -> str:
        """CreateMultipartUpload, with CRC32C as the parts' checksum."""
        answer = self._call("create_multipart", "CreateMultipartUpload", key, ChecksumAlgorithm="CRC32C")
        return str(self._required(answer, "UploadId", "create_multipart", "CreateMultipartUpload", key))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        """UploadPart."""
        body = ViewsBody(views)
        answer = self._call(
            "upload_part",
            "UploadPart",
            key,
            UploadId=upload_id,
            PartNumber=part.number,
            Body=body,
            ContentLength=len(body),
            ChecksumCRC32C=_encoded(crc32c),
        )
        token = self._required(answer, "ETag", "upload_part", "UploadPart", key)
        return UploadedPart(part=part, token=token, crc32c=crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """CompleteMultipartUpload, with each part's checksum."""
        listed = [
            {"PartNumber": done.part.number, "ETag": done.token, "ChecksumCRC32C": _encoded(done.crc32c)}
            for done in in_order(self, key, list(parts))
        ]
        self._call(
            "complete_multipart",
            "CompleteMultipartUpload",
            key,
            UploadId=upload_id,
            MultipartUpload={"Parts": listed},
        )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """AbortMultipartUpload."""
        abort_upload(self._session, "abort_multipart", self._key(key, "abort_multipart"), upload_id)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        """One ranged GetObject, read into `views` without a copy."""
        read_range(self._session, self._key(key, "read_into"), offset_bytes, views)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """GetObject."""
        return read_object(self._session, self._key(key, "read"), max_bytes=max_bytes)

    def head(self, key: str) -> ObjectInfo:
        """HeadObject; where that fails, GetObject, whose answer says why."""
        size_bytes, modified_at, version = measure(self._session, "head", self._key(key, "head"))
        return ObjectInfo(key=key, size_bytes=size_bytes, modified_at=modified_at, version=version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """ListObjectsV2, page by page."""
        for item in list_objects(self._session, "list", prefix=self._root + prefix):
            if item["Key"] != self._root:  # some tools mark directories by empty objects
                yield ObjectInfo(
                    key=item["Key"][len(self._root) :],
                    size_bytes=item["Size"],
                    modified_at=item["LastModified"],
                    version=str(item.get("ETag") or ""),
                )

    def list_directories(self) -> Iterator[str]:
        """ListObjectsV2 with a delimiter, page by page."""
        for found in list_prefixes(self._session, "list_directories", prefix=self._root):
            yield found[len(self._root) :].rstrip("/")

    def delete(self, keys: Iterable[str]) -> None:
        """DeleteObject for each key, in order; DeleteObjects for long rows of siblings, in any order."""
        delete_objects(self._session, (self._key(key, "delete") for key in keys))

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        """ListMultipartUploads, page by page."""
        for item in list_unfinished(self._session, "list_uploads", prefix=self._root + prefix):
            yield UploadInfo(
                key=item["Key"][len(self._root) :],
                upload_id=item["UploadId"],
                started_at=item["Initiated"],
            )

    def list_parts(self, key: str, upload_id: str) -> Iterator[FoundPart]:
        """ListParts, page by page. The MD5 is the ETag, which is something else under SSE-KMS."""
        for item in list_parts(self._session, "list_parts", self._key(key, "list_parts"), upload_id):
            tag = item["ETag"].strip('"')
            yield FoundPart(
                number=item["PartNumber"],
                size_bytes=item["Size"],
                token=item["ETag"],
                crc32c=crc32c_of_answer(item.get("ChecksumCRC32C")),
                md5=tag if _MD5.fullmatch(tag) else None,
            )

    def copy(self, source_key: str, target_key: str) -> None:
        """CopyObject; above 5 GiB, UploadPartCopy."""
        size_bytes = self.head(source_key).size_bytes
        copy_object(self._session, self._root + source_key, self._key(target_key, "copy"), size_bytes=size_bytes)

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        """CopyObject; above 256 MiB, UploadPartCopy."""
        target = self._key(target_key, "copy_from")
        bucket, _, key = source_url.removeprefix("s3://").partition("/")
        if bucket.startswith("arn:") or is_directory_bucket(bucket) or is_directory_bucket(self._session.bucket):
            return super().copy_from(source_url, target_key)
        source = S3Session(bucket, self._session.client_key)
        size_bytes, _, _ = tried(lambda: measure(source, "copy_from", key))
        place = {"Bucket": bucket, "Key": key}
        return copy_checked(self._session, place, target, size_bytes=size_bytes, tried=tried)

    def _call(self, operation: str, api: str, key: str, **members: Any) -> dict[str, Any]:
        return self._session.call(operation, api, self._key(key, operation), **members)

    def _key(self, key: str, operation: str) -> str:
        check_key(self, key, operation)
        return self._root + key

    def _required(self, answer: dict[str, Any], name: str, operation: str, api: str, key: str) -> Any:
        return self._session.required(answer, name, operation, api, self._root + key)


def _encoded(crc32c: int) -> str:
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()
