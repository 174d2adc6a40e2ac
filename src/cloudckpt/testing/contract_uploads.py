"""Clauses about multipart uploads."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone

import pytest

from cloudckpt.errors import ChecksumRefusedError, ObjectNotFoundError, StoreError, UnsupportedOperationError
from cloudckpt.stores.base import FoundPart, Part, Store, UploadedPart, UploadInfo
from cloudckpt.testing.contract_base import (
    ODD_KEYS,
    Clauses,
    capture_outcome,
    content,
    crc,
    keys,
    make_bodies,
    make_parts,
    put,
    read_range,
    run_at_once,
    upload_part,
    upload_parts,
)


class UploadClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    def test_parts_come_in_parallel_and_the_last_of_a_number_counts(self, store: Store) -> None:
        """Every rank uploads from several threads, and sends a part again if its answer is lost."""
        self.require_multipart(store)
        bodies = make_bodies(store, 4)
        parts = make_parts(bodies)
        upload_id = store.create_multipart("data/a b")
        upload_part(store, "data/a b", upload_id, parts[0], b"?" * len(bodies[0]))
        results = run_at_once(
            [
                functools.partial(upload_part, store, "data/a b", upload_id, part, body)
                for part, body in zip(parts, bodies, strict=True)
            ]
        )
        uploaded = [result for result in results if not isinstance(result, Exception)]
        assert len(uploaded) == 4, results
        store.complete_multipart("data/a b", upload_id, [uploaded[index] for index in (2, 0, 3, 1)])
        whole = b"".join(bodies)
        assert store.head("data/a b").size_bytes == len(whole)
        assert content(store, "data/a b") == whole
        edge = len(bodies[0])
        assert read_range(store, "data/a b", edge - 2, edge + 2) == whole[edge - 2 : edge + 2]

    def test_an_upload_is_invisible_until_completed(self, store: Store) -> None:
        """A job that dies half-way must leave nothing that a reader could take for an object; an old one stays."""
        self.require_multipart(store)
        bodies = make_bodies(store, 2)
        put(store, "old", b"old")
        uploads = {key: store.create_multipart(key) for key in ("step/new", "old")}
        parts = {key: upload_parts(store, key, upload_id, bodies) for key, upload_id in uploads.items()}
        with pytest.raises(ObjectNotFoundError):
            store.head("step/new")
        with pytest.raises(ObjectNotFoundError):
            content(store, "step/new")
        assert keys(store) == ["old"]
        assert list(store.list_directories()) == []
        assert content(store, "old") == b"old"
        for key, upload_id in uploads.items():
            store.complete_multipart(key, upload_id, parts[key])
            assert content(store, key) == b"".join(bodies)
        assert keys(store) == ["old", "step/new"]

    def test_memory_of_parts_may_be_reused(self, store: Store) -> None:
        """Parts are sent from a ring of buffers that is filled anew as soon as the call returns."""
        self.require_multipart(store)
        bodies = make_bodies(store, 2)
        buffer = bytearray(bodies[0])
        upload_id = store.create_multipart("a")
        uploaded = []
        for part, body in zip(make_parts(bodies), bodies, strict=True):
            buffer[: len(body)] = body
            view = memoryview(buffer)[: len(body)]
            uploaded.append(store.upload_part("a", upload_id, part, [view], crc32c=crc(body)))
        buffer[:] = bytes(len(buffer))
        store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)

    def test_two_uploads_to_one_key_do_not_mix(self, store: Store) -> None:
        """A zombie's parts must not end up in another's object."""
        self.require_multipart(store)
        bodies = make_bodies(store, 2)
        parts = make_parts(bodies)
        own_id, other_id = store.create_multipart("a"), store.create_multipart("a")
        assert own_id != other_id
        uploaded = [upload_part(store, "a", own_id, parts[0], bodies[0])]
        upload_part(store, "a", other_id, parts[0], b"?" * len(bodies[0]))
        uploaded.append(upload_part(store, "a", own_id, parts[1], bodies[1]))
        store.complete_multipart("a", own_id, uploaded)
        store.abort_multipart("a", other_id)
        assert content(store, "a") == b"".join(bodies)

    def test_an_aborted_upload_leaves_nothing(self, store: Store) -> None:
        """Parts that remain cost money every month, and no listing of objects shows them."""
        self.require_multipart(store)
        bodies = make_bodies(store, 2)
        parts = make_parts(bodies)
        upload_id = store.create_multipart("a")
        uploaded = upload_part(store, "a", upload_id, parts[0], bodies[0])
        store.abort_multipart("a", upload_id)
        store.abort_multipart("a", upload_id)
        assert list(store.list_uploads()) == []
        assert keys(store) == []
        with pytest.raises(StoreError):
            upload_part(store, "a", upload_id, parts[1], bodies[1])
        with pytest.raises(StoreError):
            store.complete_multipart("a", upload_id, [uploaded])
        assert keys(store) == []

    def test_a_damaged_part_is_refused(self, store: Store) -> None:
        """A bit that flips on the way must not get into the object; the part can be sent again."""
        self.require_multipart(store)
        self.require_checksums(store)
        bodies = make_bodies(store, 2)
        upload_id = store.create_multipart("a")
        with pytest.raises(ChecksumRefusedError):
            store.upload_part("a", upload_id, make_parts(bodies)[0], [memoryview(bodies[0])], crc32c=crc(b"other"))
        assert keys(store) == []
        store.complete_multipart("a", upload_id, upload_parts(store, "a", upload_id, bodies))
        assert content(store, "a") == b"".join(bodies)

    def test_parts_with_a_gap_are_not_completed(self, store: Store) -> None:
        """An object with a hole has the right name and the wrong bytes."""
        self.require_multipart(store)
        bodies = make_bodies(store, 3)
        upload_id = store.create_multipart("a")
        uploaded = upload_parts(store, "a", upload_id, bodies)
        with pytest.raises(StoreError):
            store.complete_multipart("a", upload_id, [uploaded[0], uploaded[2]])
        assert keys(store) == []
        store.abort_multipart("a", upload_id)

    def test_requests_after_a_completion_change_nothing(self, store: Store) -> None:
        """The answer to a completion can be lost, and a part that was believed lost can arrive late."""
        self.require_multipart(store)
        bodies = make_bodies(store, 2)
        upload_id = store.create_multipart("a")
        uploaded = upload_parts(store, "a", upload_id, bodies)
        store.complete_multipart("a", upload_id, uploaded)
        outcome = capture_outcome(lambda: store.complete_multipart("a", upload_id, uploaded))
        assert outcome is None or isinstance(outcome, ObjectNotFoundError)
        assert content(store, "a") == b"".join(bodies)
        late = make_parts(bodies)[0]
        outcome = capture_outcome(lambda: upload_part(store, "a", upload_id, late, b"?" * len(bodies[0])))
        assert isinstance(outcome, UploadedPart | StoreError)
        store.abort_multipart("a", upload_id)
        assert keys(store) == ["a"]
        assert list(store.list_uploads()) == []
        assert content(store, "a") == b"".join(bodies)

    def test_unfinished_uploads_are_listed(self, store: Store) -> None:
        """Uploads of crashed jobs can be removed only if they are listed and distinguished from running ones."""
        self.require_multipart(store)
        ids = {key: store.create_multipart(key) for key in ("step-1/a", "step-1/b", "step-2/a b", *ODD_KEYS)}
        body = make_bodies(store, 1)[0]
        for key, upload_id in ids.items():  # some stores have nothing to list before the first part
            upload_part(store, key, upload_id, make_parts([body])[0], body)
        assert {info.key: info.upload_id for info in store.list_uploads()} == ids
        assert {info.key for info in store.list_uploads("step-1/")} == {"step-1/a", "step-1/b"}
        assert {info.key for info in store.list_uploads("step-2/a")} == {"step-2/a b"}
        assert list(store.list_uploads("step-3/")) == []
        for info in list(store.list_uploads()):
            self.check_upload_time(info)
            store.abort_multipart(info.key, info.upload_id)
        assert list(store.list_uploads()) == []
        assert keys(store) == []

    def test_hidden_uploads_are_recognized_by_their_ids(self, store: Store) -> None:
        """Garbage collection removes hidden uploads of any key, so each that is listed must be one of cloudckpt's."""
        if not store.capabilities.has_hidden_uploads:
            pytest.skip("uploads are not hidden beside their keys")
        upload_ids = {store.create_multipart(key) for key in ("a", "folder/any name")}
        assert {info.upload_id for info in store.list_uploads()} == upload_ids
        assert all(re.fullmatch("[0-9a-f]{32}", upload_id) for upload_id in upload_ids)
        assert [info.key for info in store.list_uploads("folder/")] == ["folder/any name"]
        assert keys(store) == []

    def check_upload_time(self, info: UploadInfo) -> None:
        """Check the start time of an unfinished upload; garbage collection chooses uploads by age."""
        assert info.started_at.tzinfo is not None
        assert abs(datetime.now(tz=timezone.utc) - info.started_at) < timedelta(minutes=30)

    def require_listed_parts(self, store: Store) -> None:
        """Skip the clause if the store does not list parts, after a check that it refuses the call."""
        if store.capabilities.listed_parts != "none":
            return
        with pytest.raises(UnsupportedOperationError):
            list(store.list_parts("a", "an upload that never was"))
        pytest.skip("the store does not list the parts of an upload, and refuses the call")

    def test_parts_are_listed_with_their_number_size_and_token(self, store: Store) -> None:
        """A part that is confused with another mixes two saves in one object; an unlisted part is sent again."""
        self.require_listed_parts(store)
        bodies = make_bodies(store, 4)
        parts = make_parts(bodies)
        upload_id, other = store.create_multipart("run/a b"), store.create_multipart("run/a b")
        assert list(store.list_parts("run/a b", upload_id)) == []
        upload_part(store, "run/a b", other, parts[1], b"?" * len(bodies[1]))
        for index in (2, 0, 3):
            upload_part(store, "run/a b", upload_id, parts[index], bodies[index])
        found = list(store.list_parts("run/a b", upload_id))
        assert sorted(part.number for part in found) == [1, 3, 4]
        for part in found:
            _check_is(part, bodies[part.number - 1])

    def test_a_part_that_was_sent_again_is_listed_as_it_is_now(self, store: Store) -> None:
        """Otherwise the completion would use an outdated token, and the whole object would be sent again."""
        self.require_listed_parts(store)
        bodies = make_bodies(store, 2)
        part = make_parts(bodies)[0]
        upload_id = store.create_multipart("a")
        upload_part(store, "a", upload_id, part, b"?" * len(bodies[0]))
        last = upload_part(store, "a", upload_id, part, bodies[0])
        assert crc(bodies[0]) == last.crc32c
        found = [found for found in store.list_parts("a", upload_id) if _is_same_part(found, bodies[0])]
        assert len(found) == 1
        assert store.capabilities.listed_parts == "any_upload" or len(list(store.list_parts("a", upload_id))) == 1

    def test_listed_parts_complete_the_upload(self, store: Store) -> None:
        """A process that continues an upload knows only the listing."""
        self.require_listed_parts(store)
        bodies = make_bodies(store, 3)
        parts = make_parts(bodies)
        upload_id = store.create_multipart("a")
        for part, body in zip(parts[:2], bodies, strict=False):
            upload_part(store, "a", upload_id, part, body)
        uploaded = _convert_parts(store.list_parts("a", upload_id), parts, bodies)
        assert len(uploaded) == 2
        uploaded.append(upload_part(store, "a", upload_id, parts[2], bodies[2]))
        store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)

    def test_listed_parts_complete_another_upload_where_that_is_declared(self, store: Store) -> None:
        """Only the new save may write to the key that the new save names."""
        self.require_listed_parts(store)
        if store.capabilities.listed_parts != "any_upload":
            pytest.skip("the store completes an upload with the parts of no other")
        bodies = make_bodies(store, 3)
        parts = make_parts(bodies)
        old, new = store.create_multipart("data/old/@ a"), store.create_multipart("data/new/a")
        upload_parts(store, "data/old/@ a", old, bodies)
        uploaded = _convert_parts(store.list_parts("data/old/@ a", old), parts, bodies)
        uploaded[1] = upload_part(store, "data/new/a", new, parts[1], bodies[1])
        store.complete_multipart("data/new/a", new, uploaded)
        assert content(store, "data/new/a") == b"".join(bodies)
        # The old upload is not changed, and can still be completed or aborted.
        assert len(list(store.list_parts("data/old/@ a", old))) == 3
        store.abort_multipart("data/old/@ a", old)
        assert content(store, "data/new/a") == b"".join(bodies)
        assert list(store.list_uploads()) == []

    def test_a_part_that_was_replaced_is_not_completed_as_it_was(self, store: Store) -> None:
        """A process that was believed dead may continue; its parts must not end up in the other's object."""
        self.require_listed_parts(store)
        bodies = make_bodies(store, 2)
        upload_id = store.create_multipart("a")
        uploaded = upload_parts(store, "a", upload_id, bodies)
        upload_part(store, "a", upload_id, make_parts(bodies)[0], b"?" * len(bodies[0]))
        outcome = capture_outcome(lambda: store.complete_multipart("a", upload_id, uploaded))
        if isinstance(outcome, StoreError):
            with pytest.raises(ObjectNotFoundError):
                store.head("a")
        else:
            assert content(store, "a") == b"".join(bodies)

    def test_an_ended_upload_lists_no_parts(self, store: Store) -> None:
        """A save that continues such an upload would send its parts in vain."""
        self.require_listed_parts(store)
        bodies = make_bodies(store, 2)
        for key, is_completed in (("completed", True), ("aborted", False)):
            upload_id = store.create_multipart(key)
            uploaded = upload_parts(store, key, upload_id, bodies)
            if is_completed:
                store.complete_multipart(key, upload_id, uploaded)
            else:
                store.abort_multipart(key, upload_id)
            outcome = capture_outcome(functools.partial(_list_parts, store, key, upload_id))
            assert outcome == [] or isinstance(outcome, ObjectNotFoundError)

    def test_a_part_that_the_service_copies_is_a_range_of_its_source(self, store: Store) -> None:
        """An export by the service would have other bytes than the checkpoint."""
        bodies = make_bodies(store, 3)
        put(store, "source", b"before" + bodies[1] + b"after")
        upload_id = store.create_multipart("a") if store.capabilities.multipart else ""
        parts = make_parts(bodies)
        try:
            found = store.copy_part("a", upload_id, parts[1], source_url=store.url("source"), source_begin=6)
        except UnsupportedOperationError:
            assert not store.probe().copies_ranges
            pytest.skip("the store has no copies of ranges by the service, and refuses the call")
        assert store.capabilities.copies_ranges
        _check_is(found, bodies[1])
        copied = UploadedPart(part=parts[1], token=found.token, crc32c=found.crc32c)
        first, last = (upload_part(store, "a", upload_id, parts[index], bodies[index]) for index in (0, 2))
        store.complete_multipart("a", upload_id, [first, copied, last])
        assert content(store, "a") == b"".join(bodies)
        upload_id = store.create_multipart("b")
        with pytest.raises(StoreError):
            store.copy_part("b", upload_id, parts[0], source_url=store.url("missing"), source_begin=0)
        store.abort_multipart("b", upload_id)

    def test_more_than_a_page_of_parts(self, store: Store) -> None:
        """Large objects have thousands of parts, and parts that are not listed are sent again."""
        self.require_listed_parts(store)
        numbers = range(1, min(self.num_paging_keys, store.limits.max_parts) + 1)
        upload_id = store.create_multipart("a")

        def send(part_numbers: Sequence[int]) -> None:
            for number in part_numbers:  # too small to be completed, and good enough to be listed
                body = number.to_bytes(4, "big")
                upload_part(store, "a", upload_id, Part(number=number, offset_bytes=0, size_bytes=4), body)

        assert run_at_once([functools.partial(send, numbers[first::8]) for first in range(8)]) == [None] * 8
        found = list(store.list_parts("a", upload_id))
        assert sorted(part.number for part in found) == list(numbers)
        for part in found:
            _check_is(part, part.number.to_bytes(4, "big"))
        store.abort_multipart("a", upload_id)


def _list_parts(store: Store, key: str, upload_id: str) -> list[FoundPart]:
    return list(store.list_parts(key, upload_id))


def _check_is(found: FoundPart, body: bytes) -> None:
    assert found.size_bytes == len(body)
    assert found.token
    assert found.crc32c in (None, crc(body))
    assert found.crc32c is not None or found.md5 is None or found.md5 == _md5(body)


def _is_same_part(found: FoundPart, body: bytes) -> bool:
    return found.size_bytes == len(body) and (found.crc32c == crc(body) or found.md5 == _md5(body))


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _convert_parts(found: Iterable[FoundPart], parts: Sequence[Part], bodies: Sequence[bytes]) -> list[UploadedPart]:
    """Convert listed parts for the completion of an upload, with the checksums of the known `bodies`."""
    listed = sorted(found, key=lambda part: part.number)
    return [
        UploadedPart(part=parts[part.number - 1], token=part.token, crc32c=crc(bodies[part.number - 1]))
        for part in listed
    ]
