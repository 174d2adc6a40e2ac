"""One bucket, as its callers see it: requests go in, answers or cloudckpt's own errors come out."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cloudckpt.errors import CredentialsError, InvalidOptionError, StoreError, TransientStoreError
from cloudckpt.stores import _http_rules as rules
from cloudckpt.stores._http_errors import masked
from cloudckpt.stores.gcs import client as clients
from cloudckpt.stores.gcs.translate import PERMISSIONS, Request, built, is_gcss, translate

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_UNAUTHORIZED = 401
_NOT_FOUND = 404
_LISTING = "storage#objects"
# A 404 to these can mean the bucket; to a listing it can mean nothing else, and a delete does not mind.
_ABOUT_OBJECTS = ("objects.compose", "objects.get", "objects.insert", "objects.rewrite")


class GCSSession:
    """Makes requests about one bucket. Safe to share between threads; can be pickled; survives a fork."""

    def __init__(self, bucket: str, key: clients.ClientKey) -> None:
        self.bucket = bucket
        self._key = key
        self._environment = clients.ambient()
        self._client: clients.GCSClient | None = None

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

    def beside(self, bucket: str) -> GCSSession:
        """Another bucket, with the same client."""
        return GCSSession(bucket, self._key)

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
            client = self._client = clients.client_for(self._key, self._environment)
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
        what = (
            f"the answer to {api} cannot be read: it is not GCS's. Try again; if it goes on, check endpoint_url, and "
            "proxies on the way."
        )
        return self.error(TransientStoreError, operation, key, what)

    def error(self, cls: type[StoreError], operation: str, key: str, what: str, **attributes: Any) -> StoreError:
        """An error of our own about `key`."""
        url = self.url(key).rstrip("/")
        what = masked(what, () if self._client is None else self._client.secrets)
        return cls(f"{url}: {what}", key=url, operation=operation, **attributes)

    def _translate(
        self, error: Exception, client: clients.GCSClient | None, operation: str, api: str, key: str
    ) -> StoreError | None:
        if isinstance(error, StoreError):  # ours already
            return error
        request = self._request(client or self._client, error, operation, api, key)
        found = None
        if client is not None and _status(error) == _NOT_FOUND:
            found = self._missing(client, api, key, is_own=is_gcss(error))
        return translate(error, request) if found is None else built(found[0], request, reason=found[1])

    def _missing(self, client: clients.GCSClient, api: str, key: str, *, is_own: bool) -> tuple[rules.Rule, str] | None:
        """What a 404 to `api` means, and why; ``None`` where it means what the answer says.

        It can be the bucket that is missing. An answer that is not GCS's own is believed where a listing agrees.
        """
        if api not in _ABOUT_OBJECTS and (is_own or api != "objects.delete"):
            return None
        is_about_key = api in ("objects.get", "objects.delete", "objects.rewrite")
        seen = self._look(client, key if is_about_key else "")
        if seen == "no bucket":
            return rules.BUCKET, f"status {_NOT_FOUND}"
        if seen == "there":
            return rules.FOREIGN, f"status {_NOT_FOUND}, and a listing shows the object"
        if seen == "nothing" and is_about_key and not is_own:
            return rules.NOTHING, f"status {_NOT_FOUND}, and a listing does not show the object"
        return None

    def _look(self, client: clients.GCSClient, name: str) -> Literal["no bucket", "nothing", "there", "unseen"]:
        """What a listing shows of the object `name`, or of the bucket."""
        try:
            found = client.storage.list_blobs(
                client.bucket(self.bucket), prefix=name, max_results=1, fields="kind,items/name", **client.each_call
            )
            page = next(found.pages)
            names = [blob.name for blob in page]
        except Exception as error:  # noqa: BLE001  # whoever asked hears of the first error
            return "no bucket" if _status(error) == _NOT_FOUND and is_gcss(error) else "unseen"
        if page.raw_page.get("kind") != _LISTING:
            return "unseen"
        return "there" if name and name in names else "nothing"

    def _request(
        self, client: clients.GCSClient | None, error: Exception, operation: str, api: str, key: str
    ) -> Request:
        sent = _sent_token(error)  # which may have been renewed since
        secrets = (*(() if client is None else client.secrets), *((sent,) if sent else ()))
        return Request(
            operation=operation,
            api=api,
            url=self.url(key).rstrip("/"),
            bucket=self.bucket,
            endpoint=clients.endpoint_of(self._key, dict(self._environment)),
            permission=self._permission(api),
            secrets=secrets,
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
    request = getattr(getattr(error, "response", None), "request", None)
    sent = getattr(request, "headers", {}).get("Authorization", "")
    return sent.removeprefix("Bearer ") if sent.startswith("Bearer ") else None
