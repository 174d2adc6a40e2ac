"""``storage_options``, clients and the ordinary AWS configuration; what is never shown."""

from __future__ import annotations

import base64
import tracemalloc
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import pytest
from tests.stores.http_contract import ClientTests

from cloudckpt import errors
from cloudckpt.errors import InvalidOptionError
from cloudckpt.stores.base import Part
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3 import session as sessions
from cloudckpt.stores.s3.session import S3Config, parse_storage_options

if TYPE_CHECKING:
    from pathlib import Path


MIB = 1 << 20


def open_store(bucket: str = "bucket", *, timeout_s: float = 20, **options: Any) -> S3Store:
    return S3Store(bucket, "p", storage_options=options, timeout_s=timeout_s, connections=2)


class TestClients(ClientTests):
    """The clients of boto3."""

    cache = sessions.S3Session.cache
    extra = "s3"
    store_type = S3Store
    credentials: ClassVar = {"access_key_id": "a", "secret_access_key": "b", "region": "eu-west-1"}
    endpoint_variable = "AWS_ENDPOINT_URL_S3"
    another_class = "STANDARD_IA"

    def timeouts_s(self, client: Any) -> tuple[float, float]:
        config = client.boto3_client.meta.config
        return config.connect_timeout, config.read_timeout


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


def test_a_missing_profile_is_one_clear_error() -> None:
    """boto3 raises it where the client is made, outside of any request."""
    with pytest.raises(errors.CredentialsError, match=r"s3://bucket/p/k: .*no-such-profile"):
        open_store(profile="no-such-profile").read("k", max_bytes=1)


def test_an_endpoint_in_the_environment_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3's ValueError would pass for a bug, and quote a password that was meant for the store."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "user:hush@127.0.0.1:9000")
    with pytest.raises(errors.InvalidOptionError, match="AWS_ENDPOINT_URL_S3") as caught:
        open_store(access_key_id="a", secret_access_key="b").read("k", max_bytes=1)  # noqa: S106 (a dummy)
    assert "hush" not in str(caught.value)


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


KEY, SECRET, TOKEN = "AKIDOFATEST", "se/cret+of=HUSH/1", "to/ken+of=/" + 30 * "HUSH/2"


def _environment(patch: pytest.MonkeyPatch, _: Path) -> dict[str, Any]:
    for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("SESSION_TOKEN", TOKEN)):
        patch.setenv(f"AWS_{name}", value)
    return {}


def _options(_patch: pytest.MonkeyPatch, _: Path) -> dict[str, Any]:
    return {"access_key_id": KEY, "secret_access_key": SECRET, "session_token": TOKEN}


@pytest.mark.parametrize("configure", [_environment, _options])
@pytest.mark.parametrize("as_sent", [str, lambda text: quote(text, safe="")], ids=["plain", "quoted"])
@pytest.mark.parametrize("kind", ["own", "foreign", "range"])
def test_no_secret_that_a_store_echoes_is_repeated(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, configure: Any, as_sent: Any, kind: str
) -> None:
    """If this fails, an error in a training log gives the bucket away, wherever the credentials came from."""
    words = f"{as_sent(SECRET)} {as_sent(TOKEN)} {KEY}"
    answers = {
        "own": scripted.error(403, "InvalidToken", words),
        "foreign": scripted.reply(404, as_sent(TOKEN), {"Content-Type": as_sent(SECRET)}),
        "range": scripted.reply(206, "x", {"Content-Range": words}),
    }
    server = scripted.serve(answers[kind])
    options = {"endpoint_url": server.endpoint_url, "region": "eu-west-1", **configure(monkeypatch, tmp_path)}
    store = S3Store("bucket", "", storage_options=options, timeout_s=20, connections=2)
    with pytest.raises(errors.StoreError) as caught:
        store.read_into("k", 0, [memoryview(bytearray(4))])
    assert server.requests[0].headers["x-amz-security-token"] == TOKEN
    message = f"{caught.value} {vars(caught.value)!r} {store!r}"
    assert "***" in message
    assert "HUSH" not in message
    if kind == "own":
        assert KEY in message  # it names a key, as a user's name does, and says which one was refused


CUSTOMER_KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"endpoint_url": "http://127.0.0.1:9000"}, {"endpoint_url": "http://127.0.0.1:9000"}),
        ({"region_name": "eu-west-1"}, {"region": "eu-west-1"}),
        (
            {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_session_token": "c"},
            {"access_key_id": "a", "secret_access_key": "b", "session_token": "c"},
        ),
        ({"path_style": True}, {"addressing_style": "path"}),
        ({"kms_key_id": "k"}, {"kms_key_id": "k", "sse": "aws:kms"}),
        ({"sse": "aws:kms:dsse", "kms_key_id": "k"}, {"kms_key_id": "k", "sse": "aws:kms:dsse"}),
        ({"sse_customer_key": CUSTOMER_KEY}, {"sse_customer_key": CUSTOMER_KEY}),
        ({"sse_customer_key": base64.b64encode(CUSTOMER_KEY).decode()}, {"sse_customer_key": CUSTOMER_KEY}),
        ({"tags": {"team": "a b", "n": "1"}}, {"tags": "team=a+b&n=1"}),
        ({"request_payer": True}, {"request_payer": "requester"}),
        ({"request_payer": False}, {}),
        ({"connect_timeout_s": 3, "read_timeout_s": 4.5}, {"connect_timeout_s": 3.0, "read_timeout_s": 4.5}),
        ({"verify": False}, {"verify": False}),
        ({"ca_bundle": "/etc/ca.pem"}, {"verify": "/etc/ca.pem"}),
        ({"region": None, "profile": None}, {}),
        ({"endpoint_url": "https://host/a@b"}, {"endpoint_url": "https://host/a@b"}),
    ],
)
def test_options_are_understood(options: dict[str, Any], expected: dict[str, Any]) -> None:
    """An option that the documentation names would be refused, or taken for another."""
    assert parse_storage_options(options) == S3Config(**expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "http://x"}, "'endpoint' is not known (did you mean 'endpoint_url'?)"),
        ({"endpoint_url": "127.0.0.1:9000"}, "must look like https://host"),
        ({"region": "eu west"}, "white space"),
        ({"access_key_id": "a"}, "belong together"),
        ({"session_token": "a"}, "session_token needs"),
        ({"anonymous": True, "profile": "p"}, "anonymous excludes"),
        ({"anonymous": "yes"}, "True or False"),
        ({"path_style": True, "addressing_style": "virtual"}, "contradicts"),
        ({"sse": "aes"}, "must be one of AES256"),
        ({"sse": "AES256", "kms_key_id": "k"}, "kms_key_id needs"),
        ({"sse": "AES256", "sse_customer_key": CUSTOMER_KEY}, "excludes"),
        ({"sse_customer_key": b"short"}, "32 bytes"),
        ({"tags": {str(n): "" for n in range(11)}}, "10 tags"),
        ({"read_timeout_s": "soon"}, "positive"),
        ({"ca_bundle": ""}, "certificate bundle"),
    ],
)
def test_options_that_cannot_work_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    """A typing error would be ignored, and surface as a failed save hours later."""
    with pytest.raises(InvalidOptionError) as caught:
        S3Store("bucket", "", storage_options=options, timeout_s=1, connections=1)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"access_key_id": "AKID", "secret_access_key": "hush\n"},
        {"access_key_id": "AKID", "secret_access_key": "x", "session_token": "hush\r\n"},
        {"sse_customer_key": "hush"},
        {"endpoint_url": "https://user:hush@host"},
        {"endpoint_url": "user:hush@host"},
        {"endpoint_url": "https://user:hush/@host"},
    ],
)
def test_refusals_do_not_show_secrets(options: dict[str, Any]) -> None:
    """A key with a stray line break would be printed into a log by the message that complains about it."""
    with pytest.raises(InvalidOptionError) as caught:
        parse_storage_options(options)
    assert "hush" not in str(caught.value)


def test_reprs_do_not_show_secrets() -> None:
    """A debugger's or logger's repr would give the credentials away."""
    options = {
        "access_key_id": "AKID",
        "secret_access_key": "hush",
        "session_token": "hush-too",
        "sse_customer_key": CUSTOMER_KEY,
    }
    store = S3Store("bucket", "a/b", storage_options=options, timeout_s=1, connections=1)
    assert repr(store) == "S3Store('s3://bucket/a/b')"
    shown = f"{store!r} {store.uri} {store.session!r} {store.session.client_key!r} {parse_storage_options(options)!r}"
    assert "hush" not in shown
    assert repr(CUSTOMER_KEY) not in shown
    assert base64.b64encode(CUSTOMER_KEY).decode() not in shown
