"""What is different in directory buckets (S3 Express One Zone).

https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html. Create-if-absent, CRC32C and
multipart uploads are as in other buckets; boto3 makes the sessions (CreateSession) by itself. None of this has been run
on the real service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudckpt.errors import InvalidOptionError
from cloudckpt.stores.s3.client import is_amazons

if TYPE_CHECKING:
    from cloudckpt.stores.s3.config import S3Config

PERMISSION = "s3express:CreateSession"
"""What IAM calls the right to make any request to a directory bucket."""

_SUFFIXES = ("--x-s3", "--xa-s3")  # a bucket's, and an access point's to one
# The second in Local Zones.
_STORAGE_CLASSES = ("EXPRESS_ONEZONE", "ONEZONE_IA")


def is_directory_bucket(bucket: str) -> bool:
    """Whether the name is a directory bucket's; no other bucket may have such a name."""
    return bucket.endswith(_SUFFIXES)


def check_options(bucket: str, config: S3Config) -> None:
    """Raise `InvalidOptionError`, with every problem at once, for options that cannot work in a directory bucket."""
    amazons_endpoint = config.endpoint_url is None or is_amazons(config.endpoint_url)
    problems = {
        "anonymous: these buckets are never public": config.anonymous,
        "endpoint_url: leave it out, the address follows from the bucket's name and the region": (
            config.endpoint_url is not None and amazons_endpoint
        ),
        "path_style, addressing_style: the bucket's name is part of the address here": (
            config.addressing_style == "path" and amazons_endpoint
        ),
        "request_payer: the owner pays here": config.request_payer,
        "sse='aws:kms:dsse': use 'aws:kms' or 'AES256'": config.sse == "aws:kms:dsse",
        "sse_customer_key: use sse='aws:kms' or 'AES256'": config.sse_customer_key,
        f"storage_class: only {' or '.join(_STORAGE_CLASSES)}, or nothing": (
            config.storage_class is not None and config.storage_class not in _STORAGE_CLASSES
        ),
        "tags: objects have none here": config.tagging,
    }
    found = [problem for problem, is_there in problems.items() if is_there]
    if found:
        raise InvalidOptionError(
            f"storage_options that a directory bucket (S3 Express One Zone) does not know, such as {bucket!r}: "
            + "; ".join(found)
        )
