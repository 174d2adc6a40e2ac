"""Clients of google-cloud-storage: made when first needed, shared within a process, never across a fork."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from cloudckpt._version import __version__
from cloudckpt.errors import InvalidOptionError, MissingDependencyError
from cloudckpt.stores._calls import cancellable
from cloudckpt.stores._clear_text import is_clear, warn_of_clear_text
from cloudckpt.stores._client_cache import ClientCache, Environment
from cloudckpt.stores.gcs.credentials import find_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cloudckpt.stores.gcs.config import GCSConfig

_MOST_CLIENTS = 16
_SPARE_CONNECTIONS = 4
_STORES_AT_ONCE = 4
MOST_HELPERS = 4
"""Threads in which one call makes requests of its own side by side."""
_LONGEST_CONNECT_S = 20.0
_TRIES_WITHIN_TIMEOUT = 3
_MOST_ANSWER_BYTES = 64 * 1024
_TAKEN, _PARTIAL, _FIRST_REFUSED = (200, 204), 206, 300
_DELETED = (b"", b"null")
_SECRET_FIELDS = ("token", "refresh_token", "client_secret")
_DEFAULT_ENDPOINT = "https://storage.googleapis.com"

_AMBIENT_NAMES = ("HOME", "NO_GCE_CHECK", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "APPDATA")
_AMBIENT_PREFIXES = (
    "GOOGLE_",
    "STORAGE_EMULATOR_HOST",
    "API_ENDPOINT_OVERRIDE",
    "CLOUDSDK_",
    "GCE_METADATA",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKey:
    """All that a client is made of. May hold credentials, so it is never shown."""

    config: GCSConfig
    timeout_s: float
    connections: int

    def __repr__(self) -> str:
        return "ClientKey(…)"


class GCSClient:
    """One client of google-cloud-storage, and the HTTP session below it, over which bodies go directly."""

    def __init__(self, key: ClientKey) -> None:
        from google.api_core.client_info import ClientInfo  # noqa: PLC0415 (an extra, and slow to import)
        from google.cloud import storage  # type: ignore[import-untyped]  # noqa: PLC0415

        config = key.config
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        # With a slash at its end the library's addresses would have two in a row.
        endpoint_url = (config.endpoint_url or _with_scheme(emulator) or "").rstrip("/")
        is_emulator = config.endpoint_url is None and bool(emulator)
        credentials = find_credentials(config, is_emulator=is_emulator, timeout_s=key.timeout_s)
        self.config = config
        self.timeout_s = (
            # urllib3 sends bodies under the connect timeout. It holds for each address of a host in turn.
            config.connect_timeout_s or min(key.timeout_s, _LONGEST_CONNECT_S),
            # Short of the whole patience, so that one dead connection leaves time for another try.
            config.read_timeout_s or key.timeout_s / _TRIES_WITHIN_TIMEOUT,
        )
        self.credentials = credentials
        self._renewing = threading.Lock()
        # How many are kept, not how many there may be. Stores of one configuration share them: a save and a load at
        # once would otherwise close what both need, and open a connection for each request.
        most_connections = (_STORES_AT_ONCE + MOST_HELPERS) * key.connections + _SPARE_CONNECTIONS
        self.http, self._auth_request = _http_session(credentials, most_connections=most_connections)
        self.storage = storage.Client(
            project=config.project,
            credentials=credentials,
            _http=self.http,
            client_info=ClientInfo(user_agent=f"cloudckpt/{__version__}"),  # type: ignore[no-untyped-call]
            client_options={"api_endpoint": endpoint_url} if endpoint_url else None,
        )
        # For its traces the library asks for the bucket, in a thread of its own, and again and again where denied.
        self.storage._bucket_metadata_cache = None  # noqa: SLF001
        self.endpoint_url: str = self.storage.api_endpoint.rstrip("/")
        _check_endpoint(self.endpoint_url)
        if config.endpoint_url is None:
            _keep_from_clear_text(credentials, self.endpoint_url)

    @property
    def each_call(self) -> dict[str, Any]:
        """What every call of the library is given; cloudckpt._transfer decides about retries."""
        return {"timeout": self.timeout_s, "retry": None}

    def bucket(self, name: str) -> Any:
        """The library's bucket; nothing is asked."""
        return self.storage.bucket(name, user_project=self.config.user_project)

    def blob(self, bucket: str, name: str) -> Any:
        """The library's object, about to be written as the options want it."""
        blob = self.bucket(bucket).blob(name, kms_key_name=self.config.kms_key_name)
        blob.content_type = CONTENT_TYPE
        if self.config.storage_class is not None:
            blob.storage_class = self.config.storage_class
        return blob

    def object_url(self, bucket: str, name: str) -> str:
        """Where the bytes of an object are read."""
        return f"{self.endpoint_url}/download/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"

    def upload_url(self, bucket: str) -> str:
        """Where the bytes of an object are sent."""
        return f"{self.endpoint_url}/upload/storage/v1/b/{quote(bucket, safe='')}/o"

    def query(self, **parameters: str) -> dict[str, str]:
        """A request's query parameters, with those that the options add."""
        project = self.config.user_project
        return {**parameters, **({"userProject": project} if project else {})}

    @property
    def token(self) -> str | None:
        """The access token in use. A secret."""
        token = getattr(self.credentials, "token", None)
        return token if isinstance(token, str) else None

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be printed, of the credentials in use and of those that they come from."""
        sources = (self.credentials, getattr(self.credentials, "_source_credentials", None))
        found = (getattr(source, name, None) for source in sources for name in _SECRET_FIELDS)
        return tuple(secret for secret in found if isinstance(secret, str))

    def renew(self, refused_token: str | None) -> bool:
        """Whether there is another access token than `refused_token`; a new one is fetched if need be."""
        if refused_token is None:
            return False
        with self._renewing:
            if self.token == refused_token:
                # Google's own patience is two minutes, and all other threads wait for this one.
                self.credentials.refresh(functools.partial(self._auth_request, timeout=self.timeout_s))
            return self.token != refused_token

    def close(self) -> None:
        """Close all connections."""
        self.http.close()


CONTENT_TYPE = "application/octet-stream"


def require_gcs() -> None:
    """Raise `MissingDependencyError` where google-cloud-storage is not installed."""
    try:
        found = importlib.util.find_spec("google.cloud.storage")
    except ModuleNotFoundError:  # not even google.cloud
        found = None
    if found is None:
        raise MissingDependencyError(
            "gs:// needs google-cloud-storage, which is not installed: pip install 'cloudckpt[gcs]'"
        )


def ambient() -> Environment:
    """The part of the environment from which Google's libraries take their configuration."""
    return tuple(
        sorted(
            (name, value)
            for name, value in os.environ.items()
            if name in _AMBIENT_NAMES or name.upper().startswith(_AMBIENT_PREFIXES)
        )
    )


_clients: ClientCache[ClientKey, GCSClient] = ClientCache(GCSClient, ambient=ambient, most=_MOST_CLIENTS)
client_for = _clients.client_for
forget = _clients.forget


def endpoint_of(key: ClientKey, environment: Mapping[str, str]) -> str:
    """Where requests for `key` go, for messages."""
    elsewhere = _with_scheme(environment.get("STORAGE_EMULATOR_HOST"))
    if elsewhere is None and environment.get("API_ENDPOINT_OVERRIDE"):
        elsewhere = f"{environment['API_ENDPOINT_OVERRIDE']} (from API_ENDPOINT_OVERRIDE)"
    elsewhere = re.sub(r"//[^/]*@", "//***@", elsewhere) if elsewhere else None
    return key.config.endpoint_url or elsewhere or _DEFAULT_ENDPOINT


def is_googles(endpoint_url: str) -> bool:
    """Whether the endpoint is Google's own: private and regional ones too."""
    return (urlsplit(endpoint_url).hostname or "").rstrip(".").endswith(".googleapis.com")


def _with_scheme(host: str | None) -> str | None:
    # The Go and Java clients take a bare host and port too.
    return f"http://{host}" if host and "://" not in host else host


def _http_session(credentials: Any, *, most_connections: int) -> tuple[Any, Any]:
    from google.auth.transport.requests import AuthorizedSession, Request  # noqa: PLC0415
    from requests import Session  # noqa: PLC0415
    from requests.adapters import HTTPAdapter  # noqa: PLC0415

    auth_request = Request(Session())
    # A refused token is renewed by us: the library would send the same body again, which is at its end by then.
    http = AuthorizedSession(credentials, refresh_status_codes=(), auth_request=auth_request)  # type: ignore[no-untyped-call]
    adapter = HTTPAdapter(pool_connections=2, pool_maxsize=most_connections, max_retries=0)
    adapter.poolmanager.pool_classes_by_scheme = cancellable(adapter.poolmanager.pool_classes_by_scheme)
    http.mount("https://", adapter)
    http.mount("http://", adapter)
    http.headers["User-Agent"] = f"cloudckpt/{__version__}"
    # Otherwise a line for the host in ~/.netrc would replace the credentials, or be sent where none should be.
    http.auth = _unchanged
    http.hooks["response"] = [refuse_errors]
    return http, auth_request


def _unchanged(request: Any) -> Any:
    return request


def refuse_errors(response: Any, **_: Any) -> None:
    """Raise google.api_core's error, with the answer's body for its text, for every answer but those of a success.

    The library does so too, but reads bodies of any size, and stumbles over those that are not GCS's. A redirection is
    an error as well: followed, a DELETE or POST becomes a GET, which looks as if it had succeeded.
    """
    is_error, is_taken = response.status_code >= _FIRST_REFUSED, response.status_code in _TAKEN
    is_delete = getattr(response.request, "method", None) == "DELETE"
    if is_taken and is_delete:
        is_taken = response.content.strip() in _DELETED
    if is_taken or (response.status_code == _PARTIAL and "Content-Range" in response.headers):
        return
    from google.api_core.exceptions import from_http_status  # noqa: PLC0415

    text = ""
    if is_error or is_delete:  # no object's bytes, which may never end
        text = next(response.iter_content(_MOST_ANSWER_BYTES), b"").decode(errors="replace")
    response.close()
    raise from_http_status(response.status_code, text, response=response)  # type: ignore[no-untyped-call]


def _keep_from_clear_text(credentials: Any, endpoint_url: str) -> None:
    """Raise `InvalidOptionError` where the environment alone would have a token sent in clear to another machine.

    Whoever names such an endpoint in ``storage_options`` is warned, and gets it.
    """
    from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415

    if is_clear(endpoint_url) and not isinstance(credentials, AnonymousCredentials):
        raise InvalidOptionError(
            f"GCS: the environment (STORAGE_EMULATOR_HOST, API_ENDPOINT_OVERRIDE) leads to {endpoint_url}, which is "
            "plain HTTP: credentials are not sent there. Leave them out, for an emulator; or, if that is where they "
            "belong, say so with storage_options endpoint_url."
        )


def _check_endpoint(endpoint_url: str) -> None:
    parts = urlsplit(endpoint_url)
    if parts.username is not None or parts.password is not None:
        raise InvalidOptionError(
            "The URL in STORAGE_EMULATOR_HOST or API_ENDPOINT_OVERRIDE holds credentials, which would show up in "
            "messages. Remove them."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidOptionError(
            f"{endpoint_url!r} is no endpoint: STORAGE_EMULATOR_HOST must look like http://host:port or host:port."
        )
    warn_of_clear_text(endpoint_url, store="GCS")
