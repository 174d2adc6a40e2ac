"""Credentials that an agent renews beneath a running job, and services that hand them out late."""

from __future__ import annotations

import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, Any

import botocore.session
import pytest
from tests.kit.clock import skip_waits

from cloudckpt import errors
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.base import Part
from cloudckpt.stores.s3 import S3Store

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "token-of-the-first-hour", "token-of-the-second-hour"
WHOLE = [memoryview(b"the whole "), memoryview(b"body")]


def open_store(endpoint_url: str, **options: Any) -> S3Store:
    options = {"endpoint_url": endpoint_url, "region": "eu-west-1", **options}
    return S3Store("bucket", "", storage_options=options, timeout_s=20, connections=2)


def write_credentials(file: Path, token: str) -> None:
    file.write_text(f"[default]\naws_access_key_id=AKID\naws_secret_access_key=s\naws_session_token={token}\n")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared credentials file, with the old token."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    write_credentials(path, OLD)
    return path


def refuse_old(scripted: Any, code: str = "ExpiredToken") -> Any:
    """Return a store's answer that refuses the old token."""
    s3, refusal = scripted.any_s3(), scripted.error(400, code)

    def answer(connection: Any, request: Any) -> None:
        (refusal if request.headers["x-amz-security-token"] == OLD else s3)(connection, request)

    return answer


@pytest.mark.parametrize(
    "code",
    [
        *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "RequestExpired"),
        "TokenRefreshRequired",
    ],
)
def test_credentials_renewed_in_the_file_are_taken_up_by_the_call_that_is_refused(
    scripted: Any, file: Path, code: str
) -> None:
    """If this fails, a job ends although an agent has renewed its credentials, or stores an empty object."""
    server = scripted.serve(refuse_old(scripted, code))
    store = open_store(server.endpoint_url)
    store.session.client()  # looks for the credentials
    write_credentials(file, NEW)
    store.put("k", WHOLE, crc32c=0)
    assert server.requests[-1].body == b"the whole body"
    assert {request.headers["x-amz-security-token"] for request in server.requests} == {OLD, NEW}
    num_requests = len(server.requests)
    store.head("k")
    assert len(server.requests) == num_requests + 1


@pytest.mark.parametrize("operation", ["head", "list", "read_into", "upload_part"])
def test_each_call_takes_up_renewed_credentials(scripted: Any, file: Path, operation: str) -> None:
    """If this fails, one kind of request still ends a job whose credentials were renewed."""
    server = scripted.serve(refuse_old(scripted))
    store = open_store(server.endpoint_url)
    store.session.client()
    write_credentials(file, NEW)
    part = Part(number=1, offset_bytes=0, size_bytes=14)
    {
        "head": lambda: store.head("k"),
        "list": lambda: list(store.list()),
        "read_into": lambda: store.read_into("k", 0, [memoryview(bytearray(4))]),
        "upload_part": lambda: store.upload_part("k", "UP", part, WHOLE, crc32c=0),
    }[operation]()
    assert server.requests[-1].headers["x-amz-security-token"] == NEW


def test_credentials_of_a_process_are_fetched_anew(scripted: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """If this fails, only files are looked at again: a program that hands out tokens is not asked."""
    token, config = tmp_path / "token", tmp_path / "config"
    token.write_text(OLD)
    program = (
        "import json, pathlib; print(json.dumps(dict(Version=1, AccessKeyId='AKID', SecretAccessKey='s', "
        f"SessionToken=pathlib.Path({str(token)!r}).read_text())))"
    )
    config.write_text(f"[default]\ncredential_process = {shlex.join([sys.executable, '-c', program])}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    server = scripted.serve(refuse_old(scripted))
    store = open_store(server.endpoint_url)
    with pytest.raises(errors.CredentialsError, match="credential_process have expired"):
        store.read("k", max_bytes=10)
    store.session.client()  # runs the program
    num_requests = len(server.requests)
    token.write_text(NEW)
    store.read("k", max_bytes=10)
    sent = [request.headers["x-amz-security-token"] for request in server.requests[num_requests:]]
    assert sent == [OLD, NEW]


def test_many_parts_that_are_refused_together_make_one_look(
    scripted: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, sixteen connections ask an identity service sixteen times, and keep sixteen clients."""
    barrier, made = Barrier(8, timeout=30), []
    refusal, s3 = scripted.error(400, "ExpiredToken"), scripted.any_s3()

    def answer(connection: Any, request: Any) -> None:
        if request.headers["x-amz-security-token"] == OLD:
            barrier.wait()  # all are on their way with the old token
            refusal(connection, request)
        else:
            s3(connection, request)

    session = botocore.session.Session
    monkeypatch.setattr("botocore.session.Session", lambda **settings: made.append(settings) or session(**settings))
    store = open_store(scripted.serve(answer).endpoint_url)
    store.session.client()
    write_credentials(file, NEW)
    part = Part(number=1, offset_bytes=0, size_bytes=14)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(store.upload_part, "k", "UP", part, WHOLE, crc32c=0) for _ in range(8)]
        assert [future.result(30).token for future in futures] == ['"e"'] * 8
    assert len(made) == 2


@pytest.mark.parametrize("way", ["the shared credentials file", "the storage options"])
def test_the_same_credentials_are_an_error_at_once_that_names_their_source(scripted: Any, file: Path, way: str) -> None:
    """If this fails, a job whose credentials have expired waits for a long time, or does not say which to renew."""
    server = scripted.serve(scripted.error(400, "ExpiredToken"))
    keys = {"access_key_id": "AKID", "secret_access_key": "s", "session_token": OLD}
    store = open_store(server.endpoint_url, **({} if way == "the shared credentials file" else keys))
    for num_calls in (1, 2):
        with pytest.raises(errors.CredentialsError, match=f"credentials from {way} have expired"):
            StoreClient(store, retries=9, timeout_s=60).read("k", max_bytes=10)
        assert len(server.requests) == num_calls


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        (["RequestTimeTooSkewed"], ""),
        (["RequestTimeTooSkewed"] * 2, "[Tt]his machine's clock is off"),
        (["RequestExpired"], ""),
        (["RequestExpired"] * 2, r"credentials from .* have expired, or this machine's clock is off.*cloudckpt doctor"),
    ],
)
def test_one_request_that_waited_too_long_is_signed_anew(scripted: Any, codes: list[str], problem: str) -> None:
    """If this fails, one request that stood in a queue ends a save, a wrong clock is asked for ever, or the clock is
    blamed for credentials that have expired.
    """
    server = scripted.serve(*(scripted.error(403, code) for code in codes), scripted.any_s3())
    store = server.store()
    if problem:
        with pytest.raises(errors.CredentialsError, match=problem):
            store.put("k", WHOLE, crc32c=0)
    else:
        for _ in range(2):
            store.put("k", WHOLE, crc32c=0)
        assert [request.body for request in server.requests] == [b"the whole body"] * 3
    store.put("k", WHOLE, crc32c=0)
    assert len(server.requests) == (3 if problem else 4)


# Services of the machine.

ROLE = {
    "Code": "Success",
    "AccessKeyId": "AKIDROLE",
    "SecretAccessKey": "s",
    "Token": NEW,
    "Expiration": "2999-01-01T00:00:00Z",
}


def any_metadata(scripted: Any) -> Any:
    """Return the answer of a metadata service, and of a container's endpoint."""

    def answer(connection: Any, request: Any) -> None:
        body = "session" if "token" in request.path else json.dumps(ROLE)
        body = "role" if request.path.endswith("security-credentials/") else body
        scripted.reply(200, body)(connection, request)

    return answer


def lead_to(patch: pytest.MonkeyPatch, service: str, endpoint_url: str) -> None:
    patch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "1")
    patch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    if service == "ec2":
        patch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint_url)
        patch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    else:
        patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{endpoint_url}/role")


@pytest.mark.parametrize("service", ["ec2", "container"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_metadata_service_that_is_busy_is_waited_for(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, service: str, status: int
) -> None:
    """If this fails, a restore ends because many processes have started on the machine at the same moment."""
    skip_waits(monkeypatch)
    metadata = scripted.serve(*[scripted.error(status, "busy")] * 20, any_metadata(scripted))
    lead_to(monkeypatch, service, metadata.endpoint_url)
    server = scripted.serve(scripted.any_s3())
    # It is bounded by timeout_s alone: a service that starts refuses at once, and retries are soon used up.
    StoreClient(open_store(server.endpoint_url), retries=0, timeout_s=60).read("k", max_bytes=10)
    assert "Credential=AKIDROLE/" in server.requests[0].headers["authorization"]


@pytest.mark.parametrize(("service", "words"), [("ec2", "EC2 metadata service"), ("container", "container's")])
def test_a_metadata_service_that_stays_busy_is_named(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, service: str, words: str
) -> None:
    """If this fails, the message advises keys to somebody whose machine has a role."""
    metadata = scripted.serve(scripted.error(503, "busy"))
    lead_to(monkeypatch, service, metadata.endpoint_url)
    client = StoreClient(open_store("http://127.0.0.1:1"), retries=5, timeout_s=0.5)
    with pytest.raises(errors.TransientStoreError, match=rf"{words}.* at {metadata.endpoint_url}/.*503"):
        client.read("k", max_bytes=10)


@pytest.mark.parametrize("answer", ["nobody", "no role", "not allowed"])
def test_a_machine_without_a_role_is_told_at_once(scripted: Any, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """If this fails, a laptop without credentials waits for timeout_s, for a service that is not there."""
    status = 404 if answer == "no role" else 401
    metadata = "http://127.0.0.1:1" if answer == "nobody" else scripted.serve(scripted.error(status, "x")).endpoint_url
    lead_to(monkeypatch, "ec2", metadata)
    client = StoreClient(open_store("http://127.0.0.1:1"), retries=9, timeout_s=60)
    with pytest.raises(errors.CredentialsError, match="No usable credentials"):
        client.read("k", max_bytes=10)
    assert client.num_retries == 0


def test_a_role_whose_source_is_a_busy_metadata_service_is_waited_for(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If this fails, a profile with `credential_source` ends its job where the machine's own role would wait."""
    config = tmp_path / "config"
    role = "role_arn = arn:aws:iam::123456789012:role/trainer\ncredential_source = Ec2InstanceMetadata\n"
    config.write_text(f"[profile trainer]\n{role}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    metadata = scripted.serve(scripted.error(503, "busy"))
    lead_to(monkeypatch, "ec2", metadata.endpoint_url)
    store = open_store("http://127.0.0.1:1", profile="trainer")
    with pytest.raises(
        errors.TransientStoreError, match=r"EC2 metadata service at .* answered with status 503"
    ) as caught:
        store.read("k", max_bytes=10)
    assert caught.value.is_unsent
