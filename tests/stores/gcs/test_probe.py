"""A server that speaks GCS's JSON API is tried out before a save relies on it, unless it is Google's own."""

from __future__ import annotations

from typing import Any

import pytest

from cloudckpt.errors import UnsupportedOperationError
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.gcs.client import is_googles
from cloudckpt.testing.contract_base import put


@pytest.mark.parametrize(
    ("endpoint_url", "expected"),
    [
        ("https://storage.googleapis.com", True),
        ("https://storage.europe-west3.rep.googleapis.com", True),
        ("http://127.0.0.1:4443", False),
        ("https://storage.googleapis.com.example", False),
    ],
)
def test_googles_endpoints_are_told_by_their_names(endpoint_url: str, expected: bool) -> None:  # noqa: FBT001
    """If this fails, a stranger's server is believed, or Google's own is asked before each first save."""
    assert is_googles(endpoint_url) is expected


def test_google_is_not_asked() -> None:
    """If this fails, a role without the right to delete leaves an object in the bucket with each job."""
    store = GCSStore("bucket", "", storage_options={"anonymous": True}, timeout_s=1, connections=1)
    assert store.probe() == store.capabilities  # nothing answers under that name here


def test_a_server_that_ignores_the_condition_is_refused(scripted: Any) -> None:
    """If this fails, two saves to one URI both succeed there, and one of them is lost."""
    server = scripted.serve(scripted.any_gcs())
    store = server.store()
    found = store.probe()
    assert not found.conditional_create
    assert server.endpoint_url in found.observed
    assert "ignores the condition" in found.observed
    num_requests = len(server.requests)
    with pytest.raises(UnsupportedOperationError, match="ignores the condition"):
        put(store, "manifest.json", b"ours", if_absent=True)
    assert len(server.requests) == num_requests
