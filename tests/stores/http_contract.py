"""The contract that every store is held to, for S3 and GCS: each on a server on loopback that lets everybody in."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from tests.kit.clock import set_time
from tests.kit.wire import Reply, Wire, WireRule
from tests.stores.wire_contract import WireContract

from cloudckpt.stores import clock


class HTTPStoreContract(WireContract):
    """A subclass says which store's, and has its server in the fixture `http_server`."""

    shared_between_processes = True
    num_paging_keys = 40  # thousands take half a minute; pages are shown in test_requests
    store_type: ClassVar[type[Any]]
    denial: ClassVar[Reply]

    @pytest.fixture
    def store(self, http_server: Any) -> Any:
        bucket = f"contract-{uuid.uuid4().hex}"
        http_server.create_bucket(bucket)
        self.storage_options = http_server.storage_options
        return self._opened(bucket, self.storage_options["endpoint_url"], timeout_s=60)

    def _opened(self, bucket: str, endpoint_url: str, *, timeout_s: float) -> Any:
        options = {**self.storage_options, "endpoint_url": endpoint_url}
        return self.store_type(bucket, "a root/x", storage_options=options, timeout_s=timeout_s, connections=8)

    def endpoint_url(self, store: Any) -> str:
        return self.storage_options["endpoint_url"]

    def at(self, store: Any, endpoint_url: str, *, timeout_s: float) -> Any:
        return self._opened(urlsplit(store.uri).netloc, endpoint_url, timeout_s=timeout_s)

    @pytest.fixture(autouse=True)
    def _refusing_wire(self, http_server: Any) -> Iterator[None]:
        """The server lets everybody in, so it is the wire that refuses as the service does."""
        with Wire(http_server.endpoint_url, WireRule(action=self.denial, times=None)) as self.refusing_wire:
            yield

    def denied(self, store: Any) -> Any:
        return self.at(store, self.refusing_wire.url, timeout_s=60)

    @pytest.mark.parametrize("hours_ahead", [-30, 0.5, 30])
    def test_a_clock_that_is_an_hour_off_is_named(
        self, store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hours_ahead: float
    ) -> None:
        """If this fails, nobody learns of a wrong clock; or gc, on a machine that is ahead, takes running saves for
        dead.
        """
        set_time(monkeypatch, ahead_s=hours_ahead * 3600)
        new_client = self.at(store, self.endpoint_url(store), timeout_s=60 + hours_ahead)
        for _ in range(2):
            list(new_client.list())
        found = [one.getMessage() for one in caplog.records if "clock" in one.getMessage()]
        assert len(found) == (abs(hours_ahead) > 1), found
        assert all(f"30.0 hours {'ahead of' if hours_ahead > 0 else 'behind'} that of" in text for text in found)
        error_s = (clock.now() - datetime.now(timezone.utc)).total_seconds()
        assert error_s == pytest.approx(0 if hours_ahead > 1 else hours_ahead * 3600, abs=5)
