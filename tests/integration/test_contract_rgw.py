"""The contract on Ceph's RADOS Gateway."""

from __future__ import annotations

import pytest
from tests.integration.contract_on import ContractOn, bucket_of

from cloudckpt.errors import CredentialsError
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract_base import keys


class TestOnCephRGW(ContractOn):
    """Races, pages and signatures are real here. It does not look at checksums, as the probe finds out."""

    server_name = "rgw"

    def denied(self, store: Store) -> Store:
        """Nobody's requests: the bucket is private."""
        server = self.server.storage_options
        nobody = {"endpoint_url": server["endpoint_url"], "region": server["region"], "anonymous": True}
        return self.opened(bucket_of(store), nobody)

    @pytest.mark.parametrize("wrong", ["access_key_id", "secret_access_key"])
    def test_wrong_credentials_are_named_as_such(self, store: Store, wrong: str) -> None:
        """A mistyped key would send its owner to look for a missing permission. Signatures are checked here."""
        stranger = self.opened(bucket_of(store), {**self.server.storage_options, wrong: "mistyped-by-hand"})
        with pytest.raises(CredentialsError) as caught:
            keys(stranger)
        assert "mistyped-by-hand" not in str(caught.value)
