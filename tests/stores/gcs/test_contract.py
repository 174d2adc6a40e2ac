"""The contract that every store is held to, on fake-gcs-server, less what that breaks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from cloudckpt.errors import ChecksumRefusedError
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.testing.contract import StoreContract
from cloudckpt.testing.contract_base import crc, keys, put
from cloudckpt.testing.wire import GCS_FORBIDDEN, Wire, WireRule

if TYPE_CHECKING:
    from cloudckpt.testing.servers import GCSServer


class TestGCSOnFakeServer(StoreContract):
    shared_between_processes = True
    num_paging_keys = 40  # pages are shown in test_requests, and by the server with files in tests/integration

    @pytest.fixture
    def store(self, gcs_server: GCSServer) -> GCSStore:
        bucket = f"contract-{uuid.uuid4().hex}"
        gcs_server.create_bucket(bucket)
        self.storage_options = gcs_server.storage_options
        return self._opened(bucket, self.storage_options)

    @staticmethod
    def _opened(bucket: str, storage_options: Mapping[str, Any], *, timeout_s: float = 60) -> GCSStore:
        return GCSStore(bucket, "a root/x", storage_options=storage_options, timeout_s=timeout_s, connections=8)

    def endpoint_url(self, store: GCSStore) -> str:
        return self.storage_options["endpoint_url"]

    def at(self, store: GCSStore, endpoint_url: str, *, timeout_s: float) -> GCSStore:
        bucket = urlsplit(store.uri).netloc
        return self._opened(bucket, {**self.storage_options, "endpoint_url": endpoint_url}, timeout_s=timeout_s)

    @pytest.fixture(autouse=True)
    def _doorman(self, gcs_server: GCSServer) -> Iterator[None]:
        """The server lets everybody in, so it is the wire that answers as GCS does."""
        with Wire(gcs_server.endpoint_url, WireRule(action=GCS_FORBIDDEN, times=None)) as self.doorman:
            yield

    def denied(self, store: GCSStore) -> GCSStore:
        return self.at(store, self.doorman.url, timeout_s=60)

    def test_the_wrong_checksum_is_refused(self, store: GCSStore) -> None:
        """The server takes any checksum, so an object is replaced before its answer shows that it is another: the
        caller hears of it, and the damaged object is gone. That GCS is given the checksum is in test_requests.
        """
        put(store, "other", b"other")
        with pytest.raises(ChecksumRefusedError):
            store.put("new", [memoryview(b"body")], crc32c=crc(b"other"))
        assert keys(store) == ["other"]
