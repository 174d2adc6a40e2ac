"""What ``storage_options`` may hold for S3: checked as a whole, before anything is sent."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from cloudckpt.stores._storage_options import choice, endpoint, flag, parse, seconds, text

if TYPE_CHECKING:
    from cloudckpt.stores._storage_options import Parser

_CUSTOMER_KEY_BYTES = 32
_MAX_TAGS = 10  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
_ADDRESSING_STYLES = ("auto", "path", "virtual")
_SSE_MODES = ("AES256", "aws:kms", "aws:kms:dsse")

ALIASES: Mapping[str, str] = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "profile_name": "profile",
    "region_name": "region",
}
"""boto3's own names for some of the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """How to talk to one S3-compatible service. ``None`` leaves it to the ordinary AWS configuration."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    """Sign nothing: for public buckets."""
    addressing_style: str | None = None
    """``"path"``, ``"virtual"`` or ``"auto"``; the option ``path_style=True`` is short for ``"path"``."""
    verify: bool | str | None = None
    """Whether to check TLS certificates, or the path of a bundle to check them with."""
    sse: str | None = None
    kms_key_id: str | None = None
    sse_customer_key: bytes | None = field(default=None, repr=False)
    storage_class: str | None = None
    tagging: str | None = None
    """The option ``tags``, as the header wants it."""
    request_payer: str | None = None
    connect_timeout_s: float | None = None
    read_timeout_s: float | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be printed."""
        key = self.sse_customer_key
        encoded = base64.b64encode(key).decode() if key else None
        return tuple(secret for secret in (self.secret_access_key, self.session_token, encoded) if secret)

    def request_members(self) -> dict[str, Any]:
        """Members of S3 requests that these options ask for, each to go into every request that knows it."""
        members: dict[str, Any] = {
            "ServerSideEncryption": self.sse,
            "SSEKMSKeyId": self.kms_key_id,
            "StorageClass": self.storage_class,
            "Tagging": self.tagging,
            "TaggingDirective": "REPLACE" if self.tagging else None,
            "RequestPayer": self.request_payer,
        }
        if self.sse_customer_key is not None:
            for prefix in ("", "CopySource"):
                members[f"{prefix}SSECustomerAlgorithm"] = "AES256"
                members[f"{prefix}SSECustomerKey"] = self.sse_customer_key
        return {name: value for name, value in members.items() if value is not None}


def parse_storage_options(storage_options: Mapping[str, Any]) -> S3Config:
    """The configuration that `storage_options` ask for.

    Raises `InvalidOptionError` with every problem at once. Values of secrets are never part of it.
    """
    values = parse(storage_options, _PARSERS, aliases=ALIASES, contradictions=_contradictions, store="S3")
    if "kms_key_id" in values:
        values.setdefault("sse", "aws:kms")
    return S3Config(**values)


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    problems = []
    if ("access_key_id" in values) != ("secret_access_key" in values):
        problems.append("access_key_id and secret_access_key belong together; one of them is missing")
    if "session_token" in values and "access_key_id" not in values:
        problems.append("session_token needs access_key_id and secret_access_key beside it")
    if values.get("anonymous") and ("access_key_id" in values or "profile" in values):
        problems.append("anonymous excludes credentials and profile")
    if "sse_customer_key" in values and ("sse" in values or "kms_key_id" in values):
        problems.append("sse_customer_key excludes sse and kms_key_id")
    if "kms_key_id" in values and values.get("sse") == "AES256":
        problems.append("kms_key_id needs sse='aws:kms'")
    return problems


def _path_style(value: Any) -> dict[str, Any]:
    return {"addressing_style": "path" if flag("path_style")(value)["path_style"] else "virtual"}


def _verify(value: Any) -> dict[str, Any]:
    if not isinstance(value, bool | str):
        raise TypeError(f"must be True, False or the path of a certificate bundle, not {value!r}")
    return {"verify": value}


def _ca_bundle(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise TypeError("must be the path of a certificate bundle")
    return {"verify": value}


def _customer_key(value: Any) -> dict[str, Any]:
    key = value
    if isinstance(key, str):
        try:
            key = base64.b64decode(key, validate=True)
        except binascii.Error:
            key = b""
    if not isinstance(key, bytes) or len(key) != _CUSTOMER_KEY_BYTES:
        raise ValueError("must be a key of 32 bytes, or those in base64 (its value is not shown)")
    return {"sse_customer_key": key}


def _tags(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(tag, str) for key, tag in value.items()
    ):
        raise TypeError("must map strings to strings")
    if len(value) > _MAX_TAGS:
        raise ValueError(f"may hold {_MAX_TAGS} tags, not {len(value)}")
    return {"tagging": urlencode(value)} if value else {}


def _request_payer(value: Any) -> dict[str, Any]:
    if value not in (True, False, "requester"):
        raise ValueError(f"must be True or 'requester', not {value!r}")
    return {"request_payer": "requester"} if value else {}


_PARSERS: Mapping[str, Parser] = {
    "access_key_id": text("access_key_id"),
    "addressing_style": choice("addressing_style", _ADDRESSING_STYLES),
    "anonymous": flag("anonymous"),
    "ca_bundle": _ca_bundle,
    "connect_timeout_s": seconds("connect_timeout_s"),
    "endpoint_url": endpoint("access_key_id and secret_access_key"),
    "kms_key_id": text("kms_key_id"),
    "path_style": _path_style,
    "profile": lambda value: {"profile": str(value)},
    "read_timeout_s": seconds("read_timeout_s"),
    "region": text("region"),
    "request_payer": _request_payer,
    "secret_access_key": text("secret_access_key"),
    "session_token": text("session_token"),
    "sse": choice("sse", _SSE_MODES),
    "sse_customer_key": _customer_key,
    "storage_class": text("storage_class"),
    "tags": _tags,
    "verify": _verify,
}
