"""The table of the errors of google-cloud-storage and GCS.

A test fails if google.auth or requests has an exception that is new to it. Reasons are those of
https://cloud.google.com/storage/docs/json_api/v1/status-codes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from cloudckpt.errors import (
    AccessDeniedError,
    CredentialsError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores import http_errors as shared
from cloudckpt.stores.http_errors import (
    CredentialSourceError,
    ErrorRule,
    ErrorTable,
    FailedRequest,
    build_error,
    by_name,
    describe_foreign,
    is_json_error,
    is_xml_error,
    translate_exception,
)

CERTIFICATE = ErrorRule(
    StoreError,
    "The certificate of {endpoint} was not accepted. Check endpoint_url, or name the authority's certificate in "
    "REQUESTS_CA_BUNDLE.",
)
CONFIGURATION = ErrorRule(
    StoreError, "Check the storage options and the Google configuration (GOOGLE_* variables, gcloud)."
)
CREDENTIALS = ErrorRule(
    CredentialsError,
    "The store does not accept the credentials from {credentials}, and no newer ones were found. Renew them (gcloud "
    "auth application-default login), or check credentials_file and GOOGLE_APPLICATION_CREDENTIALS.",
)
PART_GONE = ErrorRule(
    ObjectNotFoundError,
    "A part of the upload is gone: it was completed or aborted. Upload the object anew.",
)
HELD = ErrorRule(
    AccessDeniedError,
    "A retention policy or a hold keeps the object. Use a bucket without, since uploads in parts leave temporary "
    "objects to remove.",
)
MISSING = ErrorRule(
    StoreError,
    "Bucket {bucket!r} is there, so something else that the request names is not: check kms_key_name and user_project.",
)
NO_CREDENTIALS = ErrorRule(
    CredentialsError,
    "No usable credentials were found. Run gcloud auth application-default login, set "
    "GOOGLE_APPLICATION_CREDENTIALS, or set the storage option credentials_file, or anonymous to true for a "
    "public bucket or an emulator.",
)
POLICY = ErrorRule(AccessDeniedError, "A policy of the organization forbids it. Ask its owner.")
REDIRECT = ErrorRule(StoreError, "{endpoint} sends requests elsewhere. Check endpoint_url (http or https).")
REFRESH = ErrorRule(
    CredentialsError,
    "The credentials from {credentials} could not be renewed. Log in again (gcloud auth application-default login), or "
    "check the service account and its key.",
)
REFRESH_LATER = ErrorRule(
    TransientStoreError,
    "The service that renews the credentials from {credentials} was not reached until timeout_s was over. Try again.",
)
ZONAL = ErrorRule(
    StoreError,
    "Bucket {bucket!r} is zonal (Rapid storage): it takes only appendable objects, and no compose or rewrite, so that "
    "nothing can be saved there. Use a bucket in a region.",
)
WHO_PAYS = ErrorRule(StoreError, "The bucket wants the requester to pay: check the storage option user_project.")


BY_REQUEST: Mapping[tuple[str, int], ErrorRule] = {
    ("objects.compose", 404): PART_GONE,
    ("objects.insert", 404): MISSING,
    ("objects.list", 404): shared.BUCKET,
    ("objects.list", 416): shared.FOREIGN,
}
"""Statuses that mean something else for one request, because it names another kind of thing."""

REASONS: Mapping[str, ErrorRule] = by_name(
    [
        (shared.ACCOUNT, "accountDisabled countryBlocked accessNotConfigured UserProjectAccountProblem"),
        (shared.ACCOUNT, "userProjectAccountProblem userAccountClosed"),
        (CREDENTIALS, "authError expired lockedDomainExpired"),
        (shared.DENIED, "forbidden insufficientPermissions UserProjectAccessDenied userProjectAccessDenied"),
        (shared.EXISTS, "conditionNotMet"),
        (shared.FULL, "quotaExceeded dailyLimitExceeded"),
        (HELD, "objectUnderActiveHold retentionPolicyNotMet"),
        (shared.TOO_LARGE, "uploadTooLarge"),
        (shared.TRY_AGAIN, "backendError internalError backendNotConnected uploadBrokenConnection gatewayTimeout"),
        (POLICY, "orgPolicyConstraintFailed"),
        (shared.TOO_SHORT, "requestedRangeNotSatisfiable"),
        (shared.SLOW_DOWN, "rateLimitExceeded userRateLimitExceeded"),
        (WHO_PAYS, "AuthenticationRequiredRequesterPays UserProjectInconsistent UserProjectInvalid UserProjectMissing"),
        (WHO_PAYS, "userProjectInconsistent userProjectInvalid userProjectMissing"),
    ]
)
"""GCS's own names of errors that say more than the status."""

EXCEPTIONS: Mapping[str, ErrorRule] = by_name(
    [
        (shared.CLOSED, "ChunkedEncodingError"),
        (shared.CONNECT_LATE, "ConnectTimeout"),
        (shared.FOREIGN, "ContentDecodingError InvalidJSONError"),
        (NO_CREDENTIALS, "DefaultCredentialsError"),
        (shared.PROXY, "InvalidProxyURL ProxyError"),
        (shared.READ_LATE, "Timeout"),
        (REDIRECT, "TooManyRedirects"),
        (REFRESH, "GoogleAuthError"),
        (REFRESH_LATER, "ResponseError TimeoutError TransportError"),
        (shared.BAD_REQUEST, "HTTPError"),
        (shared.TLS, "SSLError"),
        (shared.UNREACHED, "ConnectionError RetryError"),
    ]
)

TABLE = ErrorTable(
    codes=REASONS,
    statuses={
        **dict.fromkeys((301, 302, 303, 307, 308), REDIRECT),
        **shared.STATUSES,
        401: CREDENTIALS,
        407: shared.PROXY,
        499: shared.TRY_AGAIN,
    },
    exceptions=EXCEPTIONS,
    packages=frozenset({"google", "requests"}),
    parsers=("google.api_core.", "google.cloud."),
    quoted="google.auth",
    certificate=CERTIFICATE,
    configuration=CONFIGURATION,
)

_REDIRECTION, _UNAUTHORIZED = 300, 401
_WRITES = ("objects.compose", "objects.insert", "objects.rewrite")

PERMISSIONS: Mapping[str, str] = {
    "buckets.getStorageLayout": "storage.objects.list",
    "objects.compose": "storage.objects.create and storage.objects.get (storage.objects.delete to replace an object)",
    "objects.delete": "storage.objects.delete",
    "objects.get": "storage.objects.get",
    "objects.insert": "storage.objects.create (storage.objects.delete too, to replace an object)",
    "objects.list": "storage.objects.list",
    "objects.rewrite": "storage.objects.create and storage.objects.get (storage.objects.delete to replace an object)",
}
"""The right that IAM grants for each request of the store."""


def translate(
    error: Exception, request: FailedRequest, *, is_zonal: Callable[[], bool] = lambda: False
) -> StoreError | None:
    """Return the error to raise for `error`; None if neither store, network nor configuration caused it.

    `is_zonal` finds out if the bucket is zonal. It is called if GCS refuses a write as such.
    """
    status = getattr(error, "code", None)
    if type(error).__module__ == "google.api_core.exceptions" and isinstance(status, int):
        return _translate_answer(error, int(status), request, is_zonal)
    rule = TABLE.rule_for_exception(error)
    cause = error.args[0] if rule is REFRESH and error.args else None
    if isinstance(cause, Exception) and type(cause).__name__ == "TransportError":  # only of the metadata server
        status = next((getattr(more, "status", None) for more in cause.args[1:]), None)
        if is_metadata_busy(status):
            error = CredentialSourceError(describe_metadata_server(status))
    if rule is REFRESH and getattr(error, "retryable", False):
        rule = REFRESH_LATER
    translated = translate_exception(error, request, TABLE, library_rule=rule)
    if translated is not None and rule is REFRESH_LATER:
        translated.is_unsent = True
    return translated


def is_about_credentials(error: Exception) -> bool:
    """Return True if a service has refused the credentials, and not only one request with them."""
    if getattr(error, "code", None) == _UNAUTHORIZED:
        return True
    return TABLE.rule_for_exception(error) in (NO_CREDENTIALS, REFRESH) and not getattr(error, "retryable", False)


def is_metadata_busy(status: int | None) -> bool:
    """Return True if a later answer of the metadata server may be another. None stands for no answer.

    https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity#limitations: it refuses connections, or
    answers 404, in a pod's first seconds.
    """
    return status in (None, 404, 408, 429) or (status is not None and status >= shared.SERVER_ERROR)


def describe_metadata_server(status: int | None) -> str:
    """Describe the metadata server and its answer."""
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_ROOT") or "metadata.google.internal"
    answer = "did not answer" if status is None else f"answered with status {status}"
    return f"Google's metadata server at {host} {answer}"


def is_genuine_error(error: Any) -> bool:
    """Return True if a refusal is GCS's own, or says nothing about any object.

    GCS answers with a document of one of its APIs; to a download with plain text, but with headers that it alone sends
    (https://github.com/firebase/firebase-tools/pull/3647 quotes both).
    """
    status = int(error.code)
    if status >= shared.SERVER_ERROR or _REDIRECTION <= status < shared.CLIENT_ERROR or status in shared.SAID_BY_ANYONE:
        return True
    if status < _REDIRECTION:
        return False
    body = str(error.message).encode()
    return has_gcs_headers(getattr(error.response, "headers", {})) or is_json_error(body) or is_xml_error(body)


def has_gcs_headers(headers: Mapping[str, str]) -> bool:
    """Return True if there are headers that GCS alone sends."""
    return any(name.lower().startswith(("x-goog-", "x-guploader-")) for name in headers)


def _translate_answer(error: Any, status: int, request: FailedRequest, is_zonal: Callable[[], bool]) -> StoreError:
    if not is_genuine_error(error):
        content_type = getattr(error.response, "headers", {}).get("Content-Type")
        text = describe_foreign("GCS's", status, content_type, str(error.message).encode())
        return build_error(shared.FOREIGN, request, reason=text)
    reason, detail = _parse_document(error.message)
    rule = BY_REQUEST.get((request.api, status)) or TABLE.rule_for_answer(reason, status)
    if rule in (shared.BAD_REQUEST, shared.NOT_SUPPORTED) and request.api in _WRITES and is_zonal():
        # An object that the service cannot copy from there can perhaps be read.
        rule = ZONAL._replace(error=UnsupportedOperationError) if request.api == "objects.rewrite" else ZONAL
    text = f"{reason} ({status})" if reason else f"status {status}"
    return build_error(rule, request, reason=f"{text}: {detail}" if detail else text)


def _parse_document(text: Any) -> tuple[str, str]:
    """Return GCS's reason and message from an error's body."""
    try:
        details = json.loads(text)["error"]
    except (KeyError, TypeError, ValueError):
        return "", str(text)
    if not isinstance(details, dict):  # OAuth's answers name the error so
        return str(details), ""
    errors = details.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    return str(first.get("reason") or ""), str(details.get("message") or first.get("message") or "")
