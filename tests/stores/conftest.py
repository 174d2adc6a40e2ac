"""No test of stores sees the developer's own configuration, or a client that another test made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.kit.rights import use_environment

from cloudckpt.stores import probe
from cloudckpt.stores.gcs.session import GCSSession
from cloudckpt.stores.s3.session import S3Session
from cloudckpt.testing.servers import clean_environment


@pytest.fixture(autouse=True)
def _nothing_ambient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_environment(clean_environment(), monkeypatch)
    _forget_clients()  # of tests elsewhere
    yield
    _forget_clients()


def _forget_clients() -> None:
    S3Session.cache.clear()
    GCSSession.cache.clear()
    probe.FOUND.clear()  # the next test's server may get this one's port
