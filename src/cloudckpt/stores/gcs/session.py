"""One bucket, as its callers see it: requests go in, answers or cloudckpt's own errors come out."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, TypeVar

from cloudckpt.errors import CredentialsError, InvalidOptionError, StoreError
from cloudckpt.stores import _http_rules as rules
from cloudckpt.stores.gcs import client as clients
from cloudckpt.stores.gcs.translate import PERMISSIONS, Request, built, translate

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_UNAUTHORIZED = 401
_NOT_FOUND = 404
# A 404 to these can mean the bucket; to a listing it can mean nothing else, and a delete does not mind.
_ABOUT_OBJECTS = ("objects.compose", "objects.get", "objects.insert", "objects.rewrite")


class GCSSession:
    """Makes requests about one bucket. Safe to share between threads; can be pickled; survives a fork."""

    def __init__(self, bucket: str, key: clients.ClientKey) -> None:
        self.bucket = bucket
        self._key = key
        self._environment = clients.ambient()

    def __getstate__(self) -> tuple[str, clients.ClientKey]:
        credentials = self._key.config.credentials
        try:
            pickle.dumps(credentials)
        except Exception as error:  # noqa: BLE001  # a class of the caller's own may raise anything
            raise InvalidOptionError(
                f"storage_options for GCS: credentials of the type {type(credentials).__name__} cannot be pickled "
                f"({type(error).__name__}), which a save in a background process needs. Pass credentials_file, or set "
                f"GOOGLE_APPLICATION_CREDENTIALS, instead."
            ) from None
        return self.bucket, self._key

    def __setstate__(self, state: tuple[str, clients.ClientKey]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def storage_class(self) -> str | None:
        """The class that objects are to have; ``None`` for the bucket's own."""
        return self._key.config.storage_class

    def endpoint_url(self, operation: str) -> str:
        """Where requests go. Raises `StoreError` where the Google configuration cannot be used."""
        return self.call(operation, "objects.insert", "", lambda client: client.endpoint_url)

    def url(self, key: str) -> str:
        """The full address of `key`, a key of the bucket."""
        return f"gs://{self.bucket}/{key}"

    def call(self, operation: str, api: str, key: str, ask: Callable[[clients.GCSClient], T]) -> T:
        """What `ask` returns, which makes the request `api` about `key` on behalf of the store's `operation`.

        It is called again, once, where the access token was refused and could be renewed. Raises `StoreError`
        subclasses.
        """
        client: clients.GCSClient | None = None
        try:
            client = clients.client_for(self._key, self._environment)
            try:
                return ask(client)
            except Exception as error:
                if _status(error) != _UNAUTHORIZED or not client.renew(_sent_token(error)):
                    raise
            return ask(client)
        except Exception as error:
            translated = self._translate(error, client, operation, api, key)
            if translated is None:
                raise
            if isinstance(translated, CredentialsError) and client is not None:
                clients.forget(client)
            # Not chained: the texts and attributes of HTTP errors can hold headers, and with them tokens.
            raise translated from None

    def translate(self, error: Exception, operation: str, api: str, key: str) -> StoreError | None:
        """What to raise for `error`; ``None`` where it is not the store's."""
        return self._translate(error, None, operation, api, key)

    def not_gcs(self, operation: str, api: str, key: str) -> StoreError:
        """The error for an answer to `api` that lacks what GCS's have."""
        what = f"the answer to {api} cannot be read: it is not GCS's. Check endpoint_url, and proxies on the way."
        return self.error(StoreError, operation, key, what)

    def error(self, cls: type[StoreError], operation: str, key: str, what: str, **attributes: Any) -> StoreError:
        """An error of our own about `key`."""
        url = self.url(key).rstrip("/")
        return cls(f"{url}: {what}", key=url, operation=operation, **attributes)

    def _translate(
        self, error: Exception, client: clients.GCSClient | None, operation: str, api: str, key: str
    ) -> StoreError | None:
        if isinstance(error, StoreError):  # ours already
            return error
        request = self._request(client, operation, api, key)
        if client is not None and api in _ABOUT_OBJECTS and _status(error) == _NOT_FOUND and self._lacks_bucket(client):
            return built(rules.BUCKET, request, reason=f"status {_NOT_FOUND}")
        return translate(error, request)

    def _lacks_bucket(self, client: clients.GCSClient) -> bool:
        """Whether it is the bucket that is missing. Where that cannot be seen, the key counts as what is missing."""
        try:
            found = client.storage.list_blobs(
                client.bucket(self.bucket), max_results=1, fields="kind", **client.each_call
            )
            next(found.pages, None)
        except Exception as error:  # noqa: BLE001  # whoever asked hears of the first error
            return _status(error) == _NOT_FOUND
        return False

    def _request(self, client: clients.GCSClient | None, operation: str, api: str, key: str) -> Request:
        token = client.token if client is not None else None
        return Request(
            operation=operation,
            api=api,
            url=self.url(key).rstrip("/"),
            bucket=self.bucket,
            endpoint=clients.endpoint_of(self._key, dict(self._environment)),
            permission=self._permission(api),
            secrets=(token,) if token else (),
        )

    def _permission(self, api: str) -> str:
        """What must be granted for `api` with these options."""
        config = self._key.config
        needed = [PERMISSIONS[api]]
        if config.user_project:
            needed.append(f"serviceusage.services.use on the project {config.user_project}")
        if config.kms_key_name:
            needed.append("the use of the KMS key to the service agent of Cloud Storage")
        return ", ".join(needed)


def _status(error: Exception) -> int | None:
    status = getattr(error, "code", None)
    return int(status) if isinstance(status, int) else None


def _sent_token(error: Any) -> str | None:
    """The access token that was refused, which need not be the client's any more."""
    sent = error.response.request.headers.get("Authorization", "")
    return sent.removeprefix("Bearer ") if sent.startswith("Bearer ") else None
