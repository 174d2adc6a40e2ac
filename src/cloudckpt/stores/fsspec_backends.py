"""The file systems of fsspec: their abilities, their instances and their errors.

fsspec promises neither atomic writes nor create-if-absent, but some of its file systems do both. The first table says
which; a file system that it does not name is taken to do neither. Nor does fsspec fix any errors: each is looked up by
its HTTP status if it has one (except for a few classes that say more), else by its class or a base of it, else, for an
`OSError`, by its number. A `FileNotFoundError` that another error has caused counts as that error: some file systems
raise it for every failure.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec

from cloudckpt.errors import (
    AccessDeniedError,
    CloudckptError,
    CredentialsError,
    MissingDependencyError,
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

Filesystem = Any  # fsspec.spec.AbstractFileSystem, whose methods have no types


class Create(enum.Enum):
    """The ways to create an object only if it is absent."""

    NO = "there is none"
    LOCK = "look and write under a lock of this process, beyond which the file system does not reach"
    OVERWRITE = "pipe_file(overwrite=False), which sends the condition with the request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The abilities of one protocol, beyond what fsspec promises."""

    create: Create = Create.NO
    pipes_whole: bool = False
    """`pipe_file` makes the object visible whole or not at all."""
    locked: bool = False
    """Its calls may not run side by side."""


_BACKENDS = {
    "memory": Backend(create=Create.LOCK, pipes_whole=True, locked=True),
    # Put Blob with If-None-Match: *; above 64 MiB, blocks that Put Block List makes an object of, with that condition.
    "abfs": Backend(create=Create.OVERWRITE, pipes_whole=True),
    "az": Backend(create=Create.OVERWRITE, pipes_whole=True),
}


def backend_of(kind: type[Filesystem]) -> Backend:
    """Return the table's entry for a class of file systems, without what its installed version lacks."""
    protocols = (kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol
    found = next((_BACKENDS[protocol] for protocol in protocols if protocol in _BACKENDS), Backend())
    if found.create is Create.OVERWRITE and not _takes(kind, "overwrite"):
        return Backend(pipes_whole=found.pipes_whole, locked=found.locked)
    return found


def _takes(kind: type[Filesystem], parameter: str) -> bool:
    # A file system writes the coroutine itself; the method of that name is made from it.
    method = getattr(kind, "_pipe_file", None) or kind.pipe_file
    return parameter in inspect.signature(method).parameters


@contextlib.contextmanager
def _importing(protocol: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(f"{protocol}:// needs a package that is not installed: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The class and the arguments of a file system, to make instances in any process and thread. Hides its options."""

    kind: type[Filesystem]
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_protocol(cls, protocol: str, options: Mapping[str, Any]) -> Source:
        """Return the source for a protocol. Raises `MissingDependencyError` if its package is not installed."""
        with _importing(protocol):
            kind = fsspec.get_filesystem_class(protocol)
        return cls(kind=kind, options=dict(options))

    @classmethod
    def of_instance(cls, filesystem: Filesystem) -> Source:
        """Return the source of instances that equal `filesystem`: fsspec takes two with the same arguments for one."""
        return cls(kind=type(filesystem), args=tuple(filesystem.storage_args), options=dict(filesystem.storage_options))

    def new(self) -> Filesystem:
        """Make an instance that shares nothing with other users of fsspec, and caches no listings if it can.

        Raises `MissingDependencyError`: some file systems import their package only now.
        """
        options = {**self.options, "skip_instance_cache": True}
        takes = inspect.signature(self.kind.__init__).parameters.values()
        if any(taken.kind is taken.VAR_KEYWORD or taken.name == "use_listings_cache" for taken in takes):
            options["use_listings_cache"] = False
        protocol = self.kind.protocol
        with _importing(protocol if isinstance(protocol, str) else protocol[0]):
            return self.kind(*self.args, **options)


class Instances:
    """The instances of one file system: one for all threads if it is asynchronous, else one for each thread.

    Most synchronous file systems hold one connection, which two threads cannot share.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._shared: Filesystem = None
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[type[Instances], tuple[Source]]:
        return Instances, (self.source,)

    def get(self) -> Filesystem:
        """Return the calling thread's instance."""
        if not self.source.kind.async_impl:
            if not hasattr(self._of_thread, "instance"):
                self._of_thread.instance = self.source.new()
            return self._of_thread.instance
        with self._lock:
            if self._shared is None:
                self._shared = self.source.new()
            return self._shared


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
    "botocore.exceptions.ConnectionError": TransientStoreError,
    "botocore.exceptions.HTTPClientError": TransientStoreError,
    "botocore.parsers.ResponseParserError": TransientStoreError,
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
    if isinstance(response, Mapping):  # botocore's
        yield response.get("ResponseMetadata", {}).get("HTTPStatusCode")


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif (
            isinstance(value, str) and len(value) >= _SHORTEST_SECRET and any(w in name.lower() for w in _SECRET_WORDS)
        ):
            yield value
