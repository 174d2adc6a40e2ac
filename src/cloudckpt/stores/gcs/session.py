"""Options and clients of google-cloud-storage, and requests about one bucket.

`GCSConfig` checks the ``storage_options`` as a whole, before anything is sent.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlsplit

from typing_extensions import Self

from cloudckpt._version import __version__
from cloudckpt.errors import InvalidOptionError, StoreError, TransientStoreError
from cloudckpt.stores import http_errors as shared
from cloudckpt.stores.gcs.errors import (
    PERMISSIONS,
    describe_metadata_server,
    has_gcs_headers,
    is_about_credentials,
    is_genuine_error,
    is_metadata_busy,
    translate,
)
from cloudckpt.stores.http_body import ResponseBody
from cloudckpt.stores.http_clients import (
    ClientCache,
    ClientKey,
    SDKClient,
    check_endpoint,
    is_clear_text,
    make_cancellable,
)
from cloudckpt.stores.http_errors import (
    CredentialSourceError,
    ErrorRule,
    ForeignAnswerError,
    build_error,
    describe_foreign,
)
from cloudckpt.stores.http_store import HTTPSession
from cloudckpt.stores.storage_options import (
    PARSER,
    list_parsers,
    option,
    parse,
    parse_endpoint,
    parse_flag,
    parse_path,
    parse_seconds,
    parse_text,
)

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_METADATA_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT")
_MAX_SEARCH_S = 20.0  # for Google's own search for credentials
CONTENT_TYPE = "application/octet-stream"
MAX_HELPERS = 4
"""Threads in which one call of the store makes requests side by side."""
_SPARE_CONNECTIONS = 4
_STORES_AT_ONCE = 4
_MAX_ANSWER_BYTES = 64 * 1024
_OK, _NO_CONTENT, _PARTIAL, _FIRST_REFUSED, _UNAUTHORIZED, _NOT_FOUND = 200, 204, 206, 300, 401, 404
_LENGTH = re.compile(r"[0-9]{1,18}")
LISTING = "storage#objects"
"""The kind of a page of a listing."""
_SECRET_FIELDS = ("token", "refresh_token", "client_secret")
_ABOUT_ONE_OBJECT = ("objects.delete", "objects.get", "objects.rewrite")
# A 404 to these can mean the bucket; to a listing it can mean nothing else.
_ABOUT_OBJECTS = (*_ABOUT_ONE_OBJECT, "objects.compose", "objects.insert")


def _parse_credentials(value: Any) -> Any:
    from google.auth.credentials import Credentials

    if not isinstance(value, Credentials):
        raise TypeError(f"must be a google.auth.credentials.Credentials, not a {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class GCSConfig:
    """The configuration of GCS. ``None`` leaves a field to the ordinary Google configuration."""

    endpoint_url: str | None = option(functools.partial(parse_endpoint, "credentials_file"))
    project: str | None = option(parse_text)
    credentials_file: str | None = option(
        functools.partial(parse_path, "a JSON file with a service account's key or a user's credentials")
    )
    """The path of a service account's key, or of an authorized user's credentials, as JSON."""
    credentials: Any = field(default=None, repr=False, metadata={PARSER: _parse_credentials})
    """A ``google.auth.credentials.Credentials``."""
    anonymous: bool | None = option(parse_flag)
    """Send no credentials: for public buckets and emulators."""
    user_project: str | None = option(parse_text)
    """The project that pays, where the requester does."""
    kms_key_name: str | None = option(parse_text)
    storage_class: str | None = option(parse_text)
    connect_timeout_s: float | None = option(parse_seconds)
    read_timeout_s: float | None = option(parse_seconds)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must never be printed: none, because no option is a text of that kind."""
        return ()


PARSERS = list_parsers(GCSConfig)
"""Every option by its name."""


def parse_storage_options(storage_options: Mapping[str, Any]) -> GCSConfig:
    """Parse `storage_options`. Raises `InvalidOptionError` with every problem at once, and without any credentials."""
    values = parse(storage_options, PARSERS, aliases={}, find_contradictions=_find_contradictions, store="GCS")
    return GCSConfig(**values)


def _find_contradictions(values: Mapping[str, Any]) -> list[str]:
    sources = [name for name in ("anonymous", "credentials", "credentials_file") if values.get(name)]
    if len(sources) > 1:
        return [f"{' and '.join(sources)} exclude each other"]
    return []


def _find_credentials(config: GCSConfig, *, is_emulator: bool, timeout_s: float) -> Any:
    """Return the credentials of requests: of the options, or the ordinary application-default credentials.

    Raises google.auth's `DefaultCredentialsError` if there are none. Outside Google's cloud, that is known only
    once the metadata server has not answered, within `timeout_s`.
    """
    import google.auth
    from google.auth.credentials import AnonymousCredentials, with_scopes_if_required
    from google.auth.exceptions import DefaultCredentialsError

    if config.credentials is not None:
        credentials = config.credentials
    elif config.credentials_file is not None:
        credentials = _from_file(config.credentials_file)
    elif config.anonymous or is_emulator:
        return AnonymousCredentials()
    else:
        search: Any = _BoundedSearch(min(timeout_s, _MAX_SEARCH_S))
        try:
            credentials, _ = google.auth.default(scopes=_SCOPES, request=search)
        except DefaultCredentialsError:
            if search.problem is None:
                raise
            raise CredentialSourceError(search.problem) from None
    return with_scopes_if_required(credentials, list(_SCOPES))


def _from_file(path: str) -> Any:
    # google.auth's own loader for files of all kinds warns of itself: some kinds name programs to run.
    from google.auth.exceptions import DefaultCredentialsError
    from google.oauth2 import credentials, service_account

    try:
        info = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DefaultCredentialsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise DefaultCredentialsError(f"{path} is not JSON") from None
    kind = info.get("type") if isinstance(info, dict) else None
    try:
        if kind == "service_account":
            return service_account.Credentials.from_service_account_info(info)
        if kind == "authorized_user":
            return credentials.Credentials.from_authorized_user_info(info)
    except (KeyError, ValueError):  # their texts can quote the key
        raise DefaultCredentialsError(f"{path} holds no usable {kind} credentials") from None
    raise DefaultCredentialsError(
        f"{path} holds credentials of type {kind!r}; service_account and authorized_user can be given so. Name a file "
        f"of another type in GOOGLE_APPLICATION_CREDENTIALS"
    )


class _BoundedSearch:
    """Makes google.auth's requests, until the time for all of them is over, and notes if its metadata server is busy.

    To google.auth, a busy server means a machine outside Google's cloud. In fact only a server that does not answer
    means this, unless a variable names the server.
    """

    problem: str | None = None

    def __init__(self, timeout_s: float) -> None:
        from google.auth.transport.requests import Request

        self._request = Request()
        self._deadline = time.monotonic() + timeout_s

    @property
    def session(self) -> Any:
        """Google's session, to which google.auth may add a client certificate."""
        return self._request.session

    def __call__(self, url: str, *, timeout: float | None = None, **kwargs: Any) -> Any:
        from google.auth.exceptions import TransportError

        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TransportError("no time left to look for credentials")
        is_expected = any(name in os.environ for name in _METADATA_VARIABLES)
        status = None
        try:
            response = self._request(url, timeout=min(remaining_s, timeout or remaining_s), **kwargs)
            status = response.status
            is_expected = is_expected or "metadata-flavor" in response.headers
            return response
        finally:
            is_busy = is_metadata_busy(status) and (is_expected or status not in (None, _NOT_FOUND))
            self.problem = describe_metadata_server(status) if is_busy else None


T = TypeVar("T")


class GCSClient(SDKClient):
    """A client of google-cloud-storage, and the HTTP session below it, over which bodies go directly."""

    def __init__(self, key: ClientKey[GCSConfig]) -> None:
        from google.api_core.client_info import ClientInfo
        from google.cloud import storage  # type: ignore[import-untyped]  # has no types; an extra

        config = key.config
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator and "://" not in emulator:  # the Go and Java clients take a bare host and port too
            emulator = f"http://{emulator}"
        # With a slash at its end, the library's addresses would have two in a row.
        endpoint_url = (config.endpoint_url or emulator).rstrip("/")
        is_emulator = config.endpoint_url is None and bool(emulator)
        credentials = _find_credentials(config, is_emulator=is_emulator, timeout_s=key.timeout_s)
        self.config = config
        self.timeout_s = key.timeouts_s(config.connect_timeout_s, config.read_timeout_s)
        self.each_call: dict[str, Any] = {"timeout": self.timeout_s, "retry": None}
        """The arguments of every call of the library; cloudckpt.io decides about retries."""
        self.credentials = credentials
        self._renewing = threading.Lock()
        # The connections that stay open, not a limit. Stores of one configuration share it: a save beside a load would
        # otherwise close connections that both need.
        max_idle_connections = (_STORES_AT_ONCE + MAX_HELPERS) * key.connections + _SPARE_CONNECTIONS
        self.http, self._auth_request = _make_http_session(credentials, max_idle_connections=max_idle_connections)
        self.storage = storage.Client(
            project=config.project,
            credentials=credentials,
            _http=self.http,
            client_info=ClientInfo(user_agent=f"cloudckpt/{__version__}"),
            client_options={"api_endpoint": endpoint_url} if endpoint_url else None,
        )
        # For its traces the library asks for the bucket, in a thread of its own, and again and again if denied.
        self.storage._bucket_metadata_cache = None  # noqa: SLF001  # the library has no option for it
        self.endpoint_url: str = self.storage.api_endpoint.rstrip("/")
        check_endpoint(self.endpoint_url, store="GCS", variables="STORAGE_EMULATOR_HOST or API_ENDPOINT_OVERRIDE")
        if config.endpoint_url is None:
            _refuse_clear_text_credentials(credentials, self.endpoint_url)

    def bucket(self, name: str) -> Any:
        """Return the library's bucket. Makes no request."""
        return self.storage.bucket(name, user_project=self.config.user_project)

    def blob(self, bucket: str, name: str) -> Any:
        """Return the library's object, to be written as the options say. Makes no request."""
        blob = self.bucket(bucket).blob(name, kms_key_name=self.config.kms_key_name)
        blob.content_type = CONTENT_TYPE
        if self.config.storage_class is not None:
            blob.storage_class = self.config.storage_class
        return blob

    def load(self, bucket: str, name: str) -> Any:
        """Return the library's object with its metadata."""
        blob = self.bucket(bucket).blob(name)
        blob.reload(**self.each_call)
        return blob

    def query(self, **parameters: str) -> dict[str, str]:
        """Return a request's query parameters, with those of the options."""
        project = self.config.user_project
        return {**parameters, **({"userProject": project} if project else {})}

    @property
    def token(self) -> str | None:
        """The access token in use. A secret."""
        token = getattr(self.credentials, "token", None)
        return token if isinstance(token, str) else None

    @property
    def credentials_source(self) -> str:
        if self.config.credentials is not None:
            return "the storage option credentials"
        if self.config.credentials_file is not None:
            return self.config.credentials_file
        if "compute_engine" in type(self.credentials).__module__:
            return "the metadata server"
        return os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or "gcloud"

    def identity(self) -> tuple[object, ...] | None:
        names = ("service_account_email", "refresh_token")
        key_id = getattr(getattr(self.credentials, "signer", None), "key_id", None)
        return type(self.credentials), key_id, *(getattr(self.credentials, name, None) for name in names)

    def fetch_credentials(self) -> None:
        pass  # a token is fetched for the next request

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must never be printed: of the credentials in use and of those that they come from."""
        sources = (self.credentials, getattr(self.credentials, "_source_credentials", None))
        values = (getattr(source, name, None) for source in sources for name in _SECRET_FIELDS)
        return tuple(secret for secret in values if isinstance(secret, str))

    def renew(self, refused_token: str | None) -> bool:
        """Fetch another access token than `refused_token`, if need be. Returns True if there is one."""
        if refused_token is None:
            return False
        with self._renewing:
            if self.token == refused_token:
                # Google's own timeout is two minutes, and all other threads wait for this one.
                self.credentials.refresh(functools.partial(self._auth_request, timeout=self.timeout_s))
            return self.token != refused_token


class GCSSession(HTTPSession):
    """Requests about one bucket of GCS."""

    scheme = "gs"
    service = "GCS"
    get_api = "objects.get"
    cache: ClassVar = ClientCache(
        GCSClient,
        environment_prefixes=(
            "API_ENDPOINT_OVERRIDE",
            "CLOUDSDK_",
            "GCE_METADATA",
            "GOOGLE_",
            "NO_GCE_CHECK",
            "STORAGE_EMULATOR_HOST",
        ),
    )

    def __reduce__(self) -> tuple[type[Self], tuple[str, ClientKey[GCSConfig]]]:
        credentials = self.client_key.config.credentials
        try:
            pickle.dumps(credentials)
        except Exception as error:  # noqa: BLE001  # a class of the caller's own may raise anything
            raise InvalidOptionError(
                f"storage_options for GCS: credentials of the type {type(credentials).__name__} cannot be pickled "
                f"({type(error).__name__}), which a save in a background process needs. Pass credentials_file, or set "
                f"GOOGLE_APPLICATION_CREDENTIALS, instead."
            ) from None
        return super().__reduce__()

    def call(self, operation: str, api: str, key: str, ask: Callable[[GCSClient], T]) -> T:
        """Call `ask`, which makes the request `api` about `key`, for the store's `operation`. Raises `StoreError`.

        Calls it a second time if the access token was refused and could be renewed, and once more if other credentials
        are found after these gave no accepted token.
        """
        with self.translation(operation, api, key):
            client = self.client()
            try:
                return _ask(client, ask)
            except Exception as error:
                if not is_about_credentials(error):
                    raise
                client = self.client_after(error, client)
            return _ask(client, ask)

    def prepare_get(self, operation: str, key: str, byte_range: tuple[int, int] | None) -> Callable[[], Any]:
        headers = {} if byte_range is None else {"Range": f"bytes={byte_range[0]}-{byte_range[1] - 1}"}
        return functools.partial(self.call, operation, self.get_api, key, functools.partial(self._get, key, headers))

    def _get(self, key: str, headers: dict[str, str], client: GCSClient) -> Any:
        response = client.http.get(
            f"{client.endpoint_url}/download/storage/v1/b/{quote(self.bucket, safe='')}/o/{quote(key, safe='')}",
            params=client.query(alt="media"),
            # Decompressed bytes would not be those of the range.
            headers={"Accept-Encoding": "identity", **headers},
            timeout=client.timeout_s,
            stream=True,
            allow_redirects=False,
        )
        check_answer(response)
        # A web page can have a length, an ETag and ranges, too.
        proof = "Content-Range" if response.status_code == _PARTIAL else "ETag"
        content_type = response.headers.get("Content-Type", "")
        is_object = proof in response.headers and not content_type.startswith("text/html")
        if not is_object and not has_gcs_headers(response.headers):
            response.close()
            raise ForeignAnswerError(describe_foreign("GCS's", response.status_code, content_type, None))
        return response

    def open_body(self, answer: Any) -> tuple[ResponseBody, str | None, int | None]:
        length = answer.headers.get("Content-Length", "")
        length_bytes = int(length) if _LENGTH.fullmatch(length) else None
        return ResponseBody(answer.raw), answer.headers.get("Content-Range"), length_bytes

    def translate(self, error: Exception, operation: str, api: str, key: str) -> StoreError | None:
        if isinstance(error, StoreError):
            return error
        token = _sent_token(error)  # which may have been renewed since
        request = self.failed_request(operation, api, key, secrets=(token,) if token else ())
        if self._client is not None and _status_of(error) == _NOT_FOUND and api in _ABOUT_OBJECTS:
            rule = self._explain_absence(self._client, api, key, is_own=is_genuine_error(error))
            if rule is not None:
                return build_error(rule, request, reason=f"status {_NOT_FOUND}")
        return translate(error, request, is_zonal=self._is_zonal)

    def location_type(self, client: GCSClient) -> str:
        """Return the type of the bucket's location, such as ``region`` or ``zone``; empty if the answer has none."""
        response = client.http.get(
            f"{client.endpoint_url}/storage/v1/b/{quote(self.bucket, safe='')}/storageLayout",
            params=client.query(),
            timeout=client.timeout_s,
            allow_redirects=False,
        )
        check_answer(response)
        layout = response.json()
        return str(layout.get("locationType", "")) if isinstance(layout, dict) else ""

    def _is_zonal(self) -> bool:
        try:
            return self._client is not None and self.location_type(self._client) == "zone"
        except Exception:  # noqa: BLE001  # the caller raises the first error
            return False

    def foreign_answer(self, operation: str, api: str, key: str) -> StoreError:
        """Return the error for an answer to `api` that is not GCS's."""
        problem = (
            f"the answer to {api} cannot be read: it is not GCS's. Try again; if it persists, check endpoint_url, and "
            "proxies on the way."
        )
        return self.error(TransientStoreError, operation, key, problem)

    def _explain_absence(self, client: GCSClient, api: str, key: str, *, is_own: bool) -> ErrorRule | None:
        """Find the cause of a 404 to `api` by a listing; return None if the object is absent.

        The bucket may be missing. An answer that is not GCS's own is believed if the listing agrees.
        """
        if is_own and api == "objects.delete":
            return None  # it does not matter
        name = key if api in _ABOUT_ONE_OBJECT else ""
        try:
            listing = client.storage.list_blobs(
                client.bucket(self.bucket), prefix=name, max_results=1, fields="kind,items/name", **client.each_call
            )
            page = next(listing.pages)
            names = [blob.name for blob in page]
        except Exception as error:  # noqa: BLE001  # the caller raises the first error
            is_bucket = _status_of(error) == _NOT_FOUND and is_genuine_error(error)
            return shared.BUCKET if is_bucket else None
        if page.raw_page.get("kind") != LISTING:
            return None
        if name and name in names:
            return shared.FOREIGN
        return shared.NO_OBJECT if name and not is_own else None

    def permission(self, api: str) -> str:
        config = self.client_key.config
        needed = [PERMISSIONS[api]]
        if config.user_project:
            needed.append(f"serviceusage.services.use on the project {config.user_project}")
        if config.kms_key_name:
            needed.append("the use of the KMS key to the service agent of Cloud Storage")
        return ", ".join(needed)


def _ask(client: GCSClient, ask: Callable[[GCSClient], T]) -> T:
    try:
        return ask(client)
    except Exception as error:
        if _status_of(error) != _UNAUTHORIZED or not client.renew(_sent_token(error)):
            raise
    return ask(client)


def _status_of(error: Exception) -> int | None:
    status = getattr(error, "code", None)
    return int(status) if isinstance(status, int) else None


def _sent_token(error: Any) -> str | None:
    """Return the access token that was refused, which need not be the client's any more."""
    request = getattr(getattr(error, "response", None), "request", None)
    sent = getattr(request, "headers", {}).get("Authorization", "")
    return sent.removeprefix("Bearer ") if sent.startswith("Bearer ") else None


def is_googles(endpoint_url: str) -> bool:
    """Return True if the endpoint is Google's own: private and regional ones too."""
    return (urlsplit(endpoint_url).hostname or "").rstrip(".").endswith(".googleapis.com")


def _make_http_session(credentials: Any, *, max_idle_connections: int) -> tuple[Any, Any]:
    from google.auth.transport.requests import AuthorizedSession, Request
    from requests import Session
    from requests.adapters import HTTPAdapter

    auth_request = Request(Session())
    # cloudckpt renews a refused token: the library would send the same body again, which is at its end by then.
    http = AuthorizedSession(credentials, refresh_status_codes=(), auth_request=auth_request)
    adapter = HTTPAdapter(pool_connections=2, pool_maxsize=max_idle_connections, max_retries=0)
    adapter.poolmanager.pool_classes_by_scheme = make_cancellable(adapter.poolmanager.pool_classes_by_scheme)
    http.mount("https://", adapter)
    http.mount("http://", adapter)
    http.headers["User-Agent"] = f"cloudckpt/{__version__}"
    # Otherwise a line for the host in ~/.netrc would replace the credentials, or be sent where none should be.
    http.auth = _keep_request
    http.hooks["response"] = [refuse_errors]
    return http, auth_request


def _keep_request(request: Any) -> Any:
    return request


def refuse_errors(response: Any, **_: Any) -> None:
    """Raise google.api_core's error, with the answer's body for its text, for every answer but a success.

    The library does so too, but reads bodies of any size, and fails to parse those that are not GCS's. A redirection is
    an error as well: followed, a DELETE or POST becomes a GET, which looks as if it had succeeded.
    """
    is_error, is_success = response.status_code >= _FIRST_REFUSED, response.status_code in (_OK, _NO_CONTENT)
    is_delete = getattr(response.request, "method", None) == "DELETE"
    if is_success and is_delete:
        is_success = response.content.strip() in (b"", b"null")
    if is_success or (response.status_code == _PARTIAL and "Content-Range" in response.headers):
        return
    from google.api_core.exceptions import from_http_status

    text = ""
    if is_error or is_delete:  # no object's bytes, which may never end
        text = next(response.iter_content(_MAX_ANSWER_BYTES), b"").decode(errors="replace")
    response.close()
    raise from_http_status(response.status_code, text, response=response)


def check_answer(response: Any) -> None:
    """Raise google.api_core's error for an answer that is neither an error nor of the requested kind."""
    from google.api_core.exceptions import from_http_status

    if response.status_code not in (_OK, _PARTIAL):
        response.close()
        raise from_http_status(response.status_code, "", response=response)


def _refuse_clear_text_credentials(credentials: Any, endpoint_url: str) -> None:
    """Raise `InvalidOptionError` if the environment alone would have a token sent in clear text to another machine.

    A user who names such an endpoint in ``storage_options`` is warned, and can use it.
    """
    from google.auth.credentials import AnonymousCredentials

    if is_clear_text(endpoint_url) and not isinstance(credentials, AnonymousCredentials):
        raise InvalidOptionError(
            f"GCS: the environment (STORAGE_EMULATOR_HOST, API_ENDPOINT_OVERRIDE) leads to {endpoint_url}, which is "
            "plain HTTP: credentials are not sent there. Leave them out, for an emulator; or, if that is where they "
            "belong, set the storage option endpoint_url."
        )
