"""The contract on MiniStack, which keeps all of it."""

from __future__ import annotations

from tests.integration.contract_on import ContractOn

from cloudckpt.stores.base import Store


class TestOnMiniStack(ContractOn):
    """Races and checksums are real here. It lets everybody in, so that nobody can be denied."""

    server_name = "ministack"

    def test_it_looks_at_checksums(self, store: Store) -> None:
        """It is the S3 server here that does: without it, no S3 server would have refused our wrong checksum, or taken
        our right one for what it is.
        """
        assert store.probe().verifies_crc32c
