"""Checks of what surrounds a store: the clock, credentials, a bucket's region and settings, a disk's free space.

A check returns a sentence, or None if nothing is known, or raises `CheckFailed`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from email.message import Message
from email.utils import parsedate_to_datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloudckpt.errors import StoreError
from cloudckpt.options import GIB, MIB
from cloudckpt.stores.probe import CheckFailed

if TYPE_CHECKING:
    from cloudckpt.stores.gcs import GCSStore
    from cloudckpt.stores.s3 import S3Store
    from cloudckpt.uri import Location

_MAX_SKEW_S = 300.0
_MIN_FREE_BYTES = 1 * GIB
_PAID_UNTIL_GC = "The store bills the data of killed saves until gc runs."
SERVICE_COLUMNS = ("service", "create-if-absent", "parts", "list after write", "copy", "CRC32C", "consequence", "ran")


@contextlib.contextmanager
def removing_directories(location: Location) -> Iterator[None]:
    """Remove, on exit, the directories at and above `location` that did not exist before, if they are empty."""
    path = Path(location.path)
    above = (path, *path.parents) if location.scheme == "file" else ()
    missing = [directory for directory in above if not directory.exists()]
    try:
        yield
    finally:
        for directory in missing:  # the deepest first
            with contextlib.suppress(OSError):  # another program has put something there meanwhile
                directory.rmdir()


def request_headers(endpoint_url: str, *, timeout_s: float) -> Message | None:
    """Send an unsigned request. Returns the headers of the answer, or None if none came."""
    parts = urlsplit(endpoint_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=timeout_s)
    try:
        connection.request("HEAD", "/")
        return connection.getresponse().headers
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def check_clock(endpoint_url: str, *, timeout_s: float) -> str | None:
    """Compare this machine's clock with the endpoint's."""
    headers = request_headers(endpoint_url, timeout_s=timeout_s) or Message()
    try:
        skew_s = time.time() - parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except (ValueError, TypeError):
        return None
    if abs(skew_s) > _MAX_SKEW_S:
        raise CheckFailed(
            f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store's",
            "A store refuses requests whose time is off by more than a quarter of an hour, and gc trusts the clock. "
            "Set the clock (NTP).",
        )
    return f"at most {abs(skew_s):.0f} s off"


def check_s3_credentials(store: S3Store) -> str:
    """Return where boto3 found the credentials."""
    import botocore  # noqa: PLC0415  # an extra

    client = store.session.boto3_client()
    if client.meta.config.signature_version is botocore.UNSIGNED:
        return "none: anonymous requests"
    credentials = client._request_signer._credentials  # noqa: SLF001  # boto3 has no other access to them
    if credentials is None:
        raise CheckFailed(
            "boto3 found none",
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or an instance role; or set the storage option "
            "anonymous to true for a public bucket.",
        )
    source = "the storage options" if credentials.method == "explicit" else credentials.method
    return f"access key …{credentials.get_frozen_credentials().access_key[-4:]}, from {source}"


def check_s3_region(store: S3Store) -> str | None:
    """Compare the bucket's region with the region in the signature of requests."""
    client = store.session.boto3_client()
    try:
        headers = client.head_bucket(Bucket=store.session.bucket)["ResponseMetadata"]["HTTPHeaders"]
    except Exception as error:  # noqa: BLE001  # other checks report the error; the answer names the region all the same
        headers = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region, signed_region = headers.get("x-amz-bucket-region"), client.meta.region_name
    if region is None:
        return None
    if region != signed_region:
        raise CheckFailed(
            f"the bucket is in {region}, and requests are signed for {signed_region}",
            f"Set the storage option region={region}, or AWS_REGION={region}.",
        )
    return str(region)


def check_s3_lifecycle(store: S3Store) -> str | None:
    """Look for a rule that aborts unfinished uploads."""
    client = store.session.boto3_client()
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=store.session.bucket).get("Rules", [])
    except Exception as error:  # noqa: BLE001  # no save needs this permission
        if getattr(error, "response", {}).get("Error", {}).get("Code") != "NoSuchLifecycleConfiguration":
            return None
        rules = []
    for rule in rules:
        days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        if days is not None and rule.get("Status") == "Enabled":
            return f"unfinished uploads are aborted after {days} days"
    raise CheckFailed(
        "no rule aborts unfinished uploads",
        f"{_PAID_UNTIL_GC} Add a rule with AbortIncompleteMultipartUpload (terraform/modules/s3-bucket).",
    )


def check_s3_versioning(store: S3Store) -> str | None:
    """Return the bucket's versioning, which keeps deleted objects."""
    client = store.session.boto3_client()
    try:
        status = client.get_bucket_versioning(Bucket=store.session.bucket).get("Status", "off")
    except Exception:  # noqa: BLE001  # no save needs this permission
        return None
    return {
        "Enabled": "on: deleted objects are paid for until a rule for noncurrent versions removes them",
        "Suspended": "suspended: earlier versions are kept",
    }.get(status, "off")


def check_gcs_credentials(store: GCSStore) -> str:
    """Return the account, or the kind of the credentials."""
    credentials = store.session.call("examine", "objects.list", "", lambda client: client.credentials)
    kind = type(credentials)
    if kind.__name__ == "AnonymousCredentials":
        return "none: anonymous requests"
    email = getattr(credentials, "service_account_email", None)
    return str(email) if email else f"{kind.__module__}.{kind.__name__}"


def check_gcs_location_type(store: GCSStore) -> str | None:
    """Return the type of the bucket's location. A zonal bucket takes no save."""
    try:
        location_type = store.session.call("examine", "buckets.getStorageLayout", "", store.session.location_type)
    except StoreError:  # servers that are not Google's lack the request
        return None
    if location_type == "zone":
        raise CheckFailed(
            "the bucket is zonal (Rapid storage)",
            "It takes only appendable objects, and no compose or rewrite: every save fails. Use a bucket in a region.",
        )
    return location_type or None


def read_gcs_bucket(store: GCSStore) -> Any:
    """Return the bucket as google-cloud-storage has it, or None without the permission storage.buckets.get."""

    def read(client: Any) -> Any:
        bucket = client.bucket(store.session.bucket)
        bucket.reload(**client.each_call)
        return bucket

    try:
        return store.session.call("examine", "objects.list", "", read)
    except StoreError:  # no save needs this permission
        return None


def check_gcs_lifecycle(bucket: Any) -> str:
    """Look for a rule that removes the parts of unfinished uploads."""
    for rule in bucket.lifecycle_rules:
        suffixes = rule.get("condition", {}).get("matchesSuffix", [])
        if rule.get("action", {}).get("type") == "Delete" and any(".~part".endswith(suffix) for suffix in suffixes):
            return f"parts are removed after {rule['condition'].get('age')} days"
    raise CheckFailed(
        "no rule removes the parts of unfinished uploads",
        f"{_PAID_UNTIL_GC} Add a rule: Delete if matchesSuffix is .~part and age is 7 (terraform/modules/gcs-bucket).",
    )


def check_gcs_versioning(bucket: Any) -> str:
    """Return the bucket's versioning and soft delete, which keep what is deleted."""
    policy = bucket._properties.get("softDeletePolicy", {})  # noqa: SLF001  # the bucket's own accessors read it
    settings = ["versioning"] if bucket.versioning_enabled else []
    if int(policy.get("retentionDurationSeconds", 0) or 0):
        settings.append("soft delete")
    if not settings:
        return "off, and so is soft delete"
    return f"{' and '.join(settings)} on: the parts that large objects are composed of are paid for until they expire"


def check_free_space(path: str) -> str:
    """Measure the free space of the file system."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _MIN_FREE_BYTES:
        raise CheckFailed(f"{free_bytes // MIB} MiB are free", "Free at least 1 GiB, and what a save takes.")
    return f"{free_bytes / GIB:.1f} GiB are free"


def read_services() -> list[dict[str, str]]:
    """Return the rows: each column in Markdown, and ``match``, a regular expression that `find_service` uses."""
    services: list[dict[str, str]] = json.loads(files(__package__).joinpath("services.json").read_text("utf-8"))
    return services


def find_service(scheme: str, *, host: str = "", server: str = "") -> Mapping[str, str] | None:
    """Return the row of a store by column, as plain text; None if no row applies.

    `scheme` is that of the URI, or ``gs-zonal`` for a zonal bucket of GCS, and `host` the endpoint's. `server` has the
    headers Server and x-amz-request-id of an answer; older Ceph has only the second.
    """
    text = f"{scheme} {host} {server}"
    for row in read_services():
        if re.match(row["match"], text):
            return {column: re.sub(r"\[([^]]+)\]\(([^)]+)\)", r"\1 (\2)", row[column]) for column in SERVICE_COLUMNS}
    return None
