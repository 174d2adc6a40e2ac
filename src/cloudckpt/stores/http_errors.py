"""Translate failures over HTTP into cloudckpt's errors.

S3 and GCS share the translator, most rules, and the errors of the network below their SDKs. Each adds an `ErrorTable`.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import ssl
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from cloudckpt._messages import TOO_MANY_FILES
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
    UnsupportedOperationError,
)

_MAX_CHARACTERS = 400
_MAX_QUOTED_BYTES = 60
_PREFIX_CHARACTERS = 12
_MIN_SECRET_CHARACTERS = 6  # shorter ones are dummies, and part of any word


class ErrorRule(NamedTuple):
    """The error to raise, and what to do next.

    ``{bucket}``, ``{credentials}``, ``{endpoint}`` and ``{permission}`` are filled in.
    """

    error: type[StoreError]
    advice: str


ACCOUNT = ErrorRule(AccessDeniedError, "The account or project may not use the store at present. Ask its owner.")
BUCKET = ErrorRule(
    BucketNotFoundError, "Bucket {bucket!r} does not exist at {endpoint}. Create it, or correct its name."
)
NOT_SUPPORTED = ErrorRule(
    UnsupportedOperationError, "This store does not offer the operation, or not with these options."
)
CLOSED = ErrorRule(TransientStoreError, "{endpoint} closed the connection. Try again.")
CONNECT_LATE = ErrorRule(
    StoreTimeoutError,
    "{endpoint} accepted no connection in time. Check endpoint_url and the network.",
)
DENIED = ErrorRule(AccessDeniedError, "Grant {permission} to these credentials.")
EXISTS = ErrorRule(ObjectExistsError, "An object exists at this key already; it was left as it is.")
NO_FREE_FILES = ErrorRule(TransientStoreError, TOO_MANY_FILES)
FOREIGN = ErrorRule(
    TransientStoreError,
    "Is there a proxy or a load balancer in between? Try again; if it persists, check endpoint_url, and what answers "
    "at {endpoint}.",
)
FULL = ErrorRule(StoreError, "The store is full, or its quota used up. Free some space, or raise the quota.")
TOO_LARGE = ErrorRule(
    StoreError, "The object or part is larger than the store takes. Lower object_bytes or part_bytes."
)
TRY_AGAIN = ErrorRule(TransientStoreError, "Try again; if it persists, check the health of {endpoint}.")
NO_OBJECT = ErrorRule(ObjectNotFoundError, "No object exists at this key.")
PROXY = ErrorRule(TransientStoreError, "The proxy did not connect. Check HTTP_PROXY, HTTPS_PROXY and NO_PROXY.")
READ_LATE = ErrorRule(StoreTimeoutError, "{endpoint} made no progress in time. Try again.")
BAD_REQUEST = ErrorRule(
    StoreError, "The store refuses the request as it stands. Check the storage options and the key."
)
TOO_SHORT = ErrorRule(ShortObjectError, "The object ends before the range that was asked for.")
CREDENTIALS_UNREACHED = ErrorRule(
    TransientStoreError,
    "It is asked until timeout_s is over. If it stays so, look into that service, or pass other credentials.",
)
SLOW_DOWN = ErrorRule(ThrottledError, "Send fewer requests: fewer connections, or other key prefixes.")
TLS = ErrorRule(TransientStoreError, "TLS to {endpoint} failed. Check endpoint_url (http or https), and try again.")
UNREACHED = ErrorRule(
    TransientStoreError,
    "No connection to {endpoint}. Check that it runs, the network, and endpoint_url (host, port, http or https).",
)

_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
_NETWORK_RULES = (CLOSED, CONNECT_LATE, PROXY, READ_LATE, TLS, UNREACHED)
_BROKEN_CONNECTIONS = (http.client.HTTPException, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)

SAID_BY_ANYONE = frozenset({407, 408, 413, 429})
"""Statuses below 500 that mean the same from a proxy as from the store. They say nothing about an object."""

CLIENT_ERROR, SERVER_ERROR = 400, 500

STATUSES: Mapping[int, ErrorRule] = {
    403: DENIED,
    404: NO_OBJECT,
    405: NOT_SUPPORTED,
    408: TRY_AGAIN,
    409: TRY_AGAIN,
    412: EXISTS,
    413: TOO_LARGE,
    416: TOO_SHORT,
    429: SLOW_DOWN,
    501: NOT_SUPPORTED,
    507: FULL,
}
"""Rules for codes that a table lacks, and for answers without a body. For others: `TRY_AGAIN` from 500 on, and
`BAD_REQUEST` below."""


def by_name(groups: Sequence[tuple[ErrorRule, str]]) -> dict[str, ErrorRule]:
    """Return a table from each name in the groups' texts to its rule."""
    return {name: rule for rule, names in groups for name in names.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """The request that failed. `secrets` must not be repeated, even if the store's answer does."""

    operation: str
    """The store's method."""
    api: str
    """The request, by the service's name for it."""
    url: str
    bucket: str
    endpoint: str
    permission: str
    """The right that a policy must grant for it."""
    secrets: tuple[str, ...]
    credentials: str = "their source"
    """The source of the credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTable:
    """The errors of one service and of its SDK.

    Classes are named, not imported, so that an SDK that lacks or adds one still works.
    """

    codes: Mapping[str, ErrorRule]
    """By the service's own name of an error."""
    statuses: Mapping[int, ErrorRule]
    exceptions: Mapping[str, ErrorRule]
    """By the name of a class of the SDK. A class without a rule has the rule of its nearest base."""
    packages: frozenset[str]
    """The packages of the SDK."""
    parsers: tuple[str, ...]
    """The beginnings of the names of the modules in which the SDK parses answers."""
    quoted: str
    """The package whose exceptions have texts without headers of requests, and thus without tokens."""
    certificate: ErrorRule
    """For a certificate that is not accepted."""
    configuration: ErrorRule
    """For all other exceptions of the SDK."""

    def rule_for_answer(self, code: str, status: int) -> ErrorRule:
        """Return the rule for an answer of the service."""
        fallback = TRY_AGAIN if status >= SERVER_ERROR else BAD_REQUEST
        return self.codes.get(code) or self.statuses.get(status, fallback)

    def rule_for_exception(self, error: Exception) -> ErrorRule | None:
        """Return the rule for an exception of the SDK; None if it is not of the SDK."""
        names = [cls.__name__ for cls in type(error).__mro__ if cls.__module__.partition(".")[0] in self.packages]
        rules = (self.exceptions[name] for name in names if name in self.exceptions)
        return next(rules, self.configuration) if names else None


class ForeignAnswerError(Exception):
    """An answer that does not come from the store, but from a proxy, a load balancer or another server."""


class CredentialSourceError(Exception):
    """A service that hands out credentials is busy, or not ready yet. The text names it."""


def build_error(rule: ErrorRule, request: FailedRequest, *, reason: str) -> StoreError:
    """Return the error that `rule` asks for."""
    cls, advice = rule
    advice = advice.format(
        bucket=request.bucket,
        credentials=request.credentials,
        endpoint=request.endpoint,
        permission=request.permission,
    )
    if rule is BUCKET and request.bucket != request.bucket.lower():
        advice += " New buckets have no capital letters in their names."
    reason = " ".join(mask(reason, request.secrets).split())
    if len(reason) > _MAX_CHARACTERS:
        reason = f"{reason[:_MAX_CHARACTERS]}…"
    text = f"{request.url}: {request.api} failed: {reason.rstrip('. ')}. {advice}"
    return cls(text, key=request.url, operation=request.operation)


def translate_exception(
    error: Exception, request: FailedRequest, table: ErrorTable, *, library_rule: ErrorRule | None
) -> StoreError | None:
    """Translate an exception without an answer of the store; None if neither network nor configuration raised it.

    `library_rule` is the rule for an exception of the SDK.
    """
    if isinstance(error, ForeignAnswerError):
        return build_error(FOREIGN, request, reason=str(error))
    if isinstance(error, CredentialSourceError):
        failure = build_error(CREDENTIALS_UNREACHED, request, reason=str(error))
        failure.is_unsent = True
        return failure
    rule = library_rule or _network_rule(error)
    if rule in _NETWORK_RULES:
        rule = _refine_network_rule(rule, error, certificate=table.certificate)
    if rule is None and _is_parse_failure(error, table):
        rule = FOREIGN
    if rule is None:
        return None
    name = type(error).__name__
    is_quoted = type(error).__module__.startswith(table.quoted) and not issubclass(rule.error, TransientStoreError)
    # The texts of HTTP errors can hold headers, and with them tokens. The arguments after the first can hold a body.
    if is_quoted and error.args and isinstance(error.args[0], str):
        return build_error(rule, request, reason=f"{name}: {error.args[0]}")
    failure = build_error(rule, request, reason=_network_reason(error) or name)
    failure.is_unsent = rule is NO_FREE_FILES
    return failure


def _is_parse_failure(error: Exception, table: ErrorTable) -> bool:
    """Return True if the SDK failed to parse an answer, which it does for any foreign XML or JSON."""
    if not isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError):
        return False
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.startswith(table.parsers) for module in modules)


def _network_rule(error: Exception) -> ErrorRule | None:
    if isinstance(error, TimeoutError) or type(error).__name__ == "ReadTimeoutError":
        return READ_LATE
    if isinstance(error, ssl.SSLError):
        return TLS
    if isinstance(error, socket.gaierror):
        return UNREACHED
    is_of_urllib3 = any(cls.__module__.partition(".")[0] == "urllib3" for cls in type(error).__mro__)
    if is_of_urllib3 or isinstance(error, http.client.HTTPException | OSError):
        return CLOSED
    return None


def _refine_network_rule(rule: ErrorRule | None, error: Exception, *, certificate: ErrorRule) -> ErrorRule | None:
    chain = list(_causes(error))
    if is_out_of_files(error):
        return NO_FREE_FILES
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in chain):
        return certificate
    # A body that cannot be sent in time appears as a closed connection.
    if rule in (CLOSED, UNREACHED) and any(isinstance(cause, TimeoutError) for cause in chain):
        return READ_LATE
    # requests reports a broken connection as one that was never made.
    if rule is UNREACHED and any(isinstance(cause, _BROKEN_CONNECTIONS) for cause in chain):
        return CLOSED
    return rule


def is_out_of_files(error: Exception) -> bool:
    """Return True if `error` comes from this process's limit of open files."""
    chain = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno in _OUT_OF_FILES for cause in chain):
        return True
    # Looking up a host's name opens files, and does not say that it could not.
    return any(isinstance(cause, socket.gaierror) for cause in chain) and may_open_no_file()


def may_open_no_file() -> bool:
    """Return True if this process has reached its limit of open files."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in _OUT_OF_FILES
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and all errors that caused it, by each link that the libraries keep."""
    visited: set[int] = set()
    pending: list[Any] = [error]
    while pending:
        cause = pending.pop()
        if not isinstance(cause, BaseException) or id(cause) in visited:
            continue
        visited.add(id(cause))
        yield cause
        kwargs = getattr(cause, "kwargs", None)
        inner = kwargs.get("error") if isinstance(kwargs, dict) else None
        pending += [cause.__context__, cause.__cause__, getattr(cause, "reason", None), inner, *cause.args]


def _network_reason(error: Exception) -> str | None:
    """Return why the network failed, without any header or token; None if the network is not the cause."""
    name = type(error).__name__
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return f"{name}: the host's name cannot be resolved"
        if isinstance(cause, ssl.SSLError):
            text = getattr(cause, "verify_message", None) or getattr(cause, "reason", None)
            return f"{name}: {text or 'TLS failed'}"
        if isinstance(cause, OSError) and cause.errno:
            return f"{name}: {os.strerror(cause.errno)}"
    return None


def describe_foreign(whose: str, status: int, content_type: str | None, body: object) -> str:
    """Describe an answer that is not of the kind `whose`. Quotes the beginning of `body` if it is bytes."""
    beginning = f", {body[:_MAX_QUOTED_BYTES]!r}" if isinstance(body, bytes) and body else ""
    return f"the answer is not {whose}: status {status}, {content_type or 'no Content-Type'}{beginning}"


def is_xml_error(body: bytes) -> bool:
    """Return True if `body` is a whole error document with a code, as S3 and GCS's XML API write it."""
    try:
        root = ET.fromstring(body)  # noqa: S314  # as botocore does; expat bounds the growth of entities
    except (ET.ParseError, LookupError, ValueError):  # the last two: an unknown encoding
        return False
    names = {element.tag.rpartition("}")[2] for element in root.iter() if (element.text or "").strip()}
    return root.tag.rpartition("}")[2].startswith("Error") and "Code" in names


def is_json_error(body: bytes) -> bool:
    """Return True if `body` is a whole error document, as GCS's JSON API writes it."""
    try:
        document = json.loads(body)
    except (RecursionError, ValueError):
        return False
    return isinstance(document, dict) and isinstance(document.get("error"), dict | str)


def mask(text: str, secrets: Iterable[str]) -> str:
    """Replace `secrets` in `text`, plain and as in a URL; also the beginning of a long one, as quotes are cut."""
    for secret in secrets:
        if len(secret) >= _MIN_SECRET_CHARACTERS:
            for form in (secret, quote(secret, safe="", errors="replace"), quote(secret, errors="replace")):
                text = text.replace(form, "***")
                if len(form) >= 2 * _PREFIX_CHARACTERS:
                    text = re.sub(rf"{re.escape(form[:_PREFIX_CHARACTERS])}[^\s'\"]*", "***", text)
    return text
