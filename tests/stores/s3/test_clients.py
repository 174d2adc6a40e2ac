"""Clients: made late, shared, thrown away with what made them; and the ordinary AWS configuration."""

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
from tests.stores.shared_clients import ClientTests

from cloudckpt import errors
from cloudckpt.stores.base import Part
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3 import client as clients

if TYPE_CHECKING:
    from pathlib import Path

    from cloudckpt.testing.servers import S3Server

MIB = 1 << 20


def open_store(bucket: str = "bucket", *, timeout_s: float = 20, **options: Any) -> S3Store:
    return S3Store(bucket, "p", storage_options=options, timeout_s=timeout_s, connections=2)


def client_of(store: S3Store) -> clients.S3Client:
    return clients.client_cache.client_for(store._session.client_key, store._session._environment)


class TestClients(ClientTests):
    """Of boto3."""

    clients = clients
    store_type = S3Store
    credentials: ClassVar = {"access_key_id": "a", "secret_access_key": "b", "region": "eu-west-1"}
    endpoint_variable = "AWS_ENDPOINT_URL_S3"
    another_class = "STANDARD_IA"


def test_no_client_is_made_before_the_first_request() -> None:
    """Opening a store would cost a tenth of a second and fail for want of a profile, before anything is asked."""
    open_store(profile="no-such-profile")
    assert len(clients.client_cache) == 0


def test_stores_at_work_at_once_keep_the_connections_that_they_opened(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A save and a load at once would close each other's connections, and open and greet anew for each request."""
    num_calls = 8  # of two connections each, by four stores
    all_under_way = threading.Barrier(num_calls, timeout=30)
    answer = scripted.any_s3()

    def answer_together(connection: Any, request: Any) -> None:
        all_under_way.wait()
        answer(connection, request)

    server = scripted.serve(answer_together)
    stores = [server.store(prefix=f"p{number % 4}") for number in range(num_calls)]
    with ThreadPoolExecutor(num_calls) as pool:
        for _ in range(2):
            list(pool.map(lambda store: store.read_into("k", 0, [memoryview(bytearray(10))]), stores))
    assert len(clients.client_cache) == 1
    assert server.num_connections == num_calls
    assert "pool is full" not in caplog.text


def test_another_environment_means_another_client(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store opened after the credentials in the environment changed would go on with the old ones."""
    server = scripted.serve(scripted.any_s3())
    for access_key in ("FIRST", "SECOND"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        open_store(endpoint_url=server.endpoint_url, region="us-east-1").head("k")
    first, second = (request.headers["authorization"] for request in server.requests)
    assert "Credential=FIRST/" in first
    assert "Credential=SECOND/" in second


def test_refused_credentials_are_looked_up_anew(scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials renewed in ~/.aws would not be taken up until the training is restarted."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id=OLD\naws_secret_access_key=s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    server = scripted.serve(scripted.error(400, "ExpiredToken"), scripted.any_s3())
    store = open_store(endpoint_url=server.endpoint_url, region="us-east-1")
    with pytest.raises(errors.CredentialsError):
        store.read("k", max_bytes=10)
    file.write_text("[default]\naws_access_key_id=NEW\naws_secret_access_key=s\n")
    store.read("k", max_bytes=10)
    assert "Credential=NEW/" in server.requests[-1].headers["authorization"]


def test_a_pickled_store_works_elsewhere(s3_server: S3Server, store: S3Store) -> None:
    """An async save in a process of its own pickles its writer, and the store with it."""
    store.put("k", [memoryview(b"before")], crc32c=0)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.uri == store.uri
    assert copy.read("k", max_bytes=10) == b"before"
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply_async(store.read, ("k",), {"max_bytes": 10}).get(60) == b"before"
    assert s3_server.endpoint_url not in repr(copy)


def test_the_ordinary_aws_environment_is_enough(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users would have to repeat in options what every other tool takes from the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(bucket)
    store.put("k", [memoryview(b"x")], crc32c=0)
    assert store.read("k", max_bytes=1) == b"x"


def test_a_profile_is_enough(scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles hold endpoint, region, addressing and credentials for most users of compatible stores."""
    server = scripted.serve(scripted.any_s3())
    file = tmp_path / "config"
    file.write_text(
        "[profile work]\naws_access_key_id=PROFILED\naws_secret_access_key=s\nregion=ap-south-1\n"
        f"s3 =\n  addressing_style = path\nendpoint_url = {server.endpoint_url}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    open_store(profile="work").head("k")
    (request,) = server.requests
    assert "Credential=PROFILED/" in request.headers["authorization"]
    assert "/ap-south-1/" in request.headers["authorization"]
    assert request.path == "/bucket/p/k"


def test_options_win_over_the_environment(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit option that loses to a variable cannot be explained to anyone."""
    server = scripted.serve(scripted.any_s3())
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    store = server.store()
    store.put("k", [memoryview(b"x")], crc32c=0)
    (request,) = server.requests
    assert "Credential=AKID/" in request.headers["authorization"]
    assert "transfer-encoding" not in request.headers


def test_no_credentials_is_one_clear_error(scripted: Any) -> None:
    """boto3's "Unable to locate credentials" says neither for what nor where to put them."""
    store = open_store(endpoint_url=scripted.serve(scripted.any_s3()).endpoint_url, region="us-east-1")
    with pytest.raises(errors.CredentialsError, match=r"s3://bucket/p/k: .*AWS_ACCESS_KEY_ID"):
        store.read("k", max_bytes=1)


def test_a_missing_profile_is_one_clear_error() -> None:
    """boto3 raises it where the client is made, outside of any request."""
    with pytest.raises(errors.CredentialsError, match=r"s3://bucket/p/k: .*no-such-profile"):
        open_store(profile="no-such-profile").read("k", max_bytes=1)


def test_an_impossible_bucket_name_is_one_clear_error(scripted: Any) -> None:
    """boto3 refuses it with a validation error of its own."""
    server = scripted.serve(scripted.any_s3())
    store = S3Store(
        "Not A Bucket!",
        "",
        storage_options={"endpoint_url": server.endpoint_url, "access_key_id": "a", "secret_access_key": "b"},
        timeout_s=5,
        connections=1,
    )
    with pytest.raises(errors.StoreError, match="bucket"):
        store.read("k", max_bytes=1)
    assert server.requests == []


def test_an_endpoint_with_credentials_in_its_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message names the endpoint, and would name the password with it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://user:hush@127.0.0.1:1")
    with pytest.raises(errors.InvalidOptionError) as caught:
        open_store(access_key_id="a", secret_access_key="b").read("k", max_bytes=1)  # noqa: S106 (a dummy)
    assert "hush" not in str(caught.value)


def test_an_endpoint_in_the_environment_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3's ValueError would pass for a bug, and quote a password that was meant for the store."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "user:hush@127.0.0.1:9000")
    with pytest.raises(errors.InvalidOptionError, match="AWS_ENDPOINT_URL_S3") as caught:
        open_store(access_key_id="a", secret_access_key="b").read("k", max_bytes=1)  # noqa: S106 (a dummy)
    assert "hush" not in str(caught.value)


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ModuleNotFoundError would not say which of cloudckpt's extras to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(errors.MissingDependencyError, match=r"pip install 'cloudckpt\[s3\]'"):
        open_store()


def test_importing_the_store_does_not_import_boto3() -> None:
    """Users of local paths would need boto3, or wait for it."""
    source = "import sys, cloudckpt.stores.s3; assert 'boto3' not in sys.modules and 'botocore' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


def test_secrets_reach_neither_messages_nor_logs(scripted: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A training log is shared with many people."""
    echo = "you sent HUSHKEY and HUSHTOKEN"
    server = scripted.serve(scripted.error(403, "SignatureDoesNotMatch", echo))
    store = open_store(
        endpoint_url=server.endpoint_url,
        region="us-east-1",
        access_key_id="AKID",
        secret_access_key="HUSHKEY",  # noqa: S106 (a dummy)
        session_token="HUSHTOKEN",  # noqa: S106 (a dummy)
    )
    with caplog.at_level("INFO"), pytest.raises(errors.CredentialsError) as caught:
        store.read("k", max_bytes=1)
    shown = f"{caught.value} {caught.value!r} {vars(caught.value)} {caplog.text}"
    assert "HUSH" not in shown
    assert caught.value.__suppress_context__


def test_transfers_copy_nothing(scripted: Any) -> None:
    """G7: a save of CPU tensors copies none of them; a copy of every part in flight would be 256 MiB."""

    num_bytes = 64 * MIB
    source, target = bytearray(num_bytes), bytearray(num_bytes)

    def send(connection: Any, _request: Any) -> None:
        fields = f"Content-Length: {num_bytes}\r\nContent-Range: bytes 0-{num_bytes - 1}/{num_bytes}\r\n\r\n"
        connection.sendall(b"HTTP/1.1 206 X\r\n" + fields.encode())
        connection.sendall(source)

    taken = scripted.reply(200, b"", {"ETag": '"e"'})
    server = scripted.serve(taken, send, taken, send, keeps_bodies=False)
    store, part = server.store(), Part(number=1, offset_bytes=0, size_bytes=num_bytes)

    def transfer() -> None:
        store.upload_part("k", "UP", part, [memoryview(source)], crc32c=0)
        store.read_into("k", 0, [memoryview(target)])

    transfer()  # the client, its connection and its imports
    tracemalloc.start()
    try:
        transfer()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * MIB
