"""boto3 clients: made when first needed, shared within a process, never across a fork."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloudckpt._version import __version__
from cloudckpt.errors import InvalidOptionError, MissingDependencyError
from cloudckpt.stores._calls import cancellable
from cloudckpt.stores._clear_text import warn_of_clear_text
from cloudckpt.stores._client_cache import ClientCache, Environment
from cloudckpt.stores.s3.answers import refuse_foreign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cloudckpt.stores.s3.config import S3Config

_MOST_CLIENTS = 16
_SPARE_CONNECTIONS = 4
_STORES_AT_ONCE = 4
_LONGEST_CONNECT_S = 20.0
_TRIES_WITHIN_TIMEOUT = 3
# As in s3.eu-west-1, s3-fips.us-gov-west-1, s3-us-west-2, s3-accelerate, s3express-use1-az4.us-east-1. S3 on Outposts
# is another matter.
_S3_LABEL = re.compile(r"s3(?!-outposts)(?:express)?(?:-[a-z0-9-]+)?")

# An access key's id is none: it names the key, as a user's name does.
_SECRET_FIELDS = ("secret_key", "token", "_secret_key", "_token")

APIS: Mapping[str, str] = {
    "AbortMultipartUpload": "abort_multipart_upload",
    "CompleteMultipartUpload": "complete_multipart_upload",
    "CopyObject": "copy_object",
    "CreateMultipartUpload": "create_multipart_upload",
    "DeleteObject": "delete_object",
    "DeleteObjects": "delete_objects",
    "GetObject": "get_object",
    "HeadObject": "head_object",
    "ListMultipartUploads": "list_multipart_uploads",
    "ListObjectsV2": "list_objects_v2",
    "ListParts": "list_parts",
    "PutObject": "put_object",
    "UploadPart": "upload_part",
    "UploadPartCopy": "upload_part_copy",
}
"""Every request that the store makes, by its name in S3 and in boto3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKey:
    """All that a client is made of. Holds credentials, so it is never shown."""

    config: S3Config
    timeout_s: float
    connections: int

    def __repr__(self) -> str:
        return "ClientKey(…)"


class S3Client:
    """One boto3 client, and the members that the options add to each of its requests."""

    def __init__(self, key: ClientKey) -> None:
        client = _boto3_client(key)
        members = key.config.request_members()
        model = client.meta.service_model
        self.endpoint_url: str = client.meta.endpoint_url
        self.boto3_client = client
        # The signer's own, whatever they come from; to ask the session for them could mean to look for them again.
        self._credentials = getattr(getattr(client, "_request_signer", None), "_credentials", None)
        self._configured = key.config.secrets
        self._methods = {api: getattr(client, method) for api, method in APIS.items()}
        # What the model knows decides where an option goes, so that none is forgotten on any request.
        self._members = {
            api: {
                name: value for name, value in members.items() if name in model.operation_model(api).input_shape.members
            }
            for api in APIS
        }
        _encode_customer_key(self._members["ListParts"])

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be printed: of the options, and of the credentials in use. They are not renewed for it."""
        held = getattr(self._credentials, "__dict__", {})
        found = (held.get(name) for name in _SECRET_FIELDS)
        return (*self._configured, *(secret for secret in found if isinstance(secret, str)))

    def call(self, api: str, **members: Any) -> dict[str, Any]:
        """Make one request."""
        answer: dict[str, Any] = self._methods[api](**self._members[api], **members)
        return answer


def _encode_customer_key(members: dict[str, Any]) -> None:
    """As boto3 does it on every request but ListParts."""
    key = members.get("SSECustomerKey")
    if isinstance(key, bytes):
        members["SSECustomerKey"] = base64.b64encode(key).decode()
        members["SSECustomerKeyMD5"] = base64.b64encode(hashlib.md5(key, usedforsecurity=False).digest()).decode()


def require_boto3() -> None:
    """Raise `MissingDependencyError` where boto3 is not installed."""
    if importlib.util.find_spec("boto3") is None:
        raise MissingDependencyError("s3:// needs boto3, which is not installed: pip install 'cloudckpt[s3]'")


def ambient() -> Environment:
    """The part of the environment from which boto3 takes its configuration."""
    prefixes = ("AWS_", "BOTO_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
    return tuple(
        sorted(
            (name, value) for name, value in os.environ.items() if name == "HOME" or name.upper().startswith(prefixes)
        )
    )


def is_amazons(endpoint_url: str) -> bool:
    """Whether the endpoint is Amazon S3's own, in any of its partitions: dual-stack, FIPS and VPC ones too.

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
    from botocore.loaders import create_loader  # noqa: PLC0415 (an extra, and slow to import)

    partitions = create_loader().load_data("partitions")["partitions"]
    names = ("dnsSuffix", "dualStackDnsSuffix")
    return frozenset(str(partition["outputs"][name]) for partition in partitions for name in names)


def _make_client(key: ClientKey) -> S3Client:
    try:
        return S3Client(key)
    except InvalidOptionError:
        raise
    except ValueError as error:
        # boto3's own checks of what comes from the environment or ~/.aws; it quotes the value, password and all.
        words = re.sub(r"\S+@", "***@", str(error))
        raise InvalidOptionError(
            f"The AWS configuration cannot be used: {words}. Check AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, "
            "AWS_REGION and ~/.aws/config."
        ) from None


_clients: ClientCache[ClientKey, S3Client] = ClientCache(_make_client, ambient=ambient, most=_MOST_CLIENTS)
client_for = _clients.client_for
forget = _clients.forget


def endpoint_of(key: ClientKey, environment: Environment) -> str:
    """Where requests for `key` go, for messages."""
    client = _clients.known(key, environment)
    return client.endpoint_url if client is not None else key.config.endpoint_url or "S3"


def _boto3_client(key: ClientKey) -> Any:
    import boto3.session  # noqa: PLC0415 (an extra, and slow to import)
    import botocore  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    config = key.config
    session = boto3.session.Session(
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=config.secret_access_key,
        aws_session_token=config.session_token,
        region_name=config.region,
        profile_name=config.profile,
    )
    # The CRC32C that goes with every body protects it. Hashing it for the signature costs ten times as much.
    s3_settings: Any = {"payload_signing_enabled": False}
    if config.addressing_style is not None:
        s3_settings["addressing_style"] = config.addressing_style
    client = session.client(
        "s3",
        endpoint_url=config.endpoint_url,
        verify=config.verify,
        config=Config(
            # Otherwise left to boto3: naming one would sign requests to directory buckets without their session.
            signature_version=botocore.UNSIGNED if config.anonymous else None,
            s3=s3_settings,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # cloudckpt._transfer decides about retries.
            retries={"total_max_attempts": 1, "mode": "standard"},
            # urllib3 sends bodies under the connect timeout. It holds for each address of a host in turn.
            connect_timeout=config.connect_timeout_s or min(key.timeout_s, _LONGEST_CONNECT_S),
            # Short of the whole patience, so that one dead connection leaves time for another try.
            read_timeout=config.read_timeout_s or key.timeout_s / _TRIES_WITHIN_TIMEOUT,
            # How many are kept, not how many there may be. Stores of one configuration share them: a save and a load at
            # once would otherwise close what both need, and open a connection for each request.
            max_pool_connections=_STORES_AT_ONCE * key.connections + _SPARE_CONNECTIONS,
            tcp_keepalive=True,
            user_agent_extra=f"cloudckpt/{__version__}",
        ),
    )
    with contextlib.suppress(AttributeError):  # a botocore that has changed there: then no request is made twice
        pool_classes = client._endpoint.http_session._pool_classes_by_scheme  # noqa: SLF001  # it has no other door
        pool_classes.update(cancellable(pool_classes))
    # Stores that do not answer it cost a second's wait each time.
    client.meta.events.register_last("before-call.s3", _drop_expect_header)
    client.meta.events.register("before-call.s3.HeadBucket", _end_redirects)
    client.meta.events.register_last("before-parse.s3", refuse_foreign)
    _check_endpoint(client.meta.endpoint_url)
    return client


def _drop_expect_header(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _end_redirects(params: dict[str, Any], **_: Any) -> None:
    # boto3 asks HeadBucket for the region of a bucket that was redirected; redirected again, it asks for ever.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _check_endpoint(endpoint_url: str) -> None:
    parts = urlsplit(endpoint_url)
    if parts.username is not None or parts.password is not None:
        raise InvalidOptionError(
            "The S3 endpoint's URL holds credentials, which would show up in messages. Move them from there "
            "(AWS_ENDPOINT_URL_S3, ~/.aws/config) into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    warn_of_clear_text(endpoint_url, store="S3")
