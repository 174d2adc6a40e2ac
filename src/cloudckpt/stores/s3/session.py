"""Options and clients of boto3, and requests about one bucket.

`S3Config` checks the ``storage_options`` as a whole, before anything is sent.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit
from xml.etree.ElementTree import ParseError

import msgspec

from cloudckpt._version import __version__
from cloudckpt.errors import InvalidOptionError, StoreError
from cloudckpt.stores.http_body import ResponseBody
from cloudckpt.stores.http_clients import ClientCache, ClientKey, SDKClient, check_endpoint, make_cancellable
from cloudckpt.stores.http_errors import CredentialSourceError, ForeignAnswerError
from cloudckpt.stores.http_store import HTTPSession
from cloudckpt.stores.s3.credentials import SOURCES, MetadataServices
from cloudckpt.stores.s3.errors import (
    SKEWED,
    OtherRegionError,
    SameRegionError,
    code_of,
    is_redirection,
    refuse_foreign,
    region_in,
    status_of,
    translate,
)
from cloudckpt.stores.storage_options import (
    Parser,
    list_parsers,
    option,
    parse,
    parse_choice,
    parse_endpoint,
    parse_flag,
    parse_path,
    parse_seconds,
    parse_text,
)

_CUSTOMER_KEY_BYTES = 32
_MAX_TAGS = 10  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
# s3.eu-west-1, s3-fips.us-gov-west-1, s3-us-west-2, s3-accelerate, s3express-use1-az4.us-east-1. S3 on Outposts is
# another service.
_S3_LABEL = re.compile(r"s3(?!-outposts)(?:express)?(?:-[a-z0-9-]+)?")
_DIRECTORY_SUFFIXES = ("--x-s3", "--xa-s3")  # a bucket's, and an access point's
_DIRECTORY_STORAGE_CLASSES = ("EXPRESS_ONEZONE", "ONEZONE_IA")  # the second in Local Zones
_SPARE_CONNECTIONS = 4
_STORES_AT_ONCE = 4
# An access key's id is no secret: it names the key, as a user name does.
_SECRET_FIELDS = ("secret_key", "token", "_secret_key", "_token")
_IDENTIFYING_FIELDS = ("access_key", "_access_key", *_SECRET_FIELDS)
_MAX_SENDINGS = 3
_TEMPORARY = 307
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetBucketLocation.html
_LEGACY_REGIONS = {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}
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


def _parse_path_style(value: Any) -> str:
    return "path" if parse_flag(value) else "virtual"


def _parse_verify(value: Any) -> bool | str:
    if not isinstance(value, bool | str):
        raise TypeError(f"must be True, False or the path of a certificate bundle, not {value!r}")
    return value


def _parse_customer_key(value: Any) -> bytes:
    key = value
    if isinstance(key, str):
        try:
            key = base64.b64decode(key, validate=True)
        except binascii.Error:
            key = b""
    if not isinstance(key, bytes) or len(key) != _CUSTOMER_KEY_BYTES:
        raise ValueError("must be a key of 32 bytes, or those in base64 (its value is not shown)")
    return key


def _parse_tags(value: Any) -> str | None:
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(tag, str) for key, tag in value.items()
    ):
        raise TypeError("must map strings to strings")
    if len(value) > _MAX_TAGS:
        raise ValueError(f"may hold {_MAX_TAGS} tags, not {len(value)}")
    return urlencode(value) or None


def _parse_request_payer(value: Any) -> str | None:
    if value not in (True, False, "requester"):
        raise ValueError(f"must be True or 'requester', not {value!r}")
    return "requester" if value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """The configuration of one S3-compatible service. ``None`` leaves a field to the ordinary AWS configuration."""

    endpoint_url: str | None = option(functools.partial(parse_endpoint, "access_key_id and secret_access_key"))
    region: str | None = option(parse_text)
    profile: str | None = option(str)
    access_key_id: str | None = option(parse_text, is_secret=True)
    secret_access_key: str | None = option(parse_text, is_secret=True)
    session_token: str | None = option(parse_text, is_secret=True)
    anonymous: bool | None = option(parse_flag)
    addressing_style: str | None = option(functools.partial(parse_choice, ("auto", "path", "virtual")))
    verify: bool | str | None = option(_parse_verify)
    """Check TLS certificates; or the path of a bundle to check them with."""
    sse: str | None = option(functools.partial(parse_choice, ("AES256", "aws:kms", "aws:kms:dsse")))
    kms_key_id: str | None = option(parse_text)
    sse_customer_key: bytes | None = option(_parse_customer_key, is_secret=True)
    storage_class: str | None = option(parse_text)
    tags: str | None = option(_parse_tags)
    """In the form of the header."""
    request_payer: str | None = option(_parse_request_payer)
    connect_timeout_s: float | None = option(parse_seconds)
    read_timeout_s: float | None = option(parse_seconds)

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
            "Tagging": self.tags,
            "TaggingDirective": "REPLACE" if self.tags else None,
            "RequestPayer": self.request_payer,
        }
        if self.sse_customer_key is not None:
            for prefix in ("", "CopySource"):
                members[f"{prefix}SSECustomerAlgorithm"] = "AES256"
                members[f"{prefix}SSECustomerKey"] = self.sse_customer_key
        return {name: value for name, value in members.items() if value is not None}


ALIASES: Mapping[str, str] = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "profile_name": "profile",
    "region_name": "region",
}
"""boto3's own names for some of the options."""
_OTHER_FORMS: Mapping[str, str] = {"ca_bundle": "verify", "path_style": "addressing_style"}
"""Options that are another form of a field."""
PARSERS: Mapping[str, Parser] = {
    **list_parsers(S3Config),
    "ca_bundle": functools.partial(parse_path, "a certificate bundle"),
    "path_style": _parse_path_style,
}
"""Every option by its name."""


def parse_storage_options(storage_options: Mapping[str, Any]) -> S3Config:
    """Parse `storage_options`. Raises `InvalidOptionError` with every problem at once, and without any secret."""
    aliases = {**ALIASES, **_OTHER_FORMS}
    values = parse(storage_options, PARSERS, aliases=aliases, find_contradictions=_find_contradictions, store="S3")
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
        "tags: objects have none here": config.tags,
    }
    clashes = [problem for problem, exists in problems.items() if exists]
    if clashes:
        raise InvalidOptionError(
            f"Storage options that a directory bucket (S3 Express One Zone) does not know, such as {bucket!r}: "
            + "; ".join(clashes)
        )


class S3Client(SDKClient):
    """A boto3 client, and the members that the options add to each of its requests."""

    def __init__(self, key: ClientKey[S3Config]) -> None:
        client, self.metadata = _make_boto3_client(key)
        self.regions: dict[str, str] = {}
        """The buckets that are in other regions than the configuration says."""
        client.meta.events.register("before-endpoint-resolution.s3", self._use_region)
        self.endpoint_url: str = client.meta.endpoint_url
        self.boto3_client = client
        # The signer's own, whatever they come from; asking the session for them could look for them again.
        self._credentials = getattr(getattr(client, "_request_signer", None), "_credentials", None)
        self._configured_secrets = key.config.secrets
        self._requests: dict[str, Callable[..., dict[str, Any]]] = {}
        for api, (method, _) in APIS.items():
            # boto3's model decides which requests take an option, so that none is forgotten.
            accepted = client.meta.service_model.operation_model(api).input_shape.members
            members = {name: value for name, value in key.config.request_members().items() if name in accepted}
            if api == "ListParts":
                _encode_customer_key(members)
            self._requests[api] = functools.partial(getattr(client, method), **members)

    @property
    def credentials_source(self) -> str:
        method = getattr(self._credentials, "method", None)
        return SOURCES.get(method, f"boto3's provider {method!r}")

    def identity(self) -> tuple[object, ...] | None:
        fields = getattr(self._credentials, "__dict__", None)
        return None if fields is None else tuple(fields.get(name) for name in _IDENTIFYING_FIELDS)

    def fetch_credentials(self) -> None:
        if self._credentials is not None:
            self._credentials.get_frozen_credentials()

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must never be printed: of the options, and of the credentials in use. Renews none for it."""
        fields = getattr(self._credentials, "__dict__", {})
        values = (fields.get(name) for name in _SECRET_FIELDS)
        return (*self._configured_secrets, *(secret for secret in values if isinstance(secret, str)))

    def region_of(self, bucket: str) -> str:
        """Return the region that requests about `bucket` are sent to."""
        return self.regions.get(bucket) or str(self.boto3_client.meta.region_name)

    def _use_region(self, builtins: dict[str, Any], params: dict[str, Any], **_: Any) -> None:
        region = self.regions.get(params.get("Bucket", ""))
        if region is not None:
            builtins["AWS::Region"] = region

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
    cache: ClassVar = ClientCache(_make_client, environment_prefixes=("AWS_", "BOTO_"))

    def boto3_client(self) -> Any:
        """Return boto3's own client, for the doctor's requests that the store has no method for."""
        with self.translation("examine", "PutObject", ""):
            return self.client().boto3_client

    def call(self, operation: str, api: str, key: str | None, **members: Any) -> dict[str, Any]:
        """Make the request `api` about `key`, or about the bucket, for the store's `operation`. Raises `StoreError`."""
        with self.translation(operation, api, key or members.get("Prefix", "")):
            return self.send(api, key, **members)

    def send(self, api: str, key: str | None, **members: Any) -> dict[str, Any]:
        """Make a request as `call` does, but let the caller translate its errors: data then passes a frame less.

        It is made again, at most twice, after a redirect, and after an error that a new signature or other credentials
        may prevent.
        """
        members |= {"Bucket": self.bucket} if key is None else {"Bucket": self.bucket, "Key": key}
        client, code, num_sent = self.client(), "", 0
        while True:
            num_sent += 1
            region = client.region_of(self.bucket)
            try:
                return client.request_for(api)(**members)  # type: ignore[no-any-return]  # the client has no types
            except Exception as error:
                problem = client.metadata.problem_behind(error)
                if problem is not None:
                    self.cache.discard(client)
                    raise CredentialSourceError(problem) from None
                last_code, code = code, code_of(error)
                if num_sent == _MAX_SENDINGS:
                    raise
                if is_redirection(error, sent_to=region):
                    self._follow(error, client, last_region=region)
                # One request may have waited for long in a queue; two in a row have not.
                elif code not in SKEWED or code == last_code:
                    client = self.client_after(error, client)
            if "Body" in members:
                members["Body"].seek(0)

    def _follow(self, error: Exception, client: S3Client, *, last_region: str) -> None:
        """Note the region of the bucket, which boto3 has not found, for the next request.

        Raises `OtherRegionError` if it is unknown, `SameRegionError` if it is `last_region`, where the request was
        sent, and `ForeignAnswerError` if it is not S3 that redirects.
        """
        region = region_in(error)
        if region is None:
            try:
                answer = client.boto3_client.get_bucket_location(Bucket=self.bucket)
                region = _LEGACY_REGIONS.get(answer.get("LocationConstraint"), answer.get("LocationConstraint"))
            except ParseError:  # not a store's answer: something redirects all requests
                raise ForeignAnswerError(
                    f"status {status_of(error)}: the answer names neither a region nor an error of S3's"
                ) from None
            except Exception as unknown:  # it may be denied, or redirected as well
                if getattr(unknown, "response", None) is None:
                    raise
        code = code_of(error) or f"status {status_of(error)}"
        if region is None:
            message = str(getattr(error, "response", {}).get("Error", {}).get("Message", "")).rstrip(".")
            named = f"{message}. No region is named" if message else "no region is named"
            raise OtherRegionError(f"{code}: {named}, and the request was sent to {last_region!r}") from None
        if region == last_region:
            if status_of(error) == _TEMPORARY:
                raise error  # the names of a new bucket are still being spread
            raise SameRegionError(f"{code}: the bucket is in region {region!r}, where the request was sent") from None
        client.regions[self.bucket] = region

    def prepare_get(
        self, operation: str, key: str, byte_range: tuple[int, int] | None
    ) -> Callable[[], Any]:  # GCS's needs the operation
        members = {} if byte_range is None else {"Range": f"bytes={byte_range[0]}-{byte_range[1] - 1}"}
        return functools.partial(self.send, "GetObject", key, **members)

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
        if config.tags and api in ("CopyObject", "CreateMultipartUpload", "PutObject"):
            needed.append("s3:PutObjectTagging")
        if config.kms_key_id:
            needed.append("kms:GenerateDataKey and kms:Decrypt on the KMS key")
        return ", ".join(needed)


def _make_boto3_client(key: ClientKey[S3Config]) -> tuple[Any, MetadataServices]:
    # Not boto3's session, which imports transfer managers: 2 MiB. Its client is this one.
    import botocore
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import CredentialRetrievalError

    config = key.config
    connect_timeout_s, read_timeout_s = key.timeouts_s(config.connect_timeout_s, config.read_timeout_s)
    session = botocore.session.Session(profile=config.profile)
    _decode_fast(session)
    # The CRC32C beside every body protects it. Hashing it for the signature costs ten times as much.
    s3_settings: Any = {"payload_signing_enabled": False}
    if config.addressing_style is not None:
        s3_settings["addressing_style"] = config.addressing_style
    metadata = MetadataServices()
    if not config.anonymous and config.access_key_id is None:
        metadata.watch(session)
    make: Callable[[], Any] = functools.partial(
        session.create_client,
        "s3",
        region_name=config.region,
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=config.secret_access_key,
        aws_session_token=config.session_token,
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
    try:
        client = make()
    except CredentialRetrievalError as error:
        problem = metadata.problem_behind(error)
        if problem is None:
            raise
        raise CredentialSourceError(problem) from None
    with contextlib.suppress(AttributeError):  # a later botocore; then no request is hedged
        pool_classes = client._endpoint.http_session._pool_classes_by_scheme  # noqa: SLF001  # botocore has no public way
        pool_classes.update(make_cancellable(pool_classes))
    # Stores that do not answer it cost a second's wait each time.
    client.meta.events.register_last("before-call.s3", _drop_expect_header)
    for api in ("GetBucketLocation", "HeadBucket"):
        client.meta.events.register(f"before-call.s3.{api}", _end_redirects)
    client.meta.events.register_last("before-parse.s3", refuse_foreign)
    check_endpoint(
        client.meta.endpoint_url, store="S3", variables="AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or ~/.aws/config"
    )
    return client, metadata


def _decode_fast(session: Any) -> None:
    """Have botocore's data about services decoded into plain dicts: half of the time, and 4 MiB less."""
    from botocore.loaders import JSONFileLoader

    class FileLoader(JSONFileLoader):
        def load_file(self, file_path: str) -> Any:
            for suffix, open_file in ((".json", open), (".json.gz", gzip.open)):
                with contextlib.suppress(FileNotFoundError), open_file(file_path + suffix, "rb") as file:
                    return msgspec.json.decode(file.read())
            return None

    session.get_component("data_loader").file_loader = FileLoader()


def _drop_expect_header(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _end_redirects(params: dict[str, Any], **_: Any) -> None:
    # boto3 asks HeadBucket for the region of a bucket that was redirected; redirected again, it asks for ever.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
