"""Helpers that the S3 servers of the integration tests share."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config

from cloudckpt.testing.servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Service(S3Server):
    """An S3 server that checks its requests; all of these servers are given moto's credentials."""

    def create_bucket(self, name: str) -> None:
        """Create the bucket `name`; one that exists is left as it is."""
        with closing(self.client()) as client:
            if name not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
                client.create_bucket(Bucket=name)

    def client(self) -> Any:
        """A client of boto3's, to look at it with code that is not cloudckpt's."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            config=Config(
                connect_timeout=10, read_timeout=30, retries={"total_max_attempts": 3}, s3={"addressing_style": "path"}
            ),
        )
