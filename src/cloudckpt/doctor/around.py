"""What lies around a store's objects: whose requests they are, the clock, the bucket's region and settings."""

from __future__ import annotations

import http.client
import os
import shutil
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloudckpt.doctor.trials import Refusal
from cloudckpt.errors import StoreError
from cloudckpt.options import GIB, MIB

if TYPE_CHECKING:
    from cloudckpt.stores.gcs import GCSStore
    from cloudckpt.stores.s3 import S3Store

_MOST_SKEW_S = 300.0
_LEAST_FREE_BYTES = 1 * GIB


def now_s() -> float:
    """The time by the clock of this machine."""
    return time.time()


def answers(endpoint_url: str, timeout_s: float) -> bool:
    """Whether there is an answer to a request that nobody has signed, whatever it says."""
    return _date(endpoint_url, timeout_s=timeout_s) is not None


def clock(endpoint_url: str, *, timeout_s: float) -> str | None:
    """How far this machine's clock is from that of the endpoint; ``None`` where it does not say."""
    try:
        skew_s = now_s() - parsedate_to_datetime(_date(endpoint_url, timeout_s=timeout_s) or "").timestamp()
    except (ValueError, TypeError):
        return None
    if abs(skew_s) > _MOST_SKEW_S:
        raise Refusal(
            f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store's",
            "Requests are signed with the time, and refused where it is off by more than a quarter of an hour; gc goes "
            "by it, too. Set the clock (NTP).",
        )
    return f"{abs(skew_s):.0f} s off, at most"


def _date(endpoint_url: str, *, timeout_s: float) -> str | None:
    """The header of its answer, perhaps empty; ``None`` where there is no answer."""
    parts = urlsplit(endpoint_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=timeout_s)
    try:
        connection.request("HEAD", "/")
        return connection.getresponse().headers.get("Date", "")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def s3_credentials(store: S3Store) -> str:
    """Where boto3 found them; `Refusal` where it found none."""
    client = store.session.boto3_client("examine")
    if client.meta.config.signature_version is not None and _is_unsigned(client):
        return "none: anonymous requests"
    credentials = client._request_signer._credentials  # noqa: SLF001  # boto3 has no other door
    if credentials is None:
        raise Refusal(
            "boto3 found none",
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or an instance role; or pass anonymous=True in "
            "storage_options for a public bucket.",
        )
    key = credentials.get_frozen_credentials().access_key
    return f"access key …{key[-4:]}, from {_source(credentials.method)}"


def s3_region(store: S3Store) -> str | None:
    """Whether requests are signed for the bucket's own; ``None`` where the bucket's is not told."""
    client = store.session.boto3_client("examine")
    try:
        headers = client.head_bucket(Bucket=store.session.bucket)["ResponseMetadata"]["HTTPHeaders"]
    except Exception as error:  # noqa: BLE001  # what it means for saves, other checks say
        headers = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region, own = headers.get("x-amz-bucket-region"), client.meta.region_name
    if region is None:
        return None
    if region != own:
        raise Refusal(
            f"the bucket lies in {region}, and requests are signed for {own}",
            f"Pass region={region} in storage_options, or set AWS_REGION={region}.",
        )
    return str(region)


def s3_lifecycle(store: S3Store) -> str | None:
    """Whether unfinished uploads are aborted by a rule; ``None`` where that may not be read."""
    client = store.session.boto3_client("examine")
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=store.session.bucket).get("Rules", [])
    except Exception as error:  # noqa: BLE001  # a permission that nothing else needs
        if _code(error) != "NoSuchLifecycleConfiguration":
            return None
        rules = []
    for rule in rules:
        days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        if days is not None and rule.get("Status") == "Enabled":
            return f"unfinished uploads are aborted after {days} days"
    raise Refusal(
        "no rule aborts unfinished uploads",
        "What a killed save leaves is paid for until gc runs. Add a rule with AbortIncompleteMultipartUpload "
        "(terraform/modules/s3-bucket).",
    )


def s3_versioning(store: S3Store) -> str | None:
    """Whether what is deleted is kept; ``None`` where that may not be read."""
    client = store.session.boto3_client("examine")
    try:
        status = client.get_bucket_versioning(Bucket=store.session.bucket).get("Status", "off")
    except Exception:  # noqa: BLE001  # a permission that nothing else needs
        return None
    return {
        "Enabled": "on: what is deleted is paid for until a rule for noncurrent versions removes it",
        "Suspended": "suspended: versions of before are kept",
    }.get(status, "off")


def gcs_credentials(store: GCSStore) -> str:
    """Of which kind they are."""
    credentials = store.session.call("examine", "objects.list", "", lambda client: client.credentials)
    name = type(credentials).__name__
    if name == "AnonymousCredentials":
        return "none: anonymous requests"
    email = getattr(credentials, "service_account_email", None)
    return f"{email}" if email else f"{type(credentials).__module__}.{name}"


def gcs_bucket(store: GCSStore) -> Any:
    """The bucket's settings, as the library's object; ``None`` where they may not be read."""

    def ask(client: Any) -> Any:
        bucket = client.bucket(store.session.bucket)
        bucket.reload(**client.each_call)
        return bucket

    try:
        return store.session.call("examine", "objects.list", "", ask)
    except StoreError:  # it needs storage.buckets.get, which nothing else does
        return None


def gcs_lifecycle(bucket: Any) -> str:
    """Whether parts that are left behind are removed."""
    for rule in bucket.lifecycle_rules:
        suffixes = rule.get("condition", {}).get("matchesSuffix", [])
        if rule.get("action", {}).get("type") == "Delete" and any(".~part".endswith(suffix) for suffix in suffixes):
            return f"parts are removed after {rule['condition'].get('age')} days"
    raise Refusal(
        "no rule removes the parts of unfinished uploads",
        "What a killed save leaves is paid for until gc runs. Add a rule: Delete where matchesSuffix is .~part and age "
        "is 7 (terraform/modules/gcs-bucket).",
    )


def gcs_versioning(bucket: Any) -> str:
    """Whether what is deleted is kept."""
    policy: Mapping[str, Any] = bucket._properties.get("softDeletePolicy", {})  # noqa: SLF001  # as its own accessors do
    soft_s = int(policy.get("retentionDurationSeconds", 0) or 0)
    if not bucket.versioning_enabled and not soft_s:
        return "off, and so is soft delete"
    kept = [*(["versioning"] if bucket.versioning_enabled else []), *(["soft delete"] if soft_s else [])]
    return f"{' and '.join(kept)} on: the parts that large objects are composed of are paid for until they end"


def free_space(path: str) -> str:
    """How much room there is on the file system."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < _LEAST_FREE_BYTES:
        raise Refusal(f"{free_bytes // MIB} MiB are free", "Free some space: saves will fail for want of it.")
    return f"{free_bytes / GIB:.1f} GiB are free"


def user() -> str:
    """Whose files they will be."""
    return f"user {os.getuid()}" if hasattr(os, "getuid") else "this user"


def _is_unsigned(client: Any) -> bool:
    import botocore  # noqa: PLC0415  # an extra

    return client.meta.config.signature_version is botocore.UNSIGNED


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def _source(method: str) -> str:
    return {
        "explicit": "storage_options",
        "env": "the environment",
        "shared-credentials-file": "~/.aws/credentials",
        "config-file": "~/.aws/config",
        "iam-role": "the machine's role",
        "container-role": "the container's role",
        "assume-role": "a role that was assumed",
        "assume-role-with-web-identity": "a web identity (IRSA)",
        "sso": "AWS SSO",
    }.get(method, method)
