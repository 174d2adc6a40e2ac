"""The contract that every store is held to, on moto's server, less what moto itself breaks."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from typing import TYPE_CHECKING

import pytest

from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing._contract_tools import at_once, bodies_of, content, parts_of, put, upload_part
from cloudckpt.testing.contract import StoreContract

if TYPE_CHECKING:
    from cloudckpt.testing.servers import S3Server


class TestS3OnMoto(StoreContract):
    shared_between_processes = True
    num_paging_keys = 40  # a thousand puts cost moto ten seconds; paging is held to scripted pages in test_requests

    @pytest.fixture
    def store(self, s3_server: S3Server) -> S3Store:
        bucket = f"contract-{uuid.uuid4().hex}"
        s3_server.create_bucket(bucket)
        store = S3Store(bucket, "a root/x", storage_options=s3_server.storage_options, timeout_s=60, connections=8)
        # moto takes any checksum. That ours is the right one, and is sent, is shown in test_requests.
        store.capabilities = dataclasses.replace(store.capabilities, verifies_crc32c=False)
        return store

    def test_of_many_threads_exactly_one_creates(self, store: S3Store) -> None:
        """moto has no lock between the check and the write: several may win, but never none, and never a mixture."""
        bodies = [f"writer {writer}".encode() * 100 for writer in range(4)]
        results = at_once([functools.partial(put, store, "race", body, if_absent=True) for body in bodies])
        winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
        assert content(store, "race") in winners

    def test_of_two_processes_exactly_one_creates(self, store: S3Store) -> None:
        """As above: no race can be held on moto. That a pickled store works in another process is in test_clients."""

    def test_unfinished_uploads_are_listed(self, store: S3Store) -> None:
        """moto says of every upload that it began in 2010; all else that gc needs must be right."""
        ids = {key: store.create_multipart(key) for key in ("step-1/a", "step-1/b", "step-2/a b")}
        bodies = bodies_of(store, 1)
        upload_part(store, "step-1/a", ids["step-1/a"], parts_of(bodies)[0], bodies[0])
        assert {info.key: info.upload_id for info in store.list_uploads()} == ids
        assert {info.key for info in store.list_uploads("step-1/")} == {"step-1/a", "step-1/b"}
        for info in store.list_uploads():
            assert info.started_at.tzinfo is not None
            store.abort_multipart(info.key, info.upload_id)
        assert list(store.list_uploads()) == []
