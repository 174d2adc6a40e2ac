"""The contract on fake-gcs-server, with its objects in files; in memory it has it in ``tests/stores/gcs``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.contract_on import ContractOn

from cloudckpt.errors import ChecksumRefusedError
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract_base import crc, keys, put
from cloudckpt.testing.wire import GCS_FORBIDDEN, Wire, WireRule


class TestOnFakeGCSServer(ContractOn):
    """Creating if absent is atomic here, and races are real."""

    server_name = "fake-gcs"
    num_paging_keys = 40  # thousands of files take a minute; pages are shown in memory

    @pytest.fixture(autouse=True)
    def _doorman(self, store: Store) -> Iterator[None]:
        """The server lets everybody in, so it is the wire that answers as GCS does."""
        with Wire(self.server.endpoint_url, WireRule(action=GCS_FORBIDDEN, times=None)) as self.doorman:
            yield

    def denied(self, store: Store) -> Store:
        return self.at(store, self.doorman.url, timeout_s=60.0)

    def test_the_wrong_checksum_is_refused(self, store: Store) -> None:
        """The server takes any checksum, so that only its answer shows that it has other bytes: the caller hears of it
        and what was put is gone, and with it what it had replaced. gcp-storage-emulator refuses, as GCS does.
        """
        put(store, "other", b"other")
        put(store, "replaced", b"old")
        for key in ("new", "replaced"):
            with pytest.raises(ChecksumRefusedError):
                store.put(key, [memoryview(b"body")], crc32c=crc(b"other"))
        assert keys(store) == ["other"]
