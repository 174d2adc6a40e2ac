"""The contract of a store, as a test class to inherit from.

Everything that saving, loading, committing and sweeping rely on is one clause. Against the bucket that you pay for it
runs with ``python -m cloudckpt.testing s3://bucket/prefix``; against a store of your own, as tests of yours::

    class TestMyStore(StoreContract):
        shared_between_processes = True

        @pytest.fixture
        def store(self):
            return MyStore(f"my-bucket/contract/{uuid.uuid4()}")

The fixture returns an empty store, at a root that nothing else uses. Where the store does not have a capability
(`Store.probe` says so), a clause about it checks that the call is refused. A clause that a server is known to break
is overridden, with the reason. A clause that asks nothing of a store notes why in its test's ``user_properties``.
"""

from __future__ import annotations

import pytest

# Before they are imported: pytest explains a failed clause only in modules that it has rewritten.
pytest.register_assert_rewrite(
    "cloudckpt.testing._contract_base",
    "cloudckpt.testing._contract_calls",
    "cloudckpt.testing._contract_denied",
    "cloudckpt.testing._contract_keys",
    "cloudckpt.testing._contract_parts",
    "cloudckpt.testing._contract_races",
    "cloudckpt.testing._contract_reads",
    "cloudckpt.testing._contract_uploads",
    "cloudckpt.testing._contract_views",
    "cloudckpt.testing._contract_wire",
    "cloudckpt.testing._contract_writes",
)

from cloudckpt.stores.base import Store  # noqa: E402
from cloudckpt.testing._contract_denied import DeniedClauses  # noqa: E402
from cloudckpt.testing._contract_keys import KeyClauses  # noqa: E402
from cloudckpt.testing._contract_parts import PartClauses  # noqa: E402
from cloudckpt.testing._contract_races import RaceClauses  # noqa: E402
from cloudckpt.testing._contract_reads import ReadClauses  # noqa: E402
from cloudckpt.testing._contract_uploads import UploadClauses  # noqa: E402
from cloudckpt.testing._contract_views import ViewClauses  # noqa: E402
from cloudckpt.testing._contract_wire import WireClauses  # noqa: E402
from cloudckpt.testing._contract_writes import WriteClauses  # noqa: E402

__all__ = ["StoreContract"]


class StoreContract(
    WriteClauses,
    UploadClauses,
    PartClauses,
    ReadClauses,
    KeyClauses,
    ViewClauses,
    RaceClauses,
    DeniedClauses,
    WireClauses,
):
    """Inherit under a name that begins with ``Test``, and define the fixture `store`.

    ``shared_between_processes``: whether another process sees the store's objects (default False).
    ``num_racing_rounds``, ``num_paging_keys``: how much of it to do where each call costs.
    ``endpoint_url(store)``, ``at(store, endpoint_url, timeout_s=…)``: for a store that is reached over HTTP, where it
    is, and the same root through another address; with them it is shown what becomes of broken connections.
    ``short_timeout_s``: how patient such a store is where nobody answers it.
    ``denied(store)``: the same root with credentials that are refused, or may not write.
    ``longest_key_bytes``: of keys as the service counts them, from the bucket on.
    ``check_upload_time(info)``: what must hold of the time at which an unfinished upload began.
    """

    @pytest.fixture
    def store(self) -> Store:
        """An empty store at a fresh root."""
        raise NotImplementedError("define the fixture 'store' in the class that inherits from StoreContract")
