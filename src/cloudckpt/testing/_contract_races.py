"""Clauses about two calls at the same instant."""
# ruff: noqa: S101
# (these are tests)

from __future__ import annotations

import functools
from dataclasses import dataclass

from cloudckpt.errors import ObjectExistsError, TransientStoreError
from cloudckpt.stores.base import Store, UploadedPart
from cloudckpt.testing._contract_base import Clauses
from cloudckpt.testing._contract_processes import race_in_processes
from cloudckpt.testing._contract_tools import at_once, bodies_of, content, parts_of, put, upload_part


class RaceClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    def test_a_create_never_replaces_what_was_just_completed(self, store: Store) -> None:
        """Two ways lead to an object, and the condition has to hold against both.

        A completion has none itself, so it always has the last word.
        """
        if self.lacks_create(store) or self.lacks_multipart(store):
            return
        rounds = [self._uploaded(store, f"race/threads/{number}") for number in range(self.num_racing_rounds)]
        outcomes = [
            at_once([functools.partial(_complete, store, done), functools.partial(_create, store, done)])
            for done in rounds
        ]
        if self.shared_between_processes:
            more = [self._uploaded(store, f"race/processes/{number}") for number in range(self.num_racing_rounds)]
            outcomes += [list(pair) for pair in race_in_processes(store, _complete, _create, more)]
            rounds += more
        for done, (completed, created) in zip(rounds, outcomes, strict=True):
            assert completed is None, (done.key, completed)
            # S3 may refuse a create as "conflicting", and asks for another try.
            assert created is None or isinstance(created, ObjectExistsError | TransientStoreError), (done.key, created)
            assert content(store, done.key) == done.body, done.key

    @staticmethod
    def _uploaded(store: Store, key: str) -> _Uploaded:
        body = bodies_of(store, 1)[0]
        upload_id = store.create_multipart(key)
        part = upload_part(store, key, upload_id, parts_of([body])[0], body)
        return _Uploaded(key=key, upload_id=upload_id, part=part, body=body)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uploaded:
    key: str
    upload_id: str
    part: UploadedPart
    body: bytes


def _create(store: Store, done: _Uploaded) -> None:
    put(store, done.key, b"created", if_absent=True)


def _complete(store: Store, done: _Uploaded) -> None:
    try:
        store.complete_multipart(done.key, done.upload_id, [done.part])
    except TransientStoreError:  # a busy store may say so once
        store.complete_multipart(done.key, done.upload_id, [done.part])
