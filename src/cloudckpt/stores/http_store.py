"""The half of a store that S3 and GCS share: keys, reads, checks of answers, and the order of deletions."""

from __future__ import annotations

import abc
import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from typing_extensions import Self

from cloudckpt.errors import (
    CredentialsError,
    InterruptedReadError,
    ShortObjectError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores import probe
from cloudckpt.stores.base import Capabilities, Store, Views, check_key, check_size, num_bytes
from cloudckpt.stores.http_body import BodyEndedError, ResponseBody
from cloudckpt.stores.http_clients import ClientCache, ClientKey
from cloudckpt.stores.http_errors import NO_FREE_FILES, FailedRequest, build_error, mask, may_open_no_file
from cloudckpt.uri import Location

_MAX_NAME_CHARACTERS = 200
_LISTINGS = ("list", "list_directories", "list_uploads")
_MAX_PER_ROW = 1000  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
_MIN_PER_ROW = 17
_BETWEEN = (
    "Is there a proxy or a load balancer in between? Try again; if it persists, use another store or another route to "
    "it."
)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


class HTTPSession(abc.ABC):
    """Requests about one bucket. Safe to share between threads; can be pickled."""

    scheme: ClassVar[str]
    service: ClassVar[str]
    get_api: ClassVar[str]
    """The service's name for the request that reads an object."""
    cache: ClassVar[ClientCache[Any, Any]]

    def __init__(self, bucket: str, client_key: ClientKey[Any]) -> None:
        self.bucket = bucket
        self.client_key = client_key
        self._client: Any = None
        self._former_secrets: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[Self], tuple[str, ClientKey[Any]]]:
        return type(self), (self.bucket, self.client_key)

    def client(self) -> Any:
        """Return the client. Raises the SDK's errors if its configuration cannot be used."""
        client = self._client
        if client is None or client.is_refused:
            self._former_secrets = () if client is None else client.secrets
            self._client = client = self.cache.client_for(self.client_key)
        return client

    def client_after(self, error: Exception, client: Any) -> Any:
        """Return a client with new credentials, if the service refused those of `client` and new ones are found.

        Raises `error` otherwise.
        """
        translated = self.translate(error, "", self.get_api, "")
        successor = self.cache.replace(client, self.client_key) if isinstance(translated, CredentialsError) else None
        if successor is None:
            raise error
        return self.client()

    def endpoint_url(self, operation: str) -> str:
        """Return the address of the service. Raises `StoreError` if the SDK's configuration cannot be used."""
        with self.translation(operation, self.get_api, ""):
            return str(self.client().endpoint_url)

    def url(self, key: str) -> str:
        """Return the full address of `key`, a key of the bucket."""
        return f"{self.scheme}://{self.bucket}/{key}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that no message may show."""
        source = self.client_key.config if self._client is None else self._client
        return (*source.secrets, *self._former_secrets)

    def failed_request(self, operation: str, api: str, key: str, *, secrets: tuple[str, ...] = ()) -> FailedRequest:
        """Describe the request `api` about `key`, for an error. `secrets` are further secrets of this request."""
        if operation in _LISTINGS:  # the user gave the folder, and knows no prefix of names in it
            key = key.rpartition("/")[0]
        endpoint = self.client_key.config.endpoint_url or self.service
        return FailedRequest(
            operation=operation,
            api=api,
            url=self.url(key).rstrip("/"),
            bucket=self.bucket,
            endpoint=endpoint if self._client is None else self._client.endpoint_url,
            permission=self.permission(api),
            secrets=(*self.secrets, *secrets),
            credentials="their source" if self._client is None else self._client.credentials_source,
        )

    @abc.abstractmethod
    def permission(self, api: str) -> str:
        """Return the rights that `api` needs with these options."""

    @abc.abstractmethod
    def translate(self, error: Exception, operation: str, api: str, key: str) -> StoreError | None:
        """Return the error to raise for `error`; None if `error` does not come from the store."""

    @abc.abstractmethod
    def prepare_get(self, operation: str, key: str, byte_range: tuple[int, int] | None) -> Callable[[], Any]:
        """Return a function that requests an object, or the half-open range of it."""

    @abc.abstractmethod
    def open_body(self, answer: Any) -> tuple[ResponseBody, str | None, int | None]:
        """Return the body of a request that `prepare_get` has prepared, its Content-Range and its length in bytes."""

    @contextlib.contextmanager
    def translation(self, operation: str, api: str, key: str) -> Iterator[None]:
        """Translate the exceptions of the block, which makes the request `api` about `key`.

        A context adds no frame between a save and the SDK, as a function that makes the request would.
        """
        try:
            yield
        except Exception as error:
            translated = self.translate(error, operation, api, key)
            if translated is None:
                raise
            if isinstance(translated, CredentialsError) and may_open_no_file():  # including the credentials'
                request = self.failed_request(operation, api, key)
                translated = build_error(NO_FREE_FILES, request, reason="the credentials' files cannot be read")
                translated.is_unsent = True
                self.cache.clear()
                self._client = None
            elif isinstance(translated, CredentialsError) and self._client is not None:
                self.cache.discard(self._client)  # the next client looks for credentials again
            # Not chained: the texts and attributes of HTTP errors can hold headers, and with them tokens.
            raise translated from None

    @contextlib.contextmanager
    def receiving(self, body: ResponseBody, operation: str, key: str) -> Iterator[None]:
        """Translate the exceptions of the block, which receives `body`, and release the connection at its end.

        Raises `InterruptedReadError` if the body breaks off after its first byte.
        """
        is_received = False
        try:
            yield
            is_received = True
        except BodyEndedError:
            problem = "the answer ended early"
        except Exception as error:
            translated = error if isinstance(error, StoreError) else self.translate(error, operation, self.get_api, key)
            if translated is None:
                raise
            if isinstance(error, StoreError) or body.received_bytes == 0:
                raise translated from None
            problem = f"the answer broke off ({type(error).__name__})"
        finally:
            body.close(reuse=is_received)
        if not is_received:
            raise self.error(
                InterruptedReadError,
                operation,
                key,
                f"{problem} after {body.received_bytes:,} bytes. Try again from there.",
                received_bytes=body.received_bytes,
            )

    def error(self, cls: type[StoreError], operation: str, key: str, problem: str, **attributes: Any) -> StoreError:
        """Return an error about `key` that has no exception of the SDK."""
        url = self.url(key)
        return cls(f"{url.rstrip('/')}: {mask(problem, self.secrets)}", key=url, operation=operation, **attributes)

    def check_names(self, operation: str, *, prefix: str, names: Iterable[object]) -> None:
        """Raise `UnsupportedOperationError` for a listed name that does not begin with `prefix`.

        A caller that removes what it lists would remove objects of others.
        """
        for name in names:
            if not isinstance(name, str) or not name.startswith(prefix):
                raise self.error(
                    UnsupportedOperationError,
                    operation,
                    prefix,
                    f"a listing of this prefix holds {ascii(name)[:_MAX_NAME_CHARACTERS]} too. The store, or a proxy "
                    "before it, ignores prefixes. Use another one.",
                )

    def check_goes_on(self, operation: str, *, prefix: str, token: object, last_token: object) -> None:
        """Raise `UnsupportedOperationError` if the next page is the page just read: the listing would never end."""
        if token == last_token:
            problem = "the listing repeats its pages: the store, or a proxy before it, ignores page tokens."
            raise self.error(UnsupportedOperationError, operation, prefix, problem)


class HTTPStore(Store):
    """Objects under a prefix of a bucket. A subclass adds the requests of one service."""

    session: HTTPSession
    """Requests about the bucket."""
    condition: ClassVar[str]
    """The condition of a put that creates an object only if it is absent, for the log."""

    def __init__(self, prefix: str, session: HTTPSession) -> None:
        prefix = prefix.strip("/")
        self._root = f"{prefix}/" if prefix else ""
        self.session = session

    @classmethod
    def at(cls, location: Location, options: Options) -> HTTPStore:
        """Return the store at `location`."""
        make: Callable[..., HTTPStore] = cls
        return make(
            location.authority,
            location.path,
            storage_options=options.storage_options,
            timeout_s=options.timeout_s,
            connections=options.connections or DEFAULT_CONNECTIONS,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @abc.abstractmethod
    def is_genuine(self, endpoint_url: str) -> bool:
        """Return True if the endpoint is the service's own, whose behaviour is known."""

    @property
    def uri(self) -> str:
        return self.session.url(self._root).rstrip("/")

    def probe(self) -> Capabilities:
        """Return the declared capabilities for the service's own endpoint. Try out any other, once per process."""
        endpoint = self.session.endpoint_url("probe")
        if self.is_genuine(endpoint):
            return self.capabilities
        return probe.probe_bucket(self, endpoint=endpoint, bucket=self.session.bucket, condition=self.condition)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        """Make one ranged request and receive its body into `views`, without a copy."""
        session, name = self.session, self.name_of(key, "read_into")
        end_bytes = offset_bytes + num_bytes(views)
        if end_bytes == offset_bytes:
            return
        with session.translation("read_into", session.get_api, name):
            answer = session.prepare_get("read_into", name, (offset_bytes, end_bytes))()
        body, content_range, length_bytes = session.open_body(answer)
        with session.receiving(body, "read_into", name):
            _check_range(session, name, content_range, length_bytes, offset_bytes=offset_bytes, end_bytes=end_bytes)
            body.fill(views)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        session, name = self.session, self.name_of(key, "read")
        with session.translation("read", session.get_api, name):
            answer = session.prepare_get("read", name, None)()
        body, content_range, size_bytes = session.open_body(answer)
        with session.receiving(body, "read", name):
            if size_bytes is None or content_range is not None:
                problem = f"the answer has {size_bytes} bytes (Content-Range: {content_range})"
                raise session.error(
                    TransientStoreError, "read", name, f"the whole object was asked for, and {problem}. {_BETWEEN}"
                )
            check_size(self, key, size_bytes, max_bytes=max_bytes)
            content = bytearray(size_bytes)
            body.fill([memoryview(content)])
        return bytes(content)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects. Each request is made after the request before it has succeeded.

        One request removes a long row of siblings in any order: the objects of one attempt's data. A manifest, with few
        objects beside it, has a request of its own.
        """
        names = (self.name_of(key, "delete") for key in keys)
        for _, siblings in itertools.groupby(names, key=lambda name: name.rpartition("/")[0]):
            while row := list(itertools.islice(siblings, _MAX_PER_ROW)):
                if len(row) >= _MIN_PER_ROW:
                    self.delete_row(row)
                else:
                    for name in row:
                        self.delete_object(name)

    @abc.abstractmethod
    def delete_object(self, name: str) -> None:
        """Remove one object, if it exists."""

    @abc.abstractmethod
    def delete_row(self, names: Sequence[str]) -> None:
        """Remove many objects, in any order."""

    def name_of(self, key: str, operation: str) -> str:
        """Return the key in the bucket. Raises `StoreError` for a key that could lead out of the root."""
        check_key(self, key, operation)
        return self._root + key

    def refuse_ignored_condition(self, key: str) -> None:
        """Raise `UnsupportedOperationError` if this process has seen the endpoint ignore the condition of a put."""
        endpoint = self.session.endpoint_url("put")
        probe.refuse_if_ignored(self, key, endpoint=endpoint, bucket=self.session.bucket)


def _check_range(
    session: HTTPSession,
    key: str,
    content_range: str | None,
    length_bytes: int | None,
    *,
    offset_bytes: int,
    end_bytes: int,
) -> None:
    """Check that a body is bytes ``[offset_bytes, end_bytes)`` of the object.

    Raises `ShortObjectError` if the answer says that the object ends earlier, and `TransientStoreError` if the answer
    contradicts the request or itself.
    """
    wanted = f"bytes {offset_bytes:,} to {end_bytes:,} were asked for"
    begin, end, object_bytes = 0, length_bytes, length_bytes  # the whole object, from a store that ignores ranges
    if content_range is not None:
        match = _CONTENT_RANGE.fullmatch(content_range.strip())
        is_right = False
        if match is not None:
            begin, end = int(match[1]), int(match[2]) + 1
            object_bytes = None if match[3] == "*" else int(match[3])
            due = end_bytes if object_bytes is None else min(end_bytes, object_bytes)
            is_whole = length_bytes is None or length_bytes == max(end - begin, 0)
            is_right = (begin, end) == (offset_bytes, due) and is_whole
        if not is_right:
            problem = f"{wanted}, and the answer holds others (Content-Range: {content_range:.100})"
            raise session.error(TransientStoreError, "read_into", key, f"{problem}. {_BETWEEN}")
    if object_bytes is not None and object_bytes < end_bytes:
        problem = f"the object ends at byte {object_bytes:,}; {wanted}."
        raise session.error(ShortObjectError, "read_into", key, problem)
    if (begin, end) != (offset_bytes, end_bytes):
        raise session.error(
            UnsupportedOperationError,
            "read_into",
            key,
            f"{wanted}, and the answer holds the whole object. The store, or a proxy before it, does not serve ranges.",
        )


def size_of_range(
    session: HTTPSession, operation: str, key: str, content_range: str | None, length_bytes: int | None
) -> int:
    """Return the size of an object whose first byte was asked for."""
    match = _CONTENT_RANGE.fullmatch((content_range or "").strip())
    if match is not None and match[3] != "*":
        return int(match[3])
    if content_range is not None or length_bytes is None:
        problem = f"the answer does not say how large the object is (Content-Range: {content_range}). {_BETWEEN}"
        raise session.error(TransientStoreError, operation, key, problem)
    return length_bytes
