"""What the S3 servers of the integration tests share."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config

from cloudckpt.testing.servers import S3Server, ServerProcess
from cloudckpt.testing.servers.moto import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Service:
    """A `cloudckpt.testing.servers.Server` that speaks S3."""

    name: str
    endpoint_url: str
    process: ServerProcess
    keeps_data: bool
    scheme: str = "s3"

    @property
    def pid(self) -> int:
        """The process that serves; another one after a restart."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and neither killed nor ended by itself."""
        return self.process.is_running

    @property
    def storage_options(self) -> dict[str, Any]:
        """What `cloudckpt.Options.storage_options` need to reach it."""
        return self._as_motos.storage_options

    @property
    def environment(self) -> dict[str, str]:
        """What the ordinary AWS configuration needs to reach it."""
        return self._as_motos.environment

    @property
    def _as_motos(self) -> S3Server:
        """The same address and credentials; all of these servers are given moto's."""
        return S3Server(endpoint_url=self.endpoint_url)

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

    def kill(self) -> None:
        """SIGKILL. On return it is gone."""
        self.process.kill()

    def restart(self) -> None:
        """Start it again at the same address."""
        self.process.restart()
