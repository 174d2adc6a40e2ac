"""The table of the errors of boto3 and of S3-compatible stores, and the check that an answer is S3's own.

Classes are named, not imported, so that a botocore that lacks or adds one still works; a test fails if botocore has an
exception that is neither in `EXCEPTIONS` nor in `UNREACHABLE`. Codes are those of
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and of the compatible stores.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import Any

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ChecksumRefusedError,
    CredentialsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.http_errors import (
    BUCKET,
    CANNOT,
    CLOSED,
    CONNECT_LATE,
    DENIED,
    EXISTS,
    FOREIGN,
    LATER,
    NETWORK_RULES,
    NOTHING,
    PROXY,
    READ_LATE,
    REQUEST,
    SAID_BY_ANYONE,
    SHORT,
    TLS,
    UNREACHED,
    FailedRequest,
    ForeignAnswerError,
    Rule,
    build_error,
    by_name,
    describe_foreign,
    is_xml_error,
    network_reason,
    translate_exception,
)

_CHECK = "Check keys, profile and region (storage options, AWS_* variables, ~/.aws)."

ARCHIVED = Rule(StoreError, "The object is archived. Restore it first (aws s3api restore-object).")
ACCOUNT = Rule(AccessDeniedError, "The account may not use the store at present. Ask its owner.")
BUCKET_NAME = Rule(BucketNotFoundError, "{bucket!r} cannot be used as a bucket's name. Correct it.")
CERTIFICATE = Rule(
    StoreError,
    "The certificate of {endpoint} was not accepted. Check endpoint_url, or pass ca_bundle.",
)
CLOCK = Rule(CredentialsError, "This machine's clock is off, so its signatures are refused. Set it (NTP).")
CONFIG = Rule(StoreError, "Check the AWS configuration (~/.aws/config, AWS_* variables) and the storage options.")
CREDENTIALS = Rule(CredentialsError, f"The store does not accept these credentials. {_CHECK}")
DAMAGED = Rule(
    ChecksumRefusedError,
    "The bytes were damaged on their way, or in memory while they were being sent. Try again.",
)
EXPIRED = Rule(CredentialsError, "The credentials have expired. Renew them (aws sso login, a new token).")
FULL = Rule(StoreError, "The store is full, or its quota used up. Free some space, or raise the quota.")
GONE = Rule(ObjectNotFoundError, "The multipart upload was completed or aborted. Upload the object anew.")
INVALID = Rule(StoreError, "boto3 refuses the request. Check the bucket's name, the key and the storage options.")
KMS = Rule(
    AccessDeniedError,
    "The KMS key cannot be used. Check kms_key_id, and grant kms:GenerateDataKey and kms:Decrypt.",
)
LARGE = Rule(StoreError, "The object or part is larger than the store takes. Lower object_bytes or part_bytes.")
MODELS = Rule(StoreError, "boto3's own data files do not fit. Reinstall boto3 and botocore.")
NO_CREDENTIALS = Rule(
    CredentialsError,
    "No usable credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or an instance role, "
    "or set the storage option anonymous to true for a public bucket.",
)
NO_PROFILE = Rule(
    CredentialsError,
    "The profile does not exist. Correct the storage option profile, AWS_PROFILE, or ~/.aws/config.",
)
PARTS = Rule(StoreError, "The parts do not fit together. Check part_bytes, and upload the object anew.")
REGION = Rule(
    StoreError,
    "The bucket is in another region, or {endpoint} sends requests elsewhere. Set the storage option region, "
    "or AWS_REGION, to the bucket's; check endpoint_url (http or https).",
)
SLOWER = Rule(ThrottledError, "Send fewer requests: fewer connections, or other key prefixes.")

CODES: Mapping[str, Rule] = by_name(
    [
        (ACCOUNT, "AccountProblem AllAccessDisabled InvalidPayer NotSignedUp"),
        (ARCHIVED, "InvalidObjectState"),
        (BUCKET, "NoSuchBucket"),
        (BUCKET_NAME, "InvalidBucketName"),
        (CANNOT, "MethodNotAllowed NotImplemented"),
        (CLOCK, "RequestTimeTooSkewed RequestExpired"),
        (CREDENTIALS, "AuthFailure AuthorizationQueryParametersError InvalidAccessKeyId InvalidClientTokenId"),
        (CREDENTIALS, "InvalidSecurity InvalidToken SignatureDoesNotMatch UnrecognizedClientException"),
        (DAMAGED, "BadDigest InvalidChecksum InvalidDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch"),
        (DENIED, "AccessDenied AccessForbidden Forbidden UnauthorizedAccess"),
        (EXISTS, "PreconditionFailed"),
        (EXPIRED, "ExpiredToken ExpiredTokenException TokenRefreshRequired"),
        (FULL, "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded"),
        (GONE, "NoSuchUpload"),
        (KMS, "KMS.DisabledException KMS.InvalidKeyUsageException KMS.InvalidStateException"),
        (KMS, "KMS.KMSInvalidStateException KMS.NotFoundException"),
        (LARGE, "EntityTooLarge MaxMessageLengthExceeded"),
        (LATER, "ConditionalRequestConflict IncompleteBody InternalError InternalServerError OperationAborted"),
        (LATER, "RequestTimeout RequestTimeoutException TemporaryRedirect"),
        (NOTHING, "NoSuchKey NoSuchVersion"),
        (PARTS, "EntityTooSmall InvalidPart InvalidPartOrder"),
        (REGION, "AuthorizationHeaderMalformed IllegalLocationConstraintException IncorrectEndpoint"),
        (REGION, "PermanentRedirect Redirect"),
        (REQUEST, "InvalidArgument InvalidEncryptionAlgorithmError InvalidRequest InvalidStorageClass InvalidTag"),
        (REQUEST, "KeyTooLongError MalformedXML"),
        (SHORT, "InvalidRange"),
        (SLOWER, "BandwidthLimitExceeded RequestLimitExceeded ServiceUnavailable SlowDown SlowDownRead SlowDownWrite"),
        (SLOWER, "Throttling ThrottlingException TooManyRequests TooManyRequestsException"),
    ]
)

STATUSES: Mapping[int, Rule] = {
    301: REGION,
    307: LATER,
    401: CREDENTIALS,
    403: DENIED,
    404: NOTHING,
    405: CANNOT,
    408: LATER,
    409: LATER,
    412: EXISTS,
    413: LARGE,
    416: SHORT,
    429: SLOWER,
    501: CANNOT,
    503: SLOWER,
    507: FULL,
}
"""For codes that `CODES` lacks and answers without a body. Others from 500 on are `LATER`, below `REQUEST`."""

EXCEPTIONS: Mapping[str, Rule] = by_name(
    [
        (BUCKET_NAME, "InvalidDNSNameError InvalidHostLabelError UnsupportedS3ArnError"),
        (CLOSED, "ConnectionClosedError HTTPClientError IncompleteReadError ResponseStreamingError"),
        (CONFIG, "BotoCoreError ConfigNotFound ConfigParseError EndpointProviderError EndpointResolutionError"),
        (CONFIG, "EndpointVariantError InfiniteLoopConfigError InvalidChecksumConfigError InvalidConfigError"),
        (CONFIG, "InvalidDefaultsMode InvalidEndpointConfigurationError InvalidIMDSEndpointError"),
        (CONFIG, "InvalidIMDSEndpointModeError InvalidMaxRetryAttemptsError InvalidProxiesConfigError"),
        (CONFIG, "InvalidRetryConfigurationError InvalidRetryModeError InvalidS3AddressingStyleError"),
        (CONFIG, "InvalidS3UsEast1RegionalEndpointConfigError InvalidSTSRegionalEndpointsConfigError"),
        (CONFIG, "MD5UnavailableError MissingDependencyException UnknownCredentialError"),
        (CONFIG, "UnknownEndpointResolutionBuiltInName UnknownSignatureVersionError UnknownTokenProviderError"),
        (CONFIG, "UnsupportedS3AccesspointConfigurationError UnsupportedS3ConfigurationError"),
        (CONFIG, "UnsupportedSignatureVersionError"),
        (CONNECT_LATE, "ConnectTimeoutError"),
        (DAMAGED, "ChecksumError FlexibleChecksumError"),
        (EXPIRED, "LoginAuthorizationCodeError LoginError LoginRefreshRequired LoginTokenLoadError"),
        (EXPIRED, "NoAuthTokenError SSOError SSOTokenLoadError TokenRetrievalError UnauthorizedSSOTokenError"),
        (FOREIGN, "ResponseParserError"),
        (INVALID, "ParamValidationError"),
        (MODELS, "ApiVersionNotFoundError DataNotFoundError MissingServiceIdError UndefinedModelAttributeError"),
        (MODELS, "UnknownServiceError UnknownServiceStyle UnsupportedServiceProtocolsError"),
        (NO_CREDENTIALS, "CredentialRetrievalError LoginInsufficientPermissions MetadataRetrievalError"),
        (NO_CREDENTIALS, "NoCredentialsError PartialCredentialsError RefreshWithMFAUnsupportedError"),
        (NO_PROFILE, "ProfileNotFound"),
        (PROXY, "ProxyConnectionError"),
        (READ_LATE, "ReadTimeoutError"),
        (REGION, "InvalidRegionError NoRegionError ServiceNotInRegionError UnknownEndpointError"),
        (REGION, "UnknownFIPSEndpointError UnknownRegionError"),
        (REQUEST, "AliasConflictParameterError AwsChunkedWrapperError ClientError MissingParametersError RangeError"),
        (REQUEST, "UnknownKeyError UnknownParameterError UnseekableStreamError ValidationError"),
        (SLOWER, "CapacityNotAvailableError"),
        (TLS, "SSLError"),
        (UNREACHED, "ConnectionError EndpointConnectionError"),
    ]
)
"""Exceptions of botocore by name; one that is missing here is taken for its nearest base that is not."""

UNREACHABLE: Mapping[str, str] = {
    "BaseEndpointResolverError": "abstract",
    "EventStreamError": "event streams belong to SelectObjectContent",
    "ImminentRemovalWarning": "a warning",
    "InvalidEndpointDiscoveryConfigurationError": "S3 has no endpoint discovery",
    "InvalidExpressionError": "JMESPath is for paginators and waiters, and neither is used",
    "OperationNotPageableError": "paginators are not used",
    "PaginationError": "paginators are not used",
    "StubAssertionError": "botocore's stubber is for tests",
    "StubResponseError": "botocore's stubber is for tests",
    "UnStubbedResponseError": "botocore's stubber is for tests",
    "UnknownClientMethodError": "URLs are not presigned",
    "UnsupportedOutpostResourceError": "belongs to S3 Control",
    "UnsupportedS3ControlArnError": "belongs to S3 Control",
    "UnsupportedS3ControlConfigurationError": "belongs to S3 Control",
    "UnsupportedTLSVersionWarning": "a warning",
    "WaiterConfigError": "waiters are not used",
    "WaiterError": "waiters are not used",
}

_OK, _NO_CONTENT, _PARTIAL = 200, 204, 206
_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_WRITES = frozenset({"abort_multipart", "complete_multipart", "create_multipart", "put", "upload_part"})
"""The store's methods that write with one request: if it is refused, nothing was written."""
_LISTINGS = frozenset({"ListMultipartUploads", "ListObjectsV2"})
_REDIRECTIONS = (301, 307)
"""To the bucket's region. S3 redirects for nothing else, as a proxy does to a page for signing in."""
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
"""How the name of each document's root begins: moto and rclone end some of them in their own way."""
_WITHOUT_DOCUMENT = frozenset(
    {"AbortMultipartUpload", "DeleteObject", "GetObject", "HeadObject", "PutObject", "UploadPart"}
)
_ROOT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<[?!][^>]*>\s*)*<(?:[\w.-]+:)?([\w.-]+)")


def translate(error: Exception, request: FailedRequest) -> StoreError | None:
    """Return the error to raise for `error`; None if neither store, network nor configuration caused it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict) and ("Error" in response or "ResponseMetadata" in response):
        return _translate_answer(response, request)
    return translate_exception(
        error,
        request,
        library_rule=_library_rule(error),
        certificate=CERTIFICATE,
        describe=_describe,
        is_of_parsing=_is_of_parsing,
    )


def translate_code(code: str, detail: str, request: FailedRequest) -> StoreError:
    """Return the error to raise for one key's error in an answer about many keys."""
    return _build(_rule_for_answer(code, 0), request, reason=f"{code}: {detail}")


def _translate_answer(response: dict[str, Any], request: FailedRequest) -> StoreError:
    found = response.get("Error", {})
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code, detail = str(found.get("Code", "") or status), str(found.get("Message", "") or "")
    if not status and code.isdigit():
        status = int(code)
    if detail in ("Not Found", "Forbidden", "Bad Request", "Moved Permanently", "Unknown"):
        detail = ""  # botocore's words for an answer without a body; the code says more
    rule = _rule_for_answer(code, status)
    if rule in (NOTHING, SHORT) and request.api in _LISTINGS:
        rule = FOREIGN  # it is about one object, and the request names none
    reason = f"{code} ({status})" if code != str(status) else f"status {status}"
    failure = _build(rule, request, reason=f"{reason}: {detail}" if detail else reason)
    # A code of S3's own and not a proxy's, because of what the client did or may not do: a quota is used up, say.
    is_refused = code in CODES and _CLIENT_ERROR <= status < _SERVER_ERROR
    is_final = request.operation in _WRITES and not isinstance(failure, TransientStoreError)
    failure.had_no_effect = is_refused and is_final
    return failure


def _rule_for_answer(code: str, status: int) -> Rule:
    return CODES.get(code) or STATUSES.get(status, LATER if status >= _SERVER_ERROR else REQUEST)


def _library_rule(error: Exception) -> Rule | None:
    if not any(cls.__module__.partition(".")[0] in ("botocore", "boto3") for cls in type(error).__mro__):
        return None
    names = (cls.__name__ for cls in type(error).__mro__)
    rule = next((EXCEPTIONS[name] for name in names if name in EXCEPTIONS), CONFIG)
    # botocore wraps broken answers, in whose chains a ValueError is common. A bare one is a header that cannot be sent,
    # so credentials with a line break.
    if rule is CLOSED and type(getattr(error, "kwargs", {}).get("error")) is ValueError:
        return CONFIG
    return rule


def _describe(error: Exception, rule: Rule) -> str:
    name = type(error).__name__
    # The texts of HTTP errors can hold headers, and with them tokens.
    is_of_http = rule in NETWORK_RULES or any(cls.__name__ == "HTTPClientError" for cls in type(error).__mro__)
    return network_reason(error) or (name if is_of_http else f"{name}: {error}")


def _is_of_parsing(error: Exception) -> bool:
    """Return True if botocore failed to parse an answer: it takes any XML, and any header, for S3's."""
    if not isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError):
        return False
    modules = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module in ("botocore.handlers", "botocore.parsers") for module in modules)


def _build(rule: Rule, request: FailedRequest, *, reason: str) -> StoreError:
    if rule.error is AccessDeniedError and request.api in ("GetObject", "HeadObject"):
        hint = "Without s3:ListBucket on the bucket, S3 also answers so for a key without an object."
        rule = Rule(rule.error, f"{rule.advice} {hint}")
    return build_error(rule, request, reason=reason)


def refuse_foreign(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raise `ForeignAnswerError` for an answer that is not S3's. A handler of botocore's event ``before-parse``.

    botocore takes any XML for what it asked for, and any body for an object: a web page is an empty listing to it, and
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
    if status >= _SERVER_ERROR or status in _REDIRECTIONS or status in SAID_BY_ANYONE:
        return True  # an error that says nothing about any object
    if status >= _CLIENT_ERROR:
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
