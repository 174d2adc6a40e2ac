"""The embedded GCS server, talked to by Google's own client."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from google.cloud import storage

from cloudckpt.testing import servers


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's own environment says."""
    wanted = servers.clean_environment()
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a client as a user does, who sets nothing but the environment."""
    made: list[storage.Client] = []

    def make(server: servers.GCSServer) -> storage.Client:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        made.append(storage.Client())
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_objects_live_in_buckets_until_it_is_reset(client: Any) -> None:
    """Fixtures share a server: a second creation must not fail, and leftovers must not leak."""
    with servers.fake_gcs_server() as server:
        google = client(server)
        server.create_bucket("twice")
        google.bucket("twice").blob("a b/c+ü").upload_from_string(b"body", if_generation_match=0, checksum="crc32c")
        server.create_bucket("twice")
        assert [blob.name for blob in google.list_blobs("twice")] == ["a b/c+ü"]
        assert google.bucket("twice").blob("a b/c+ü").download_as_bytes(checksum="crc32c") == b"body"
        server.reset()
        assert list(google.list_buckets()) == []
        with pytest.raises(RuntimeError, match="was answered with 400"):
            server.create_bucket("")


@pytest.mark.parametrize("keeps_data", [True, False])
def test_data_outlive_a_kill_where_it_says_so(client: Any, *, keeps_data: bool) -> None:
    """A test that kills the server would judge a save by what the server alone has lost."""
    with servers.fake_gcs_server(keeps_data=keeps_data) as server:
        assert server.keeps_data is keeps_data
        server.create_bucket("kept")
        google = client(server)
        google.bucket("kept").blob("k").upload_from_string(b"body")
        server.kill()
        server.restart()
        again = client(server)
        assert [bucket.name for bucket in again.list_buckets()] == (["kept"] if keeps_data else [])
        if keeps_data:
            assert again.bucket("kept").blob("k").download_as_bytes() == b"body"


@pytest.mark.skipif(sys.platform != "linux", reason="what is unfinished shows in an extended attribute")
def test_an_object_in_whose_upload_it_was_killed_is_not_there(client: Any) -> None:
    """One with its bytes but without metadata fails every listing, and so a save that nothing is wrong with."""
    with servers.fake_gcs_server(keeps_data=True) as server:
        assert server.directory is not None
        server.create_bucket("kept")
        client(server).bucket("kept").blob("a/whole").upload_from_string(b"body")
        server.kill()
        (server.directory / "kept" / "a" / "unfinished").write_bytes(b"bo")
        server.restart()
        assert [blob.name for blob in client(server).list_blobs("kept")] == ["a/whole"]


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without it would not know what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"fake-gcs-server.*cloudckpt\[testing\]"), servers.fake_gcs_server():
        pass


def test_a_machine_that_the_package_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure would be a program that cannot be run, without a word about the platform."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ImportError, match="linux-riscv64"), servers.fake_gcs_server():
        pass
