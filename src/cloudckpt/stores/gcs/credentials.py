"""Whom the requests come from: options first, then the ordinary application-default credentials."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudckpt.stores.gcs.config import GCSConfig

SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)

_LONGEST_SEARCH_S = 20.0


def find_credentials(config: GCSConfig, *, is_emulator: bool, timeout_s: float) -> Any:
    """The credentials to sign requests with.

    Raises google.auth's `DefaultCredentialsError` where there are none; on a machine outside Google's cloud that is
    known only once its metadata address has not answered, which is waited for within `timeout_s`.
    """
    import google.auth  # noqa: PLC0415 (an extra)
    from google.auth.credentials import AnonymousCredentials, with_scopes_if_required  # noqa: PLC0415

    if config.credentials is not None:
        credentials = config.credentials
    elif config.credentials_file is not None:
        credentials = _from_file(config.credentials_file)
    elif config.anonymous or is_emulator:
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
    else:
        search: Any = _BoundedRequest(min(timeout_s, _LONGEST_SEARCH_S))
        credentials, _ = google.auth.default(scopes=SCOPES, request=search)
    return with_scopes_if_required(credentials, list(SCOPES))  # type: ignore[no-untyped-call]


def _from_file(path: str) -> Any:
    # google.auth's own loader for files of all kinds warns of itself: some kinds name programs to run.
    from google.auth.exceptions import DefaultCredentialsError  # noqa: PLC0415
    from google.oauth2 import credentials, service_account  # noqa: PLC0415

    try:
        info = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DefaultCredentialsError(f"{path} cannot be read: {error.strerror}") from None  # type: ignore[no-untyped-call]
    except ValueError:
        raise DefaultCredentialsError(f"{path} is not JSON") from None  # type: ignore[no-untyped-call]
    kind = info.get("type") if isinstance(info, dict) else None
    try:
        if kind == "service_account":
            return service_account.Credentials.from_service_account_info(info)  # type: ignore[no-untyped-call]
        if kind == "authorized_user":
            return credentials.Credentials.from_authorized_user_info(info)  # type: ignore[no-untyped-call]
    except (KeyError, ValueError):  # their texts can quote the key
        raise DefaultCredentialsError(f"{path} holds no usable {kind} credentials") from None  # type: ignore[no-untyped-call]
    raise DefaultCredentialsError(  # type: ignore[no-untyped-call]
        f"{path} holds credentials of type {kind!r}; service_account and authorized_user can be given so. Name a file "
        f"of another type in GOOGLE_APPLICATION_CREDENTIALS"
    )


class _BoundedRequest:
    """google.auth's requests, until the time for all of them is up."""

    def __init__(self, timeout_s: float) -> None:
        from google.auth.transport.requests import Request  # noqa: PLC0415

        self._request = Request()
        self._deadline = time.monotonic() + timeout_s

    @property
    def session(self) -> Any:
        """Where google.auth adds a client certificate, should there be one."""
        return self._request.session

    def __call__(self, url: str, *, timeout: float | None = None, **kwargs: Any) -> Any:
        from google.auth.exceptions import TransportError  # noqa: PLC0415

        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TransportError("no time left to look for credentials")  # type: ignore[no-untyped-call]
        return self._request(url, timeout=min(left_s, timeout or left_s), **kwargs)
