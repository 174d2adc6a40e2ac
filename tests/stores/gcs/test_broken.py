"""Answers of GCS that are cut at every byte of head, chunk sizes, body and trailer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.stores import broken
from tests.stores.broken import CRC, PART, VIEWS, BrokenAnswerTests, Tape

from cloudckpt.stores.base import UploadedPart
from cloudckpt.stores.gcs import GCSStore

if TYPE_CHECKING:
    from cloudckpt.testing.servers import GCSServer


def _complete(store: GCSStore, done: UploadedPart) -> None:
    # The part belongs to another upload: what one call does is not known to the next.
    store.complete_multipart("multi", store.create_multipart("multi"), [done])


# Each with a part that was uploaded.
CALLS: dict[str, Callable[[GCSStore, UploadedPart], object]] = {
    **broken.CALLS,
    "upload_part": lambda store, _: store.upload_part("m", "fedcba98765432ff", PART, VIEWS, crc32c=CRC).part,
    "list_parts": lambda store, done: list(store.list_parts("multi", done.token.split("@")[1])),
    "complete_multipart": _complete,
    "abort_multipart": lambda store, _: store.abort_multipart("multi", "fedcba98765432ee"),
}


class TestBrokenAnswers(BrokenAnswerTests):
    calls = CALLS

    @pytest.fixture
    def http_server(self, gcs_server: GCSServer) -> GCSServer:
        return gcs_server

    @pytest.fixture
    def taped(self, tape: Tape, http_server: GCSServer, bucket: str) -> tuple[GCSStore, UploadedPart]:
        """A store behind the tape with objects and an upload, whose part comes with it."""
        options = {**http_server.storage_options, "endpoint_url": tape.server.endpoint_url}
        store = GCSStore(bucket, "runs/one", storage_options=options, timeout_s=30, connections=2)
        for key in ("k", "a/b", "gone"):
            store.put(key, VIEWS, crc32c=CRC)
        upload_id = store.create_multipart("multi")
        store.upload_part("multi", upload_id, PART, VIEWS, crc32c=CRC)
        (found,) = store.list_parts("multi", upload_id)
        return store, UploadedPart(part=PART, token=found.token, crc32c=CRC)
