"""Translate failures over HTTP into cloudckpt's errors.

S3 and GCS share the rules, the words and the errors of the network below their SDKs. Each adds a table of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    TransientStoreError,
    UnsupportedOperationError,
)

_MOST_CHARACTERS = 400
_MOST_QUOTED_BYTES = 60
_PREFIX_CHARACTERS = 12
_FEWEST_SECRET_CHARACTERS = 6  # shorter ones are dummies, and part of any word


class Rule(NamedTuple):
    """The error to raise, and what to do next; ``{bucket}``, ``{endpoint}`` and ``{permission}`` are filled in."""

    error: type[StoreError]
    advice: str


BUCKET = Rule(BucketNotFoundError, "Bucket {bucket!r} does not exist at {endpoint}. Create it, or correct its name.")
CANNOT = Rule(UnsupportedOperationError, "This store does not offer the operation, or not with these options.")
CLOSED = Rule(TransientStoreError, "{endpoint} closed the connection. Try again.")
CONNECT_LATE = Rule(
    StoreTimeoutError,
    "{endpoint} accepted no connection in time. Check endpoint_url and the network.",
)
DENIED = Rule(AccessDeniedError, "Grant {permission} to these credentials.")
EXISTS = Rule(ObjectExistsError, "An object exists at this key already; it was left as it is.")
FOREIGN = Rule(
    TransientStoreError,
    "Is a proxy or a load balancer between? Try again; if it goes on, check endpoint_url, and what answers at "
    "{endpoint}.",
)
LATER = Rule(TransientStoreError, "Try again; if it goes on, look into what {endpoint} says.")
NOTHING = Rule(ObjectNotFoundError, "No object exists at this key.")
PROXY = Rule(TransientStoreError, "The proxy did not connect. Check HTTP_PROXY, HTTPS_PROXY and NO_PROXY.")
READ_LATE = Rule(StoreTimeoutError, "{endpoint} made no progress in time. Try again.")
REQUEST = Rule(StoreError, "The store refuses the request as it stands. Check the storage options and the key.")
SHORT = Rule(ShortObjectError, "The object ends before the range that was asked for.")
TLS = Rule(TransientStoreError, "TLS to {endpoint} failed. Check endpoint_url (http or https), and try again.")
UNREACHED = Rule(
    TransientStoreError,
    "No connection to {endpoint}. Check that it runs, the network, and endpoint_url (host, port, http or https).",
)

NETWORK_RULES = (CLOSED, CONNECT_LATE, PROXY, READ_LATE, TLS, UNREACHED)
_BROKEN_CONNECTIONS = (http.client.HTTPException, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)

SAID_BY_ANYONE = frozenset({407, 408, 413, 429})
"""Statuses below 500 that mean the same from a proxy. None of them says anything about an object."""


def by_name(groups: Sequence[tuple[Rule, str]]) -> dict[str, Rule]:
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


class ForeignAnswerError(Exception):
    """An answer that the store itself never gives, but a proxy, a load balancer or another server does."""


def build_error(rule: Rule, request: FailedRequest, *, reason: str) -> StoreError:
    """Return the error that `rule` asks for."""
    cls, advice = rule
    advice = advice.format(bucket=request.bucket, endpoint=request.endpoint, permission=request.permission)
    reason = " ".join(mask(reason, request.secrets).split())
    if len(reason) > _MOST_CHARACTERS:
        reason = f"{reason[:_MOST_CHARACTERS]}…"
    text = f"{request.url}: {request.api} failed: {reason.rstrip('. ')}. {advice}"
    return cls(text, key=request.url, operation=request.operation)


def translate_exception(
    error: Exception,
    request: FailedRequest,
    *,
    library_rule: Rule | None,
    certificate: Rule,
    describe: Callable[[Exception, Rule], str],
    is_of_parsing: Callable[[Exception], bool],
) -> StoreError | None:
    """Translate an exception that carries no answer of the store; None if neither network nor configuration raised it.

    Args:
        error: The exception.
        request: The request that raised it.
        library_rule: The rule of the SDK's own table, if the exception is of the SDK.
        certificate: The rule for a certificate that is not accepted.
        describe: Returns the reason, in words that hold no header and no token.
        is_of_parsing: Returns True if the SDK failed to parse an answer.

    """
    if isinstance(error, ForeignAnswerError):
        return build_error(FOREIGN, request, reason=str(error))
    rule = library_rule or _network_rule(error)
    if rule in NETWORK_RULES:
        rule = _refine_network_rule(rule, error, certificate=certificate)
    if rule is None and is_of_parsing(error):
        rule = FOREIGN
    if rule is None:
        return None
    return build_error(rule, request, reason=describe(error, rule))


def _network_rule(error: Exception) -> Rule | None:
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


def _refine_network_rule(rule: Rule | None, error: Exception, *, certificate: Rule) -> Rule | None:
    chain = list(_causes(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in chain):
        return certificate
    # A body that cannot be sent in time appears as a closed connection.
    if rule in (CLOSED, UNREACHED) and any(isinstance(cause, TimeoutError) for cause in chain):
        return READ_LATE
    # requests reports a broken connection as one that was never made.
    if rule is UNREACHED and any(isinstance(cause, _BROKEN_CONNECTIONS) for cause in chain):
        return CLOSED
    return rule


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and all errors that it came from, by each link that the libraries keep."""
    seen: set[int] = set()
    pending: list[Any] = [error]
    while pending:
        cause = pending.pop()
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        kwargs = getattr(cause, "kwargs", None)
        inner = kwargs.get("error") if isinstance(kwargs, dict) else None
        pending += [cause.__context__, cause.__cause__, getattr(cause, "reason", None), inner, *cause.args]


def network_reason(error: Exception) -> str | None:
    """Return why the network failed, without any header or token; None if it was something else."""
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
    """Describe an answer that is not of `whose` kind. Quotes the beginning of `body` if it is bytes."""
    beginning = f", {body[:_MOST_QUOTED_BYTES]!r}" if isinstance(body, bytes) and body else ""
    return f"the answer is not {whose}: status {status}, {content_type or 'no Content-Type'}{beginning}"


def is_xml_error(body: bytes) -> bool:
    """Return True if `body` is a whole error document with a code, as S3 and GCS's XML API write it."""
    try:
        root = ET.fromstring(body)  # noqa: S314  # as botocore does; expat bounds what entities grow to
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
    """Replace `secrets` in `text`, plain and as in a URL; the beginning of a long one too, since quotes are cut."""
    for secret in secrets:
        if len(secret) >= _FEWEST_SECRET_CHARACTERS:
            for form in (secret, quote(secret, safe=""), quote(secret)):
                text = text.replace(form, "***")
                if len(form) >= 2 * _PREFIX_CHARACTERS:
                    text = re.sub(rf"{re.escape(form[:_PREFIX_CHARACTERS])}[^\s'\"]*", "***", text)
    return text
