"""Copies that the service makes: one request up to a size, in parts above."""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING, Any

from awscrt.checksums import combine_crc32c

from cloudckpt._workers import each_done
from cloudckpt.errors import CloudckptError, ObjectNotFoundError, StoreError
from cloudckpt.options import GIB, MIB
from cloudckpt.stores.base import once

if TYPE_CHECKING:
    from cloudckpt.stores.base import Tried
    from cloudckpt.stores.s3.session import S3Session

_log = logging.getLogger("cloudckpt")

_MOST_PER_COPY_BYTES = 5 * GIB
_CRC32C_BYTES = 4
_PART_BYTES = 1 * GIB
CHECKED_PART_BYTES = 256 * MIB
"""The service answers a copy only once it has made it: one of a few GiB can take longer than anybody waits."""


def copy_object(session: S3Session, source: str, target: str, *, size_bytes: int) -> None:
    """Copy the object at `source`, of `size_bytes`, to `target`."""
    place = {"Bucket": session.bucket, "Key": source}
    if size_bytes <= _MOST_PER_COPY_BYTES:
        session.call("copy", "CopyObject", target, CopySource=place)
        return
    _copy_parts(session, "copy", place, target, size_bytes=size_bytes, part_bytes=_PART_BYTES, tried=once)


def copy_checked(
    session: S3Session, place: dict[str, str], target: str, *, size_bytes: int, tried: Tried
) -> int | None:
    """Copy the object at `place`, of any bucket; the CRC32C that the service says it has, if it says one."""
    if size_bytes <= CHECKED_PART_BYTES:
        answer = tried(
            lambda: session.call("copy_from", "CopyObject", target, CopySource=place, ChecksumAlgorithm="CRC32C")
        )
        result = session.required(answer, "CopyObjectResult", "copy_from", "CopyObject", target)
        return crc32c_of_answer(result.get("ChecksumCRC32C"))
    parts = _copy_parts(
        session, "copy_from", place, target, size_bytes=size_bytes, part_bytes=CHECKED_PART_BYTES, tried=tried
    )
    if parts is None:
        return None
    whole = 0
    for number, part in enumerate(parts):
        value = crc32c_of_answer(part.get("ChecksumCRC32C"))
        if value is None:
            return None
        num_bytes = min(CHECKED_PART_BYTES, size_bytes - number * CHECKED_PART_BYTES)
        whole = combine_crc32c(whole, value, num_bytes) if number else value
    return whole


def crc32c_of_answer(encoded: str | None) -> int | None:
    """What an answer says; None where that is not the checksum of one piece."""
    if not encoded:
        return None
    try:
        value = base64.b64decode(encoded, validate=True)
    except ValueError:
        return None
    return int.from_bytes(value, "big") if len(value) == _CRC32C_BYTES else None


def _copy_parts(
    session: S3Session,
    operation: str,
    place: dict[str, str],
    target: str,
    *,
    size_bytes: int,
    part_bytes: int,
    tried: Tried,
) -> list[dict[str, Any]] | None:
    """The parts, as the service described them; None where its answer to their completion was lost, so that what lies
    at `target` may be something else.
    """
    created = tried(lambda: session.call(operation, "CreateMultipartUpload", target, ChecksumAlgorithm="CRC32C"))
    upload_id = session.required(created, "UploadId", operation, "CreateMultipartUpload", target)
    begins = range(0, size_bytes, part_bytes)
    found: dict[int, dict[str, Any]] = {}  # each written by one thread

    def copy_part(begin: int) -> None:
        found[begin] = tried(
            lambda: _copy_part(
                session,
                operation,
                target,
                place=place,
                upload_id=upload_id,
                number=begin // part_bytes + 1,
                begin_bytes=begin,
                end_bytes=min(begin + part_bytes, size_bytes),
            )
        )

    try:
        with session.share_of_connections() as width:
            for _ in each_done(begins, copy_part, num_threads=width, name="cloudckpt-s3", on_failure=_nothing):
                pass
        parts = [found[begin] for begin in begins]
        is_ours = _complete(session, operation, target, upload_id=upload_id, parts=parts, tried=tried)
    except BaseException:
        try:
            _abort(session, operation, target, upload_id=upload_id, tried=tried)
        except StoreError as error:  # the first failure is what it is about
            _log.warning("could not abort the upload to %s, gc will: %s", session.url(target), error)
        raise
    return parts if is_ours else None


def _complete(
    session: S3Session, operation: str, target: str, *, upload_id: str, parts: list[dict[str, Any]], tried: Tried
) -> bool:
    """Whether it was certainly this call that completed the upload."""
    num_tries = 0

    def complete() -> None:
        nonlocal num_tries
        num_tries += 1
        session.call(operation, "CompleteMultipartUpload", target, UploadId=upload_id, MultipartUpload={"Parts": parts})

    try:
        tried(complete)
    except ObjectNotFoundError:
        # The upload is gone: an earlier try completed it and only the answer was lost, or somebody aborted it.
        if num_tries == 1:
            raise
        return False
    return True


def _abort(session: S3Session, operation: str, target: str, *, upload_id: str, tried: Tried) -> None:
    try:
        tried(lambda: abort_upload(session, operation, target, upload_id))
    except StoreError:
        raise
    except CloudckptError:  # it begins nothing any more
        abort_upload(session, operation, target, upload_id)


def _nothing() -> None:
    """Requests that are under way end by themselves."""


def abort_upload(session: S3Session, operation: str, key: str, upload_id: str) -> None:
    """Drop the upload; one that is gone already is no error."""
    try:
        session.call(operation, "AbortMultipartUpload", key, UploadId=upload_id)
    except ObjectNotFoundError:
        return


def _copy_part(
    session: S3Session,
    operation: str,
    target: str,
    *,
    place: dict[str, str],
    upload_id: str,
    number: int,
    begin_bytes: int,
    end_bytes: int,
) -> dict[str, Any]:
    answer = session.call(
        operation,
        "UploadPartCopy",
        target,
        UploadId=upload_id,
        PartNumber=number,
        CopySource=place,
        CopySourceRange=f"bytes={begin_bytes}-{end_bytes - 1}",
    )
    result = session.required(answer, "CopyPartResult", operation, "UploadPartCopy", target)
    checksum = {"ChecksumCRC32C": result["ChecksumCRC32C"]} if result.get("ChecksumCRC32C") else {}
    return {
        "PartNumber": number,
        "ETag": session.required(result, "ETag", operation, "UploadPartCopy", target),
        **checksum,
    }
