"""The store contract on servers that really run. Each clause has a bucket of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from tests.integration.servers import Servers
from tests.kit.wire import GCS_FORBIDDEN, Wire, WireRule
from tests.stores.wire_contract import WireContract

from cloudckpt import Options
from cloudckpt.errors import ChecksumRefusedError, CredentialsError, TransientStoreError
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract_base import content, crc, keys, put, read_range
from cloudckpt.testing.servers import Server


class ContractOn(WireContract):
    """Inherit, and name the server."""

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


class TestOnMiniStack(ContractOn):
    """Races and checksums are real here. It lets everybody in, so that nobody can be denied."""

    server_name = "ministack"
    num_paging_keys = 40  # thousands take half a minute; Ceph has pages that real clients get

    def test_the_server_checks_checksums(self, store: Store) -> None:
        """It is the S3 server here that does: without it, no S3 server would have refused our wrong checksum, or taken
        our right one for what it is.
        """
        assert store.probe().verifies_crc32c


class TestOnFakeGCSServer(ContractOn):
    """Creating if absent is atomic here, and races are real. Its objects are files; in memory: ``tests/stores/gcs``."""

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


class TestOnGCPStorageEmulator(ContractOn):
    """It refuses a wrong checksum, as GCS does, and ignores all preconditions. The probe finds that out, and from then
    on the store refuses to create if absent, which is what the clauses about it then ask for.
    """

    server_name = "gcp-emulator"
    num_paging_keys = 40  # each call takes it longer than the one before

    def test_the_server_checks_checksums_and_no_condition(self, store: Store) -> None:
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
