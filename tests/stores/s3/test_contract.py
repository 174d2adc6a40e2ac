"""The contract of stores on moto, less what that breaks; and its answers, cut at every byte."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from tests.kit.wire import S3_ACCESS_DENIED
from tests.stores import broken
from tests.stores.broken import CRC, PART, VIEWS, BrokenAnswerTests, Tape
from tests.stores.http_contract import HTTPStoreContract

from cloudckpt.stores.base import UploadedPart, UploadInfo
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing.contract_base import content, put, run_at_once
from cloudckpt.testing.servers import S3Server


@pytest.fixture
def http_server(s3_server: S3Server) -> S3Server:
    return s3_server


class TestS3OnMoto(HTTPStoreContract):
    store_type = S3Store
    denial = S3_ACCESS_DENIED

    def test_one_of_many_threads_creates(self, store: S3Store) -> None:
        """moto has no lock between the check and the write: several may win, but never none, and never a mixture."""
        bodies = [f"writer {writer}".encode() * 100 for writer in range(4)]
        results = run_at_once([functools.partial(put, store, "race", body, if_absent=True) for body in bodies])
        winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
        assert content(store, "race") in winners

    def test_one_of_two_processes_creates(self, store: S3Store) -> None:
        """No race can be held on moto."""
        pytest.skip("moto has no lock between the check and the write")

    def test_a_create_never_replaces_what_was_just_completed(self, store: S3Store) -> None:
        """Nor this one."""
        pytest.skip("moto has no lock between the check and the write")

    def check_upload_time(self, info: UploadInfo) -> None:
        """moto says of every upload that it began in 2010."""
        assert info.started_at.tzinfo is not None


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
    def taped(self, tape: Tape, http_server: S3Server, bucket: str) -> tuple[S3Store, str]:
        """A store behind the tape with an object and an upload, whose id comes with it."""
        options = {**http_server.storage_options, "endpoint_url": tape.server.endpoint_url}
        store = S3Store(bucket, "runs/one", storage_options=options, timeout_s=30, connections=2)
        for key in ("k", "a/b", "a/c"):
            store.put(key, VIEWS, crc32c=CRC)
        upload_id = store.create_multipart("multi")
        store.upload_part("multi", upload_id, PART, VIEWS, crc32c=CRC)
        return store, upload_id
