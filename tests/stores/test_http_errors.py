"""Every error that an SDK or its network can raise becomes one of cloudckpt's, with the key and the next step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import pickle
import resource
import socket
import ssl
import string
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.exceptions
import botocore.parsers
import google.api_core.exceptions
import google.auth.exceptions
import pytest
import requests
import requests.exceptions
import urllib3.exceptions

from cloudckpt import errors
from cloudckpt.stores.gcs import errors as gcs
from cloudckpt.stores.gcs.session import refuse_errors
from cloudckpt.stores.http_errors import FailedRequest
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3 import errors as s3
from cloudckpt.stores.s3.session import APIS, S3Session

Translate = Callable[[Exception, FailedRequest], errors.StoreError | None]
ErrorType = type[errors.StoreError]


def classes_of(module: Any) -> dict[str, type[Exception]]:
    found = inspect.getmembers(module, inspect.isclass)
    return {name: cls for name, cls in found if cls.__module__ == module.__name__ and issubclass(cls, Exception)}


BOTO = classes_of(botocore.exceptions)
AUTH, REQUESTS = classes_of(google.auth.exceptions), classes_of(requests.exceptions)
# Faults of the configuration, and of requests that the store does not make. A new name belongs here or into a table.
DEFAULTS = """
AliasConflictParameterError ApiVersionNotFoundError AwsChunkedWrapperError BaseEndpointResolverError BotoCoreError
ClientError ConfigNotFound ConfigParseError DataNotFoundError EndpointProviderError EndpointResolutionError
EndpointVariantError EventStreamError ImminentRemovalWarning InfiniteLoopConfigError InvalidChecksumConfigError
InvalidConfigError InvalidDefaultsMode InvalidEndpointConfigurationError InvalidEndpointDiscoveryConfigurationError
InvalidExpressionError InvalidIMDSEndpointError InvalidIMDSEndpointModeError InvalidMaxRetryAttemptsError
InvalidProxiesConfigError InvalidRetryConfigurationError InvalidRetryModeError InvalidS3AddressingStyleError
InvalidS3UsEast1RegionalEndpointConfigError InvalidSTSRegionalEndpointsConfigError MD5UnavailableError
MissingDependencyException MissingParametersError MissingServiceIdError OperationNotPageableError PaginationError
RangeError StubAssertionError StubResponseError UnStubbedResponseError UndefinedModelAttributeError
UnknownClientMethodError UnknownCredentialError UnknownEndpointResolutionBuiltInName UnknownKeyError
UnknownParameterError UnknownServiceError UnknownServiceStyle UnknownSignatureVersionError UnknownTokenProviderError
UnseekableStreamError UnsupportedOutpostResourceError UnsupportedS3AccesspointConfigurationError
UnsupportedS3ConfigurationError UnsupportedS3ControlArnError UnsupportedS3ControlConfigurationError
UnsupportedServiceProtocolsError UnsupportedSignatureVersionError UnsupportedTLSVersionWarning ValidationError
WaiterConfigError WaiterError ClientCertError InvalidOperation InvalidResource InvalidType InvalidValue
MalformedError MutualTLSChannelError OAuthError OSError ReauthFailError ReauthSamlChallengeFailError RefreshError
UserAccessTokenError FileModeWarning InvalidHeader InvalidSchema InvalidURL JSONDecodeError MissingSchema
ReadTimeout RequestException RequestsDependencyWarning RequestsWarning StreamConsumedError URLRequired
UnrewindableBodyError
"""


def s3_request(api: str = "PutObject", operation: str = "put", secrets: tuple[str, ...] = ()) -> FailedRequest:
    return FailedRequest(
        operation=operation,
        api=api,
        url="scheme://bucket/run/manifest.json",
        bucket="bucket",
        endpoint="http://127.0.0.1:9",
        permission=APIS[api][1] if api in APIS else gcs.PERMISSIONS[api],
        secrets=secrets,
    )


def gcs_request(api: str = "objects.insert") -> FailedRequest:
    return s3_request(api)


SERVICES = [pytest.param(s3.translate, s3_request(), id="s3"), pytest.param(gcs.translate, gcs_request(), id="gcs")]


def boto_error(name: str, **fields: Any) -> Exception:
    cls = BOTO[name]
    if issubclass(cls, botocore.exceptions.ClientError):
        return cls({"Error": {}}, "PutObject")
    named = {name: "x" for _, name, _, _ in string.Formatter().parse(getattr(cls, "fmt", "")) if name}
    return cls(**{**named, **fields})


def google_error(cls: type[Exception]) -> Exception:
    more: dict[type[Exception], tuple[Any, ...]] = {
        google.api_core.exceptions.RetryError: (ValueError("x"),),
        requests.exceptions.JSONDecodeError: ("doc", 0),
    }
    return cls("x", *more.get(cls, ()))


def s3_answer(code: str, status: int, message: str = "") -> Exception:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(response, "PutObject")  # type: ignore[arg-type]


def gcs_answer(status: int, reason: str, message: str = "Because.", *, body: str | None = None) -> Exception:
    if body is None and reason:
        body = json.dumps({"error": {"message": message, "errors": [{"reason": reason}]}})
    response = requests.Response()
    response.status_code, response.raw = status, io.BytesIO((body or "").encode())
    with pytest.raises(google.api_core.exceptions.GoogleAPICallError) as caught:
        refuse_errors(response)
    return caught.value


def test_a_bucket_name_with_capitals_is_told_to_be_none() -> None:
    """If this fails, a user is told to create a bucket that no service creates."""
    missing = s3_answer("NoSuchBucket", 404)
    for bucket, is_told in (("My-Bucket", True), ("my-bucket", False)):
        error = s3.translate(missing, dataclasses.replace(s3_request(), bucket=bucket))
        assert ("no capital letters" in str(error), "Create it" in str(error)) == (is_told, True)


def test_every_exception_of_the_sdks_is_known() -> None:
    """If this fails, a newer SDK raises an error that nobody has decided about: is it worth another try?"""
    known = {*s3.EXCEPTIONS, *gcs.EXCEPTIONS, *DEFAULTS.split()}
    assert {*BOTO, *AUTH, *REQUESTS} - known == set()


def test_each_exception_says_what_failed_and_travels() -> None:
    """If this fails, an SDK's exception gets through, or one that cannot be pickled leaves other ranks hanging."""
    google_classes = [*AUTH.values(), *REQUESTS.values(), *classes_of(google.api_core.exceptions).values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            s3.translate(boto_error(name), s3_request())
            for name in BOTO
            if hasattr(BOTO[name], "fmt") and name != "WaiterError"
        ]
        found += [
            gcs.translate(google_error(cls), gcs_request()) for cls in google_classes if not issubclass(cls, Warning)
        ]
    for translated in found:
        if translated is not None:
            assert (translated.key, translated.operation) == ("scheme://bucket/run/manifest.json", "put")
            assert "failed: " in str(translated)
            copied = pickle.loads(pickle.dumps(translated))
            assert (type(copied), str(copied)) == (type(translated), str(translated))
    assert [cls for cls in found if cls is None] in ([], [None])  # an exception of asyncio's clients, which is no error


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        ("NoCredentialsError", errors.CredentialsError, "AWS_ACCESS_KEY_ID"),
        ("EndpointConnectionError", errors.TransientStoreError, "http://127.0.0.1:9"),
        ("ReadTimeoutError", errors.StoreTimeoutError, "http://127.0.0.1:9"),
        ("ProxyConnectionError", errors.TransientStoreError, "NO_PROXY"),
        ("FlexibleChecksumError", errors.ChecksumRefusedError, "damaged"),
        ("NoRegionError", s3.WrongRegionError, "region"),
        (botocore.parsers.ResponseParserError("no XML"), errors.TransientStoreError, "load balancer"),
        (AUTH["DefaultCredentialsError"]("x"), errors.CredentialsError, "gcloud auth application-default login"),
        (AUTH["RefreshError"]("internal_failure", retryable=True), errors.TransientStoreError, "Try again"),
        (REQUESTS["ConnectionError"]("x"), errors.TransientStoreError, "http://127.0.0.1:9"),
        (REQUESTS["ReadTimeout"]("x"), errors.StoreTimeoutError, "timeout_s"),
        (REQUESTS["ProxyError"]("x"), errors.TransientStoreError, "NO_PROXY"),
    ],
    ids=str,
)
def test_exceptions_follow_what_a_handler_would_do(error: str | Exception, expected: ErrorType, words: str) -> None:
    """A missing credential would be retried for minutes, or a passing failure would end a save."""
    if isinstance(error, str):
        error = boto_error(error)
    is_boto = any(cls.__module__.startswith("botocore") for cls in type(error).__mro__)
    translate, request = (s3.translate, s3_request()) if is_boto else (gcs.translate, gcs_request())
    translated = translate(error, request)
    assert type(translated) is expected
    assert words in str(translated)


@pytest.mark.parametrize(
    ("code", "status", "expected", "words"),
    [
        ("NoSuchKey", 404, errors.ObjectNotFoundError, "No object exists"),
        ("NoSuchBucket", 404, errors.BucketNotFoundError, "http://127.0.0.1:9"),
        ("PreconditionFailed", 412, errors.ObjectExistsError, "left as it is"),
        ("ConditionalRequestConflict", 409, errors.TransientStoreError, "Try again"),
        ("AccessDenied", 403, errors.AccessDeniedError, "s3:PutObject"),
        ("SignatureDoesNotMatch", 403, errors.CredentialsError, "credentials"),
        ("ExpiredToken", 400, errors.CredentialsError, "expired"),
        ("SlowDown", 503, errors.ThrottledError, "fewer requests"),
        ("BadDigest", 400, errors.ChecksumRefusedError, "damaged"),
        ("PermanentRedirect", 301, s3.WrongRegionError, "region"),
        ("InvalidRange", 416, errors.ShortObjectError, "ends before"),
        ("NotImplemented", 501, errors.UnsupportedOperationError, "does not offer"),
        ("KMS.DisabledException", 400, errors.AccessDeniedError, "kms:GenerateDataKey"),
        ("InvalidObjectState", 403, errors.StoreError, "archived"),
        # codes that no table can know, and none at all
        ("NeverHeardOf", 503, errors.ThrottledError, "fewer requests"),
        ("404", 404, errors.ObjectNotFoundError, "status 404"),
        ("403", 403, errors.AccessDeniedError, "status 403"),
    ],
)
def test_answers_of_s3_follow_what_a_handler_would_do(code: str, status: int, expected: ErrorType, words: str) -> None:
    """The commit hangs on telling "exists" from "denied" from "try again"."""
    translated = s3.translate(s3_answer(code, status), s3_request())
    assert type(translated) is expected
    assert words in str(translated)
    if code in s3.CODES:
        assert type(s3.translate_code(code, "no", s3_request("DeleteObjects"))) is expected


@pytest.mark.parametrize(
    ("status", "reason", "expected", "words"),
    [
        (404, "notFound", errors.ObjectNotFoundError, "No object exists"),
        (412, "conditionNotMet", errors.ObjectExistsError, "left as it is"),
        (401, "authError", errors.CredentialsError, "application-default login"),
        (403, "forbidden", errors.AccessDeniedError, "storage.objects.get"),
        (403, "retentionPolicyNotMet", errors.AccessDeniedError, "retention policy"),
        (403, "rateLimitExceeded", errors.ThrottledError, "fewer requests"),
        (409, "conflict", errors.TransientStoreError, "Try again"),
        (503, "backendError", errors.TransientStoreError, "Try again"),
        # reasons that no table can know, and none at all
        (418, "neverHeardOf", errors.StoreError, "refuses"),
        (404, "", errors.TransientStoreError, "not GCS's: status 404"),
        (412, "", errors.TransientStoreError, "not GCS's: status 412"),
        (429, "", errors.ThrottledError, "fewer requests"),
        (501, "", errors.UnsupportedOperationError, "does not offer"),
    ],
)
def test_answers_of_gcs_follow_what_a_handler_would_do(
    status: int, reason: str, expected: ErrorType, words: str
) -> None:
    """The commit hangs on telling "exists" from "denied" from "try again"."""
    translated = gcs.translate(gcs_answer(status, reason), gcs_request("objects.get"))
    assert type(translated) is expected
    assert words in str(translated)


@pytest.mark.parametrize(
    ("api", "status", "expected", "words"),
    [
        ("objects.list", 404, errors.BucketNotFoundError, "'bucket' does not exist at http://127.0.0.1:9"),
        ("objects.compose", 404, errors.ObjectNotFoundError, "part of the upload is gone"),
        ("objects.insert", 404, errors.StoreError, "kms_key_name"),
        ("objects.list", 416, errors.TransientStoreError, "load balancer"),
        ("ListObjectsV2", 404, errors.TransientStoreError, "load balancer"),
    ],
)
def test_meaning_of_404_depends_on_the_request(api: str, status: int, expected: ErrorType, words: str) -> None:
    """ "Nothing lies at this key" in answer to a listing would read as "no checkpoints" (G10)."""
    if api in APIS:
        translated = s3.translate(s3_answer("", status), s3_request(api))
    else:
        translated = gcs.translate(gcs_answer(status, "notFound" if status == 404 else "x"), gcs_request(api))
    assert type(translated) is expected
    assert words in str(translated)


@pytest.mark.parametrize(
    ("code", "status", "operation", "is_known"),
    [
        ("QuotaExceeded", 403, "put", True),
        ("AccessDenied", 403, "complete_multipart", True),
        ("AccessDenied", 403, "delete", False),  # keys before the one that was refused may be gone
        ("OperationAborted", 409, "put", False),
        ("NeverHeardOf", 400, "put", False),
    ],
)
def test_a_refusal_in_the_stores_own_words_had_no_effect(
    code: str, status: int, operation: str, *, is_known: bool
) -> None:
    """A bucket whose quota is used up at the commit would leave it unknown; or an answer that says nothing of what
    became of the request would make data be removed under a commit.
    """
    translated = s3.translate(s3_answer(code, status), s3_request(operation=operation))
    assert translated is not None
    assert translated.had_no_effect is is_known


def test_messages_quote_an_answer_in_bounds_and_without_secrets() -> None:
    """A policy's explanation would be lost, a page of HTML drown the message, or an echoed secret be in the log."""
    request = dataclasses.replace(s3_request(), secrets=("s3cr3t/key", "a-surrogate\udcff"))
    for words in ("no policy allows it", "<html>" * 10_000, "you signed with s3cr3t/key"):
        message = str(s3.translate(s3_answer("AccessDenied", 403, words), request))
        assert len(message) < 1000
        assert "s3cr3t/key" not in message
        assert "policy allows" in message or "policy" not in words
        assert "s3cr3t/key" not in str(gcs.translate(gcs_answer(401, "authError", words), request))


def test_texts_of_exceptions_show_no_secret() -> None:
    """A session token with a line break, or the body of a refused renewal, would be printed by the SDK's exception."""
    translated = s3.translate(
        boto_error("HTTPClientError", error=ValueError(r"Invalid header b'TOKEN\n'")), s3_request()
    )
    assert "TOKEN" not in str(translated)
    assert not isinstance(translated, errors.TransientStoreError)
    refused = AUTH["RefreshError"]("invalid_grant: Token has been revoked.", '{"secret": "HUSH"}')
    assert "revoked" in str(gcs.translate(refused, gcs_request()))
    assert "HUSH" not in str(gcs.translate(refused, gcs_request()))
    assert "HUSH" not in str(gcs.translate(REQUESTS["InvalidHeader"]("Authorization: HUSH"), gcs_request()))


def test_a_denial_names_the_permission_of_each_request() -> None:
    """An operator would have to guess which right the policy lacks."""
    for api, (_, permission) in APIS.items():
        assert permission in str(s3.translate(s3_answer("AccessDenied", 403), s3_request(api)))
    for api, permission in gcs.PERMISSIONS.items():
        assert permission in str(gcs.translate(gcs_answer(403, "forbidden"), gcs_request(api)))
    # Without this right S3 answers 403 for missing keys.
    assert "s3:ListBucket" in str(s3.translate(s3_answer("AccessDenied", 403), s3_request("GetObject")))


@pytest.mark.parametrize(
    ("translate", "request_", "wrap"),
    [
        (
            s3.translate,
            s3_request(),
            lambda inner: boto_error("EndpointConnectionError", endpoint_url="x", error=inner),
        ),
        (gcs.translate, gcs_request(), REQUESTS["ConnectionError"]),
    ],
    ids=["s3", "gcs"],
)
def test_the_cause_of_a_failed_connection_is_named(
    translate: Translate, request_: FailedRequest, wrap: Callable[[Exception], Exception]
) -> None:
    """ "Connection refused", "unknown host", a wrong certificate and a stalled upload need different remedies."""
    stalled = urllib3.exceptions.ProtocolError("Connection aborted.", TimeoutError("timed out"))
    cases: list[tuple[Exception, ErrorType, str]] = [
        (ConnectionRefusedError(111, "no"), errors.TransientStoreError, "Connection refused"),
        (socket.gaierror(-2, "no"), errors.TransientStoreError, "resolved"),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), errors.StoreError, "certificate"),
        (stalled, errors.StoreTimeoutError, "in time"),
        (OSError(24, "no"), errors.TransientStoreError, "Too many open files. This process may open no more files"),
        (OSError(23, "no"), errors.TransientStoreError, "ulimit -n"),
    ]
    for inner, expected, words in cases:
        translated = translate(wrap(inner), request_)
        assert type(translated) is expected
        assert words in str(translated)
        assert translated.is_unsent is ("ulimit" in str(translated))


@contextlib.contextmanager
def no_file_to_open() -> Iterator[None]:
    """Let this process open nothing more meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_host_that_cannot_be_looked_up_for_want_of_a_file_is_no_wrong_name() -> None:
    """If this fails, a job at its limit of open files is told to correct the endpoint."""
    error = boto_error("EndpointConnectionError", endpoint_url="x", error=socket.gaierror(-3, "no"))
    assert "ulimit" not in str(s3.translate(error, s3_request()))
    with no_file_to_open():
        translated = s3.translate(error, s3_request())
    assert "ulimit -n" in str(translated)


def test_credentials_that_cannot_be_read_for_want_of_a_file_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a job at its limit of open files is told to set keys, which are in ~/.aws."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id=A\naws_secret_access_key=s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"endpoint_url": "http://127.0.0.1:1", "region": "eu-west-1"}
    store = S3Store("bucket", "", storage_options=options, timeout_s=1, connections=1)
    store.session.client()  # boto3 reads files of its own, whose absence it reports
    S3Session.cache.clear()
    store = S3Store("bucket", "", storage_options=options, timeout_s=1, connections=1)
    with no_file_to_open(), pytest.raises(errors.TransientStoreError, match="ulimit -n") as caught:
        store.read("k", max_bytes=1)
    assert caught.value.is_unsent
    with pytest.raises(errors.TransientStoreError, match="Connection refused"):
        store.read("k", max_bytes=1)
