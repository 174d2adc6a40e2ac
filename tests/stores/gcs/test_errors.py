"""Every error that Google's libraries can raise becomes one of cloudckpt's, with the key and the next step."""

from __future__ import annotations

import http.client
import inspect
import io
import json
import pickle
import socket
import ssl

import google.api_core.exceptions
import google.auth.exceptions
import pytest
import requests
import requests.exceptions
import urllib3.exceptions

from cloudckpt import errors
from cloudckpt.stores.gcs import errors as table
from cloudckpt.stores.gcs.client import refuse_errors
from cloudckpt.stores.gcs.errors import PERMISSIONS, translate
from cloudckpt.stores.http_errors import FailedRequest

MODULES = {"api_core": google.api_core.exceptions, "auth": google.auth.exceptions, "requests": requests.exceptions}
CLASSES: dict[str, type[Exception]] = {
    f"{library}.{name}": cls
    for library, module in MODULES.items()
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == module.__name__
}
URL = "gs://bucket/run/manifest.json"


def request_for(api: str = "objects.insert", secrets: tuple[str, ...] = ()) -> FailedRequest:
    return FailedRequest(
        operation="put",
        api=api,
        url=URL,
        bucket="bucket",
        endpoint="http://127.0.0.1:9",
        permission=PERMISSIONS[api],
        secrets=secrets,
    )


def answered(status: int, body: str = "") -> Exception:
    response = requests.Response()
    response.status_code = status
    response.raw = io.BytesIO(body.encode())
    try:
        refuse_errors(response)
    except Exception as error:  # noqa: BLE001  # it is what was asked for
        return error
    return google.api_core.exceptions.from_http_status(status, body, response=response)


def explained(status: int, reason: str, message: str = "Because.") -> Exception:
    return answered(status, json.dumps({"error": {"message": message, "errors": [{"reason": reason}]}}))


def instance_of(name: str) -> Exception:
    cls = CLASSES[name]
    if name == "api_core.RetryError":
        return cls("x", ValueError("x"))
    if name == "requests.JSONDecodeError":
        return cls("x", "doc", 0)
    return cls("x")


def test_every_exception_is_in_the_table_or_out_of_reach() -> None:
    """A newer library could raise what the table has never heard of, and nobody would notice."""
    known = set(table.EXCEPTIONS) | set(table.UNREACHABLE)
    assert set(CLASSES) - known == set(), "add them to EXCEPTIONS or, with the reason, to UNREACHABLE"


def test_the_table_names_nothing_twice() -> None:
    """Of two entries only one counts, and nobody could say which."""
    assert set(table.EXCEPTIONS) & set(table.UNREACHABLE) == set()
    assert {name.partition(".")[0] for name in (*table.EXCEPTIONS, *table.UNREACHABLE)} == set(MODULES)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(table.UNREACHABLE)))
def test_each_exception_says_what_failed_and_travels(name: str) -> None:
    """An exception of Google's that got through, or one that cannot be pickled, leaves other ranks hanging."""
    translated = translate(instance_of(name), request_for())
    assert isinstance(translated, errors.StoreError)
    assert (translated.key, translated.operation) == (URL, "put")
    assert str(translated).startswith(f"{URL}: objects.insert failed: ")
    copied = pickle.loads(pickle.dumps(translated))
    assert (type(copied), str(copied)) == (type(translated), str(translated))


@pytest.mark.parametrize("name", sorted(name for name in CLASSES if name.startswith("api_core.")))
def test_the_table_and_the_status_agree(name: str) -> None:
    """A class of the library's with a status of its own must mean what a bare answer with that status means."""
    code = getattr(CLASSES[name], "code", None)
    if name in table.EXCEPTIONS and isinstance(code, int) and code in table.STATUSES:
        assert issubclass(table.EXCEPTIONS[name].error, errors.StoreError)
        if CLASSES[name].__bases__[0].__name__ in ("ClientError", "ServerError", "Redirection"):
            assert table.EXCEPTIONS[name] == table.STATUSES[code]


@pytest.mark.parametrize(
    ("name", "expected", "words"),
    [
        ("auth.DefaultCredentialsError", errors.CredentialsError, "gcloud auth application-default login"),
        ("auth.RefreshError", errors.CredentialsError, "renewed"),
        ("auth.ReauthFailError", errors.CredentialsError, "Log in again"),
        ("auth.TransportError", errors.TransientStoreError, "Try again"),
        ("auth.TimeoutError", errors.TransientStoreError, "Try again"),
        ("requests.ConnectionError", errors.TransientStoreError, "http://127.0.0.1:9"),
        ("requests.ConnectTimeout", errors.StoreTimeoutError, "http://127.0.0.1:9"),
        ("requests.ReadTimeout", errors.StoreTimeoutError, "timeout_s"),
        ("requests.ProxyError", errors.TransientStoreError, "NO_PROXY"),
        ("requests.SSLError", errors.TransientStoreError, "TLS"),
        ("requests.JSONDecodeError", errors.TransientStoreError, "load balancer"),
        ("requests.ChunkedEncodingError", errors.TransientStoreError, "Try again"),
        ("requests.TooManyRedirects", errors.StoreError, "elsewhere"),
    ],
)
def test_exceptions_follow_what_a_handler_would_do(name: str, expected: type[errors.StoreError], words: str) -> None:
    """A missing credential would be retried for minutes, or a passing failure would end a save."""
    translated = translate(instance_of(name), request_for())
    assert type(translated) is expected
    assert words in str(translated)


@pytest.mark.parametrize(
    ("status", "reason", "expected", "words"),
    [
        (404, "notFound", errors.ObjectNotFoundError, "No object exists"),
        (412, "conditionNotMet", errors.ObjectExistsError, "left as it is"),
        (412, "orgPolicyConstraintFailed", errors.AccessDeniedError, "policy of the organization"),
        (401, "authError", errors.CredentialsError, "application-default login"),
        (401, "required", errors.CredentialsError, "application-default login"),
        (403, "forbidden", errors.AccessDeniedError, "storage.objects.get"),
        (403, "accountDisabled", errors.AccessDeniedError, "account"),
        (403, "retentionPolicyNotMet", errors.AccessDeniedError, "retention policy"),
        (403, "quotaExceeded", errors.StoreError, "quota"),
        (403, "rateLimitExceeded", errors.ThrottledError, "fewer requests"),
        (429, "rateLimitExceeded", errors.ThrottledError, "fewer requests"),
        (408, "uploadBrokenConnection", errors.TransientStoreError, "Try again"),
        (409, "conflict", errors.TransientStoreError, "Try again"),
        (413, "uploadTooLarge", errors.StoreError, "larger"),
        (416, "requestedRangeNotSatisfiable", errors.ShortObjectError, "ends before"),
        (500, "internalError", errors.TransientStoreError, "Try again"),
        (503, "backendError", errors.TransientStoreError, "Try again"),
        (400, "userProjectMissing", errors.StoreError, "user_project"),
        (400, "invalid", errors.StoreError, "refuses"),
        # reasons that no table can know, and none at all
        (418, "neverHeardOf", errors.StoreError, "refuses"),
        (400, "", errors.TransientStoreError, "not GCS's: status 400"),
        (404, "", errors.TransientStoreError, "not GCS's: status 404"),
        (412, "", errors.TransientStoreError, "not GCS's: status 412"),
        (403, "neverHeardOf", errors.AccessDeniedError, "storage.objects.get"),
        (429, "", errors.ThrottledError, "fewer requests"),
        (501, "", errors.UnsupportedOperationError, "does not offer"),
        (502, "neverHeardOf", errors.TransientStoreError, "Try again"),
        (504, "", errors.TransientStoreError, "Try again"),
        (307, "", errors.StoreError, "elsewhere"),
    ],
)
def test_answers_follow_what_a_handler_would_do(
    status: int, reason: str, expected: type[errors.StoreError], words: str
) -> None:
    """The commit hangs on telling "exists" from "denied" from "try again"."""
    error = explained(status, reason) if reason else answered(status)
    translated = translate(error, request_for("objects.get"))
    assert type(translated) is expected
    assert words in str(translated)


@pytest.mark.parametrize(
    ("api", "expected", "words"),
    [
        ("objects.list", errors.BucketNotFoundError, "'bucket' does not exist at http://127.0.0.1:9"),
        ("objects.compose", errors.ObjectNotFoundError, "part of the upload is gone"),
        ("objects.insert", errors.StoreError, "kms_key_name"),
        ("objects.get", errors.ObjectNotFoundError, "No object exists"),
    ],
)
def test_what_is_not_found_depends_on_what_was_asked_for(
    api: str, expected: type[errors.StoreError], words: str
) -> None:
    """ "Nothing lies at this key" in answer to a listing would read as "no checkpoints"."""
    translated = translate(explained(404, "notFound"), request_for(api))
    assert type(translated) is expected
    assert words in str(translated)


def test_a_listing_that_is_told_of_a_range_is_made_again() -> None:
    """If this fails, an answer that a proxy gives to the wrong request ends a look for checkpoints."""
    assert type(translate(explained(416, ""), request_for("objects.list"))) is errors.TransientStoreError


@pytest.mark.parametrize(
    "body",
    ["", "<html>Bad gateway</html>", "[]", "{}", '{"error": "invalid_grant"}', '{"error": {"errors": [7]}}', "null"],
)
def test_answers_that_are_not_gcss_are_errors_all_the_same(body: str) -> None:
    """A proxy's page would break the translation, and an exception of ours would be taken for a bug."""
    assert type(translate(answered(502, body), request_for())) is errors.TransientStoreError


def test_what_the_server_said_is_kept_in_bounds() -> None:
    """A policy's explanation would be lost, or a page of HTML would drown the message."""
    words = "trainer@p does not have storage.objects.create access"
    assert words in str(translate(explained(403, "forbidden", words), request_for()))
    assert len(str(translate(explained(403, "forbidden", "<html>" * 10_000), request_for()))) < 1000


def test_secrets_are_not_repeated_even_if_the_server_repeats_them() -> None:
    """A server that echoes a request in its error would put the access token into the training log."""
    error = explained(401, "authError", "you sent Bearer ya29.TOKEN")
    assert "ya29.TOKEN" not in str(translate(error, request_for(secrets=("ya29.TOKEN",))))


def test_what_a_refused_renewal_says_is_kept_without_its_answer() -> None:
    """The first line says why; the rest is an answer's body, with whatever the service put there."""
    error = google.auth.exceptions.RefreshError("invalid_grant: Token has been revoked.", '{"secret": "HUSH"}')
    text = str(translate(error, request_for()))
    assert "Token has been revoked" in text
    assert "HUSH" not in text


def test_a_renewal_that_may_succeed_later_is_tried_again() -> None:
    """A hiccup of the service that gives tokens would end a save of hours."""
    error = google.auth.exceptions.RefreshError("internal_failure", retryable=True)
    assert type(translate(error, request_for())) is errors.TransientStoreError


def test_permissions_name_the_rights_of_gcs() -> None:
    """An operator would have to guess which right the policy lacks."""
    for api, permission in PERMISSIONS.items():
        assert permission.startswith("storage.objects.")
        assert permission in str(translate(explained(403, "forbidden"), request_for(api)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError("timed out"), errors.StoreTimeoutError),
        (urllib3.exceptions.ReadTimeoutError(None, "/", "Read timed out."), errors.StoreTimeoutError),  # type: ignore[arg-type]
        (ConnectionResetError(104, "reset"), errors.TransientStoreError),
        (http.client.IncompleteRead(b"", 3), errors.TransientStoreError),
        (urllib3.exceptions.ProtocolError("broken"), errors.TransientStoreError),
        (ssl.SSLError(1, "bad record mac"), errors.TransientStoreError),
        (socket.gaierror(-2, "unknown"), errors.TransientStoreError),
    ],
)
def test_errors_below_the_libraries_are_translated_too(error: Exception, expected: type[errors.StoreError]) -> None:
    """Bodies are read on the HTTP connection itself, so that its errors reach us as they are."""
    assert type(translate(error, request_for())) is expected


def test_a_refused_certificate_is_not_tried_again() -> None:
    """Retrying would hide for a minute that the certificate is wrong."""
    inner = ssl.SSLCertVerificationError(1, "certificate verify failed")
    translated = translate(requests.exceptions.SSLError(inner), request_for())
    assert type(translated) is errors.StoreError
    assert "REQUESTS_CA_BUNDLE" in str(translated)


def test_a_body_that_cannot_be_sent_in_time_is_a_timeout() -> None:
    """requests calls a stalled upload a failed connection, which would send people after the wrong cause."""
    protocol = urllib3.exceptions.ProtocolError("Connection aborted.", TimeoutError("timed out"))
    error = requests.exceptions.ConnectionError(protocol)
    assert type(translate(error, request_for())) is errors.StoreTimeoutError


def test_the_cause_of_a_failed_connection_is_named() -> None:
    """ "Connection refused" and "unknown host" need different remedies."""
    refused = requests.exceptions.ConnectionError(ConnectionRefusedError(111, "no"))
    assert "Connection refused" in str(translate(refused, request_for()))
    unknown = requests.exceptions.ConnectionError(socket.gaierror(-2, "no"))
    assert "resolved" in str(translate(unknown, request_for()))


def test_a_new_exception_is_taken_for_its_nearest_base() -> None:
    """An exception that only a newer library has would otherwise escape untranslated."""

    class NewTimeout(requests.exceptions.ReadTimeout):
        """What a newer requests might add."""

    assert type(translate(NewTimeout("x"), request_for())) is errors.StoreTimeoutError


@pytest.mark.parametrize("error", [TypeError("a bug"), KeyError("a bug"), ValueError("a bug"), MemoryError()])
def test_bugs_stay_bugs(error: Exception) -> None:
    """A programming error dressed up as a store's would be retried and misread."""
    assert translate(error, request_for()) is None
