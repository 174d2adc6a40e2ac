"""The reference store."""

from __future__ import annotations

import os
import pickle
import uuid

import pytest

from cloudckpt.errors import UnsupportedOperationError
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing import StoreContract
from cloudckpt.testing.contract_base import content, keys, put


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


def test_another_process_is_refused(name, monkeypatch):
    """A background process or forked rank that saves into its own memory would report success and save nothing."""
    store = MemoryStore(name, "run")
    put(store, "a", b"body")
    pickled = pickle.dumps(store)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(UnsupportedOperationError, match="another store"):
        put(pickle.loads(pickled), "b", b"body")
    with pytest.raises(UnsupportedOperationError, match="work that spans processes"):
        put(store, "b", b"body")
    with pytest.raises(UnsupportedOperationError):
        keys(store)
