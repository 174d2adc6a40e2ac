"""The one table of what google-cloud-storage and GCS raise, and what becomes of it.

Classes are named, not imported, so that a library that lacks or adds one still works; a test fails where
google.api_core, google.auth or requests has an exception that stands neither in `EXCEPTIONS` nor in `UNREACHABLE`.
Reasons are those of https://cloud.google.com/storage/docs/json_api/v1/status-codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudckpt.errors import (
    AccessDeniedError,
    CredentialsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientStoreError,
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


ACCOUNT: Rule = (AccessDeniedError, "The account or project may not use the store at present. Ask its owner.")
CERTIFICATE: Rule = (
    StoreError,
    (
        "The certificate of {endpoint} was not accepted. Check endpoint_url, or name the authority's certificate in "
        "REQUESTS_CA_BUNDLE."
    ),
)
CONFIG: Rule = (StoreError, "Check storage_options and the Google configuration (GOOGLE_* variables, gcloud).")
CREDENTIALS: Rule = (
    CredentialsError,
    (
        "The store does not accept these credentials. Renew them (gcloud auth application-default login), or check "
        "credentials_file and GOOGLE_APPLICATION_CREDENTIALS."
    ),
)
FULL: Rule = (StoreError, "A quota is used up. Free some space, or raise the quota.")
GONE: Rule = (
    ObjectNotFoundError,
    "A part of the upload is gone: it was completed or aborted. Upload the object anew.",
)
HELD: Rule = (
    AccessDeniedError,
    (
        "A retention policy or a hold keeps the object. Use a bucket without, since uploads in parts leave temporary "
        "objects to remove."
    ),
)
LARGE: Rule = (StoreError, "The object is larger than the store takes. Lower object_bytes or part_bytes.")
MISSING: Rule = (
    StoreError,
    "Bucket {bucket!r} is there, so something else that the request names is not: check kms_key_name and user_project.",
)
NO_CREDENTIALS: Rule = (
    CredentialsError,
    (
        "No usable credentials were found. Run gcloud auth application-default login, set "
        "GOOGLE_APPLICATION_CREDENTIALS, or pass in storage_options credentials_file, or anonymous=True for a public "
        "bucket or an emulator."
    ),
)
POLICY: Rule = (AccessDeniedError, "A policy of the organization forbids it. Ask its owner.")
REDIRECT: Rule = (StoreError, "{endpoint} sends requests elsewhere. Check endpoint_url (http or https).")
REFRESH: Rule = (
    CredentialsError,
    (
        "The credentials could not be renewed. Log in again (gcloud auth application-default login), or check the "
        "service account and its key."
    ),
)
REFRESH_LATER: Rule = (TransientStoreError, "The service that renews the credentials was not reached. Try again.")
SLOWER: Rule = (ThrottledError, "Ask less often: fewer connections, or other keys.")
WHO_PAYS: Rule = (StoreError, "The bucket wants the requester to pay: check user_project in storage_options.")


OF_API: Mapping[tuple[str, int], Rule] = {
    ("objects.compose", 404): GONE,
    ("objects.insert", 404): MISSING,
    ("objects.list", 404): BUCKET,
    ("objects.list", 416): FOREIGN,
}
"""Where a status means something else than elsewhere, because of what the request names."""

REASONS: Mapping[str, Rule] = by_name(
    [
        (ACCOUNT, "accountDisabled countryBlocked accessNotConfigured UserProjectAccountProblem"),
        (ACCOUNT, "userProjectAccountProblem userAccountClosed"),
        (CREDENTIALS, "authError expired lockedDomainExpired"),
        (DENIED, "forbidden insufficientPermissions UserProjectAccessDenied userProjectAccessDenied"),
        (EXISTS, "conditionNotMet"),
        (FULL, "quotaExceeded dailyLimitExceeded"),
        (HELD, "objectUnderActiveHold retentionPolicyNotMet"),
        (LARGE, "uploadTooLarge"),
        (LATER, "backendError internalError backendNotConnected uploadBrokenConnection gatewayTimeout"),
        (POLICY, "orgPolicyConstraintFailed"),
        (SHORT, "requestedRangeNotSatisfiable"),
        (SLOWER, "rateLimitExceeded userRateLimitExceeded"),
        (WHO_PAYS, "AuthenticationRequiredRequesterPays UserProjectInconsistent UserProjectInvalid UserProjectMissing"),
        (WHO_PAYS, "userProjectInconsistent userProjectInvalid userProjectMissing"),
    ]
)
"""What GCS calls an error, where that says more than the status."""

STATUSES: Mapping[int, Rule] = {
    301: REDIRECT,
    302: REDIRECT,
    303: REDIRECT,
    307: REDIRECT,
    308: REDIRECT,
    401: CREDENTIALS,
    403: DENIED,
    404: NOTHING,
    405: CANNOT,
    407: PROXY,
    408: LATER,
    409: LATER,
    412: EXISTS,
    413: LARGE,
    416: SHORT,
    429: SLOWER,
    499: LATER,
    501: CANNOT,
    507: FULL,
}
"""For reasons that `REASONS` lacks and answers without a body. Others from 500 on are `LATER`, below `REQUEST`."""

EXCEPTIONS: Mapping[str, Rule] = by_name(
    [
        (CANNOT, "api_core.MethodNotAllowed api_core.MethodNotImplemented"),
        (CLOSED, "requests.ChunkedEncodingError"),
        (CONFIG, "api_core.DuplicateCredentialArgs api_core.GoogleAPIError auth.ClientCertError"),
        (CONFIG, "auth.InvalidOperation auth.InvalidResource auth.InvalidType auth.InvalidValue"),
        (CONFIG, "auth.MutualTLSChannelError requests.InvalidHeader requests.InvalidSchema requests.InvalidURL"),
        (CONFIG, "requests.MissingSchema requests.RequestException requests.URLRequired"),
        (CONNECT_LATE, "requests.ConnectTimeout"),
        (CREDENTIALS, "api_core.Unauthenticated api_core.Unauthorized"),
        (DENIED, "api_core.Forbidden api_core.PermissionDenied"),
        (EXISTS, "api_core.PreconditionFailed"),
        (LATER, "api_core.Aborted api_core.AlreadyExists api_core.BadGateway api_core.Cancelled api_core.Conflict"),
        (LATER, "api_core.DataLoss api_core.InternalServerError api_core.RetryError"),
        (LATER, "api_core.ServerError api_core.ServiceUnavailable api_core.Unknown"),
        (NO_CREDENTIALS, "auth.DefaultCredentialsError auth.MalformedError"),
        (NOTHING, "api_core.NotFound"),
        (FOREIGN, "requests.ContentDecodingError requests.InvalidJSONError requests.JSONDecodeError"),
        (PROXY, "requests.InvalidProxyURL requests.ProxyError"),
        (READ_LATE, "api_core.DeadlineExceeded api_core.GatewayTimeout requests.ReadTimeout requests.Timeout"),
        (REDIRECT, "api_core.MovedPermanently api_core.NotModified api_core.Redirection api_core.TemporaryRedirect"),
        (REDIRECT, "api_core.ResumeIncomplete requests.TooManyRedirects"),
        (REFRESH, "auth.GoogleAuthError auth.OAuthError auth.OSError auth.ReauthFailError"),
        (REFRESH, "auth.ReauthSamlChallengeFailError auth.RefreshError auth.UserAccessTokenError"),
        (REFRESH_LATER, "auth.ResponseError auth.TimeoutError auth.TransportError"),
        (REQUEST, "api_core.BadRequest api_core.ClientError api_core.FailedPrecondition api_core.GoogleAPICallError"),
        (REQUEST, "api_core.InvalidArgument api_core.LengthRequired requests.HTTPError"),
        (SHORT, "api_core.OutOfRange api_core.RequestRangeNotSatisfiable"),
        (SLOWER, "api_core.ResourceExhausted api_core.TooManyRequests"),
        (TLS, "requests.SSLError"),
        (UNREACHED, "requests.ConnectionError requests.RetryError"),
    ]
)
"""Exceptions by library and name; one that is missing here is taken for its nearest base that is not."""

UNREACHABLE: Mapping[str, str] = {
    "api_core.AsyncRestUnsupportedParameterError": "nothing here is asynchronous",
    "api_core.MissingStatusHeaderError": "resumable uploads are not used",
    "api_core.ResumableTransferError": "resumable uploads are not used",
    "api_core.TransferStalledError": "resumable uploads are not used",
    "api_core.UnseekableStreamError": "resumable uploads are not used",
    "api_core.UploadCancelledError": "resumable uploads are not used",
    "requests.FileModeWarning": "a warning",
    "requests.RequestsDependencyWarning": "a warning",
    "requests.RequestsWarning": "a warning",
    "requests.StreamConsumedError": "bodies are read below requests",
    "requests.UnrewindableBodyError": "bodies can be rewound",
}
