"""The table of the errors of boto3 and of S3-compatible stores, and the check that an answer is S3's own.

A test fails if botocore has an exception that is new to it. Codes are those of
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and of the compatible stores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ChecksumRefusedError,
    CredentialsError,
    InvalidOptionError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores import http_errors as shared
from cloudckpt.stores.http_errors import (
    ErrorRule,
    ErrorTable,
    FailedRequest,
    ForeignAnswerError,
    build_error,
    by_name,
    describe_foreign,
    is_xml_error,
    translate_exception,
)


class WrongRegionError(StoreError, InvalidOptionError):
    """The bucket is not in the region, or at the endpoint, of the configuration."""


class OtherRegionError(Exception):
    """A redirection that cannot be followed. The text says which region was named, if one was."""


class SameRegionError(Exception):
    """A redirection to the region that the request was sent to."""


ARCHIVED = ErrorRule(StoreError, "The object is archived. Restore it first (aws s3api restore-object).")
BUCKET_NAME = ErrorRule(BucketNotFoundError, "{bucket!r} cannot be used as a bucket's name. Correct it.")
CERTIFICATE = ErrorRule(
    StoreError,
    "The certificate of {endpoint} was not accepted. Check endpoint_url, or pass ca_bundle.",
)
CLOCK = ErrorRule(
    CredentialsError, "This machine's clock is off, so its signatures are refused, new ones too. Set it (NTP)."
)
CLOCK_OR_EXPIRED = ErrorRule(
    CredentialsError,
    "The credentials from {credentials} have expired, or this machine's clock is off: new requests are refused, too. "
    "`cloudckpt doctor` compares the clock. Set it (NTP), or renew the credentials.",
)
CONFIGURATION = ErrorRule(
    StoreError, "Check the AWS configuration (~/.aws/config, AWS_* variables) and the storage options."
)
CREDENTIALS = ErrorRule(
    CredentialsError,
    "The store does not accept the credentials from {credentials}, and no newer ones were found. Check keys, profile "
    "and region (storage options, AWS_* variables, ~/.aws).",
)
DAMAGED = ErrorRule(
    ChecksumRefusedError,
    "The bytes were damaged on their way, or in memory while they were being sent. Try again.",
)
EXPIRED = ErrorRule(
    CredentialsError,
    "The credentials from {credentials} have expired, and no newer ones were found. Renew them (aws sso login, a new "
    "token).",
)
UPLOAD_GONE = ErrorRule(ObjectNotFoundError, "The multipart upload was completed or aborted. Upload the object anew.")
INVALID = ErrorRule(StoreError, "boto3 refuses the request. Check the bucket's name, the key and the storage options.")
KMS_KEY = ErrorRule(
    AccessDeniedError,
    "The KMS key cannot be used. Check kms_key_id, and grant kms:GenerateDataKey and kms:Decrypt.",
)
NO_CREDENTIALS = ErrorRule(
    CredentialsError,
    "No usable credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or an instance role, "
    "or set the storage option anonymous to true for a public bucket.",
)
NO_PROFILE = ErrorRule(
    CredentialsError,
    "The profile does not exist. Correct the storage option profile, AWS_PROFILE, or ~/.aws/config.",
)
WRONG_PARTS = ErrorRule(StoreError, "The parts do not fit together. Check part_bytes, and upload the object anew.")
REGION = ErrorRule(
    WrongRegionError,
    "The bucket is in another region, or {endpoint} sends requests elsewhere. Set the storage option region, "
    "or AWS_REGION, to the bucket's; check endpoint_url (http or https).",
)
SAME_REGION = ErrorRule(
    WrongRegionError,
    "The region is the bucket's, but {endpoint} sends requests elsewhere. Check endpoint_url (host, http or https).",
)

CODES: Mapping[str, ErrorRule] = by_name(
    [
        (shared.ACCOUNT, "AccountProblem AllAccessDisabled InvalidPayer NotSignedUp"),
        (ARCHIVED, "InvalidObjectState"),
        (shared.BUCKET, "NoSuchBucket"),
        (BUCKET_NAME, "InvalidBucketName"),
        (shared.NOT_SUPPORTED, "MethodNotAllowed NotImplemented"),
        (CLOCK, "RequestTimeTooSkewed"),
        (CLOCK_OR_EXPIRED, "RequestExpired"),
        (CREDENTIALS, "AuthFailure AuthorizationQueryParametersError InvalidAccessKeyId InvalidClientTokenId"),
        (CREDENTIALS, "InvalidSecurity InvalidToken SignatureDoesNotMatch UnrecognizedClientException"),
        (DAMAGED, "BadDigest InvalidChecksum InvalidDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch"),
        (shared.DENIED, "AccessDenied AccessForbidden Forbidden UnauthorizedAccess"),
        (shared.EXISTS, "PreconditionFailed"),
        (EXPIRED, "ExpiredToken ExpiredTokenException TokenRefreshRequired"),
        (shared.FULL, "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded"),
        (UPLOAD_GONE, "NoSuchUpload"),
        (KMS_KEY, "KMS.DisabledException KMS.InvalidKeyUsageException KMS.InvalidStateException"),
        (KMS_KEY, "KMS.KMSInvalidStateException KMS.NotFoundException"),
        (shared.TOO_LARGE, "EntityTooLarge MaxMessageLengthExceeded"),
        (shared.TRY_AGAIN, "ConditionalRequestConflict IncompleteBody InternalError InternalServerError"),
        (shared.TRY_AGAIN, "OperationAborted RequestTimeout RequestTimeoutException TemporaryRedirect"),
        (shared.NO_OBJECT, "NoSuchKey NoSuchVersion"),
        (WRONG_PARTS, "EntityTooSmall InvalidPart InvalidPartOrder"),
        (REGION, "AuthorizationHeaderMalformed IllegalLocationConstraintException IncorrectEndpoint"),
        (REGION, "InvalidLocationConstraint InvalidRegion InvalidRegionName PermanentRedirect Redirect"),
        (shared.BAD_REQUEST, "InvalidArgument InvalidEncryptionAlgorithmError InvalidRequest InvalidStorageClass"),
        (shared.BAD_REQUEST, "InvalidTag KeyTooLongError MalformedXML"),
        (shared.TOO_SHORT, "InvalidRange"),
        (shared.SLOW_DOWN, "BandwidthLimitExceeded RequestLimitExceeded ServiceUnavailable SlowDown SlowDownRead"),
        (shared.SLOW_DOWN, "SlowDownWrite Throttling ThrottlingException TooManyRequests TooManyRequestsException"),
    ]
)

SKEWED = frozenset({"RequestExpired", "RequestTimeTooSkewed"})
"""The codes with which the store refuses the time of a signature. The first can also mean expired credentials."""

EXCEPTIONS: Mapping[str, ErrorRule] = by_name(
    [
        (BUCKET_NAME, "InvalidDNSNameError InvalidHostLabelError UnsupportedS3ArnError"),
        (shared.CLOSED, "ConnectionClosedError HTTPClientError IncompleteReadError ResponseStreamingError"),
        (shared.CONNECT_LATE, "ConnectTimeoutError"),
        (DAMAGED, "ChecksumError FlexibleChecksumError"),
        (EXPIRED, "LoginAuthorizationCodeError LoginError LoginRefreshRequired LoginTokenLoadError"),
        (EXPIRED, "NoAuthTokenError SSOError SSOTokenLoadError TokenRetrievalError UnauthorizedSSOTokenError"),
        (shared.FOREIGN, "ResponseParserError"),
        (INVALID, "ParamValidationError"),
        (NO_CREDENTIALS, "CredentialRetrievalError LoginInsufficientPermissions MetadataRetrievalError"),
        (NO_CREDENTIALS, "NoCredentialsError PartialCredentialsError RefreshWithMFAUnsupportedError"),
        (NO_PROFILE, "ProfileNotFound"),
        (shared.PROXY, "ProxyConnectionError"),
        (shared.READ_LATE, "ReadTimeoutError"),
        (REGION, "InvalidRegionError NoRegionError ServiceNotInRegionError UnknownEndpointError"),
        (REGION, "UnknownFIPSEndpointError UnknownRegionError"),
        (shared.SLOW_DOWN, "CapacityNotAvailableError"),
        (shared.TLS, "SSLError"),
        (shared.UNREACHED, "ConnectionError EndpointConnectionError"),
    ]
)

TABLE = ErrorTable(
    codes=CODES,
    statuses={**shared.STATUSES, 301: REGION, 307: shared.TRY_AGAIN, 401: CREDENTIALS, 503: shared.SLOW_DOWN},
    exceptions=EXCEPTIONS,
    packages=frozenset({"boto3", "botocore"}),
    parsers=("botocore.handlers", "botocore.parsers"),
    quoted="botocore",
    certificate=CERTIFICATE,
    configuration=CONFIGURATION,
)

_OK, _NO_CONTENT, _PARTIAL = 200, 204, 206
_WRITES = frozenset({"abort_multipart", "complete_multipart", "create_multipart", "put", "upload_part"})
"""The store's methods that write with one request: if it is refused, nothing was written."""
_LISTINGS = frozenset({"ListMultipartUploads", "ListObjectsV2"})
_REDIRECTIONS = (301, 307)
"""To the bucket's region. S3 redirects for nothing else, as a proxy does to a page for signing in."""
_OTHER_REGION_STATUSES = (400, 403)
"""Statuses for a signature of another region, whose codes differ between stores."""
_ROOTS: Mapping[str, tuple[str, ...]] = {
    "CompleteMultipartUpload": ("CompleteMultipartUpload",),
    "CopyObject": ("CopyObject",),
    "CreateMultipartUpload": ("InitiateMultipartUpload",),
    "DeleteObjects": ("DeleteResult", "DeleteObjects"),
    "ListMultipartUploads": ("ListMultipartUploads",),
    "ListObjectsV2": ("ListBucket", "ListObjects"),
    "ListParts": ("ListParts",),
    "UploadPartCopy": ("CopyPart", "UploadPartCopy"),
}
"""The beginnings of the names of the documents' roots. moto and rclone end some of the names differently."""
_WITHOUT_DOCUMENT = frozenset(
    {"AbortMultipartUpload", "DeleteObject", "GetObject", "HeadObject", "PutObject", "UploadPart"}
)
_REGION_IN_ADDRESS = re.compile(r"\bs3(?:-fips)?(?:\.dualstack)?[.-]([a-z]{2,}(?:-[a-z]+)+-[0-9]+)\.amazonaws\.com")
_REGION_IN_MESSAGE = re.compile(r"\bregion\b.*\bexpecting '([a-z0-9-]+)'", re.IGNORECASE)
_ROOT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<[?!][^>]*>\s*)*<(?:[\w.-]+:)?([\w.-]+)")


def translate(error: Exception, request: FailedRequest) -> StoreError | None:
    """Return the error to raise for `error`; None if neither store, network nor configuration caused it."""
    if isinstance(error, OtherRegionError):
        return build_error(REGION, request, reason=str(error))
    if isinstance(error, SameRegionError):
        return build_error(SAME_REGION, request, reason=str(error))
    response = getattr(error, "response", None)
    if isinstance(response, dict) and ("Error" in response or "ResponseMetadata" in response):
        return _translate_answer(response, request)
    rule = TABLE.rule_for_exception(error)
    # botocore wraps broken answers, in whose chains a ValueError is common. A bare one is a header that cannot be sent,
    # so credentials with a line break.
    if rule is shared.CLOSED and type(getattr(error, "kwargs", {}).get("error")) is ValueError:
        return build_error(CONFIGURATION, request, reason=type(error).__name__)
    return translate_exception(error, request, TABLE, library_rule=rule)


def is_redirection(error: Exception, *, sent_to: str) -> bool:
    """Return True if the store answers that the bucket is elsewhere than in the region `sent_to`."""
    status = status_of(error)
    if status in _REDIRECTIONS or CODES.get(code_of(error)) is REGION:
        return True
    return status in _OTHER_REGION_STATUSES and region_in(error) not in (None, sent_to)


def status_of(error: Exception) -> int:
    """Return the status of the store's answer; 0 for other errors."""
    response = getattr(error, "response", None)
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(response, dict) else 0


def region_in(error: Any) -> str | None:
    """Return the region that a redirection names in a header, its body or an address; None if it names none."""
    details, answer = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    headers = answer.get("HTTPHeaders", {})
    named = headers.get("x-amz-bucket-region") or details.get("Region")
    addresses = (str(details.get("Endpoint", "")), str(headers.get("location", "")))
    matches = [_REGION_IN_ADDRESS.search(address) for address in addresses]
    matches.append(_REGION_IN_MESSAGE.search(str(details.get("Message", ""))))
    return named or next((match[1] for match in matches if match), None)


def code_of(error: Exception) -> str:
    """Return the store's own name of the error that it has answered with; empty for other errors."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def translate_code(code: str, detail: str, request: FailedRequest) -> StoreError:
    """Return the error to raise for one key's error in an answer about many keys."""
    return _build(TABLE.rule_for_answer(code, 0), request, reason=f"{code}: {detail}")


def _translate_answer(response: dict[str, Any], request: FailedRequest) -> StoreError:
    details = response.get("Error", {})
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code, detail = str(details.get("Code", "") or status), str(details.get("Message", "") or "")
    if not status and code.isdigit():
        status = int(code)
    if detail in ("Not Found", "Forbidden", "Bad Request", "Moved Permanently", "Unknown"):
        detail = ""  # botocore's words for an answer without a body; the code says more
    rule = TABLE.rule_for_answer(code, status)
    if rule in (shared.NO_OBJECT, shared.TOO_SHORT) and request.api in _LISTINGS:
        rule = shared.FOREIGN  # it is about one object, and the request names none
    reason = f"{code} ({status})" if code != str(status) else f"status {status}"
    failure = _build(rule, request, reason=f"{reason}: {detail}" if detail else reason)
    # A code of S3 and not of a proxy, for a request that S3 did not carry out: a quota is used up, for example.
    is_refused = code in CODES and shared.CLIENT_ERROR <= status < shared.SERVER_ERROR
    is_final = request.operation in _WRITES and not isinstance(failure, TransientStoreError)
    failure.had_no_effect = is_refused and is_final
    return failure


def _build(rule: ErrorRule, request: FailedRequest, *, reason: str) -> StoreError:
    if rule.error is AccessDeniedError and request.api in ("GetObject", "HeadObject"):
        hint = "Without s3:ListBucket on the bucket, S3 also answers so for a key without an object."
        rule = ErrorRule(rule.error, f"{rule.advice} {hint}")
    return build_error(rule, request, reason=reason)


def refuse_foreign(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raise `ForeignAnswerError` for an answer that is not S3's. A handler of botocore's event ``before-parse``.

    botocore takes any XML for the expected answer, and any body for an object: a web page is an empty listing, and
    a 404 from a load balancer a missing object. Amazon S3, Ceph's gateway, MiniStack, moto and rclone pass.
    """
    status, headers, body = (response_dict[name] for name in ("status_code", "headers", "body"))
    if operation_model.name not in _ROOTS and operation_model.name not in _WITHOUT_DOCUMENT:
        return  # a request that the store does not make
    if _is_genuine(operation_model.name, status, headers, body):
        return
    if not isinstance(body, bytes):
        body.close()
    raise ForeignAnswerError(describe_foreign("S3's", status, headers.get("content-type"), body))


def _is_genuine(api: str, status: int, headers: Mapping[str, str], body: Any) -> bool:
    if status >= shared.SERVER_ERROR or status in _REDIRECTIONS or status in shared.SAID_BY_ANYONE:
        return True  # an error that says nothing about any object
    if status >= shared.CLIENT_ERROR:
        # An answer to HEAD has no body: the store makes another request, whose answer has one.
        return api == "HeadObject" or is_xml_error(body)
    if api in ("GetObject", "HeadObject"):
        is_page = headers.get("content-type", "").startswith("text/html") and "x-amz-request-id" not in headers
        proof = "content-range" if status == _PARTIAL else "etag"
        return status in (_OK, _PARTIAL) and proof in headers and not is_page
    if api in ("PutObject", "UploadPart"):
        return status == _OK and "etag" in headers
    if api in ("AbortMultipartUpload", "DeleteObject"):
        return status == _NO_CONTENT or (status == _OK and not body.strip())
    root = _ROOT.match(body)
    return status == _OK and root is not None and root[1].decode().startswith(_ROOTS[api])
