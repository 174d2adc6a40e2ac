"""Uploads that were stored wrongly, whose answers were lost, or that are repeated or come too late."""

from __future__ import annotations

from typing import Any

import pytest
from awscrt.checksums import crc32c
from tests.stores.scripted import refuse

from cloudckpt import errors
from cloudckpt.stores.base import Part, UploadedPart
from cloudckpt.stores.gcs import GCSStore

X = [memoryview(b"x")]
CRC = crc32c(b"x")
PART = Part(number=1, offset_bytes=0, size_bytes=1)
UPLOAD = "00000000000000aa"
TRY = "0123abcd"
DONE = UploadedPart(part=PART, token=f"{TRY}-7", crc32c=CRC)


def complete(store: GCSStore) -> None:
    store.complete_multipart("k", store.create_multipart("k"), [DONE])


# What was stored, and what was meant to be.


def stored(scripted: Any, *, generation: int = 7, size: int = 1, value: int = CRC) -> Any:
    described = {"generation": str(generation), "size": str(size), "crc32c": scripted.encoded(value)}
    return scripted.json({"kind": "storage#object", "name": "k", **described})


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("damage", [{"value": 1}, {"size": 2}])
def test_what_was_stored_wrongly_is_removed_and_nothing_else(
    scripted: Any, damage: dict[str, int], *, if_absent: bool
) -> None:
    """Damaged bytes would lie there as if they were right; but another writer's object at the key is not ours."""
    server = scripted.serve(stored(scripted, **damage), scripted.reply(204))
    error = refuse(lambda: server.store().put("k", X, crc32c=CRC, if_absent=if_absent), errors.ChecksumRefusedError)
    assert "removed again" in str(error)
    _, removal = server.requests
    assert (removal.method, removal.path) == ("DELETE", "/storage/v1/b/bucket/o/k")
    assert removal.query["ifGenerationMatch"] == "7"


# Completions and aborts that are repeated, or come too late.


def test_parts_that_may_not_be_removed_do_not_fail_a_completed_upload(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a retention policy, or without the right to delete, nothing could be saved that is larger than a part."""
    gcs = scripted.any_gcs()

    def keep_all(connection: Any, request: Any) -> None:
        denied = scripted.error(403, "retentionPolicyNotMet")
        (denied if request.method == "DELETE" else gcs)(connection, request)

    store = scripted.serve(keep_all).store()
    upload_id = store.create_multipart("k")
    done = store.upload_part("k", upload_id, PART, X, crc32c=CRC)
    store.complete_multipart("k", upload_id, [done])
    assert "k" in gcs.objects
    assert "gs://bucket/k is complete, but its parts stay" in caplog.text


def test_an_upload_whose_parts_are_gone_is_not_completed_by_another_object(scripted: Any) -> None:
    """An older object at the key would be taken for the one that was to be composed."""
    gcs = scripted.any_gcs()
    gcs.put("k", 1, CRC + 1)
    gcs.put("k2", 2, CRC)
    store = scripted.serve(gcs).store()
    refuse(lambda: complete(store), errors.ObjectNotFoundError)
    assert set(gcs.objects) == {"k", "k2"}


def test_a_try_that_was_given_up_and_arrives_late_does_no_harm(scripted: Any) -> None:
    """Its answer took too long, the part was sent again, and then the first request was carried out after all: if it
    replaced what the second one wrote, the upload could not be completed, and a save of hours would fail.
    """
    gcs, held = scripted.any_gcs(), []

    def hold_the_first(connection: Any, request: Any) -> None:
        if request.path.startswith("/upload/") and not held:
            held.append(request)
            scripted.hang_up(connection, request)
        else:
            gcs(connection, request)

    store = scripted.serve(hold_the_first).store()
    upload_id = store.create_multipart("k")
    refuse(lambda: store.upload_part("k", upload_id, PART, X, crc32c=CRC), errors.TransientStoreError)
    done = store.upload_part("k", upload_id, PART, X, crc32c=CRC)
    gcs._answer(held[0])
    assert len(gcs.objects) == 2
    store.complete_multipart("k", upload_id, [done])
    assert set(gcs.objects) == {"k"}


def test_an_abort_removes_what_was_composed_on_the_way(scripted: Any) -> None:
    """It is as large as the object itself."""
    gcs = scripted.any_gcs()
    for name in (
        f"k.~{UPLOAD}-1-00001-0123abcd.~part",
        f"k.~{UPLOAD}-0-00001-0123abcd.~part",
        "k.~00000000000000ab-0-00001-0123abcd.~part",
        "k",
    ):
        gcs.put(name, 1, CRC)
    scripted.serve(gcs).store().abort_multipart("k", UPLOAD)
    assert set(gcs.objects) == {"k.~00000000000000ab-0-00001-0123abcd.~part", "k"}
