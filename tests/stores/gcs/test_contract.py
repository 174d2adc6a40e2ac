"""The contract that every store is held to, on fake-gcs-server, less what that breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.wire import GCS_FORBIDDEN
from tests.stores.http_contract import HTTPStoreContract

from cloudckpt.errors import ChecksumRefusedError
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.testing.contract_base import crc, keys, put

if TYPE_CHECKING:
    from cloudckpt.testing.servers import GCSServer


class TestGCSOnFakeServer(HTTPStoreContract):
    store_type = GCSStore
    denial = GCS_FORBIDDEN

    @pytest.fixture
    def http_server(self, gcs_server: GCSServer) -> GCSServer:
        return gcs_server

    def test_the_wrong_checksum_is_refused(self, store: GCSStore) -> None:
        """The server takes any checksum, so an object is replaced before its answer shows that it is another: the
        caller hears of it, and the damaged object is gone. That GCS is given the checksum is in test_requests.
        """
        put(store, "other", b"other")
        with pytest.raises(ChecksumRefusedError):
            store.put("new", [memoryview(b"body")], crc32c=crc(b"other"))
        assert keys(store) == ["other"]
