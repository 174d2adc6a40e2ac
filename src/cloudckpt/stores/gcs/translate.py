"""From an error of Google's libraries, or of the HTTP library below them, to one of cloudckpt's."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import StoreError
from cloudckpt.stores import _http_rules as rules
from cloudckpt.stores._http_errors import (
    ForeignAnswerError,
    causes,
    foreign_words,
    is_json_error,
    is_xml_error,
    message,
    network_reason,
)
from cloudckpt.stores.gcs import errors as table

_REDIRECTION, _CLIENT_ERROR, _SERVER_ERROR = 300, 400, 500
_STUMBLES = ("google.api_core.", "google.cloud.")
_LIBRARIES = {
    "google.api_core.exceptions": "api_core",
    "google.auth.exceptions": "auth",
    "requests.exceptions": "requests",
}
_OF_THE_NETWORK = (rules.CLOSED, rules.UNREACHED, rules.TLS, rules.READ_LATE, rules.CONNECT_LATE, rules.PROXY)

PERMISSIONS: Mapping[str, str] = {
    "objects.compose": "storage.objects.create and storage.objects.get (storage.objects.delete to replace an object)",
    "objects.delete": "storage.objects.delete",
    "objects.get": "storage.objects.get",
    "objects.insert": "storage.objects.create (storage.objects.delete too, to replace an object)",
    "objects.list": "storage.objects.list",
    "objects.rewrite": "storage.objects.create and storage.objects.get (storage.objects.delete to replace an object)",
}
"""What IAM calls the right to make each request that this store makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was being asked, of whom, when it failed."""

    operation: str
    """The store's method."""
    api: str
    """The method of the JSON API."""
    url: str
    bucket: str
    endpoint: str
    permission: str
    """What a policy must grant for it."""
    secrets: tuple[str, ...]
    """What must not be repeated, even if the store's answer does."""


def translate(error: Exception, request: Request) -> StoreError | None:
    """What to raise for `error`; ``None`` where neither store, network nor configuration caused it."""
    status = getattr(error, "code", None)
    if _library(error) == "api_core" and isinstance(status, int):
        if not is_gcss(error):
            return built(rules.FOREIGN, request, reason=_foreign_words(error))
        reason, detail = _answer(error)
        words = f"{reason} ({int(status)})" if reason else f"status {int(status)}"
        rule = rule_for_answer(request.api, int(status), reason)
        return built(rule, request, reason=f"{words}: {detail}" if detail else words)
    if isinstance(error, ForeignAnswerError):
        return built(rules.FOREIGN, request, reason=str(error))
    found = _rule_for_exception(error)
    if found is None and _raised_by_google(error):
        found = rules.FOREIGN
    return None if found is None else built(found, request, reason=_reason(error, found))


def is_gcss(error: Any) -> bool:
    """Whether an answer that was refused is GCS's own, or one that says nothing of any object.

    GCS answers with a document of one of its APIs; to a download with plain text, but with headers that it alone sends
    (https://github.com/firebase/firebase-tools/pull/3647 quotes both).
    """
    status = int(error.code)
    if status >= _SERVER_ERROR or _REDIRECTION <= status < _CLIENT_ERROR or status in rules.SAID_BY_ANYONE:
        return True
    if status < _REDIRECTION:
        return False
    body = str(error.message).encode()
    return has_gcss_headers(getattr(error.response, "headers", {})) or is_json_error(body) or is_xml_error(body)


def has_gcss_headers(headers: Mapping[str, str]) -> bool:
    """Whether there are headers that GCS alone sends."""
    return any(name.lower().startswith(("x-goog-", "x-guploader-")) for name in headers)


def _foreign_words(error: Any) -> str:
    headers = getattr(error.response, "headers", {})
    return foreign_words("GCS's", int(error.code), headers.get("Content-Type"), str(error.message).encode())


def rule_for_answer(api: str, status: int, reason: str) -> rules.Rule:
    """The rule for an answer to `api` with an HTTP `status` and GCS's `reason`, which may be unknown to the table."""
    fallback = rules.LATER if status >= _SERVER_ERROR else rules.REQUEST
    return table.OF_API.get((api, status)) or table.REASONS.get(reason) or table.STATUSES.get(status, fallback)


def built(rule: rules.Rule, request: Request, *, reason: str) -> StoreError:
    """The error that `rule` asks for."""
    cls, advice = rule
    advice = advice.format(bucket=request.bucket, endpoint=request.endpoint, permission=request.permission)
    words = message(url=request.url, api=request.api, reason=reason, advice=advice, secrets=request.secrets)
    return cls(words, key=request.url, operation=request.operation)


def _answer(error: Any) -> tuple[str, str]:
    """GCS's reason and message, out of the answer's body."""
    text = error.message
    try:
        found = json.loads(text)["error"]
    except (KeyError, TypeError, ValueError):
        return "", str(text)
    if not isinstance(found, dict):  # OAuth's answers name the error so
        return str(found), ""
    errors = found.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    return str(first.get("reason") or ""), str(found.get("message") or first.get("message") or "")


def _rule_for_exception(error: Exception) -> rules.Rule | None:
    rule = _rule_for_library(error)
    if rule in _OF_THE_NETWORK:
        chain = list(causes(error))
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in chain):
            return table.CERTIFICATE
        # A body that cannot be sent in time surfaces as a closed connection.
        timed_out = any(isinstance(cause, TimeoutError) for cause in chain)
        if rule in (rules.CLOSED, rules.UNREACHED) and timed_out:
            return rules.READ_LATE
        # requests calls a connection that broke off one that was never made.
        if rule is rules.UNREACHED and any(isinstance(cause, _BROKEN) for cause in chain):
            return rules.CLOSED
    return rule


_BROKEN = (http.client.HTTPException, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


def _rule_for_library(error: Exception) -> rules.Rule | None:
    if _library(error) is not None:
        names = (f"{_LIBRARIES.get(cls.__module__)}.{cls.__name__}" for cls in type(error).__mro__)
        rule = next((table.EXCEPTIONS[name] for name in names if name in table.EXCEPTIONS), table.CONFIG)
        return table.REFRESH_LATER if rule is table.REFRESH and getattr(error, "retryable", False) else rule
    modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    if isinstance(error, TimeoutError) or type(error).__name__ == "ReadTimeoutError":
        return rules.READ_LATE
    if isinstance(error, ssl.SSLError):
        return rules.TLS
    if isinstance(error, socket.gaierror):
        return rules.UNREACHED
    if "urllib3" in modules or isinstance(error, http.client.HTTPException | OSError):
        return rules.CLOSED
    return None


def _library(error: Exception) -> str | None:
    return next((_LIBRARIES[cls.__module__] for cls in type(error).__mro__ if cls.__module__ in _LIBRARIES), None)


def _raised_by_google(error: Exception) -> bool:
    """Whether the library stumbled over an answer: its own code takes any JSON for GCS's."""
    if not isinstance(error, AttributeError | LookupError | TypeError | ValueError):
        return False
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith(_STUMBLES)


def _reason(error: Exception, rule: rules.Rule) -> str:
    """Why, in safe words: the texts of HTTP errors can hold headers, and with them tokens."""
    name = type(error).__name__
    if rule in (table.NO_CREDENTIALS, table.REFRESH):
        # The first argument says why; what follows it is the answer's body.
        return f"{name}: {error.args[0]}" if error.args and isinstance(error.args[0], str) else name
    return network_reason(error) or name
