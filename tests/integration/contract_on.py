"""The contract on a server that really runs."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from tests.integration.conftest import Servers

from cloudckpt import Options
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract import StoreContract
from cloudckpt.testing.servers import Server


class ContractOn(StoreContract):
    """Inherit, and name the server. Each clause has a bucket of its own."""

    server_name: ClassVar[str]
    shared_between_processes = True

    @pytest.fixture
    def store(self, servers: Servers) -> Store:
        """An empty bucket's root."""
        self.server: Server = servers.up(self.server_name)
        bucket = f"contract-{uuid.uuid4().hex}"
        self.server.create_bucket(bucket)
        return self.opened(bucket, self.server.storage_options)

    def opened(self, bucket: str, storage_options: Mapping[str, Any], *, timeout_s: float = 60.0) -> Store:
        """The root in that bucket."""
        options = Options(storage_options=storage_options, timeout_s=timeout_s)
        return open_store(f"{self.server.scheme}://{bucket}/a root/x", options)

    def endpoint_url(self, store: Store) -> str:
        return self.server.endpoint_url

    def at(self, store: Store, endpoint_url: str, *, timeout_s: float) -> Store:
        storage_options = {**self.server.storage_options, "endpoint_url": endpoint_url}
        return self.opened(bucket_of(store), storage_options, timeout_s=timeout_s)


def bucket_of(store: Store) -> str:
    """Its name."""
    return urlsplit(store.uri).netloc
