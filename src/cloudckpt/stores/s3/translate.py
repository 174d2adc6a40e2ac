"""From an error of boto3, or of the HTTP library below it, to one of cloudckpt's."""

from __future__ import annotations

import http.client
import socket
import ssl
import traceback
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import AccessDeniedError, StoreError, TransientStoreError
from cloudckpt.stores import _http_rules as rules
from cloudckpt.stores._http_errors import ForeignAnswerError, causes, message, network_reason
from cloudckpt.stores.s3 import errors as table

_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_OF_ONE_REQUEST = frozenset({"abort_multipart", "complete_multipart", "create_multipart", "put", "upload_part"})
"""The methods that write, whose refused request is not one of several, of which others were carried out."""

_LISTINGS = frozenset({"ListMultipartUploads", "ListObjectsV2"})

PERMISSIONS: dict[str, str] = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CopyObject": "s3:GetObject and s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket",
    "ListParts": "s3:ListMultipartUploadParts",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "UploadPartCopy": "s3:GetObject and s3:PutObject",
}
"""What IAM calls the right to make each request that this store makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was being asked, of whom, when it failed."""

    operation: str
    """The store's method."""
    api: str
    """The S3 operation, as the model names it."""
    url: str
    bucket: str
    endpoint: str
    permission: str
    """What a policy must grant for it."""
    secrets: tuple[str, ...]
    """What must not be repeated, even if the store's answer does."""


def translate(error: Exception, request: Request) -> StoreError | None:
    """What to raise for `error`; ``None`` where neither store, network nor configuration caused it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict) and ("Error" in response or "ResponseMetadata" in response):
        code, status, detail = _answer(response)
        rule = rule_for_answer(code, status)
        if rule in (rules.NOTHING, rules.SHORT) and request.api in _LISTINGS:
            rule = rules.FOREIGN  # it speaks of one object, and the request names none
        reason = f"{code} ({status})" if code != str(status) else f"status {status}"
        failure = _build(rule, request, reason=f"{reason}: {detail}" if detail else reason)
        # A code of S3's own and not a proxy's, for what the client did or may not do: a quota is used up, say.
        is_refused = code in table.CODES and _CLIENT_ERROR <= status < _SERVER_ERROR
        is_known = request.operation in _OF_ONE_REQUEST and not isinstance(failure, TransientStoreError)
        failure.had_no_effect = is_refused and is_known
        return failure
    if isinstance(error, ForeignAnswerError):
        return _build(rules.FOREIGN, request, reason=str(error))
    found = _rule_for_exception(error)
    if found is None and _is_of_parsing(error):
        found = rules.FOREIGN
    return None if found is None else _build(found, request, reason=_reason(error))


def translate_code(code: str, detail: str, request: Request) -> StoreError:
    """What to raise for one key's error in an answer that covers many."""
    return _build(rule_for_answer(code, 0), request, reason=f"{code}: {detail}")


def rule_for_answer(code: str, status: int) -> rules.Rule:
    """The rule for an answer with an error's `code` and HTTP `status`; either may be unknown to the table."""
    fallback = rules.LATER if status >= _SERVER_ERROR else rules.REQUEST
    return table.CODES.get(code) or table.STATUSES.get(status, fallback)


def _answer(response: dict[str, Any]) -> tuple[str, int, str]:
    error = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(error.get("Code", "") or status)
    if not status and code.isdigit():
        status = int(code)
    detail = str(error.get("Message", "") or "")
    # What botocore writes where there is no body says less than the code itself.
    bare = ("Not Found", "Forbidden", "Bad Request", "Moved Permanently", "Unknown")
    return code, int(status), "" if detail in bare else detail


def _rule_for_exception(error: Exception) -> rules.Rule | None:
    rule = _rule_for_module(error)
    if rule in (rules.UNREACHED, rules.CLOSED, rules.TLS):
        chain = list(causes(error))
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in chain):
            return table.CERTIFICATE
        # A body that cannot be sent in time surfaces as a closed connection.
        if rule is rules.CLOSED and any(isinstance(cause, TimeoutError) for cause in chain):
            return rules.READ_LATE
        # The HTTP library wraps its errors of broken answers, in whose chains a ValueError is common; bare, it is a
        # header that cannot be sent, so credentials with a line break.
        if rule is rules.CLOSED and type(getattr(error, "kwargs", {}).get("error")) is ValueError:
            return table.CONFIG
    return rule


def _is_of_parsing(error: Exception) -> bool:
    """Whether botocore stumbled over an answer: it takes any XML, and any header, for S3's."""
    if not isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError):
        return False
    modules = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module in ("botocore.handlers", "botocore.parsers") for module in modules)


def _rule_for_module(error: Exception) -> rules.Rule | None:
    modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    if "botocore" in modules or "boto3" in modules:
        names = (cls.__name__ for cls in type(error).__mro__)
        return next((table.EXCEPTIONS[name] for name in names if name in table.EXCEPTIONS), table.CONFIG)
    if isinstance(error, TimeoutError) or type(error).__name__ == "ReadTimeoutError":
        return rules.READ_LATE
    if isinstance(error, ssl.SSLError):
        return rules.TLS
    if isinstance(error, socket.gaierror):
        return rules.UNREACHED
    if "urllib3" in modules or isinstance(error, http.client.HTTPException | OSError):
        return rules.CLOSED
    return None


def _reason(error: Exception) -> str:
    """Why, in safe words: the texts of HTTP errors can hold headers, and with them tokens."""
    words = network_reason(error)
    if words is not None:
        return words
    name = type(error).__name__
    if _rule_for_module(error) in (
        rules.CLOSED,
        rules.UNREACHED,
        rules.TLS,
        rules.READ_LATE,
        rules.CONNECT_LATE,
    ):
        return name
    return f"{name}: {error}"


def _build(rule: rules.Rule, request: Request, *, reason: str) -> StoreError:
    cls, advice = rule
    advice = advice.format(
        bucket=request.bucket,
        endpoint=request.endpoint,
        permission=request.permission,
    )
    if cls is AccessDeniedError and request.api in ("GetObject", "HeadObject"):
        advice += " Without s3:ListBucket on the bucket, S3 also answers so for a key at which nothing lies."
    words = message(url=request.url, api=request.api, reason=reason, advice=advice, secrets=request.secrets)
    return cls(words, key=request.url, operation=request.operation)
