"""Credentials, clients and the ordinary Google configuration: where they come from, and who gets to see them."""

from __future__ import annotations

import json
import pickle
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from awscrt.checksums import crc32c
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.credentials import AnonymousCredentials
from google.oauth2.credentials import Credentials
from tests.kit.clock import skip_waits
from tests.stores.http_contract import ClientTests

from cloudckpt import errors
from cloudckpt.errors import InvalidOptionError, UnsupportedOperationError
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.gcs import session as sessions
from cloudckpt.stores.gcs.session import is_googles, parse_storage_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cloudckpt.testing.servers import GCSServer


X = [memoryview(b"x")]
CRC = crc32c(b"x")


def open_store(bucket: str = "bucket", *, timeout_s: float = 20, **options: Any) -> GCSStore:
    return GCSStore(bucket, "p", storage_options=options, timeout_s=timeout_s, connections=2)


def test_anonymous_requests_carry_no_credentials(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public buckets would need credentials; or a line of ~/.netrc would be sent to whoever the endpoint is."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password HUSH\n")
    monkeypatch.setenv("NETRC", str(netrc))
    server = scripted.serve(scripted.any_gcs())
    store = server.store()
    store.put("k", X, crc32c=CRC)
    store.read_into("k", 0, [memoryview(bytearray(1))])
    store.head("k")
    assert not any("authorization" in request.headers for request in server.requests)


@pytest.mark.parametrize("operation", ["put", "head", "read", "list"])
def test_a_refused_token_is_renewed_once_and_the_whole_request_sent_again(scripted: Any, operation: str) -> None:
    """Tokens are revoked before their time; google.auth sends the same body again, which is at its end by then."""
    gcs = scripted.any_gcs()

    def expire_first(connection: Any, request: Any) -> None:
        refused = request.headers["authorization"] == "Bearer TOKEN-1-HUSH"
        (scripted.error(401, "authError") if refused else gcs)(connection, request)

    server = scripted.serve(expire_first)
    credentials = scripted.tokens()
    store = server.store(credentials=credentials)
    body = [memoryview(b"the whole "), memoryview(b"body")]
    calls = {
        "put": lambda: store.put("k", body, crc32c=crc32c(b"the whole body")),
        "head": lambda: store.head("k"),
        "read": lambda: store.read("k", max_bytes=10),
        "list": lambda: list(store.list()),
    }
    calls[operation]()
    assert [request.headers["authorization"][-6:] for request in server.requests] == ["1-HUSH", "2-HUSH"]
    if operation == "put":
        assert [scripted.inserted(request)[1] for request in server.requests] == [b"the whole body"] * 2
    calls[operation]()
    assert credentials.num_renewals == 2


@pytest.mark.parametrize("renewable", [True, False])
def test_credentials_that_are_refused_for_good_are_one_error(scripted: Any, *, renewable: bool) -> None:
    """They would be renewed and refused without end."""
    server = scripted.serve(scripted.error(401, "authError"))
    store = server.store(credentials=scripted.tokens(renewable=renewable))
    with pytest.raises(errors.CredentialsError, match="application-default login"):
        store.head("k")
    assert len(server.requests) == (2 if renewable else 1)
    assert len(sessions.GCSSession.cache) == 0  # looked up anew next time


def service_account(token_uri: str) -> dict[str, str]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "id",
        "private_key": pem,
        "client_email": "trainer@p.iam.gserviceaccount.com",
        "token_uri": token_uri,
    }


def user(token_uri: str) -> dict[str, str]:
    return {
        "type": "authorized_user",
        "client_id": "c",
        "client_secret": "HUSH-SECRET",
        "refresh_token": "HUSH-REFRESH",
        "token_uri": token_uri,
    }


@pytest.mark.parametrize("way", ["option", "GOOGLE_APPLICATION_CREDENTIALS", "gcloud"])
@pytest.mark.parametrize("kind", [user, service_account])
def test_each_source_of_credentials_is_used(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, kind: Callable[[str], dict[str, str]]
) -> None:
    """Users would have to do for cloudckpt what they have done for every other tool. And what is used is sent."""
    gcs = scripted.any_gcs()

    def answer(connection: Any, request: Any) -> None:
        token = scripted.json({"access_token": "FRESH", "expires_in": 3600, "token_type": "Bearer"})
        (token if request.path == "/token" else gcs)(connection, request)

    server = scripted.serve(answer)
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps(kind(f"{server.endpoint_url}/token")))
    # The place of gcloud's own file names no address: it is always Google's.
    monkeypatch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", f"{server.endpoint_url}/token")
    options = {"credentials_file": str(file)} if way == "option" else {}
    if way == "gcloud":
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    elif way != "option":
        monkeypatch.setenv(way, str(file))
    store = open_store(endpoint_url=server.endpoint_url, **options)
    store.put("k", X, crc32c=CRC)
    assert server.requests[-1].headers["authorization"] == "Bearer FRESH"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("not JSON", "is not JSON"),
        ('{"type": "authorized_user"}', "no usable authorized_user"),
        ('{"type": "service_account", "private_key": "HUSH"}', "no usable service_account"),
    ],
)
def test_an_invalid_credentials_file_is_reported(tmp_path: Path, content: str | None, words: str) -> None:
    """The file's name is what the user can correct; its content must not be shown."""
    file = tmp_path / "key.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(errors.CredentialsError, match=words) as caught:
        open_store(credentials_file=str(file)).head("k")
    assert str(file) in str(caught.value)
    assert "HUSH" not in str(caught.value)


def test_no_credentials_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside Google's cloud its metadata address answers nobody: a job would hear of an IP address."""
    monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setattr(
        "google.auth.compute_engine._metadata._get_metadata_ip_root", lambda _mtls: "http://127.0.0.1:1"
    )
    monkeypatch.setattr("google.auth.compute_engine._metadata.detect_gce_residency_linux", lambda: False)
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _s: None)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(errors.CredentialsError, match=r"gs://bucket/p/k: .*application-default login.*anonymous"):
        open_store(endpoint_url="https://127.0.0.1:1", timeout_s=0.5).head("k")


TOKEN, REFRESH, CLIENT = "ya29.a/token+of=" + 30 * "HUSH", "1//refresh-HUSH", "client-HUSH"


@pytest.mark.parametrize("kind", ["own", "plain", "page", "range"])
def test_no_secret_that_a_store_echoes_is_repeated(scripted: Any, kind: str) -> None:
    """If this fails, an error in a training log gives the bucket away."""
    words = f"Bearer {TOKEN} {REFRESH} {CLIENT}"
    answers = {
        "own": scripted.error(403, "forbidden", words),
        "plain": scripted.reply(403, words, {"Content-Type": "text/plain", "X-GUploader-UploadID": "u"}),
        "page": scripted.reply(404, words, {"Content-Type": TOKEN}),
        "range": scripted.reply(206, "x", {"Content-Range": words}),
    }
    server = scripted.serve(answers[kind])
    credentials = Credentials(
        token=TOKEN, refresh_token=REFRESH, client_id="id", client_secret=CLIENT, token_uri=server.endpoint_url
    )
    store = server.store(credentials=credentials, project="p")
    with pytest.raises(errors.StoreError) as caught:
        store.read_into("k", 0, [memoryview(bytearray(4))])
    assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert "HUSH" not in f"{caught.value} {vars(caught.value)!r} {store!r}"


def test_a_token_that_was_renewed_meanwhile_is_not_repeated(scripted: Any) -> None:
    """If this fails, the answer to the request that went out before shows a token that is still good for an hour."""
    tokens = scripted.tokens()

    def answer(connection: Any, request: Any) -> None:
        tokens.refresh(None)
        scripted.error(403, "forbidden", request.headers["authorization"])(connection, request)

    with pytest.raises(errors.AccessDeniedError) as caught:
        scripted.serve(answer).store(credentials=tokens, project="p").head("k")
    assert "HUSH" not in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    """One problem at a time means one start of a large job for each."""
    with pytest.raises(InvalidOptionError) as caught:
        parse_storage_options(
            {
                "endpoint": "http://x",
                "anonymous": "yes",
                "endpoint_url": "storage.example",
                "credentials": "a token",
                "storage_class": "NEAR LINE",
            }
        )
    text = str(caught.value)
    assert text.startswith("Storage options for GCS: 'endpoint' is not known (did you mean 'endpoint_url'?)")
    for words in (
        "anonymous must be True or False",
        "endpoint_url must look like https://host",
        "credentials must be a google.auth.credentials.Credentials, not a str",
        "storage_class holds white space",
    ):
        assert words in text
    assert "a token" not in text


def test_credentials_are_never_shown() -> None:
    """A configuration that is logged would log a token."""

    class Shown(AnonymousCredentials):
        def __repr__(self) -> str:
            return "HUSH"

    assert "HUSH" not in repr(parse_storage_options({"credentials": Shown()}))


class TestClients(ClientTests):
    """The clients of google-cloud-storage."""

    cache = sessions.GCSSession.cache
    extra = "gcs"
    store_type = GCSStore
    credentials: ClassVar = {"anonymous": True}
    endpoint_variable = "STORAGE_EMULATOR_HOST"
    another_class = "NEARLINE"

    def timeouts_s(self, client: Any) -> tuple[float, float]:
        return client.timeout_s


class Unpicklable(AnonymousCredentials):
    """Credentials that cannot be pickled, as most plug-ins of identity providers, which hold a lock or a socket."""

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


@pytest.mark.parametrize(
    ("endpoint_url", "expected"),
    [
        ("https://storage.googleapis.com", True),
        ("https://storage.europe-west3.rep.googleapis.com", True),
        ("http://127.0.0.1:4443", False),
        ("https://storage.googleapis.com.example", False),
    ],
)
def test_googles_endpoints_are_told_by_their_names(endpoint_url: str, expected: bool) -> None:  # noqa: FBT001
    """If this fails, a stranger's server is believed, or Google's own is asked before each first save."""
    assert is_googles(endpoint_url) is expected


def test_the_probe_sends_nothing_to_google() -> None:
    """If this fails, a role without the right to delete leaves an object in the bucket with each job."""
    store = GCSStore("bucket", "", storage_options={"anonymous": True}, timeout_s=1, connections=1)
    assert store.probe() == store.capabilities  # nothing answers under that name here


def test_a_server_that_ignores_the_condition_is_refused(scripted: Any) -> None:
    """If this fails, two saves to one URI both succeed there, and one of them is lost."""
    server = scripted.serve(scripted.any_gcs())
    store = server.store()
    found = store.probe()
    assert not found.conditional_create
    assert server.endpoint_url in found.observed
    assert "ignores the condition" in found.observed
    num_requests = len(server.requests)
    with pytest.raises(UnsupportedOperationError, match="ignores the condition"):
        store.put("manifest.json", X, crc32c=CRC, if_absent=True)
    assert len(server.requests) == num_requests


# Credentials that are renewed beneath a running job, and a metadata server that is late.


def test_a_renewed_file_is_taken_up_by_the_call_that_is_refused(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a job ends although its key was rotated, or its user has logged in again."""
    gcs, file = scripted.any_gcs(), tmp_path / "key.json"

    def answer(connection: Any, request: Any) -> None:
        if request.path == "/token":
            refusal = scripted.json({"error": "invalid_grant"}, 400)
            token = scripted.json({"access_token": "FRESH", "expires_in": 3600, "token_type": "Bearer"})
            (refusal if b"OLD" in request.body else token)(connection, request)
        else:
            gcs(connection, request)

    server = scripted.serve(answer)
    information = user(f"{server.endpoint_url}/token")
    file.write_text(json.dumps({**information, "refresh_token": "OLD"}))
    monkeypatch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", f"{server.endpoint_url}/token")
    store = open_store(endpoint_url=server.endpoint_url, credentials_file=str(file))
    with pytest.raises(errors.CredentialsError, match=f"from {file} could not be renewed"):
        store.put("k", X, crc32c=CRC)
    store.session.client()
    file.write_text(json.dumps(information))
    store.put("k", X, crc32c=CRC)
    assert server.requests[-1].headers["authorization"] == "Bearer FRESH"


@pytest.fixture
def metadata(scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Serves Google's metadata: the given answers first, then a service account's token."""

    def answer(connection: Any, request: Any) -> None:
        texts: dict[str, Any] = {
            "token": {"access_token": "OF-THE-POD", "expires_in": 3600},
            "default": {"email": "a@b", "scopes": []},
        }
        texts["universe-domain"] = "googleapis.com"
        last = request.path.rstrip("/").rpartition("/")[2]
        headers = {"Metadata-Flavor": "Google", "Content-Type": "application/json"}
        scripted.reply(200, json.dumps(texts.get(last, "p")), headers)(connection, request)

    def serve(*first: Any) -> Any:
        server = scripted.serve(*first, answer)
        host = server.endpoint_url.removeprefix("http://")
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("GCE_METADATA_IP", host)
        monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host)
        return server

    monkeypatch.setattr("google.auth.compute_engine._metadata._NO_GCE_CHECK", False)
    monkeypatch.setattr("google.auth.compute_engine._metadata.detect_gce_residency_linux", lambda: False)
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _s: None)
    skip_waits(monkeypatch)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    return serve


@pytest.mark.parametrize("is_known_machine", [True, False])
@pytest.mark.parametrize("num_answers", [1, 12])
@pytest.mark.parametrize("way", ["busy", "not ready", "refused"])
def test_a_metadata_server_that_is_late_is_waited_for(
    scripted: Any,
    metadata: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    way: str,
    num_answers: int,
    is_known_machine: bool,
) -> None:
    """If this fails, the first seconds of a pod on GKE end its job: 503, 404 "identity not ready", or nobody there."""
    monkeypatch.setattr("google.auth.compute_engine._metadata.detect_gce_residency_linux", lambda: is_known_machine)
    answers = {"busy": scripted.reply(503), "not ready": scripted.reply(404, "identity not ready")}
    service = metadata(*[answers.get(way, scripted.hang_up)] * num_answers)
    server = scripted.serve(scripted.any_gcs())
    StoreClient(open_store(endpoint_url=server.endpoint_url), retries=0, timeout_s=60).head("k")
    assert server.requests[-1].headers["authorization"] == "Bearer OF-THE-POD"
    assert len(service.requests) > num_answers


def test_a_metadata_server_that_stays_late_is_named(scripted: Any, metadata: Callable[..., Any]) -> None:
    """If this fails, the message advises to log in to somebody whose machine has a service account."""
    service = metadata(scripted.reply(200, "", {"Metadata-Flavor": "Google"}), *[scripted.reply(404)] * 10_000)
    host = service.endpoint_url.removeprefix("http://")
    with pytest.raises(errors.TransientStoreError, match=f"metadata server at {host} answered with status 404"):
        StoreClient(open_store(endpoint_url="http://127.0.0.1:1"), retries=0, timeout_s=0.5).head("k")
