"""The errors of the file systems of fsspec.

fsspec fixes no errors. Each is looked up by its HTTP status if it has one (except for a few classes that say more),
else by its class or a base of it, else, for an `OSError`, by its number. A `FileNotFoundError` that another error has
caused counts as that error: some file systems raise it for every failure.
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

# By name, so that a lookup imports nothing.
BEFORE_STATUS_TABLE: dict[str, type[StoreError]] = {
    "azure.core.exceptions.ResourceExistsError": ObjectExistsError,  # 409, like errors that pass
}
CLASS_TABLE: dict[str, type[StoreError]] = {
    "aiohttp.client_exceptions.ClientConnectionError": TransientStoreError,
    "aiohttp.client_exceptions.ClientPayloadError": TransientStoreError,
    "aiohttp.client_exceptions.ClientResponseError": TransientStoreError,
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
    "http.client.HTTPException": TransientStoreError,
    "json.decoder.JSONDecodeError": TransientStoreError,
    "paramiko.ssh_exception.AuthenticationException": CredentialsError,
    "paramiko.ssh_exception.SSHException": TransientStoreError,
    "requests.exceptions.ChunkedEncodingError": TransientStoreError,
    "requests.exceptions.ConnectionError": TransientStoreError,
    "requests.exceptions.ContentDecodingError": TransientStoreError,
    "requests.exceptions.Timeout": StoreTimeoutError,
    "ssl.SSLError": TransientStoreError,
    "urllib3.exceptions.HTTPError": TransientStoreError,
    "xml.etree.ElementTree.ParseError": TransientStoreError,
}
# Behind a `FileNotFoundError`, these say no more than it does: a name that is in no table, no listing, no folder.
_OF_ABSENCE = ("builtins.LookupError", "builtins.StopIteration", "ftplib.error_perm")

_ADVICE: dict[type[StoreError], str] = {
    AccessDeniedError: "Grant these credentials that operation.",
    CredentialsError: "Configure the client's credentials, or renew them.",
    UnsupportedOperationError: "This file system cannot do that: use another.",
}
_SECRET_WORDS = ("secret", "password", "passwd", "token", "key", "credential", "connection_string", "sas", "cookie")
_SHORTEST_SECRET = 6


def translate(error: Exception, *, key: str, operation: str, options: Mapping[str, Any]) -> StoreError:
    """Return `error` as a `StoreError`, without the values of `options` that may be secret."""
    kind = _kind(error)
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in _secrets(options):
        text = text.replace(secret, "***")
    return kind(f"{operation} {key}: {text}. {_ADVICE.get(kind, '')}".rstrip(), key=key, operation=operation)


@contextlib.contextmanager
def translated(key: str, operation: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Translate every exception of the block into a `StoreError`."""
    try:
        yield
    except CloudckptError:
        raise
    except Exception as error:
        raise translate(error, key=key, operation=operation, options=options) from error


def says_absence(error: FileNotFoundError) -> bool:
    """Return True if `error` says that nothing exists, and not that something failed on the way to it."""
    return _kind(error) is ObjectNotFoundError


def _kind(error: BaseException) -> type[StoreError]:
    names = [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__]
    for name in names:
        if name in BEFORE_STATUS_TABLE:
            return BEFORE_STATUS_TABLE[name]
    for status in _statuses(error):
        # gcsfs keeps it as text at times
        if isinstance(status, (int, str)) and str(status).isdigit() and int(status) in STATUS_TABLE:
            return STATUS_TABLE[int(status)]
    # An error with a number is the operating system's. A context, unlike a cause, may be unrelated.
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and error.errno is None and cause is not None:
        is_absence = any(f"{base.__module__}.{base.__qualname__}" in _OF_ABSENCE for base in type(cause).__mro__)
        return ObjectNotFoundError if is_absence else _kind(cause)
    for name in names:
        if name in CLASS_TABLE:
            return CLASS_TABLE[name]
    if isinstance(error, OSError):
        return TransientStoreError if error.errno is None else ERRNO_TABLE.get(error.errno, (StoreError,))[0]
    return StoreError


def _statuses(error: BaseException) -> Iterator[object]:
    response = getattr(error, "response", None)
    for bearer in (error, response):
        yield from (getattr(bearer, attribute, None) for attribute in ("status", "status_code", "code"))


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif (
            isinstance(value, str) and len(value) >= _SHORTEST_SECRET and any(w in name.lower() for w in _SECRET_WORDS)
        ):
            yield value
