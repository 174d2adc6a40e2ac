"""What ``storage_options`` may hold for GCS: checked as a whole, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloudckpt.stores._storage_options import endpoint, flag, parse, seconds, text

if TYPE_CHECKING:
    from cloudckpt.stores._storage_options import Parser


@dataclass(frozen=True, slots=True, kw_only=True)
class GCSConfig:
    """How to talk to GCS. ``None`` leaves it to the ordinary Google configuration."""

    endpoint_url: str | None = None
    project: str | None = None
    credentials_file: str | None = None
    """Path of a service account's key, or of an authorized user's credentials, as JSON."""
    credentials: Any = field(default=None, repr=False)
    """A ``google.auth.credentials.Credentials`` of the caller's own."""
    anonymous: bool = False
    """Send no credentials: for public buckets and emulators."""
    user_project: str | None = None
    """The project that pays, where the requester does."""
    kms_key_name: str | None = None
    storage_class: str | None = None
    connect_timeout_s: float | None = None
    read_timeout_s: float | None = None


def parse_storage_options(storage_options: Mapping[str, Any]) -> GCSConfig:
    """The configuration that `storage_options` ask for.

    Raises `InvalidOptionError` with every problem at once. Credentials are never part of it.
    """
    return GCSConfig(**parse(storage_options, PARSERS, aliases={}, contradictions=_contradictions, store="GCS"))


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    given = [name for name in ("anonymous", "credentials", "credentials_file") if values.get(name)]
    if len(given) > 1:
        return [f"{' and '.join(given)} exclude each other"]
    return []


def _credentials(value: Any) -> dict[str, Any]:
    from google.auth.credentials import Credentials  # noqa: PLC0415 (an extra)

    if not isinstance(value, Credentials):
        raise TypeError(f"must be a google.auth.credentials.Credentials, not a {type(value).__name__}")
    return {"credentials": value}


def _path(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise TypeError("must be the path of a JSON file with a service account's key or a user's credentials")
    return {"credentials_file": value}


PARSERS: Mapping[str, Parser] = {
    "anonymous": flag("anonymous"),
    "connect_timeout_s": seconds("connect_timeout_s"),
    "credentials": _credentials,
    "credentials_file": _path,
    "endpoint_url": endpoint("credentials_file"),
    "kms_key_name": text("kms_key_name"),
    "project": text("project"),
    "read_timeout_s": seconds("read_timeout_s"),
    "storage_class": text("storage_class"),
    "user_project": text("user_project"),
}
"""Every option by its name."""
