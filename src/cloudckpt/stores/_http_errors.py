"""What an error of an HTTP library may be quoted with, and the message made of it."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

_MOST_CHARACTERS = 400
_MOST_QUOTED_BYTES = 60
_PREFIX_CHARACTERS = 12
_FEWEST_SECRET_CHARACTERS = 6  # shorter ones are dummies, and part of any word


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and all errors that it came from, by whatever link the libraries keep."""
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
    """Why the network failed, in words that hold no header and no token; ``None`` where it was something else."""
    name = type(error).__name__
    for cause in causes(error):
        if isinstance(cause, socket.gaierror):
            return f"{name}: the host's name cannot be resolved"
        if isinstance(cause, ssl.SSLError):
            words = getattr(cause, "verify_message", None) or getattr(cause, "reason", None)
            return f"{name}: {words or 'TLS failed'}"
        if isinstance(cause, OSError) and cause.errno:
            return f"{name}: {os.strerror(cause.errno)}"
    return None


class ForeignAnswerError(Exception):
    """An answer that the store itself never gives. A proxy, a load balancer or another server has given it."""


def foreign_words(whose: str, status: int, content_type: str | None, body: object) -> str:
    """The words for an answer that is not of `whose` kind. `body` is quoted where it is there as bytes."""
    begins = f", {body[:_MOST_QUOTED_BYTES]!r}" if isinstance(body, bytes) and body else ""
    return f"the answer is not {whose}: status {status}, {content_type or 'no Content-Type'}{begins}"


def is_xml_error(body: bytes) -> bool:
    """Whether `body` is a whole error document with a code, as S3 and GCS's XML API write it."""
    try:
        root = ET.fromstring(body)  # noqa: S314  # as botocore does; expat bounds what entities grow to
    except (ET.ParseError, LookupError, ValueError):  # the last two: an encoding that is none
        return False
    names = {element.tag.rpartition("}")[2] for element in root.iter() if (element.text or "").strip()}
    return root.tag.rpartition("}")[2].startswith("Error") and "Code" in names


def is_json_error(body: bytes) -> bool:
    """Whether `body` is a whole error document, as GCS's JSON API writes it."""
    try:
        document = json.loads(body)
    except (RecursionError, ValueError):
        return False
    return isinstance(document, dict) and isinstance(document.get("error"), dict | str)


def masked(text: str, secrets: Iterable[str]) -> str:
    """`text` without `secrets`, as they are and as they stand in a URL; without a beginning of a long one, too, since
    what a store says is quoted in part.
    """
    for secret in secrets:
        if len(secret) >= _FEWEST_SECRET_CHARACTERS:
            for form in (secret, quote(secret, safe=""), quote(secret)):
                text = text.replace(form, "***")
                if len(form) >= 2 * _PREFIX_CHARACTERS:
                    text = re.sub(rf"{re.escape(form[:_PREFIX_CHARACTERS])}[^\s'\"]*", "***", text)
    return text


def message(*, url: str, api: str, reason: str, advice: str, secrets: Iterable[str]) -> str:
    """What failed, why, and what to do next; in bounds, and without `secrets` even if `reason` repeats them."""
    reason = " ".join(masked(reason, secrets).split())
    if len(reason) > _MOST_CHARACTERS:
        reason = f"{reason[:_MOST_CHARACTERS]}…"
    return f"{url}: {api} failed: {reason.rstrip('. ')}. {advice}"
