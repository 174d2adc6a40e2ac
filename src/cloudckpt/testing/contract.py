"""The contract of a store, as a test class to inherit from.

Everything that saving, loading, committing and sweeping rely on is one clause. Run it against a store of your own, or
against the bucket that you pay for::

    class TestMyStore(StoreContract):
        shared_between_processes = True

        @pytest.fixture
        def store(self):
            return open_store(f"s3://my-bucket/contract/{uuid.uuid4()}", Options())

The fixture returns an empty store, at a root that nothing else uses. Where the store does not
declare a capability, a clause about it checks that the call is refused. A clause that a server is known to break is
overridden, with the reason.
"""

from __future__ import annotations

import pytest

# Before they are imported: pytest explains a failed clause only in modules that it has rewritten.
pytest.register_assert_rewrite(
    "cloudckpt.testing._contract_reads", "cloudckpt.testing._contract_uploads", "cloudckpt.testing._contract_writes"
)

from cloudckpt.stores.base import Store  # noqa: E402
from cloudckpt.testing._contract_reads import ReadClauses  # noqa: E402
from cloudckpt.testing._contract_uploads import UploadClauses  # noqa: E402
from cloudckpt.testing._contract_writes import WriteClauses  # noqa: E402

__all__ = ["StoreContract"]


class StoreContract(WriteClauses, UploadClauses, ReadClauses):
    """Inherit under a name that begins with ``Test``, and define the fixture `store`.

    ``shared_between_processes``: whether another process sees the store's objects (default False).
    ``num_racing_rounds``, ``num_paging_keys``: how much of it to do where each call costs.
    """

    @pytest.fixture
    def store(self) -> Store:
        """An empty store at a fresh root."""
        raise NotImplementedError("define the fixture 'store' in the class that inherits from StoreContract")
