"""What every clause may ask of the class that it is part of, and what that class may say about its store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableSequence

import pytest

from cloudckpt.errors import UnsupportedOperationError
from cloudckpt.stores.base import Store
from cloudckpt.testing._contract_tools import DOES_NOT_APPLY, keys, put
from cloudckpt.testing.wire import Wire


class Clauses:
    """The part of `cloudckpt.testing.StoreContract` that is not clauses."""

    shared_between_processes = False
    longest_key_bytes = 1024
    """In UTF-8, from the bucket on; the limit of S3 and GCS."""
    num_racing_rounds = 5
    num_paging_keys = 1005
    """More than one page of a listing or of a batched delete; servers page by 1,000."""

    _notes: MutableSequence[tuple[str, object]]

    def endpoint_url(self, store: Store) -> str | None:  # noqa: ARG002  # whoever inherits looks at it
        """Where `store` sends its requests, as ``http://host:port``; ``None`` where it sends none."""
        return None

    def at(self, store: Store, endpoint_url: str, *, timeout_s: float) -> Store | None:  # noqa: ARG002
        """The same root through another address, with `timeout_s` as its patience; ``None`` where there is no such
        thing.
        """
        return None

    def denied(self, store: Store) -> Store | None:  # noqa: ARG002
        """The same root, with credentials that are refused or may not write; ``None`` where nobody is refused."""
        return None

    @pytest.fixture(autouse=True)
    def _noted(self, request: pytest.FixtureRequest) -> None:
        self._notes = request.node.user_properties

    def does_not_apply(self, reason: str) -> None:
        """Note why this clause asks nothing of this store."""
        notes = getattr(self, "_notes", None)
        if notes is not None:
            notes.append((DOES_NOT_APPLY, reason))

    def lacks_create(self, store: Store) -> bool:
        """A store that cannot must refuse the call, whatever lies there: writing anyway would break the commit."""
        if store.probe().conditional_create:
            return False
        with pytest.raises(UnsupportedOperationError):
            put(store, "a", b"body", if_absent=True)
        assert keys(store) == []  # noqa: S101  # part of a test
        self.does_not_apply("the store has no create-if-absent, and refuses the call")
        return True

    def lacks_multipart(self, store: Store) -> bool:
        """Whoever overlooks the declared capability must meet an error, not a lost object."""
        if store.capabilities.multipart:
            return False
        with pytest.raises(UnsupportedOperationError):
            store.create_multipart("a")
        store.abort_multipart("a", "an upload that never was")
        assert list(store.list_uploads()) == []  # noqa: S101  # part of a test
        self.does_not_apply("the store has no multipart uploads, and refuses the call")
        return True

    def lacks_checksums(self, store: Store) -> bool:
        """Whether the store is known not to look at the checksums that come with the bytes."""
        if store.probe().verifies_crc32c:
            return False
        self.does_not_apply("the store does not look at checksums")
        return True

    def is_private(self, store: Store) -> bool:
        """Whether no other process sees the store's objects."""
        if self.shared_between_processes:
            return False
        self.does_not_apply(f"no other process sees what lies in {store.uri}")
        return True

    @contextlib.contextmanager
    def wired(self, store: Store, *, timeout_s: float = 30.0) -> Iterator[tuple[Wire, Store] | None]:
        """A wire in front of the store, and the store behind it; ``None`` where it has no address."""
        endpoint_url = self.endpoint_url(store)
        if endpoint_url is None:
            self.does_not_apply("the store has no address that a wire could be put before")
            yield None
            return
        with Wire(endpoint_url) as wire:
            far = self.at(store, wire.url, timeout_s=timeout_s)
            if far is None:
                self.does_not_apply("the store cannot be reached at another address")
                yield None
            else:
                yield wire, far
