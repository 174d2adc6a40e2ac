"""boto3 clients, and requests about one bucket."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cloudckpt._version import __version__
from cloudckpt.errors import InvalidOptionError, StoreError
from cloudckpt.stores.http_body import ResponseBody
from cloudckpt.stores.http_clients import ClientCache, ClientKey, check_endpoint, make_cancellable
from cloudckpt.stores.http_store import HTTPSession
from cloudckpt.stores.s3.config import is_directory_bucket
from cloudckpt.stores.s3.errors import refuse_foreign, translate

if TYPE_CHECKING:
    from cloudckpt.stores.s3.config import S3Config

_SPARE_CONNECTIONS = 4
_STORES_AT_ONCE = 4

# An access key's id is no secret: it names the key, as a user name does.
_SECRET_FIELDS = ("secret_key", "token", "_secret_key", "_token")

APIS: Mapping[str, tuple[str, str]] = {
    "AbortMultipartUpload": ("abort_multipart_upload", "s3:AbortMultipartUpload"),
    "CompleteMultipartUpload": ("complete_multipart_upload", "s3:PutObject"),
    "CopyObject": ("copy_object", "s3:GetObject and s3:PutObject"),
    "CreateMultipartUpload": ("create_multipart_upload", "s3:PutObject"),
    "DeleteObject": ("delete_object", "s3:DeleteObject"),
    "DeleteObjects": ("delete_objects", "s3:DeleteObject"),
    "GetObject": ("get_object", "s3:GetObject"),
    "HeadObject": ("head_object", "s3:GetObject"),
    "ListMultipartUploads": ("list_multipart_uploads", "s3:ListBucketMultipartUploads"),
    "ListObjectsV2": ("list_objects_v2", "s3:ListBucket"),
    "ListParts": ("list_parts", "s3:ListMultipartUploadParts"),
    "PutObject": ("put_object", "s3:PutObject"),
    "UploadPart": ("upload_part", "s3:PutObject"),
    "UploadPartCopy": ("upload_part_copy", "s3:GetObject and s3:PutObject"),
}
"""Every request of the store by its name in S3: its name in boto3, and the right that IAM grants for it."""


class S3Client:
    """A boto3 client, and the members that the options add to each of its requests."""

    def __init__(self, key: ClientKey[S3Config]) -> None:
        client = _make_boto3_client(key)
        self.endpoint_url: str = client.meta.endpoint_url
        self.boto3_client = client
        # The signer's own, whatever they come from; asking the session for them could look for them again.
        self._credentials = getattr(getattr(client, "_request_signer", None), "_credentials", None)
        self._configured_secrets = key.config.secrets
        self._requests: dict[str, Callable[..., dict[str, Any]]] = {}
        for api, (method, _) in APIS.items():
            # boto3's model decides which requests take an option, so that none is forgotten.
            known = client.meta.service_model.operation_model(api).input_shape.members
            members = {name: value for name, value in key.config.request_members().items() if name in known}
            if api == "ListParts":
                _encode_customer_key(members)
            self._requests[api] = functools.partial(getattr(client, method), **members)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must never be printed: of the options, and of the credentials in use. Renews none for it."""
        held = getattr(self._credentials, "__dict__", {})
        found = (held.get(name) for name in _SECRET_FIELDS)
        return (*self._configured_secrets, *(secret for secret in found if isinstance(secret, str)))

    def request_for(self, api: str) -> Callable[..., dict[str, Any]]:
        """Return boto3's method for `api`, with the options' members."""
        return self._requests[api]


def _encode_customer_key(members: dict[str, Any]) -> None:
    # boto3 does this for every request but ListParts.
    key = members.get("SSECustomerKey")
    if isinstance(key, bytes):
        members["SSECustomerKey"] = base64.b64encode(key).decode()
        members["SSECustomerKeyMD5"] = base64.b64encode(hashlib.md5(key, usedforsecurity=False).digest()).decode()


def _make_client(key: ClientKey[S3Config]) -> S3Client:
    try:
        return S3Client(key)
    except InvalidOptionError:
        raise
    except ValueError as error:
        # boto3's own checks of the environment and ~/.aws; they quote the value, password and all.
        reason = re.sub(r"\S+@", "***@", str(error))
        raise InvalidOptionError(
            f"The AWS configuration cannot be used: {reason}. Check AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, "
            "AWS_REGION and ~/.aws/config."
        ) from None


class S3Session(HTTPSession):
    """Requests about one bucket of S3."""

    scheme = "s3"
    service = "S3"
    get_api = "GetObject"
    cache: ClassVar = ClientCache(_make_client)

    def boto3_client(self, operation: str) -> Any:
        """Return boto3's own client, for requests that the store has no method for."""
        with self.translation(operation, "PutObject", ""):
            return self.client().boto3_client

    def call(self, operation: str, api: str, key: str | None, **members: Any) -> dict[str, Any]:
        """Make the request `api` about `key`, or about the bucket, for the store's `operation`. Raises `StoreError`."""
        about = {"Bucket": self.bucket} if key is None else {"Bucket": self.bucket, "Key": key}
        with self.translation(operation, api, key or members.get("Prefix", "")):
            answer: dict[str, Any] = self.client().request_for(api)(**about, **members)
        return answer

    def prepare_get(
        self, operation: str, key: str, byte_range: tuple[int, int] | None
    ) -> Callable[[], Any]:  # GCS's needs the operation
        about = {"Bucket": self.bucket, "Key": key}
        if byte_range is not None:
            about["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        return functools.partial(self.client().request_for("GetObject"), **about)

    def open_body(self, answer: Any) -> tuple[ResponseBody, str | None, int | None]:
        return ResponseBody(answer["Body"]), answer.get("ContentRange"), answer.get("ContentLength")

    def translate(self, error: Exception, operation: str, api: str, key: str) -> StoreError | None:
        return translate(error, self.failed_request(operation, api, key))

    def require(self, answer: dict[str, Any], name: str, operation: str, api: str, key: str) -> Any:
        """Return the member `name` of an answer. An answer without it is not S3's."""
        if name not in answer:
            raise self.error(
                StoreError,
                operation,
                key,
                f"the answer to {api} has no {name}: it is not S3's. Check endpoint_url, and proxies on the way.",
            )
        return answer[name]

    def permission(self, api: str) -> str:
        config = self.client_key.config
        needed = ["s3express:CreateSession" if is_directory_bucket(self.bucket) else APIS[api][1]]
        if config.tagging and api in ("CopyObject", "CreateMultipartUpload", "PutObject"):
            needed.append("s3:PutObjectTagging")
        if config.kms_key_id:
            needed.append("kms:GenerateDataKey and kms:Decrypt on the KMS key")
        return ", ".join(needed)


def _make_boto3_client(key: ClientKey[S3Config]) -> Any:
    import boto3.session
    import botocore
    from botocore.config import Config

    config = key.config
    connect_timeout_s, read_timeout_s = key.timeouts_s(config.connect_timeout_s, config.read_timeout_s)
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
            # cloudckpt.io decides about retries.
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=connect_timeout_s,
            read_timeout=read_timeout_s,
            # The number that is kept open, not a limit. Stores of one configuration share it: a save beside a load
            # would otherwise close connections that both need.
            max_pool_connections=_STORES_AT_ONCE * key.connections + _SPARE_CONNECTIONS,
            tcp_keepalive=True,
            user_agent_extra=f"cloudckpt/{__version__}",
        ),
    )
    with contextlib.suppress(AttributeError):  # a later botocore; then no request is hedged
        pool_classes = client._endpoint.http_session._pool_classes_by_scheme  # noqa: SLF001  # botocore has no public way
        pool_classes.update(make_cancellable(pool_classes))
    # Stores that do not answer it cost a second's wait each time.
    client.meta.events.register_last("before-call.s3", _drop_expect_header)
    client.meta.events.register("before-call.s3.HeadBucket", _end_redirects)
    client.meta.events.register_last("before-parse.s3", refuse_foreign)
    check_endpoint(
        client.meta.endpoint_url, store="S3", variables="AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or ~/.aws/config"
    )
    return client


def _drop_expect_header(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _end_redirects(params: dict[str, Any], **_: Any) -> None:
    # boto3 asks HeadBucket for the region of a bucket that was redirected; redirected again, it asks for ever.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
