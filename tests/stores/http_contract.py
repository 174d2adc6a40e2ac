"""The contract that every store is held to, for S3 and GCS: each on a server on loopback that lets everybody in."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from tests.stores.wire_contract import WireContract
from tests.wire import Reply, Wire, WireRule


class HTTPStoreContract(WireContract):
    """A subclass says which store's, and has its server in the fixture `http_server`."""

    shared_between_processes = True
    num_paging_keys = 40  # thousands take half a minute; pages are shown in test_requests
    store_type: ClassVar[type[Any]]
    denial: ClassVar[Reply]

    @pytest.fixture
    def store(self, http_server: Any) -> Any:
        bucket = f"contract-{uuid.uuid4().hex}"
        http_server.create_bucket(bucket)
        self.storage_options = http_server.storage_options
        return self._opened(bucket, self.storage_options["endpoint_url"], timeout_s=60)

    def _opened(self, bucket: str, endpoint_url: str, *, timeout_s: float) -> Any:
        options = {**self.storage_options, "endpoint_url": endpoint_url}
        return self.store_type(bucket, "a root/x", storage_options=options, timeout_s=timeout_s, connections=8)

    def endpoint_url(self, store: Any) -> str:
        return self.storage_options["endpoint_url"]

    def at(self, store: Any, endpoint_url: str, *, timeout_s: float) -> Any:
        return self._opened(urlsplit(store.uri).netloc, endpoint_url, timeout_s=timeout_s)

    @pytest.fixture(autouse=True)
    def _refusing_wire(self, http_server: Any) -> Iterator[None]:
        """The server lets everybody in, so it is the wire that refuses as the service does."""
        with Wire(http_server.endpoint_url, WireRule(action=self.denial, times=None)) as self.refusing_wire:
            yield

    def denied(self, store: Any) -> Any:
        return self.at(store, self.refusing_wire.url, timeout_s=60)
