"""The contract as a test class, for the store that ``python -m cloudckpt.testing`` was called with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from cloudckpt.stores.base import Store
from cloudckpt.testing.command import TARGET, Target, remove_all
from cloudckpt.testing.contract import StoreContract

_numbers = itertools.count()


class TestStore(StoreContract):
    """Every clause, each under a root of its own, from which everything is removed at once."""

    target: Target
    name: str

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        """A fresh root of the user's store."""
        self.target = request.config.stash[TARGET]
        self.shared_between_processes = not self.target.is_private
        self.num_racing_rounds = self.target.num_rounds
        self.num_paging_keys = self.target.num_keys
        self.longest_key_bytes = self.target.longest_key_bytes
        self.name = f"clause-{next(_numbers)}"
        store = self.target.opened(self.name)
        try:
            yield store
        finally:
            remove_all(store)  # what is left is told in the end

    def endpoint_url(self, store: Store) -> str | None:
        """The user's endpoint."""
        return self.target.endpoint_url

    def at(self, store: Store, endpoint_url: str, *, timeout_s: float) -> Store:
        """The same root behind the wire."""
        return self.target.behind(self.name, endpoint_url, timeout_s=timeout_s)

    def denied(self, store: Store) -> Store | None:
        """The same root with the user's bad credentials, if there are any."""
        if self.target.denied_options is None:
            return None
        return self.target.opened(self.name, **self.target.denied_options)
