"""Every error that botocore can raise becomes one of cloudckpt's, with the key and the next step."""

from __future__ import annotations

import dataclasses
import http.client
import inspect
import pickle
import socket
import ssl
import string
import warnings

import botocore.exceptions
import botocore.parsers
import pytest
import urllib3.exceptions
from botocore.exceptions import ClientError

from cloudckpt import errors
from cloudckpt.stores.http_errors import FailedRequest
from cloudckpt.stores.s3 import client as clients
from cloudckpt.stores.s3 import errors as table
from cloudckpt.stores.s3.errors import translate, translate_code

BOTOCORE = {
    name: cls
    for name, cls in inspect.getmembers(botocore.exceptions, inspect.isclass)
    if cls.__module__ == "botocore.exceptions" and issubclass(cls, Exception)
}


def request_for(api: str = "PutObject", secrets: tuple[str, ...] = ()) -> FailedRequest:
    return FailedRequest(
        operation="put",
        api=api,
        url="s3://bucket/run/manifest.json",
        bucket="bucket",
        endpoint="http://127.0.0.1:9",
        permission=clients.APIS[api][1],
        secrets=secrets,
    )


def answered(code: str, status: int, message: str = "") -> ClientError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


def instance_of(cls: type[Exception]) -> Exception:
    if issubclass(cls, ClientError):
        return cls({"Error": {}}, "PutObject")
    fields = {name: "x" for _, name, _, _ in string.Formatter().parse(getattr(cls, "fmt", "")) if name}
    return cls(**fields)


def test_every_exception_of_botocore_is_in_the_table_or_out_of_reach() -> None:
    """A newer botocore could raise what the table has never heard of, and nobody would notice."""
    known = set(table.EXCEPTIONS) | set(table.UNREACHABLE)
    assert set(BOTOCORE) - known == set(), "add them to EXCEPTIONS or, with the reason, to UNREACHABLE"


@pytest.mark.skipif(
    tuple(map(int, botocore.__version__.split(".")[:2])) < (1, 44),
    reason="the table has names that are newer than this",
)
def test_the_table_names_nothing_that_botocore_lacks() -> None:
    """A misspelt name in the table would never match."""
    names = set(BOTOCORE) | {"ResponseParserError"}
    assert set(table.EXCEPTIONS) - names == set()
    assert set(table.UNREACHABLE) - names == set()
    assert set(table.EXCEPTIONS) & set(table.UNREACHABLE) == set()


@pytest.mark.parametrize("name", sorted(set(BOTOCORE) - set(table.UNREACHABLE)))
def test_each_exception_of_botocore_says_what_failed_and_travels(name: str) -> None:
    """An exception of botocore's that got through, or one that cannot be pickled, leaves other ranks hanging."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        translated = translate(instance_of(BOTOCORE[name]), request_for())
    assert isinstance(translated, errors.StoreError)
    assert translated.key == "s3://bucket/run/manifest.json"
    assert translated.operation == "put"
    assert str(translated).startswith("s3://bucket/run/manifest.json: PutObject failed: ")
    copied = pickle.loads(pickle.dumps(translated))
    assert type(copied) is type(translated)
    assert str(copied) == str(translated)


@pytest.mark.parametrize(
    ("name", "expected", "words"),
    [
        ("NoCredentialsError", errors.CredentialsError, "AWS_ACCESS_KEY_ID"),
        ("PartialCredentialsError", errors.CredentialsError, "credentials"),
        ("CredentialRetrievalError", errors.CredentialsError, "credentials"),
        ("ProfileNotFound", errors.CredentialsError, "AWS_PROFILE"),
        ("TokenRetrievalError", errors.CredentialsError, "aws sso login"),
        ("UnauthorizedSSOTokenError", errors.CredentialsError, "aws sso login"),
        ("MetadataRetrievalError", errors.CredentialsError, "instance role"),
        ("EndpointConnectionError", errors.TransientStoreError, "http://127.0.0.1:9"),
        ("ConnectTimeoutError", errors.StoreTimeoutError, "http://127.0.0.1:9"),
        ("ReadTimeoutError", errors.StoreTimeoutError, "http://127.0.0.1:9"),
        ("ConnectionClosedError", errors.TransientStoreError, "http://127.0.0.1:9"),
        ("ProxyConnectionError", errors.TransientStoreError, "NO_PROXY"),
        ("SSLError", errors.TransientStoreError, "TLS"),
        ("IncompleteReadError", errors.TransientStoreError, "Try again"),
        ("FlexibleChecksumError", errors.ChecksumRefusedError, "damaged"),
        ("NoRegionError", errors.StoreError, "region"),
        ("InvalidDNSNameError", errors.BucketNotFoundError, "'bucket'"),
    ],
)
def test_exceptions_follow_what_a_handler_would_do(name: str, expected: type[errors.StoreError], words: str) -> None:
    """A missing credential would be retried for minutes, or a passing failure would end a save."""
    translated = translate(instance_of(BOTOCORE[name]), request_for())
    assert type(translated) is expected
    assert words in str(translated)


@pytest.mark.parametrize(
    ("code", "status", "expected", "words"),
    [
        ("NoSuchKey", 404, errors.ObjectNotFoundError, "No object exists"),
        ("NoSuchBucket", 404, errors.BucketNotFoundError, "http://127.0.0.1:9"),
        ("NoSuchUpload", 404, errors.ObjectNotFoundError, "was completed or aborted"),
        ("PreconditionFailed", 412, errors.ObjectExistsError, "left as it is"),
        ("ConditionalRequestConflict", 409, errors.TransientStoreError, "Try again"),
        ("AccessDenied", 403, errors.AccessDeniedError, "s3:PutObject"),
        ("InvalidAccessKeyId", 403, errors.CredentialsError, "credentials"),
        ("SignatureDoesNotMatch", 403, errors.CredentialsError, "credentials"),
        ("ExpiredToken", 400, errors.CredentialsError, "expired"),
        ("RequestTimeTooSkewed", 403, errors.CredentialsError, "clock"),
        ("SlowDown", 503, errors.ThrottledError, "fewer requests"),
        ("TooManyRequests", 429, errors.ThrottledError, "fewer requests"),
        ("InternalError", 500, errors.TransientStoreError, "Try again"),
        ("RequestTimeout", 400, errors.TransientStoreError, "Try again"),
        ("BadDigest", 400, errors.ChecksumRefusedError, "damaged"),
        ("XAmzContentChecksumMismatch", 400, errors.ChecksumRefusedError, "damaged"),
        ("InvalidDigest", 400, errors.ChecksumRefusedError, "damaged"),
        ("PermanentRedirect", 301, errors.StoreError, "region"),
        ("AuthorizationHeaderMalformed", 400, errors.StoreError, "region"),
        ("InvalidRange", 416, errors.ShortObjectError, "ends before"),
        ("NotImplemented", 501, errors.UnsupportedOperationError, "does not offer"),
        ("KMS.DisabledException", 400, errors.AccessDeniedError, "kms:GenerateDataKey"),
        ("InvalidObjectState", 403, errors.StoreError, "archived"),
        ("QuotaExceeded", 403, errors.StoreError, "full"),
        # codes that no table can know, and none at all
        ("NeverHeardOf", 503, errors.ThrottledError, "fewer requests"),
        ("NeverHeardOf", 502, errors.TransientStoreError, "Try again"),
        ("NeverHeardOf", 504, errors.TransientStoreError, "Try again"),
        ("NeverHeardOf", 400, errors.StoreError, "refuses"),
        ("NeverHeardOf", 403, errors.AccessDeniedError, "s3:PutObject"),
        ("404", 404, errors.ObjectNotFoundError, "status 404"),
        ("403", 403, errors.AccessDeniedError, "status 403"),
        ("", 500, errors.TransientStoreError, "status 500"),
    ],
)
def test_answers_follow_what_a_handler_would_do(
    code: str, status: int, expected: type[errors.StoreError], words: str
) -> None:
    """The commit hangs on telling "exists" from "denied" from "try again"."""
    translated = translate(answered(code, status), request_for())
    assert type(translated) is expected
    assert words in str(translated)


@pytest.mark.parametrize(("code", "status"), [("NoSuchKey", 404), ("", 404), ("InvalidRange", 416)])
@pytest.mark.parametrize("api", ["ListObjectsV2", "ListMultipartUploads"])
def test_a_listing_that_is_told_of_one_object_is_made_again(api: str, code: str, status: int) -> None:
    """If this fails, "nothing lies at this key" in answer to a listing reads as "no checkpoints"."""
    translated = translate(answered(code, status), request_for(api))
    assert type(translated) is errors.TransientStoreError


@pytest.mark.parametrize(
    ("code", "status", "is_known"),
    [
        ("QuotaExceeded", 403, True),
        ("InvalidArgument", 400, True),
        ("RequestTimeout", 400, False),
        ("OperationAborted", 409, False),
        ("NeverHeardOf", 400, False),
        ("404", 404, False),
        ("InternalError", 500, False),
    ],
)
def test_what_the_store_says_of_the_request_itself_had_no_effect(code: str, status: int, *, is_known: bool) -> None:
    """A bucket whose quota is used up at the commit would leave it unknown; or an answer that says nothing of what
    became of the request would make data be removed under a commit.
    """
    translated = translate(answered(code, status), request_for())
    assert translated is not None
    assert translated.had_no_effect is is_known


@pytest.mark.parametrize(
    ("operation", "is_known"), [("put", True), ("complete_multipart", True), ("delete", False), ("copy_from", False)]
)
def test_a_refusal_tells_nothing_of_the_requests_before_it(operation: str, *, is_known: bool) -> None:
    """If this fails, a deletion that was refused its second key says that it changed nothing."""
    request = dataclasses.replace(request_for(), operation=operation)
    translated = translate(answered("AccessDenied", 403), request)
    assert translated is not None
    assert translated.had_no_effect is is_known


def test_what_the_server_said_is_kept_in_bounds() -> None:
    """A policy's explanation would be lost, or a page of HTML would drown the message."""
    explained = translate(answered("AccessDenied", 403, "no identity-based policy allows it"), request_for())
    assert "no identity-based policy allows it" in str(explained)
    assert len(str(translate(answered("AccessDenied", 403, "<html>" * 10_000), request_for()))) < 1000


def test_secrets_are_not_repeated_even_if_the_server_repeats_them() -> None:
    """A server that echoes a request in its error would put the secret key into the training log."""
    error = answered("SignatureDoesNotMatch", 403, "you signed with s3cr3t/key")
    assert "s3cr3t/key" not in str(translate(error, request_for(secrets=("s3cr3t/key",))))


def test_a_header_that_cannot_be_sent_does_not_show_itself() -> None:
    """A session token with a line break in the environment would be printed by the HTTP library's ValueError."""
    error = BOTOCORE["HTTPClientError"](error=ValueError("Invalid header value b'TOKEN\\n'"))
    translated = translate(error, request_for())
    assert "TOKEN" not in str(translated)
    assert not isinstance(translated, errors.TransientStoreError)


@pytest.mark.parametrize("api", sorted(clients.APIS))
def test_a_denial_names_the_permission_of_each_request(api: str) -> None:
    """An operator would have to guess which right the policy lacks."""
    translated = translate(answered("AccessDenied", 403), request_for(api))
    assert clients.APIS[api][1] in str(translated)


def test_a_denied_read_says_that_the_key_may_be_missing() -> None:
    """Without s3:ListBucket S3 answers 403 for missing keys, which sends people after the wrong permission."""
    assert "s3:ListBucket" in str(translate(answered("AccessDenied", 403), request_for("GetObject")))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError("timed out"), errors.StoreTimeoutError),
        (urllib3.exceptions.ReadTimeoutError(None, "/", "Read timed out."), errors.StoreTimeoutError),  # type: ignore[arg-type]
        (ConnectionResetError(104, "reset"), errors.TransientStoreError),
        (BrokenPipeError(32, "pipe"), errors.TransientStoreError),
        (http.client.IncompleteRead(b"", 3), errors.TransientStoreError),
        (http.client.RemoteDisconnected("gone"), errors.TransientStoreError),
        (urllib3.exceptions.ProtocolError("broken"), errors.TransientStoreError),
        (ssl.SSLError(1, "bad record mac"), errors.TransientStoreError),
        (socket.gaierror(-2, "unknown"), errors.TransientStoreError),
        (botocore.parsers.ResponseParserError("no XML"), errors.TransientStoreError),
    ],
)
def test_errors_below_botocore_are_translated_too(error: Exception, expected: type[errors.StoreError]) -> None:
    """Bodies are read on the HTTP connection itself, so that its errors reach us as they are."""
    assert type(translate(error, request_for())) is expected


def test_a_refused_certificate_is_not_tried_again() -> None:
    """Retrying would hide for a minute that the certificate is wrong."""
    inner = ssl.SSLCertVerificationError(1, "certificate verify failed")
    translated = translate(BOTOCORE["SSLError"](endpoint_url="x", error=inner), request_for())
    assert type(translated) is errors.StoreError
    assert "ca_bundle" in str(translated)


def test_a_body_that_cannot_be_sent_in_time_is_a_timeout() -> None:
    """urllib3 calls a stalled upload a closed connection, which would send people after the wrong cause."""
    protocol = urllib3.exceptions.ProtocolError("Connection aborted.", TimeoutError("timed out"))
    error = BOTOCORE["ConnectionClosedError"](endpoint_url="x", error=protocol)
    assert type(translate(error, request_for())) is errors.StoreTimeoutError


def test_the_cause_of_a_failed_connection_is_named() -> None:
    """ "Connection refused" and "unknown host" need different remedies."""
    refused = BOTOCORE["EndpointConnectionError"](endpoint_url="x", error=ConnectionRefusedError(111, "no"))
    assert "Connection refused" in str(translate(refused, request_for()))
    unknown = BOTOCORE["EndpointConnectionError"](endpoint_url="x", error=socket.gaierror(-2, "no"))
    assert "resolved" in str(translate(unknown, request_for()))


def test_a_new_exception_is_taken_for_its_nearest_base() -> None:
    """An exception that only a newer botocore has would otherwise escape untranslated."""

    class NewTimeout(BOTOCORE["ReadTimeoutError"]):  # type: ignore[misc]
        """What a newer botocore might add."""

    assert type(translate(NewTimeout(endpoint_url="x"), request_for())) is errors.StoreTimeoutError


@pytest.mark.parametrize("error", [TypeError("a bug"), KeyError("a bug"), ValueError("a bug"), MemoryError()])
def test_bugs_stay_bugs(error: Exception) -> None:
    """A programming error dressed up as a store's would be retried and misread."""
    assert translate(error, request_for()) is None


def test_errors_of_single_keys_use_the_same_table() -> None:
    """A batch's partial errors would be typed otherwise than those of a single delete."""
    assert isinstance(translate_code("AccessDenied", "no", request_for("DeleteObjects")), errors.AccessDeniedError)
    assert isinstance(translate_code("SlowDown", "no", request_for("DeleteObjects")), errors.ThrottledError)
