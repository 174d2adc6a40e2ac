"""The reference store."""

from __future__ import annotations

import os
import pickle
import uuid

import pytest

from cloudckpt.errors import StoreError, UnsupportedOperationError
from cloudckpt.stores.base import Limits
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing import StoreContract
from cloudckpt.testing.contract_base import content, keys, make_parts, put, upload_part


class TestContract(StoreContract):
    """Every clause, against the store that the others are compared with."""

    @pytest.fixture
    def store(self):
        return MemoryStore(uuid.uuid4().hex, "run/step-1")


@pytest.fixture
def name():
    return uuid.uuid4().hex


def test_stores_of_one_name_share_their_objects(name):
    """A reader opened by URI must see what a writer opened by URI saved; other names must not."""
    put(MemoryStore(name, "run"), "step-1/a", b"body")
    assert content(MemoryStore(name, "run/step-1"), "a") == b"body"
    assert keys(MemoryStore(name)) == ["run/step-1/a"]
    assert keys(MemoryStore(f"{name}-other")) == []
    assert keys(MemoryStore(name, "ru")) == []


def test_limits_are_kept(name):
    """Code that packs parts is tested here with tiny limits, so the store must refuse what breaks them."""
    store = MemoryStore(name, limits=Limits(min_part_bytes=4, max_part_bytes=8, max_parts=2, max_put_bytes=10))
    put(store, "a", b"x" * 10)
    with pytest.raises(StoreError, match="11 bytes are more than the 10"):
        put(store, "a", b"x" * 11)
    upload_id = store.create_multipart("b")
    bodies = [b"123", b"45"]
    small = [upload_part(store, "b", upload_id, p, b) for p, b in zip(make_parts(bodies), bodies, strict=True)]
    with pytest.raises(StoreError, match="fewer than"):
        store.complete_multipart("b", upload_id, small)
    third = make_parts([b"1234"] * 3)[2]
    with pytest.raises(StoreError, match="outside 1…2"):
        upload_part(store, "b", upload_id, third, b"1234")
    with pytest.raises(StoreError, match="9 bytes are more than the 8"):
        upload_part(store, "b", upload_id, make_parts([b"x" * 9])[0], b"x" * 9)


def test_another_process_is_refused(name, monkeypatch):
    """A background process or forked rank that saves into its own memory would report success and save nothing."""
    store = MemoryStore(name, "run")
    put(store, "a", b"body")
    pickled = pickle.dumps(store)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(UnsupportedOperationError, match="another store"):
        pickle.loads(pickled)
    with pytest.raises(UnsupportedOperationError, match="work that spans processes"):
        put(store, "b", b"body")
    with pytest.raises(UnsupportedOperationError):
        keys(store)
