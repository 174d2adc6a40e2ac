"""Answers of S3 that are cut at every byte of head, chunk sizes, body and trailer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.stores import broken
from tests.stores.broken import CRC, PART, VIEWS, BrokenAnswerTests, Tape

from cloudckpt.stores.base import UploadedPart
from cloudckpt.stores.s3 import S3Store

if TYPE_CHECKING:
    from cloudckpt.testing.servers import S3Server


def _complete(store: S3Store, upload_id: str) -> None:
    done = UploadedPart(part=PART, token='"781e5e245d69b566979b86e28d23f2c7"', crc32c=CRC)  # noqa: S106  # an ETag
    store.complete_multipart("multi", upload_id, [done])


# Each with the id of an upload that has one part.
CALLS: dict[str, Callable[[S3Store, str], object]] = {
    **broken.CALLS,
    "put if absent": lambda store, _: store.put("created", VIEWS, crc32c=CRC, if_absent=True),
    "create_multipart": lambda store, _: store.create_multipart("multi"),
    "upload_part": lambda store, upload_id: store.upload_part("multi", upload_id, PART, VIEWS, crc32c=CRC),
    "list_parts": lambda store, upload_id: list(store.list_parts("multi", upload_id)),
    "list_parts of none": lambda store, _: list(store.list_parts("multi", "nope")),
    "complete_multipart": _complete,
    "complete_multipart of none": lambda store, _: _complete(store, "nope"),
    "abort_multipart": lambda store, upload_id: store.abort_multipart("multi", upload_id),
    "abort_multipart of none": lambda store, _: store.abort_multipart("multi", "nope"),
    "delete many": lambda store, _: store.delete([f"many/{number}" for number in range(17)]),
}


class TestBrokenAnswers(BrokenAnswerTests):
    calls = CALLS

    @pytest.fixture
    def http_server(self, s3_server: S3Server) -> S3Server:
        return s3_server

    @pytest.fixture
    def taped(self, tape: Tape, http_server: S3Server, bucket: str) -> tuple[S3Store, str]:
        """A store behind the tape with an object and an upload, whose id comes with it."""
        options = {**http_server.storage_options, "endpoint_url": tape.server.endpoint_url}
        store = S3Store(bucket, "runs/one", storage_options=options, timeout_s=30, connections=2)
        for key in ("k", "a/b", "a/c"):
            store.put(key, VIEWS, crc32c=CRC)
        upload_id = store.create_multipart("multi")
        store.upload_part("multi", upload_id, PART, VIEWS, crc32c=CRC)
        return store, upload_id
