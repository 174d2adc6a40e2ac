"""Answers of GCS that are cut or damaged, at every byte of head, chunk sizes, body and trailer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from awscrt.checksums import crc32c
from tests.stores.broken import EVERY, Tape, check_broken, check_foreign

from cloudckpt.stores.base import Part, UploadedPart
from cloudckpt.stores.gcs import GCSStore

if TYPE_CHECKING:
    from cloudckpt.testing.servers import GCSServer

BODY = b"0123456789"
VIEWS = [memoryview(BODY)]
CRC = crc32c(BODY)
PART = Part(number=1, offset_bytes=0, size_bytes=10)


def _read_into(store: GCSStore, key: str, offset_bytes: int = 2) -> bytes:
    target = bytearray(4)
    store.read_into(key, offset_bytes, [memoryview(target)])
    return bytes(target)


def _complete(store: GCSStore, done: UploadedPart) -> None:
    # The part belongs to another upload: what one call does is not known to the next.
    store.complete_multipart("multi", store.create_multipart("multi"), [done])


# Each with a part that was uploaded.
CALLS: dict[str, Callable[[GCSStore, UploadedPart], object]] = {
    "put": lambda store, _: store.put("new", VIEWS, crc32c=CRC),
    "put what exists": lambda store, _: store.put("k", VIEWS, crc32c=CRC, if_absent=True),
    "upload_part": lambda store, _: store.upload_part("m", "fedcba98765432ff", PART, VIEWS, crc32c=CRC).part,
    "list_uploads": lambda store, _: list(store.list_uploads()),
    "list_parts": lambda store, done: list(store.list_parts("multi", done.token.split("@")[1])),
    "complete_multipart": _complete,
    "abort_multipart": lambda store, _: store.abort_multipart("multi", "fedcba98765432ee"),
    "read_into": lambda store, _: _read_into(store, "k"),
    "read_into short": lambda store, _: _read_into(store, "k", 8),
    "read_into beyond": lambda store, _: _read_into(store, "k", 50),
    "read_into missing": lambda store, _: _read_into(store, "nope"),
    "read": lambda store, _: store.read("k", max_bytes=100),
    "read missing": lambda store, _: store.read("nope", max_bytes=100),
    "head": lambda store, _: store.head("k"),
    "head missing": lambda store, _: store.head("nope"),
    "list": lambda store, _: list(store.list()),
    "list of nothing": lambda store, _: list(store.list("nope/")),
    "list_directories": lambda store, _: list(store.list_directories()),
    "copy": lambda store, _: store.copy_from(store.url("k"), "copied"),
    "copy missing": lambda store, _: store.copy_from(store.url("nope"), "copied"),
    "copy_from": lambda store, _: store.copy_from(store.url("k"), "copied"),
    "delete": lambda store, _: store.delete(["gone"]),
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
