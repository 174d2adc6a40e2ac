"""Clients: made late, shared, thrown away with what made them; and the ordinary Google configuration."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from awscrt.checksums import crc32c
from google.auth.credentials import AnonymousCredentials
from tests.stores.shared_clients import ClientTests

from cloudckpt import errors
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.gcs import client as clients

if TYPE_CHECKING:
    from cloudckpt.testing.servers import GCSServer

X = [memoryview(b"x")]
CRC = crc32c(b"x")


def open_store(bucket: str = "bucket", *, timeout_s: float = 20, **options: Any) -> GCSStore:
    return GCSStore(bucket, "p", storage_options=options, timeout_s=timeout_s, connections=2)


class TestClients(ClientTests):
    """Of google-cloud-storage."""

    cache = clients.GCSSession.cache
    extra = "gcs"
    store_type = GCSStore
    credentials: ClassVar = {"anonymous": True}
    endpoint_variable = "STORAGE_EMULATOR_HOST"
    another_class = "NEARLINE"


class Unpicklable(AnonymousCredentials):
    """As those of most identity providers' plug-ins are, by a lock or a socket in them."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_credentials_that_cannot_be_pickled_are_told_before_they_fail(scripted: Any) -> None:
    """ "cannot pickle '_thread.lock' object", from the depths of a background save, would help nobody."""
    server = scripted.serve(scripted.any_gcs())
    store = server.store(credentials=Unpicklable())
    assert store.head("k").size_bytes == 10
    with pytest.raises(errors.InvalidOptionError, match=r"credentials of the type Unpicklable.*credentials_file"):
        pickle.dumps(store)
    assert pickle.loads(pickle.dumps(server.store(credentials=AnonymousCredentials()))).head("k").size_bytes == 10


# Where requests go.


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_the_emulators_variable_is_enough(gcs_server: GCSServer, bucket: str, monkeypatch: Any, scheme: str) -> None:
    """Every other tool is led to an emulator so; some write the scheme, and some do not."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", scheme + gcs_server.endpoint_url.removeprefix("http://"))
    store = open_store(bucket)
    store.put("k", X, crc32c=CRC)
    assert store.read("k", max_bytes=1) == b"x"


@pytest.mark.parametrize("value", ["http://user:hush@127.0.0.1:1", "ftp://127.0.0.1:1", "http://"])
def test_an_emulators_address_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The HTTP library's own error would pass for a bug, and quote a password that was meant for the store."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", value)
    with pytest.raises(errors.InvalidOptionError, match="STORAGE_EMULATOR_HOST") as caught:
        open_store().read("k", max_bytes=1)
    assert "hush" not in str(caught.value)
