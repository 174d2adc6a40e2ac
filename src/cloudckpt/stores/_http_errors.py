"""What an error of an HTTP library may be quoted with, and the message made of it."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable, Iterator
from typing import Any

_MOST_CHARACTERS = 400
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


def message(*, url: str, api: str, reason: str, advice: str, secrets: Iterable[str]) -> str:
    """What failed, why, and what to do next; in bounds, and without `secrets` even if `reason` repeats them."""
    for secret in secrets:
        if len(secret) >= _FEWEST_SECRET_CHARACTERS:
            reason = reason.replace(secret, "***")
    reason = " ".join(reason.split())
    if len(reason) > _MOST_CHARACTERS:
        reason = f"{reason[:_MOST_CHARACTERS]}…"
    return f"{url}: {api} failed: {reason.rstrip('. ')}. {advice}"
