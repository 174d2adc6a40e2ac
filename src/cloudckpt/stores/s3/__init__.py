"""S3 and whatever speaks its protocol, on boto3."""

from cloudckpt.stores.s3.store import S3Store

__all__ = ["S3Store"]
