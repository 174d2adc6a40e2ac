"""The contract of stores on fake-gcs-server, less what that breaks; and its answers, cut at every byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.kit.wire import GCS_FORBIDDEN
from tests.stores import broken
from tests.stores.broken import CRC, PART, VIEWS, BrokenAnswerTests, Tape
from tests.stores.http_contract import HTTPStoreContract

from cloudckpt.errors import ChecksumRefusedError
from cloudckpt.stores.base import UploadedPart
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.testing.contract_base import crc, keys, put
from cloudckpt.testing.servers import GCSServer


@pytest.fixture
def http_server(gcs_server: GCSServer) -> GCSServer:
    return gcs_server


class TestGCSOnFakeServer(HTTPStoreContract):
    store_type = GCSStore
    denial = GCS_FORBIDDEN

    def test_the_wrong_checksum_is_refused(self, store: GCSStore) -> None:
        """The server takes any checksum, so an object is replaced before its answer shows that it is another: the
        caller hears of it, and the damaged object is gone. That GCS is given the checksum is in test_requests.
        """
        put(store, "other", b"other")
        with pytest.raises(ChecksumRefusedError):
            store.put("new", [memoryview(b"body")], crc32c=crc(b"other"))
        assert keys(store) == ["other"]


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
