"""The contract of a store, as a test class to inherit from.

Each clause tests one property that saving, loading, committing or deleting relies on. To test a bucket, run
``python -m cloudckpt.testing s3://bucket/prefix``. To test your own store class, inherit from the contract::

    class TestMyStore(StoreContract):
        shared_between_processes = True

        @pytest.fixture
        def store(self):
            return MyStore(f"my-bucket/contract/{uuid.uuid4()}")

The fixture returns an empty store, at a root that nothing else uses. If the store lacks a capability (see
`Store.probe`), a clause about it checks that the store refuses the call. Override a clause that a server is known to
break, and say why. A clause that does not apply to a store is skipped.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

# This must precede the imports: pytest explains failed assertions only in modules that it has rewritten.
pytest.register_assert_rewrite(*(f"cloudckpt.testing.contract_{topic}" for topic in ("base", "uploads", "writes")))

from cloudckpt.stores import open_store
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract_base import ReadClauses
from cloudckpt.testing.contract_uploads import UploadClauses
from cloudckpt.testing.contract_writes import WriteClauses

__all__ = ["StoreContract"]


class StoreContract(WriteClauses, UploadClauses, ReadClauses):
    """Contract of a store, as a test class. Inherit from it under a name that begins with ``Test``.

    Define the fixture `store`. ``shared_between_processes``: True if other processes see the store's objects (default
    False). ``num_racing_rounds``, ``num_paging_keys``: numbers of rounds and of objects; lower them if calls cost
    money. ``check_upload_time(info)``: checks the start time of an unfinished upload.
    """

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store at a fresh root."""
        raise NotImplementedError("define the fixture 'store' in the class that inherits from StoreContract")


_numbers = itertools.count()


class TestStore(StoreContract):
    """The clauses for the store that ``python -m cloudckpt.testing`` was called with, each under its own root."""

    @pytest.fixture
    def store(self, target: Any) -> Store:
        """Open a fresh root of the user's store. `target` is the `CheckedStore` of `cloudckpt.testing.__main__`."""
        self.num_racing_rounds = target.num_rounds
        self.num_paging_keys = target.num_keys
        opened = open_store(target.root.child(f"clause-{next(_numbers)}"), target.options)
        self.shared_between_processes = not opened.capabilities.is_private
        return opened
