"""Clauses about multipart uploads."""
# ruff: noqa: S101, PLR2004
# (these are tests)

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from cloudckpt.errors import ChecksumRefusedError, ObjectNotFoundError, StoreError
from cloudckpt.stores.base import Part, Store, UploadedPart, UploadInfo
from cloudckpt.testing._contract_base import Clauses
from cloudckpt.testing._contract_calls import outcome_of
from cloudckpt.testing._contract_tools import (
    ODD_KEYS,
    at_once,
    bodies_of,
    content,
    crc,
    keys,
    parts_of,
    put,
    read_range,
    upload,
    upload_part,
)


class UploadClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    def test_an_upload_is_its_parts_joined(self, store: Store) -> None:
        """The plain case: large objects go up so."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 3)
        upload(store, "data/a b", bodies)
        whole = b"".join(bodies)
        assert store.head("data/a b").size_bytes == len(whole)
        assert content(store, "data/a b") == whole
        edge = len(bodies[0])
        assert read_range(store, "data/a b", edge - 2, edge + 2) == whole[edge - 2 : edge + 2]

    def test_an_upload_is_invisible_until_completed(self, store: Store) -> None:
        """A job that dies half-way must leave nothing that a reader could take for an object."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        upload_id = store.create_multipart("step/a")
        parts = [upload_part(store, "step/a", upload_id, p, b) for p, b in zip(parts_of(bodies), bodies, strict=True)]
        with pytest.raises(ObjectNotFoundError):
            store.head("step/a")
        with pytest.raises(ObjectNotFoundError):
            content(store, "step/a")
        assert keys(store) == []
        assert list(store.list_directories()) == []
        store.complete_multipart("step/a", upload_id, parts)
        assert keys(store) == ["step/a"]

    def test_an_upload_replaces_an_object_only_when_completed(self, store: Store) -> None:
        """Until then whoever reads the old object reads all of it."""
        if self.lacks_multipart(store):
            return
        put(store, "a", b"old")
        bodies = bodies_of(store, 2)
        upload_id = store.create_multipart("a")
        parts = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts_of(bodies), bodies, strict=True)]
        assert content(store, "a") == b"old"
        store.complete_multipart("a", upload_id, parts)
        assert content(store, "a") == b"".join(bodies)

    def test_parts_are_ordered_by_number(self, store: Store) -> None:
        """Parallel uploads arrive in any order, and are completed in any."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 3)
        parts = parts_of(bodies)
        upload_id = store.create_multipart("a")
        arrived = [upload_part(store, "a", upload_id, parts[index], bodies[index]) for index in (2, 0, 1)]
        store.complete_multipart("a", upload_id, arrived)
        assert content(store, "a") == b"".join(bodies)

    def test_parts_go_up_in_parallel(self, store: Store) -> None:
        """Every rank uploads from several threads at once."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 4)
        upload_id = store.create_multipart("a")
        results = at_once(
            [
                functools.partial(upload_part, store, "a", upload_id, part, body)
                for part, body in zip(parts_of(bodies), bodies, strict=True)
            ]
        )
        uploaded = [result for result in results if not isinstance(result, Exception)]
        assert len(uploaded) == 4, results
        store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)

    def test_of_a_part_uploaded_twice_the_last_counts(self, store: Store) -> None:
        """A part is sent again when its answer was lost."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        parts = parts_of(bodies)
        upload_id = store.create_multipart("a")
        upload_part(store, "a", upload_id, parts[0], b"?" * len(bodies[0]))
        uploaded = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts, bodies, strict=True)]
        store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)

    def test_two_uploads_to_one_key_do_not_mix(self, store: Store) -> None:
        """A zombie's parts must not end up in another's object."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        parts = parts_of(bodies)
        mine, other = store.create_multipart("a"), store.create_multipart("a")
        assert mine != other
        uploaded = [upload_part(store, "a", mine, parts[0], bodies[0])]
        upload_part(store, "a", other, parts[0], b"?" * len(bodies[0]))
        uploaded.append(upload_part(store, "a", mine, parts[1], bodies[1]))
        store.complete_multipart("a", mine, uploaded)
        store.abort_multipart("a", other)
        assert content(store, "a") == b"".join(bodies)

    def test_an_aborted_upload_leaves_nothing(self, store: Store) -> None:
        """Parts that stay are paid for every month, and seen by nobody."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        parts = parts_of(bodies)
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
        if self.lacks_multipart(store):
            return
        if self.lacks_checksums(store):
            return
        bodies = bodies_of(store, 2)
        parts = parts_of(bodies)
        upload_id = store.create_multipart("a")
        with pytest.raises(ChecksumRefusedError):
            store.upload_part("a", upload_id, parts[0], [memoryview(bodies[0])], crc32c=crc(b"other"))
        assert keys(store) == []
        uploaded = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts, bodies, strict=True)]
        store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)

    def test_parts_with_a_gap_are_not_completed(self, store: Store) -> None:
        """An object with a hole has the right name and the wrong bytes."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 3)
        upload_id = store.create_multipart("a")
        uploaded = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts_of(bodies), bodies, strict=True)]
        with pytest.raises(StoreError):
            store.complete_multipart("a", upload_id, [uploaded[0], uploaded[2]])
        assert keys(store) == []
        store.abort_multipart("a", upload_id)

    def test_completing_twice_does_no_harm(self, store: Store) -> None:
        """The answer to a completion can be lost: the second try says that the upload is gone, or succeeds again."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        upload_id = store.create_multipart("a")
        uploaded = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts_of(bodies), bodies, strict=True)]
        store.complete_multipart("a", upload_id, uploaded)
        try:
            store.complete_multipart("a", upload_id, uploaded)
        except StoreError as error:
            assert isinstance(error, ObjectNotFoundError)  # noqa: PT017  # both outcomes are right
        assert content(store, "a") == b"".join(bodies)

    def test_a_part_that_comes_late_does_no_harm(self, store: Store) -> None:
        """A part that was thought lost can arrive after the upload is complete: nobody may see it."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        parts = parts_of(bodies)
        upload_id = store.create_multipart("a")
        uploaded = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts, bodies, strict=True)]
        store.complete_multipart("a", upload_id, uploaded)
        outcome = outcome_of(lambda: upload_part(store, "a", upload_id, parts[0], b"?" * len(bodies[0])))
        assert isinstance(outcome, UploadedPart | StoreError)
        assert keys(store) == ["a"]
        assert content(store, "a") == b"".join(bodies)
        store.abort_multipart("a", upload_id)
        assert list(store.list_uploads()) == []
        assert content(store, "a") == b"".join(bodies)

    def test_a_token_that_nobody_gave_completes_nothing_else(self, store: Store) -> None:
        """Tokens say which bytes are meant: other bytes than those must not become the object."""
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        upload_id = store.create_multipart("a")
        uploaded = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts_of(bodies), bodies, strict=True)]
        wrong = [replace(uploaded[0], token=uploaded[1].token), uploaded[1]]
        outcome = outcome_of(lambda: store.complete_multipart("a", upload_id, wrong))
        if isinstance(outcome, Exception):
            assert keys(store) == []
            store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)

    def test_an_upload_of_nothing_is_empty_or_refused(self, store: Store) -> None:
        """Stores differ here, and nothing that is saved relies on it; what must not come of it is a typeless error."""
        if self.lacks_multipart(store):
            return
        for key, num_parts in (("no-parts", 0), ("one-empty-part", 1)):
            upload_id = store.create_multipart(key)
            parts = [Part(number=number, offset_bytes=0, size_bytes=0) for number in range(1, num_parts + 1)]
            outcome = outcome_of(
                lambda key=key, upload_id=upload_id, parts=parts: store.complete_multipart(  # type: ignore[misc]
                    key, upload_id, [upload_part(store, key, upload_id, part, b"") for part in parts]
                )
            )
            store.abort_multipart(key, upload_id)
            assert keys(store, key) == ([] if isinstance(outcome, StoreError) else [key])
            assert isinstance(outcome, StoreError) or content(store, key) == b""
            assert list(store.list_uploads(key)) == []

    def test_uploads_at_odd_keys_are_found(self, store: Store) -> None:
        """What a crash left under such a key must be found, told from others, and removed."""
        if self.lacks_multipart(store):
            return
        body = bodies_of(store, 1)[0]
        ids = {key: store.create_multipart(key) for key in ODD_KEYS}
        parts = {key: upload_part(store, key, ids[key], parts_of([body])[0], body) for key in ODD_KEYS}
        assert {info.key: info.upload_id for info in store.list_uploads()} == ids
        for key in ODD_KEYS[::2]:
            store.complete_multipart(key, ids[key], [parts[key]])
            assert content(store, key) == body
        assert {info.key for info in store.list_uploads()} == set(ODD_KEYS[1::2])
        for key in ODD_KEYS[1::2]:
            store.abort_multipart(key, ids[key])
        assert list(store.list_uploads()) == []
        assert keys(store) == sorted(ODD_KEYS[::2])

    def test_unfinished_uploads_are_listed(self, store: Store) -> None:
        """What crashed jobs leave behind can only be removed if it can be found, and told from what is under way."""
        if self.lacks_multipart(store):
            return
        ids = {key: store.create_multipart(key) for key in ("step-1/a", "step-1/b", "step-2/a b")}
        body = bodies_of(store, 1)[0]
        for key, upload_id in ids.items():  # some stores have nothing to list before the first part
            upload_part(store, key, upload_id, parts_of([body])[0], body)
        assert {info.key: info.upload_id for info in store.list_uploads()} == ids
        assert {info.key for info in store.list_uploads("step-1/")} == {"step-1/a", "step-1/b"}
        assert {info.key for info in store.list_uploads("step-2/a")} == {"step-2/a b"}
        assert list(store.list_uploads("step-3/")) == []
        for info in store.list_uploads():
            self.check_upload_time(info)
            store.abort_multipart(info.key, info.upload_id)
        assert list(store.list_uploads()) == []

    def check_upload_time(self, info: UploadInfo) -> None:
        """What is swept is chosen by age."""
        assert info.started_at.tzinfo is not None
        assert abs(datetime.now(tz=timezone.utc) - info.started_at) < timedelta(minutes=30)
