"""How clients are shared and thrown away: a suite for S3 and for GCS, which keep them by the same code."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from cloudckpt.stores import http_clients


class ClientTests:
    """A subclass says which store's; each directory's `scripted` serves it."""

    clients: ModuleType
    store_type: type[Any]
    credentials: dict[str, Any]
    """In its `storage_options`."""
    endpoint_variable: str
    """Of the environment, that leads its clients elsewhere."""
    another_class: str
    """Of storage."""

    def opened(self, *, timeout_s: float = 20, **options: Any) -> Any:
        options = {**self.credentials, **options}
        return self.store_type("bucket", "", storage_options=options, timeout_s=timeout_s, connections=2)

    def client_of(self, store: Any) -> Any:
        return self.clients.client_cache.client_for(store._session.client_key, store._session._environment)

    def test_stores_of_one_configuration_share_a_client(self, scripted: Any) -> None:
        """Each save would open its connections anew."""
        server = scripted.serve(scripted.any_store())
        for _ in range(3):
            server.store().head("k")
        server.store(prefix="other").head("k")
        assert len(self.clients.client_cache) == 1
        assert server.num_connections == 1
        server.store(storage_class=self.another_class).head("k")
        server.store(timeout_s=7).head("k")
        assert len(self.clients.client_cache) == 3

    def test_threads_that_start_together_make_one_client(self, scripted: Any) -> None:
        """Each would look for credentials, and open connections of its own; boto3 cannot even make two at once."""
        server = scripted.serve(scripted.any_store())
        store, barrier = server.store(), threading.Barrier(8, timeout=30)

        def ask() -> int:
            barrier.wait()
            return store.head("k").size_bytes

        with ThreadPoolExecutor(8) as pool:
            sizes = [future.result(30) for future in [pool.submit(ask) for _ in range(8)]]
        assert sizes == [10] * 8
        assert len(self.clients.client_cache) == 1

    def test_only_so_many_clients_are_kept(self, scripted: Any) -> None:
        """A process that opens stores of ever new configurations would collect sockets without end."""
        server = scripted.serve(scripted.any_store())
        first = server.store()
        kept = self.client_of(first)
        for number in range(http_clients._MOST_CLIENTS):
            self.client_of(server.store(timeout_s=100 + number))
        assert len(self.clients.client_cache) == http_clients._MOST_CLIENTS
        assert self.client_of(first) is not kept

    def test_plain_http_to_another_machine_is_warned_about_once(self) -> None:
        """Weights would cross the network in the clear without anyone having decided so."""
        http_clients._warned_endpoints.clear()
        with pytest.warns(UserWarning, match=r"http://store\.example is plain HTTP"):
            self.client_of(self.opened(endpoint_url="http://store.example"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.client_of(self.opened(endpoint_url="http://store.example", timeout_s=3))
            self.client_of(self.opened(endpoint_url="https://store.example"))
            for loopback in ("http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1", "http://s3.localhost:1"):
                self.client_of(self.opened(endpoint_url=loopback))

    def test_a_client_is_made_of_the_environment_that_it_is_filed_under(
        self, scripted: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A store opened in a test's environment, and first used after it, would lead later tests to the real one."""
        here, there = scripted.serve(scripted.any_store()), scripted.serve(scripted.any_store())
        monkeypatch.setenv(self.endpoint_variable, here.endpoint_url)
        early = self.opened()
        monkeypatch.setenv(self.endpoint_variable, there.endpoint_url)
        early.head("k")
        monkeypatch.setenv(self.endpoint_variable, here.endpoint_url)
        self.opened().head("k")
        assert (len(here.requests), len(there.requests)) == (1, 1)
