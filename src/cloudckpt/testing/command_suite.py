"""The contract as a test class, for the store that ``python -m cloudckpt.testing`` was called with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store
from cloudckpt.testing.contract import StoreContract

_numbers = itertools.count()


class TestStore(StoreContract):
    """Every clause, each under a root of its own."""

    @pytest.fixture
    def store(self, target: Any) -> Store:
        """Open a fresh root of the user's store. `target` is the `CheckedStore` of `cloudckpt.testing.__main__`."""
        self.num_racing_rounds = target.num_rounds
        self.num_paging_keys = target.num_keys
        opened = open_store(target.root.child(f"clause-{next(_numbers)}"), target.options)
        self.shared_between_processes = not opened.capabilities.is_private
        return opened
