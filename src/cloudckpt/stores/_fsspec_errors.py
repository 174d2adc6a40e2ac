"""From the errors of fsspec's file systems to ours. fsspec fixes none, so there are tables.

An error is looked up by its HTTP status, where it carries one (but for the few classes that say more than it does);
else by its class or a class it inherits from; else, for an `OSError`, by its number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from cloudckpt.errors import (
    AccessDeniedError,
    CloudckptError,
    CredentialsError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores.local.errors import ERRNO_TABLE

STATUS_TABLE: dict[int, type[StoreError]] = {
    400: StoreError,
    401: CredentialsError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    405: UnsupportedOperationError,
    408: StoreTimeoutError,
    409: TransientStoreError,
    410: ObjectNotFoundError,
    412: ObjectExistsError,
    416: ShortObjectError,
    429: ThrottledError,
    500: TransientStoreError,
    501: UnsupportedOperationError,
    502: TransientStoreError,
    503: ThrottledError,
    504: StoreTimeoutError,
}

# By name, so that looking an error up imports nothing.
BEFORE_STATUS_TABLE: dict[str, type[StoreError]] = {
    "azure.core.exceptions.ResourceExistsError": ObjectExistsError,  # 409, as much else that passes by itself
}
CLASS_TABLE: dict[str, type[StoreError]] = {
    "aiohttp.client_exceptions.ClientConnectionError": TransientStoreError,
    "aiohttp.client_exceptions.ClientPayloadError": TransientStoreError,
    "asyncio.exceptions.TimeoutError": StoreTimeoutError,
    "azure.core.exceptions.ClientAuthenticationError": CredentialsError,
    "azure.core.exceptions.ServiceRequestError": TransientStoreError,
    "azure.core.exceptions.ServiceResponseError": TransientStoreError,
    "builtins.ConnectionError": TransientStoreError,
    "builtins.EOFError": TransientStoreError,
    "builtins.FileExistsError": ObjectExistsError,
    "builtins.FileNotFoundError": ObjectNotFoundError,
    "builtins.NotImplementedError": UnsupportedOperationError,
    "builtins.PermissionError": AccessDeniedError,
    "builtins.TimeoutError": StoreTimeoutError,
    "ftplib.error_temp": TransientStoreError,
    "google.auth.exceptions.GoogleAuthError": CredentialsError,
    "paramiko.ssh_exception.AuthenticationException": CredentialsError,
    "paramiko.ssh_exception.SSHException": TransientStoreError,
    "requests.exceptions.ConnectionError": TransientStoreError,
    "requests.exceptions.Timeout": StoreTimeoutError,
}

_ADVICE: dict[type[StoreError], str] = {
    AccessDeniedError: "Grant these credentials that operation.",
    CredentialsError: "Configure the client's credentials, or renew them.",
    UnsupportedOperationError: "This file system cannot do that: use another.",
}
_SECRET_WORDS = ("secret", "password", "passwd", "token", "key", "credential", "connection_string", "sas", "cookie")
_SHORTEST_SECRET = 6


def translate(error: Exception, *, key: str, operation: str, options: Mapping[str, Any]) -> StoreError:
    """`error` as a `StoreError`. What `options` says may be secret is blotted out of its text."""
    kind = _kind(error)
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in _secrets(options):
        text = text.replace(secret, "***")
    return kind(f"{operation} {key}: {text}. {_ADVICE.get(kind, '')}".rstrip(), key=key, operation=operation)


@contextlib.contextmanager
def translated(key: str, operation: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn any exception of the block into a `StoreError`."""
    try:
        yield
    except CloudckptError:
        raise
    except Exception as error:
        raise translate(error, key=key, operation=operation, options=options) from error


def _kind(error: Exception) -> type[StoreError]:
    names = [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__]
    for name in names:
        if name in BEFORE_STATUS_TABLE:
            return BEFORE_STATUS_TABLE[name]
    for attribute in ("status", "status_code", "code"):
        status = getattr(error, attribute, None)
        # gcsfs keeps it as text at times
        if isinstance(status, (int, str)) and str(status).isdigit() and int(status) in STATUS_TABLE:
            return STATUS_TABLE[int(status)]
    for name in names:
        if name in CLASS_TABLE:
            return CLASS_TABLE[name]
    if isinstance(error, OSError) and error.errno in ERRNO_TABLE:
        return ERRNO_TABLE[error.errno][0]
    return StoreError


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif (
            isinstance(value, str) and len(value) >= _SHORTEST_SECRET and any(w in name.lower() for w in _SECRET_WORDS)
        ):
            yield value
