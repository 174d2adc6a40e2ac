"""The one table of what boto3 and S3-compatible stores raise, and what becomes of it.

Classes are named, not imported, so that a botocore that lacks or adds one still works; a test fails where
botocore has an exception that stands neither in `EXCEPTIONS` nor in `UNREACHABLE`. Codes are those of
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and of the compatible stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ChecksumRefusedError,
    CredentialsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
)
from cloudckpt.stores._http_rules import (
    BUCKET,
    CANNOT,
    CLOSED,
    CONNECT_LATE,
    DENIED,
    EXISTS,
    FOREIGN,
    LATER,
    NOTHING,
    PROXY,
    READ_LATE,
    REQUEST,
    SHORT,
    TLS,
    UNREACHED,
    Rule,
    by_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


_CHECK = "Check keys, profile and region (storage_options, AWS_* variables, ~/.aws)."

ARCHIVED: Rule = (StoreError, "The object is archived. Restore it first (aws s3api restore-object).")
ACCOUNT: Rule = (AccessDeniedError, "The account may not use the store at present. Ask its owner.")
BUCKET_NAME: Rule = (BucketNotFoundError, "{bucket!r} cannot be used as a bucket's name. Correct it.")
CERTIFICATE: Rule = (
    StoreError,
    "The certificate of {endpoint} was not accepted. Check endpoint_url, or pass ca_bundle.",
)
CLOCK: Rule = (CredentialsError, "This machine's clock is off, so its signatures are refused. Set it (NTP).")
CONFIG: Rule = (
    StoreError,
    "Check the AWS configuration (~/.aws/config, AWS_* variables) and storage_options.",
)
CREDENTIALS: Rule = (CredentialsError, f"The store does not accept these credentials. {_CHECK}")
DAMAGED: Rule = (
    ChecksumRefusedError,
    "The bytes were damaged on their way, or in memory while they were being sent. Try again.",
)
EXPIRED: Rule = (CredentialsError, "The credentials have expired. Renew them (aws sso login, a new token).")
FULL: Rule = (StoreError, "The store is full, or its quota used up. Free some space, or raise the quota.")
GONE: Rule = (
    ObjectNotFoundError,
    "The multipart upload is gone: it was completed or aborted. Upload the object anew.",
)
INVALID: Rule = (StoreError, "boto3 refuses the request. Check the bucket's name, the key and storage_options.")
KMS: Rule = (
    AccessDeniedError,
    "The KMS key cannot be used. Check kms_key_id, and grant kms:GenerateDataKey and kms:Decrypt.",
)
LARGE: Rule = (
    StoreError,
    "The object or part is larger than the store takes. Lower object_bytes or part_bytes.",
)
MODELS: Rule = (StoreError, "boto3's own data files do not fit. Reinstall boto3 and botocore.")
NO_CREDENTIALS: Rule = (
    CredentialsError,
    (
        "No usable credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or an "
        "instance role, or pass anonymous=True in storage_options for a public bucket."
    ),
)
NO_PROFILE: Rule = (
    CredentialsError,
    "The profile does not exist. Correct profile in storage_options, AWS_PROFILE, or ~/.aws/config.",
)
PARTS: Rule = (StoreError, "The parts do not fit together. Check part_bytes, and upload the object anew.")
REGION: Rule = (
    StoreError,
    (
        "The bucket lies in another region, or {endpoint} sends requests elsewhere. Set region in storage_options, "
        "or AWS_REGION, to the bucket's; check endpoint_url (http or https)."
    ),
)
SLOWER: Rule = (ThrottledError, "Ask less often: fewer connections, or other key prefixes.")


CODES: Mapping[str, Rule] = by_name(
    [
        (ACCOUNT, "AccountProblem AllAccessDisabled InvalidPayer NotSignedUp"),
        (ARCHIVED, "InvalidObjectState"),
        (BUCKET, "NoSuchBucket"),
        (BUCKET_NAME, "InvalidBucketName"),
        (CANNOT, "MethodNotAllowed NotImplemented"),
        (CLOCK, "RequestTimeTooSkewed RequestExpired"),
        (
            CREDENTIALS,
            "AuthFailure AuthorizationQueryParametersError InvalidAccessKeyId InvalidSecurity InvalidToken",
        ),
        (CREDENTIALS, "InvalidClientTokenId SignatureDoesNotMatch UnrecognizedClientException"),
        (
            DAMAGED,
            "BadDigest InvalidChecksum InvalidDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch",
        ),
        (DENIED, "AccessDenied AccessForbidden Forbidden UnauthorizedAccess"),
        (EXISTS, "PreconditionFailed"),
        (EXPIRED, "ExpiredToken ExpiredTokenException TokenRefreshRequired"),
        (FULL, "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded"),
        (GONE, "NoSuchUpload"),
        (KMS, "KMS.DisabledException KMS.InvalidKeyUsageException KMS.InvalidStateException"),
        (KMS, "KMS.KMSInvalidStateException KMS.NotFoundException"),
        (LARGE, "EntityTooLarge MaxMessageLengthExceeded"),
        (
            LATER,
            "ConditionalRequestConflict IncompleteBody InternalError InternalServerError OperationAborted",
        ),
        (LATER, "RequestTimeout RequestTimeoutException TemporaryRedirect"),
        (NOTHING, "NoSuchKey NoSuchVersion"),
        (PARTS, "EntityTooSmall InvalidPart InvalidPartOrder"),
        (REGION, "AuthorizationHeaderMalformed IllegalLocationConstraintException IncorrectEndpoint"),
        (REGION, "PermanentRedirect Redirect"),
        (
            REQUEST,
            "InvalidArgument InvalidEncryptionAlgorithmError InvalidRequest InvalidStorageClass InvalidTag",
        ),
        (REQUEST, "KeyTooLongError MalformedXML"),
        (SHORT, "InvalidRange"),
        (SLOWER, "BandwidthLimitExceeded RequestLimitExceeded ServiceUnavailable SlowDown SlowDownRead"),
        (SLOWER, "SlowDownWrite Throttling ThrottlingException TooManyRequests TooManyRequestsException"),
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
        (
            CONFIG,
            "BotoCoreError ConfigNotFound ConfigParseError EndpointProviderError EndpointResolutionError",
        ),
        (
            CONFIG,
            "EndpointVariantError InfiniteLoopConfigError InvalidChecksumConfigError InvalidConfigError",
        ),
        (CONFIG, "InvalidDefaultsMode InvalidEndpointConfigurationError InvalidIMDSEndpointError"),
        (CONFIG, "InvalidIMDSEndpointModeError InvalidMaxRetryAttemptsError InvalidProxiesConfigError"),
        (CONFIG, "InvalidRetryConfigurationError InvalidRetryModeError InvalidS3AddressingStyleError"),
        (CONFIG, "InvalidS3UsEast1RegionalEndpointConfigError InvalidSTSRegionalEndpointsConfigError"),
        (CONFIG, "MD5UnavailableError MissingDependencyException UnknownCredentialError"),
        (
            CONFIG,
            "UnknownEndpointResolutionBuiltInName UnknownSignatureVersionError UnknownTokenProviderError",
        ),
        (CONFIG, "UnsupportedS3AccesspointConfigurationError UnsupportedS3ConfigurationError"),
        (CONFIG, "UnsupportedSignatureVersionError"),
        (CONNECT_LATE, "ConnectTimeoutError"),
        (DAMAGED, "ChecksumError FlexibleChecksumError"),
        (EXPIRED, "LoginAuthorizationCodeError LoginError LoginRefreshRequired LoginTokenLoadError"),
        (EXPIRED, "NoAuthTokenError SSOError SSOTokenLoadError TokenRetrievalError UnauthorizedSSOTokenError"),
        (
            MODELS,
            "ApiVersionNotFoundError DataNotFoundError MissingServiceIdError UndefinedModelAttributeError",
        ),
        (MODELS, "UnknownServiceError UnknownServiceStyle UnsupportedServiceProtocolsError"),
        (NO_CREDENTIALS, "CredentialRetrievalError LoginInsufficientPermissions MetadataRetrievalError"),
        (NO_CREDENTIALS, "NoCredentialsError PartialCredentialsError RefreshWithMFAUnsupportedError"),
        (INVALID, "ParamValidationError"),
        (NO_PROFILE, "ProfileNotFound"),
        (FOREIGN, "ResponseParserError"),
        (PROXY, "ProxyConnectionError"),
        (READ_LATE, "ReadTimeoutError"),
        (REGION, "InvalidRegionError NoRegionError ServiceNotInRegionError UnknownEndpointError"),
        (REGION, "UnknownFIPSEndpointError UnknownRegionError"),
        (REQUEST, "AliasConflictParameterError AwsChunkedWrapperError ClientError MissingParametersError"),
        (
            REQUEST,
            "RangeError UnknownKeyError UnknownParameterError UnseekableStreamError",
        ),
        (REQUEST, "ValidationError"),
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
