"""Clients: made late, shared, thrown away with what made them; and the ordinary Google configuration."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from awscrt.checksums import crc32c
from google.auth.credentials import AnonymousCredentials
from tests.stores.shared_clients import ClientTests

from cloudckpt import errors
from cloudckpt.stores.base import Part
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.gcs import client as clients

if TYPE_CHECKING:
    from cloudckpt.testing.servers import GCSServer

MIB = 1 << 20
X = [memoryview(b"x")]
CRC = crc32c(b"x")


def open_store(bucket: str = "bucket", *, timeout_s: float = 20, **options: Any) -> GCSStore:
    return GCSStore(bucket, "p", storage_options=options, timeout_s=timeout_s, connections=2)


def client_of(store: GCSStore) -> clients.GCSClient:
    return clients.client_cache.client_for(store._session.client_key, store._session._environment)


class TestClients(ClientTests):
    """Of google-cloud-storage."""

    clients = clients
    store_type = GCSStore
    credentials: ClassVar = {"anonymous": True}
    endpoint_variable = "STORAGE_EMULATOR_HOST"
    another_class = "NEARLINE"


def test_no_client_is_made_before_the_first_request() -> None:
    """Opening a store would look for credentials, for seconds, before anything is asked."""
    open_store(credentials_file="/no/such/file")
    assert len(clients.client_cache) == 0


def test_stores_at_work_at_once_keep_the_connections_that_they_opened(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A save and a load at once would close each other's connections, and open and greet anew for each request."""
    connections, num_loads = 4, 3
    num_calls = connections * (num_loads + clients.MOST_HELPERS)  # and a save that removes what it has composed
    all_under_way = threading.Barrier(num_calls, timeout=30)
    together: list[Any] = []
    answer = scripted.any_gcs()

    def answer_together(connection: Any, request: Any) -> None:
        together.append(request)
        if len(together) <= num_calls:
            all_under_way.wait()
        answer(connection, request)

    server = scripted.serve(answer_together)
    options = {"endpoint_url": server.endpoint_url, "anonymous": True}
    stores = [
        GCSStore("bucket", f"p{number}", storage_options=options, timeout_s=40, connections=connections)
        for number in range(num_loads + 1)
    ]

    def move(number: int) -> None:
        store = stores[number % len(stores)]
        if number % len(stores):
            store.read_into("k", 0, [memoryview(bytearray(10))])
        else:
            store.delete(f"{number}-{sibling}" for sibling in range(24))

    with ThreadPoolExecutor(connections * len(stores)) as pool:
        for _ in range(2):
            together.clear()
            list(pool.map(move, range(connections * len(stores))))
    assert len(clients.client_cache) == 1
    assert server.num_connections == num_calls
    assert "pool is full" not in caplog.text


def test_a_pickled_store_works_elsewhere(gcs_server: GCSServer, store: GCSStore) -> None:
    """An async save in a process of its own pickles its writer, and the store with it."""
    store.put("k", X, crc32c=CRC)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.uri == store.uri
    assert copy.read("k", max_bytes=10) == b"x"
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply_async(store.read, ("k",), {"max_bytes": 10}).get(60) == b"x"
    assert gcs_server.endpoint_url not in repr(copy)


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


def test_another_environment_means_another_client(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store opened after the environment changed would go on with the old one."""
    first, second = scripted.serve(scripted.any_gcs()), scripted.serve(scripted.any_gcs())
    for server in (first, second):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint_url)
        open_store().head("k")
        assert len(server.requests) == 1


def test_options_win_over_the_environment(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit option that loses to a variable cannot be explained to anyone."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    server = scripted.serve(scripted.any_gcs())
    credentials = scripted.tokens()
    server.store(credentials=credentials).put("k", X, crc32c=CRC)
    assert server.requests[0].headers["authorization"] == "Bearer TOKEN-1-HUSH"


def test_without_any_of_it_requests_go_to_google() -> None:
    """The endpoint is part of every message about a failed connection."""
    store = open_store(anonymous=True)
    assert client_of(store).endpoint_url == "https://storage.googleapis.com"
    assert store.session._endpoint_for_messages() == "https://storage.googleapis.com"


@pytest.mark.parametrize("value", ["http://user:hush@127.0.0.1:1", "ftp://127.0.0.1:1", "http://"])
def test_an_emulators_address_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The HTTP library's own error would pass for a bug, and quote a password that was meant for the store."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", value)
    with pytest.raises(errors.InvalidOptionError, match="STORAGE_EMULATOR_HOST") as caught:
        open_store().read("k", max_bytes=1)
    assert "hush" not in str(caught.value)


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ModuleNotFoundError would not say which of cloudckpt's extras to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(errors.MissingDependencyError, match=r"pip install 'cloudckpt\[gcs\]'"):
        open_store()


def test_importing_the_store_does_not_import_the_client() -> None:
    """Users of local paths would need google-cloud-storage, or wait a second for it."""
    source = "import sys, cloudckpt.stores.gcs; assert not {'google.cloud.storage', 'requests'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


def test_transfers_copy_nothing(scripted: Any) -> None:
    """G7: a save of CPU tensors copies none of them; a copy of every part in flight would be 256 MiB."""
    num_bytes = 64 * MIB
    source, target = bytearray(num_bytes), bytearray(num_bytes)
    value = crc32c(source)

    def send(connection: Any, _request: Any) -> None:
        fields = f"Content-Length: {num_bytes}\r\nContent-Range: bytes 0-{num_bytes - 1}/{num_bytes}\r\n\r\n"
        connection.sendall(b"HTTP/1.1 206 X\r\n" + fields.encode())
        connection.sendall(source)

    described = {"generation": "7", "size": str(num_bytes), "crc32c": scripted.encoded(value)}
    taken = scripted.json({"kind": "storage#object", **described})
    server = scripted.serve(taken, taken, send, taken, taken, send, keeps_bodies=False)
    store, part = server.store(), Part(number=1, offset_bytes=0, size_bytes=num_bytes)
    upload_id = store.create_multipart("k")

    def transfer() -> None:
        store.put("k", [memoryview(source)], crc32c=value)
        store.upload_part("k", upload_id, part, [memoryview(source)], crc32c=value)
        store.read_into("k", 0, [memoryview(target)])

    transfer()  # the client, its connection and its imports
    tracemalloc.start()
    try:
        transfer()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * MIB
