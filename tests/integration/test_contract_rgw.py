"""The contract on Ceph's RADOS Gateway."""

from __future__ import annotations

import pytest
from tests.integration.contract_on import ContractOn, bucket_of

from cloudckpt.errors import CredentialsError, TransientStoreError
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract_base import content, keys, make_bodies, put, upload


class TestOnCephRGW(ContractOn):
    """Races, pages and signatures are real here. It does not look at checksums, as the probe finds out."""

    server_name = "rgw"
    longest_key_bytes = 900
    """In place of 1024, for the sake of uploads in parts (see below)."""

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

    def test_an_upload_to_a_key_as_long_as_s3_allows_has_a_wrong_answer(self, store: Store) -> None:
        """Ceph completes it and says that it could not: to what is its own it gives longer names, and those have a
        limit. If this fails, Ceph has been mended, and `longest_key_bytes` can go.
        """
        key, bodies = "/".join(["n" * 200] * 5), make_bodies(store, 2)
        put(store, key, b"body")
        assert content(store, key) == b"body"
        with pytest.raises(TransientStoreError):
            upload(store, key, bodies)
        assert content(store, key) == b"".join(bodies)
