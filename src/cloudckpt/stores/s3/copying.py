"""Copies within the store: one request up to 5 GiB, in parts above."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.options import GIB

if TYPE_CHECKING:
    from cloudckpt.stores.s3.session import S3Session

_MOST_PER_COPY_BYTES = 5 * GIB
_PART_BYTES = 1 * GIB


def copy_object(session: S3Session, source: str, target: str, *, size_bytes: int) -> None:
    """Copy the object at `source`, of `size_bytes`, to `target`."""
    place = {"Bucket": session.bucket, "Key": source}
    if size_bytes <= _MOST_PER_COPY_BYTES:
        session.call("copy", "CopyObject", target, CopySource=place)
        return
    created = session.call("copy", "CreateMultipartUpload", target, ChecksumAlgorithm="CRC32C")
    upload_id = session.required(created, "UploadId", "copy", "CreateMultipartUpload", target)
    try:
        parts = [
            _copy_part(
                session,
                target,
                place=place,
                upload_id=upload_id,
                number=number,
                begin_bytes=begin,
                end_bytes=min(begin + _PART_BYTES, size_bytes),
            )
            for number, begin in enumerate(range(0, size_bytes, _PART_BYTES), start=1)
        ]
        session.call("copy", "CompleteMultipartUpload", target, UploadId=upload_id, MultipartUpload={"Parts": parts})
    except BaseException:
        abort_upload(session, "copy", target, upload_id)
        raise


def abort_upload(session: S3Session, operation: str, key: str, upload_id: str) -> None:
    """Drop the upload; one that is gone already is no error."""
    try:
        session.call(operation, "AbortMultipartUpload", key, UploadId=upload_id)
    except ObjectNotFoundError:
        return


def _copy_part(
    session: S3Session,
    target: str,
    *,
    place: dict[str, str],
    upload_id: str,
    number: int,
    begin_bytes: int,
    end_bytes: int,
) -> dict[str, Any]:
    answer = session.call(
        "copy",
        "UploadPartCopy",
        target,
        UploadId=upload_id,
        PartNumber=number,
        CopySource=place,
        CopySourceRange=f"bytes={begin_bytes}-{end_bytes - 1}",
    )
    result = session.required(answer, "CopyPartResult", "copy", "UploadPartCopy", target)
    checksum = {"ChecksumCRC32C": result["ChecksumCRC32C"]} if result.get("ChecksumCRC32C") else {}
    return {
        "PartNumber": number,
        "ETag": session.required(result, "ETag", "copy", "UploadPartCopy", target),
        **checksum,
    }
