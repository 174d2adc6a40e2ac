"""The contract on gcp-storage-emulator: it is here because it refuses a wrong checksum, as GCS does.

It ignores all preconditions. The probe finds that out, and from then on the store refuses to create if absent, which is
what the clauses about it then ask for.
"""

from __future__ import annotations

import pytest
from tests.integration.contract_on import ContractOn

from cloudckpt.errors import TransientStoreError
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract_base import content, put, read_range


class TestOnGCPStorageEmulator(ContractOn):
    server_name = "gcp-emulator"
    num_paging_keys = 40  # each call takes it longer than the one before

    def test_it_looks_at_checksums_and_at_no_condition(self, store: Store) -> None:
        """It is the GCS server here that does the first, so that a refusal is seen to be translated. When it has been
        mended and does the second, it can judge races too.
        """
        found = store.probe()
        assert found.verifies_crc32c
        assert not found.conditional_create
        assert "ignores the condition" in found.observed

    def test_an_empty_object_has_no_first_byte(self, store: Store) -> None:
        """It answers with a range that ends before it begins, which is taken for what it is: not a range."""
        put(store, "empty", b"")
        assert content(store, "empty") == b""
        with pytest.raises(TransientStoreError):
            read_range(store, "empty", 0, 1)
