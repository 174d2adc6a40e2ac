"""Answers of GCS that are cut at every byte of head, chunk sizes, body and trailer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from tests.stores import broken
from tests.stores.broken import CRC, EVERY, PART, VIEWS, Tape, check_broken, check_foreign

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


@pytest.fixture
def tape(gcs_server: GCSServer) -> Iterator[Tape]:
    tape = Tape(gcs_server.endpoint_url)
    yield tape
    tape.close()


@pytest.fixture
def taped(tape: Tape, gcs_server: GCSServer, bucket: str) -> tuple[GCSStore, UploadedPart]:
    """A store behind the tape with objects and an upload, whose part comes with it."""
    options = {**gcs_server.storage_options, "endpoint_url": tape.url}
    store = GCSStore(bucket, "runs/one", storage_options=options, timeout_s=30, connections=2)
    for key in ("k", "a/b", "gone"):
        store.put(key, VIEWS, crc32c=CRC)
    upload_id = store.create_multipart("multi")
    store.upload_part("multi", upload_id, PART, VIEWS, crc32c=CRC)
    (found,) = store.list_parts("multi", upload_id)
    return store, UploadedPart(part=PART, token=found.token, crc32c=CRC)


@pytest.mark.parametrize("name", CALLS)
def test_a_broken_answer_is_tried_again(tape: Tape, taped: tuple[GCSStore, UploadedPart], name: str) -> None:
    """If this fails, a connection that breaks ends a save or a load, for a wrong reason; or half an answer is taken for
    a whole one: nothing is there, an object is shorter than it is.
    """
    assert check_broken(tape, lambda: CALLS[name](*taped), ["chunks"], every=EVERY) > 10


@pytest.mark.faults
@pytest.mark.parametrize("name", CALLS)
def test_every_broken_answer_is_tried_again(tape: Tape, taped: tuple[GCSStore, UploadedPart], name: str) -> None:
    """If this fails, it does for a byte, or a framing, that the short form of the test leaves out."""
    assert check_broken(tape, lambda: CALLS[name](*taped), ["length", "chunks", "close"], every=1) > 100


@pytest.mark.parametrize("name", CALLS)
def test_what_the_store_has_not_said_is_not_believed(
    tape: Tape, taped: tuple[GCSStore, UploadedPart], name: str
) -> None:
    """If this fails, a web page or a load balancer's 404 says that a checkpoint is missing, damaged or written."""
    removes = name.startswith(("delete", "abort"))
    check_foreign(tape, lambda: CALLS[name](*taped), may_succeed=("200 empty", "204 empty") if removes else ())
