"""Clauses about very long keys, and very many."""
# ruff: noqa: S101
# (these are tests)

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudckpt.errors import ObjectNotFoundError, StoreError
from cloudckpt.stores.base import Store
from cloudckpt.testing._contract_base import Clauses
from cloudckpt.testing._contract_calls import outcome_of
from cloudckpt.testing._contract_tools import (
    WAIT_S,
    T,
    bodies_of,
    content,
    keys,
    parts_of,
    put,
    read_range,
    upload,
    upload_part,
)

_LONGEST_NAME_BYTES = 255
"""Of a file, on all common file systems."""


class KeyClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    def test_the_longest_key_works_everywhere(self, store: Store) -> None:
        """Whatever a store adds to keys, for parts or temporary files, must leave room for the longest of them."""
        longest = self._longest_key(store)
        for key in (longest, f"{longest[:-1]}m"):
            put(store, key, b"body")
            assert content(store, key) == b"body"
            assert read_range(store, key, 1, 3) == b"od"
            assert store.head(key).key == key
            assert keys(store, key) == [key]
            store.copy(key, "copy")
            store.copy("copy", key)
            store.delete([key])
            with pytest.raises(ObjectNotFoundError):
                store.head(key)
        if self.lacks_multipart(store):
            return
        bodies = bodies_of(store, 2)
        upload(store, longest, bodies)
        assert content(store, longest) == b"".join(bodies)
        upload_id = store.create_multipart(longest)
        upload_part(store, longest, upload_id, parts_of(bodies)[0], bodies[0])
        assert [(info.key, info.upload_id) for info in store.list_uploads()] == [(longest, upload_id)]
        store.abort_multipart(longest, upload_id)
        assert keys(store) == ["copy", longest]

    def test_a_key_that_is_too_long_is_a_typed_error(self, store: Store) -> None:
        """Names come from users, and an error without a type would not say which name it was."""
        key = "far-too-long/" + "n" * 20_000
        for call in (lambda: put(store, key, b"body"), lambda: content(store, key), lambda: store.head(key)):
            outcome = outcome_of(call)
            assert not isinstance(outcome, StoreError) or outcome.key == store.url(key)

    def test_more_than_a_page_of_keys(self, store: Store) -> None:
        """A listing or delete that stops after its first thousand leaves or loses checkpoints."""
        names = [f"step-{number:04}" for number in range(self.num_paging_keys)]
        _at_several(lambda name: put(store, f"{name}/x", b""), names)
        assert keys(store) == [f"{name}/x" for name in names]
        assert sorted(store.list_directories()) == names
        store.delete(f"{name}/x" for name in names[1:])
        assert keys(store) == ["step-0000/x"]
        assert list(store.list_directories()) == ["step-0000"]

    def test_more_than_a_page_of_siblings(self, store: Store) -> None:
        """Those are deleted in batches where a store has them: the last batch counts as much as the first."""
        names = [f"data/{number:04}" for number in range(self.num_paging_keys)]
        _at_several(lambda name: put(store, name, b""), names)
        assert keys(store, "data/") == names
        store.delete(names[:-1])
        assert keys(store, "data/") == names[-1:]
        store.delete(names)
        assert keys(store, "data/") == []

    def test_more_than_a_page_of_uploads(self, store: Store) -> None:
        """Crashed jobs leave thousands of parts, and what is not listed is paid for every month."""
        if self.lacks_multipart(store):
            return
        names = [f"data/{number:04}" for number in range(self.num_paging_keys)]
        body = bodies_of(store, 1)[0]

        def begin(name: str) -> tuple[str, str]:
            upload_id = store.create_multipart(name)
            upload_part(store, name, upload_id, parts_of([body])[0], body)
            return name, upload_id

        ids = dict(_at_several(begin, names))
        assert {info.key: info.upload_id for info in store.list_uploads()} == ids
        assert {info.key: info.upload_id for info in store.list_uploads("data/")} == ids
        _at_several(lambda name: store.abort_multipart(name, ids[name]), names)
        assert list(store.list_uploads()) == []
        assert keys(store) == []

    def _longest_key(self, store: Store) -> str:
        _, separator, behind = store.uri.partition("://")
        root = f"{behind.partition('/')[2]}/".lstrip("/") if separator else f"{store.uri}/"
        room_bytes = self.longest_key_bytes - len(root.encode())
        names = []
        while room_bytes > 0:
            size_bytes = min(room_bytes, _LONGEST_NAME_BYTES)
            size_bytes -= room_bytes - size_bytes == 1  # nothing may end in a slash
            names.append(_name_of(size_bytes))
            room_bytes -= size_bytes + 1
        return "/".join(names)


def _name_of(size_bytes: int) -> str:
    odd = "ü日"
    odd_bytes = len(odd.encode())
    return odd + "n" * (size_bytes - odd_bytes) if size_bytes >= odd_bytes else "n" * size_bytes


def _at_several(function: Callable[[str], T], names: Iterable[str]) -> list[T]:
    with ThreadPoolExecutor(8) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(function, name) for name in names]]
