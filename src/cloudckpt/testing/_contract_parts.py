"""Clauses about what an unfinished upload holds, from which a later process goes on."""
# ruff: noqa: S101, PLR2004
# (these are tests)

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from cloudckpt.errors import ObjectNotFoundError, StoreError, UnsupportedOperationError
from cloudckpt.stores.base import FoundPart, Part, Store, UploadedPart
from cloudckpt.testing._contract_base import Clauses
from cloudckpt.testing._contract_calls import outcome_of
from cloudckpt.testing._contract_processes import race_in_processes
from cloudckpt.testing._contract_tools import at_once, bodies_of, content, crc, parts_of, upload_part


class PartClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    def lacks_listed_parts(self, store: Store) -> bool:
        """Whoever overlooks the declared capability must meet an error, not an upload that seems to be empty."""
        if store.capabilities.listed_parts != "none":
            return False
        with pytest.raises(UnsupportedOperationError):
            list(store.list_parts("a", "an upload that never was"))
        self.does_not_apply("the store does not list the parts of an upload, and refuses the call")
        return True

    def test_parts_are_listed_for_what_they_are(self, store: Store) -> None:
        """A part that is taken for another makes an object of two saves; one that is not seen is sent again."""
        if self.lacks_listed_parts(store):
            return
        bodies = bodies_of(store, 4)
        parts = parts_of(bodies)
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
        """Else it would be completed with a token that is no longer good, and the whole object sent again."""
        if self.lacks_listed_parts(store):
            return
        bodies = bodies_of(store, 2)
        part = parts_of(bodies)[0]
        upload_id = store.create_multipart("a")
        upload_part(store, "a", upload_id, part, b"?" * len(bodies[0]))
        last = upload_part(store, "a", upload_id, part, bodies[0])
        assert crc(bodies[0]) == last.crc32c
        found = [found for found in store.list_parts("a", upload_id) if _is(found, bodies[0])]
        assert len(found) == 1
        assert store.capabilities.listed_parts == "any_upload" or len(list(store.list_parts("a", upload_id))) == 1

    def test_listed_parts_complete_the_upload(self, store: Store) -> None:
        """Whoever goes on has nothing but what the listing says."""
        if self.lacks_listed_parts(store):
            return
        bodies = bodies_of(store, 3)
        parts = parts_of(bodies)
        upload_id = store.create_multipart("a")
        for part, body in zip(parts[:2], bodies, strict=False):
            upload_part(store, "a", upload_id, part, body)
        known = _as_uploaded(store.list_parts("a", upload_id), parts, bodies)
        assert len(known) == 2
        known.append(upload_part(store, "a", upload_id, parts[2], bodies[2]))
        store.complete_multipart("a", upload_id, known)
        assert content(store, "a") == b"".join(bodies)

    def test_listed_parts_complete_another_upload_where_that_is_declared(self, store: Store) -> None:
        """So that nobody but the new save writes to the key that the new save names."""
        if self.lacks_listed_parts(store):
            return
        if store.capabilities.listed_parts != "any_upload":
            self.does_not_apply("the store completes an upload with the parts of no other")
            return
        bodies = bodies_of(store, 3)
        parts = parts_of(bodies)
        old, new = store.create_multipart("data/old/@ a"), store.create_multipart("data/new/a")
        for part, body in zip(parts, bodies, strict=True):
            upload_part(store, "data/old/@ a", old, part, body)
        known = _as_uploaded(store.list_parts("data/old/@ a", old), parts, bodies)
        known[1] = upload_part(store, "data/new/a", new, parts[1], bodies[1])
        store.complete_multipart("data/new/a", new, known)
        assert content(store, "data/new/a") == b"".join(bodies)
        # The old one is none the worse for it, and can itself be completed still, or aborted.
        assert len(list(store.list_parts("data/old/@ a", old))) == 3
        store.abort_multipart("data/old/@ a", old)
        assert content(store, "data/new/a") == b"".join(bodies)
        assert list(store.list_uploads()) == []

    def test_a_part_that_was_replaced_is_not_completed_as_it_was(self, store: Store) -> None:
        """The process that was thought dead goes on too: what it sends must not end up in the other's object."""
        if self.lacks_listed_parts(store):
            return
        bodies = bodies_of(store, 2)
        parts = parts_of(bodies)
        upload_id = store.create_multipart("a")
        known = [upload_part(store, "a", upload_id, p, b) for p, b in zip(parts, bodies, strict=True)]
        upload_part(store, "a", upload_id, parts[0], b"?" * len(bodies[0]))
        outcome = outcome_of(lambda: store.complete_multipart("a", upload_id, known))
        if isinstance(outcome, StoreError):
            with pytest.raises(ObjectNotFoundError):
                store.head("a")
        else:
            assert content(store, "a") == b"".join(bodies)

    def test_an_upload_that_is_over_lists_nothing(self, store: Store) -> None:
        """Whoever went on from it would send what is missing into nothing."""
        if self.lacks_listed_parts(store):
            return
        bodies = bodies_of(store, 2)
        for key, is_completed in (("completed", True), ("aborted", False)):
            upload_id = store.create_multipart(key)
            known = [upload_part(store, key, upload_id, p, b) for p, b in zip(parts_of(bodies), bodies, strict=True)]
            if is_completed:
                store.complete_multipart(key, upload_id, known)
            else:
                store.abort_multipart(key, upload_id)
            outcome = outcome_of(lambda key=key, upload_id=upload_id: list(store.list_parts(key, upload_id)))  # type: ignore[misc]
            assert outcome == [] or isinstance(outcome, ObjectNotFoundError)

    def test_parts_of_another_process_are_listed(self, store: Store) -> None:
        """It is always another process that goes on."""
        if self.lacks_listed_parts(store) or self.is_private(store):
            return
        bodies = bodies_of(store, 2)
        sending = _Sending(key="a", upload_id=store.create_multipart("a"), parts=parts_of(bodies), bodies=bodies)
        assert race_in_processes(store, _send_first, _send_second, [sending]) == [(None, None)]
        known = _as_uploaded(store.list_parts("a", sending.upload_id), sending.parts, bodies)
        assert len(known) == 2
        store.complete_multipart("a", sending.upload_id, known)
        assert content(store, "a") == b"".join(bodies)

    def test_more_than_a_page_of_parts(self, store: Store) -> None:
        """Large objects have thousands of parts, and what is not listed is sent again."""
        if self.lacks_listed_parts(store):
            return
        numbers = range(1, min(self.num_paging_keys, store.limits.max_parts) + 1)
        upload_id = store.create_multipart("a")

        def send(of_thread: Sequence[int]) -> None:
            for number in of_thread:  # too small to be completed, and good enough to be listed
                body = number.to_bytes(4, "big")
                upload_part(store, "a", upload_id, Part(number=number, offset_bytes=0, size_bytes=4), body)

        assert at_once([lambda first=first: send(numbers[first::8]) for first in range(8)]) == [None] * 8  # type: ignore[misc]
        found = list(store.list_parts("a", upload_id))
        assert sorted(part.number for part in found) == list(numbers)
        for part in found:
            _check_is(part, part.number.to_bytes(4, "big"))
        store.abort_multipart("a", upload_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sending:
    key: str
    upload_id: str
    parts: list[Part]
    bodies: list[bytes]


def _send_first(store: Store, sending: _Sending) -> None:
    upload_part(store, sending.key, sending.upload_id, sending.parts[0], sending.bodies[0])


def _send_second(store: Store, sending: _Sending) -> None:
    upload_part(store, sending.key, sending.upload_id, sending.parts[1], sending.bodies[1])


def _check_is(found: FoundPart, body: bytes) -> None:
    assert found.size_bytes == len(body)
    assert found.token
    assert found.crc32c in (None, crc(body))
    assert found.crc32c is not None or found.md5 is None or found.md5 == _md5(body)


def _is(found: FoundPart, body: bytes) -> bool:
    return found.size_bytes == len(body) and (found.crc32c == crc(body) or found.md5 == _md5(body))


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _as_uploaded(found: Iterable[FoundPart], parts: Sequence[Part], bodies: Sequence[bytes]) -> list[UploadedPart]:
    """What is listed, as it is completed; the caller knows what the parts hold."""
    listed = sorted(found, key=lambda part: part.number)
    return [
        UploadedPart(part=parts[part.number - 1], token=part.token, crc32c=crc(bodies[part.number - 1]))
        for part in listed
    ]
