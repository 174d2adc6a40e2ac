"""The ``storage_options`` of S3: checked as a whole, before anything is sent."""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from cloudckpt.errors import InvalidOptionError
from cloudckpt.stores.storage_options import choice, endpoint, flag, parse, seconds, text

if TYPE_CHECKING:
    from cloudckpt.stores.storage_options import Parser

_CUSTOMER_KEY_BYTES = 32
_MAX_TAGS = 10  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
_ADDRESSING_STYLES = ("auto", "path", "virtual")
_SSE_MODES = ("AES256", "aws:kms", "aws:kms:dsse")
# s3.eu-west-1, s3-fips.us-gov-west-1, s3-us-west-2, s3-accelerate, s3express-use1-az4.us-east-1. S3 on Outposts is
# another service.
_S3_LABEL = re.compile(r"s3(?!-outposts)(?:express)?(?:-[a-z0-9-]+)?")
_DIRECTORY_SUFFIXES = ("--x-s3", "--xa-s3")  # a bucket's, and an access point's
_DIRECTORY_STORAGE_CLASSES = ("EXPRESS_ONEZONE", "ONEZONE_IA")  # the second in Local Zones

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
    """The configuration of one S3-compatible service. ``None`` leaves a field to the ordinary AWS configuration."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    addressing_style: str | None = None
    verify: bool | str | None = None
    """Check TLS certificates; or the path of a bundle to check them with."""
    sse: str | None = None
    kms_key_id: str | None = None
    sse_customer_key: bytes | None = field(default=None, repr=False)
    storage_class: str | None = None
    tagging: str | None = None
    """The option ``tags``, in the form of the header."""
    request_payer: str | None = None
    connect_timeout_s: float | None = None
    read_timeout_s: float | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must never be printed."""
        key = self.sse_customer_key
        encoded = base64.b64encode(key).decode() if key else None
        return tuple(secret for secret in (self.secret_access_key, self.session_token, encoded) if secret)

    def request_members(self) -> dict[str, Any]:
        """Return the members of S3 requests that the options ask for, each for every request that knows it."""
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
    """Parse `storage_options`. Raises `InvalidOptionError` with every problem at once, and without any secret."""
    values = parse(storage_options, PARSERS, aliases=ALIASES, find_contradictions=_find_contradictions, store="S3")
    if "kms_key_id" in values:
        values.setdefault("sse", "aws:kms")
    return S3Config(**values)


def _find_contradictions(values: Mapping[str, Any]) -> list[str]:
    problems = {
        "access_key_id and secret_access_key belong together; one of them is missing": (
            ("access_key_id" in values) != ("secret_access_key" in values)
        ),
        "session_token needs access_key_id and secret_access_key beside it": (
            "session_token" in values and "access_key_id" not in values
        ),
        "anonymous excludes credentials and profile": (
            values.get("anonymous") and ("access_key_id" in values or "profile" in values)
        ),
        "sse_customer_key excludes sse and kms_key_id": (
            "sse_customer_key" in values and ("sse" in values or "kms_key_id" in values)
        ),
        "kms_key_id needs sse='aws:kms'": "kms_key_id" in values and values.get("sse") == "AES256",
    }
    return [problem for problem, exists in problems.items() if exists]


def _parse_path_style(value: Any) -> dict[str, Any]:
    return {"addressing_style": "path" if flag("path_style")(value)["path_style"] else "virtual"}


def _parse_verify(value: Any) -> dict[str, Any]:
    if not isinstance(value, bool | str):
        raise TypeError(f"must be True, False or the path of a certificate bundle, not {value!r}")
    return {"verify": value}


def _parse_ca_bundle(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise TypeError("must be the path of a certificate bundle")
    return {"verify": value}


def _parse_customer_key(value: Any) -> dict[str, Any]:
    key = value
    if isinstance(key, str):
        try:
            key = base64.b64decode(key, validate=True)
        except binascii.Error:
            key = b""
    if not isinstance(key, bytes) or len(key) != _CUSTOMER_KEY_BYTES:
        raise ValueError("must be a key of 32 bytes, or those in base64 (its value is not shown)")
    return {"sse_customer_key": key}


def _parse_tags(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(tag, str) for key, tag in value.items()
    ):
        raise TypeError("must map strings to strings")
    if len(value) > _MAX_TAGS:
        raise ValueError(f"may hold {_MAX_TAGS} tags, not {len(value)}")
    return {"tagging": urlencode(value)} if value else {}


def _parse_request_payer(value: Any) -> dict[str, Any]:
    if value not in (True, False, "requester"):
        raise ValueError(f"must be True or 'requester', not {value!r}")
    return {"request_payer": "requester"} if value else {}


PARSERS: Mapping[str, Parser] = {
    "access_key_id": text("access_key_id"),
    "addressing_style": choice("addressing_style", _ADDRESSING_STYLES),
    "anonymous": flag("anonymous"),
    "ca_bundle": _parse_ca_bundle,
    "connect_timeout_s": seconds("connect_timeout_s"),
    "endpoint_url": endpoint("access_key_id and secret_access_key"),
    "kms_key_id": text("kms_key_id"),
    "path_style": _parse_path_style,
    "profile": lambda value: {"profile": str(value)},
    "read_timeout_s": seconds("read_timeout_s"),
    "region": text("region"),
    "request_payer": _parse_request_payer,
    "secret_access_key": text("secret_access_key"),
    "session_token": text("session_token"),
    "sse": choice("sse", _SSE_MODES),
    "sse_customer_key": _parse_customer_key,
    "storage_class": text("storage_class"),
    "tags": _parse_tags,
    "verify": _parse_verify,
}
"""Every option by its name."""


def is_amazons(endpoint_url: str) -> bool:
    """Return True if the endpoint is Amazon S3's own, in any of its partitions: dual-stack, FIPS and VPC ones too.

    Other servers have names under Amazon's domains as well: behind its load balancers, on its machines.
    """
    host = (urlsplit(endpoint_url).hostname or "").rstrip(".")
    suffix = next((suffix for suffix in _amazons_suffixes() if host.endswith(f".{suffix}")), None)
    if suffix is None:
        return False
    labels = host.removesuffix(f".{suffix}").split(".")
    return "elb" not in labels and any(_S3_LABEL.fullmatch(label) for label in labels)


@functools.cache
def _amazons_suffixes() -> frozenset[str]:
    # From botocore's own data, which knows partitions that did not exist when this was written.
    from botocore.loaders import create_loader

    partitions = create_loader().load_data("partitions")["partitions"]
    names = ("dnsSuffix", "dualStackDnsSuffix")
    return frozenset(str(partition["outputs"][name]) for partition in partitions for name in names)


def is_directory_bucket(bucket: str) -> bool:
    """Return True for a directory bucket (S3 Express One Zone). No other bucket may have such a name.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html. Create-if-absent, CRC32C and
    multipart uploads are as in other buckets; boto3 makes the sessions (CreateSession). None of this has been run on
    the real service.
    """
    return bucket.endswith(_DIRECTORY_SUFFIXES)


def check_directory_options(bucket: str, config: S3Config) -> None:
    """Raise `InvalidOptionError`, with every problem at once, for options that cannot work in a directory bucket."""
    is_of_amazon = config.endpoint_url is None or is_amazons(config.endpoint_url)
    problems = {
        "anonymous: these buckets are never public": config.anonymous,
        "endpoint_url: leave it out, the address follows from the bucket's name and the region": (
            config.endpoint_url is not None and is_of_amazon
        ),
        "path_style, addressing_style: the bucket's name is part of the address here": (
            config.addressing_style == "path" and is_of_amazon
        ),
        "request_payer: the owner pays here": config.request_payer,
        "sse='aws:kms:dsse': use 'aws:kms' or 'AES256'": config.sse == "aws:kms:dsse",
        "sse_customer_key: use sse='aws:kms' or 'AES256'": config.sse_customer_key,
        f"storage_class: only {' or '.join(_DIRECTORY_STORAGE_CLASSES)}, or nothing": (
            config.storage_class is not None and config.storage_class not in _DIRECTORY_STORAGE_CLASSES
        ),
        "tags: objects have none here": config.tagging,
    }
    found = [problem for problem, exists in problems.items() if exists]
    if found:
        raise InvalidOptionError(
            f"Storage options that a directory bucket (S3 Express One Zone) does not know, such as {bucket!r}: "
            + "; ".join(found)
        )
