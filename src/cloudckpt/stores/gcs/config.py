"""The ``storage_options`` of GCS, and the credentials that they lead to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudckpt.stores.storage_options import endpoint, flag, parse, seconds, text

if TYPE_CHECKING:
    from cloudckpt.stores.storage_options import Parser

SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)


@dataclass(frozen=True, slots=True, kw_only=True)
class GCSConfig:
    """The configuration of GCS. ``None`` leaves a field to the ordinary Google configuration."""

    endpoint_url: str | None = None
    project: str | None = None
    credentials_file: str | None = None
    """The path of a service account's key, or of an authorized user's credentials, as JSON."""
    credentials: Any = field(default=None, repr=False)
    """A ``google.auth.credentials.Credentials``."""
    anonymous: bool = False
    """Send no credentials: for public buckets and emulators."""
    user_project: str | None = None
    """The project that pays, where the requester does."""
    kms_key_name: str | None = None
    storage_class: str | None = None
    connect_timeout_s: float | None = None
    read_timeout_s: float | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must never be printed: none, because no option is a text of that kind."""
        return ()


def parse_storage_options(storage_options: Mapping[str, Any]) -> GCSConfig:
    """Parse `storage_options`. Raises `InvalidOptionError` with every problem at once, and without any credentials."""
    values = parse(storage_options, PARSERS, aliases={}, find_contradictions=_find_contradictions, store="GCS")
    return GCSConfig(**values)


def _find_contradictions(values: Mapping[str, Any]) -> list[str]:
    given = [name for name in ("anonymous", "credentials", "credentials_file") if values.get(name)]
    if len(given) > 1:
        return [f"{' and '.join(given)} exclude each other"]
    return []


def _parse_credentials(value: Any) -> dict[str, Any]:
    from google.auth.credentials import Credentials

    if not isinstance(value, Credentials):
        raise TypeError(f"must be a google.auth.credentials.Credentials, not a {type(value).__name__}")
    return {"credentials": value}


def _parse_path(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise TypeError("must be the path of a JSON file with a service account's key or a user's credentials")
    return {"credentials_file": value}


PARSERS: Mapping[str, Parser] = {
    "anonymous": flag("anonymous"),
    "connect_timeout_s": seconds("connect_timeout_s"),
    "credentials": _parse_credentials,
    "credentials_file": _parse_path,
    "endpoint_url": endpoint("credentials_file"),
    "kms_key_name": text("kms_key_name"),
    "project": text("project"),
    "read_timeout_s": seconds("read_timeout_s"),
    "storage_class": text("storage_class"),
    "user_project": text("user_project"),
}
"""Every option by its name."""


def find_credentials(config: GCSConfig, *, is_emulator: bool) -> Any:
    """Return the credentials of requests: of the options, or the ordinary application-default credentials.

    Raises google.auth's `DefaultCredentialsError` if there are none. On a machine outside Google's cloud, that is known
    only after its metadata address has not answered.
    """
    import google.auth
    from google.auth.credentials import AnonymousCredentials, with_scopes_if_required

    if config.credentials is not None:
        credentials = config.credentials
    elif config.credentials_file is not None:
        credentials = _from_file(config.credentials_file)
    elif config.anonymous or is_emulator:
        return AnonymousCredentials()
    else:
        credentials, _ = google.auth.default(scopes=SCOPES)
    return with_scopes_if_required(credentials, list(SCOPES))


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
