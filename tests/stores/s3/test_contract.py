"""The contract that every store is held to, on moto's server, less what moto itself breaks."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from cloudckpt.stores.base import UploadInfo
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing.contract import StoreContract
from cloudckpt.testing.contract_base import content, put, run_at_once
from cloudckpt.testing.wire import S3_ACCESS_DENIED, Wire, WireRule

if TYPE_CHECKING:
    from cloudckpt.testing.servers import S3Server


class TestS3OnMoto(StoreContract):
    shared_between_processes = True
    num_paging_keys = 40  # thousands take moto half a minute: Ceph's pages are real, and quicker

    @pytest.fixture
    def store(self, s3_server: S3Server) -> S3Store:
        bucket = f"contract-{uuid.uuid4().hex}"
        s3_server.create_bucket(bucket)
        # moto takes any checksum, as the probe finds out. That ours is the right one, and is sent, is shown in
        # test_requests.
        self.storage_options = s3_server.storage_options
        return self._opened(bucket, s3_server.storage_options)

    @staticmethod
    def _opened(bucket: str, storage_options: Mapping[str, object], *, timeout_s: float = 60) -> S3Store:
        return S3Store(bucket, "a root/x", storage_options=storage_options, timeout_s=timeout_s, connections=8)

    def endpoint_url(self, store: S3Store) -> str:
        return self.storage_options["endpoint_url"]

    def at(self, store: S3Store, endpoint_url: str, *, timeout_s: float) -> S3Store:
        bucket = urlsplit(store.uri).netloc
        return self._opened(bucket, {**self.storage_options, "endpoint_url": endpoint_url}, timeout_s=timeout_s)

    @pytest.fixture(autouse=True)
    def _doorman(self, s3_server: S3Server) -> Iterator[None]:
        """moto lets everybody in, so it is the wire that answers as S3 does; real refusals are shown on Ceph."""
        with Wire(s3_server.endpoint_url, WireRule(action=S3_ACCESS_DENIED, times=None)) as self.doorman:
            yield

    def denied(self, store: S3Store) -> S3Store:
        return self.at(store, self.doorman.url, timeout_s=60)

    def test_of_many_threads_exactly_one_creates(self, store: S3Store) -> None:
        """moto has no lock between the check and the write: several may win, but never none, and never a mixture."""
        bodies = [f"writer {writer}".encode() * 100 for writer in range(4)]
        results = run_at_once([functools.partial(put, store, "race", body, if_absent=True) for body in bodies])
        winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
        assert content(store, "race") in winners

    def test_of_two_processes_exactly_one_creates(self, store: S3Store) -> None:
        """No race can be held on moto. That a pickled store works in another process is in test_clients."""
        pytest.skip("moto has no lock between the check and the write")

    def test_a_create_never_replaces_what_was_just_completed(self, store: S3Store) -> None:
        """Nor this one."""
        pytest.skip("moto has no lock between the check and the write")

    def check_upload_time(self, info: UploadInfo) -> None:
        """moto says of every upload that it began in 2010."""
        assert info.started_at.tzinfo is not None
