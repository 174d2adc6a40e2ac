"""How clients are shared and thrown away: a suite for S3 and for GCS, which keep them by the same code."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cloudckpt.errors import MissingDependencyError


class ClientTests:
    """A subclass says which store's; each directory's `scripted` serves it."""

    store_type: type[Any]
    extra: str
    cache: Any
    credentials: dict[str, Any]
    """In its `storage_options`."""
    endpoint_variable: str
    """Of the environment, that leads its clients elsewhere."""
    another_class: str
    """Of storage."""

    def opened(self, *, timeout_s: float = 20, **options: Any) -> Any:
        options = {**self.credentials, **options}
        return self.store_type("bucket", "", storage_options=options, timeout_s=timeout_s, connections=2)

    def test_stores_of_one_configuration_share_a_client(self, scripted: Any) -> None:
        """Each save would open its connections anew."""
        server = scripted.serve(scripted.any_store())
        for _ in range(3):
            server.store().head("k")
        server.store(prefix="other").head("k")
        assert len(self.cache) == 1
        assert server.num_connections == 1
        server.store(storage_class=self.another_class).head("k")
        server.store(timeout_s=7).head("k")
        assert len(self.cache) == 3

    def timeouts_s(self, client: Any) -> tuple[float, float]:
        """Return the client's timeouts for connecting and for reading."""
        raise NotImplementedError

    def test_each_call_has_the_timeouts_of_its_own_store(self, scripted: Any) -> None:
        """If this fails, the timeout of the first call holds for all later ones: a load hangs for longer than asked."""
        server = scripted.serve(scripted.any_store())
        expected = {60: (20, 20), 3: (3, 1), 6: (6, 2)}
        for timeout_s in (60, 3, 6, 60):
            store = server.store(timeout_s=timeout_s)
            store.head("k")
            assert self.timeouts_s(store.session.client()) == expected[timeout_s]
        options = {"connect_timeout_s": 5.0, "read_timeout_s": 7.0}
        assert self.timeouts_s(server.store(timeout_s=60, **options).session.client()) == (5, 7)

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
        assert len(self.cache) == 1

    def test_without_its_sdk_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A ModuleNotFoundError would not say which of cloudckpt's extras to install."""
        monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
        with pytest.raises(MissingDependencyError, match=rf"extra '{self.extra}', as pip install"):
            self.opened()
