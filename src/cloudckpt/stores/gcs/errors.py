"""The table of the errors of google-cloud-storage and GCS.

Classes are named, not imported, so that a library that lacks or adds one still works; a test fails if google.api_core,
google.auth or requests has an exception that is neither in `EXCEPTIONS` nor in `UNREACHABLE`. Reasons are those of
https://cloud.google.com/storage/docs/json_api/v1/status-codes.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from cloudckpt.errors import (
    AccessDeniedError,
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
    NOTHING,
    PROXY,
    READ_LATE,
    REQUEST,
    SAID_BY_ANYONE,
    SHORT,
    TLS,
    UNREACHED,
    FailedRequest,
    Rule,
    build_error,
    by_name,
    describe_foreign,
    is_json_error,
    is_xml_error,
    network_reason,
    translate_exception,
)

ACCOUNT = Rule(AccessDeniedError, "The account or project may not use the store at present. Ask its owner.")
CERTIFICATE = Rule(
    StoreError,
    "The certificate of {endpoint} was not accepted. Check endpoint_url, or name the authority's certificate in "
    "REQUESTS_CA_BUNDLE.",
)
CONFIG = Rule(StoreError, "Check the storage options and the Google configuration (GOOGLE_* variables, gcloud).")
CREDENTIALS = Rule(
    CredentialsError,
    "The store does not accept these credentials. Renew them (gcloud auth application-default login), or check "
    "credentials_file and GOOGLE_APPLICATION_CREDENTIALS.",
)
FULL = Rule(StoreError, "A quota is used up. Free some space, or raise the quota.")
GONE = Rule(
    ObjectNotFoundError,
    "A part of the upload is gone: it was completed or aborted. Upload the object anew.",
)
HELD = Rule(
    AccessDeniedError,
    "A retention policy or a hold keeps the object. Use a bucket without, since uploads in parts leave temporary "
    "objects to remove.",
)
LARGE = Rule(StoreError, "The object is larger than the store takes. Lower object_bytes or part_bytes.")
MISSING = Rule(
    StoreError,
    "Bucket {bucket!r} is there, so something else that the request names is not: check kms_key_name and user_project.",
)
NO_CREDENTIALS = Rule(
    CredentialsError,
    "No usable credentials were found. Run gcloud auth application-default login, set "
    "GOOGLE_APPLICATION_CREDENTIALS, or set the storage option credentials_file, or anonymous to true for a "
    "public bucket or an emulator.",
)
POLICY = Rule(AccessDeniedError, "A policy of the organization forbids it. Ask its owner.")
REDIRECT = Rule(StoreError, "{endpoint} sends requests elsewhere. Check endpoint_url (http or https).")
REFRESH = Rule(
    CredentialsError,
    "The credentials could not be renewed. Log in again (gcloud auth application-default login), or check the "
    "service account and its key.",
)
REFRESH_LATER = Rule(TransientStoreError, "The service that renews the credentials was not reached. Try again.")
SLOWER = Rule(ThrottledError, "Send fewer requests: fewer connections, or other keys.")
WHO_PAYS = Rule(StoreError, "The bucket wants the requester to pay: check the storage option user_project.")


BY_REQUEST: Mapping[tuple[str, int], Rule] = {
    ("objects.compose", 404): GONE,
    ("objects.insert", 404): MISSING,
    ("objects.list", 404): BUCKET,
    ("objects.list", 416): FOREIGN,
}
"""Statuses that mean something else for one request, because of what it names."""

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
"""GCS's own names of errors that say more than the status."""

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

_REDIRECTION, _CLIENT_ERROR, _SERVER_ERROR = 300, 400, 500
_PARSERS = ("google.api_core.", "google.cloud.")
_LIBRARIES = {
    "google.api_core.exceptions": "api_core",
    "google.auth.exceptions": "auth",
    "requests.exceptions": "requests",
}

PERMISSIONS: Mapping[str, str] = {
    "objects.compose": "storage.objects.create and storage.objects.get (storage.objects.delete to replace an object)",
    "objects.delete": "storage.objects.delete",
    "objects.get": "storage.objects.get",
    "objects.insert": "storage.objects.create (storage.objects.delete too, to replace an object)",
    "objects.list": "storage.objects.list",
    "objects.rewrite": "storage.objects.create and storage.objects.get (storage.objects.delete to replace an object)",
}
"""The right that IAM grants for each request of the store."""


def translate(error: Exception, request: FailedRequest) -> StoreError | None:
    """Return the error to raise for `error`; None if neither store, network nor configuration caused it."""
    status = getattr(error, "code", None)
    if _library_of(error) == "api_core" and isinstance(status, int):
        return _translate_answer(error, int(status), request)
    return translate_exception(
        error,
        request,
        library_rule=_library_rule(error),
        certificate=CERTIFICATE,
        describe=_describe,
        is_of_parsing=_is_of_parsing,
    )


def is_genuine_error(error: Any) -> bool:
    """Return True if a refusal is GCS's own, or says nothing about any object.

    GCS answers with a document of one of its APIs; to a download with plain text, but with headers that it alone sends
    (https://github.com/firebase/firebase-tools/pull/3647 quotes both).
    """
    status = int(error.code)
    if status >= _SERVER_ERROR or _REDIRECTION <= status < _CLIENT_ERROR or status in SAID_BY_ANYONE:
        return True
    if status < _REDIRECTION:
        return False
    body = str(error.message).encode()
    return has_gcs_headers(getattr(error.response, "headers", {})) or is_json_error(body) or is_xml_error(body)


def has_gcs_headers(headers: Mapping[str, str]) -> bool:
    """Return True if there are headers that GCS alone sends."""
    return any(name.lower().startswith(("x-goog-", "x-guploader-")) for name in headers)


def _translate_answer(error: Any, status: int, request: FailedRequest) -> StoreError:
    if not is_genuine_error(error):
        content_type = getattr(error.response, "headers", {}).get("Content-Type")
        text = describe_foreign("GCS's", status, content_type, str(error.message).encode())
        return build_error(FOREIGN, request, reason=text)
    reason, detail = _parse_document(error.message)
    fallback = LATER if status >= _SERVER_ERROR else REQUEST
    rule = BY_REQUEST.get((request.api, status)) or REASONS.get(reason) or STATUSES.get(status, fallback)
    text = f"{reason} ({status})" if reason else f"status {status}"
    return build_error(rule, request, reason=f"{text}: {detail}" if detail else text)


def _parse_document(text: Any) -> tuple[str, str]:
    """Return GCS's reason and message from an error's body."""
    try:
        found = json.loads(text)["error"]
    except (KeyError, TypeError, ValueError):
        return "", str(text)
    if not isinstance(found, dict):  # OAuth's answers name the error so
        return str(found), ""
    errors = found.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    return str(first.get("reason") or ""), str(found.get("message") or first.get("message") or "")


def _library_of(error: Exception) -> str | None:
    return next((_LIBRARIES[cls.__module__] for cls in type(error).__mro__ if cls.__module__ in _LIBRARIES), None)


def _library_rule(error: Exception) -> Rule | None:
    if _library_of(error) is None:
        return None
    names = (f"{_LIBRARIES.get(cls.__module__)}.{cls.__name__}" for cls in type(error).__mro__)
    rule = next((EXCEPTIONS[name] for name in names if name in EXCEPTIONS), CONFIG)
    return REFRESH_LATER if rule is REFRESH and getattr(error, "retryable", False) else rule


def _is_of_parsing(error: Exception) -> bool:
    """Return True if the library failed to parse an answer: it takes any JSON for GCS's."""
    if not isinstance(error, AttributeError | LookupError | TypeError | ValueError):
        return False
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith(_PARSERS)


def _describe(error: Exception, rule: Rule) -> str:
    name = type(error).__name__
    if rule in (NO_CREDENTIALS, REFRESH) and error.args and isinstance(error.args[0], str):
        return f"{name}: {error.args[0]}"  # the reason; the answer's body follows it
    # The texts of HTTP errors can hold headers, and with them tokens.
    return network_reason(error) or name
