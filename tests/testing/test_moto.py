"""The embedded S3 server: it tells where it is, forgets when asked, and keeps to itself."""

from __future__ import annotations

import os

import pytest

from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing import servers


def test_a_bucket_can_be_made_twice_and_reset_forgets() -> None:
    """Fixtures share a server: a second creation must not fail, and leftovers must not leak."""
    with servers.moto_server() as server, servers.moto_server() as other:
        server.create_bucket("twice")
        server.create_bucket("twice")
        store = S3Store("twice", "", storage_options=server.storage_options, timeout_s=30, connections=1)
        store.put("k", [memoryview(b"x")], crc32c=0)
        server.reset()
        server.create_bucket("twice")
        assert list(store.list()) == []
        assert server.endpoint_url != other.endpoint_url
        with pytest.raises(RuntimeError, match="InvalidBucketName"):
            server.create_bucket("x")


def test_a_server_in_threads_cannot_be_killed() -> None:
    """A test that kills the server would kill itself."""
    server = servers.S3Server(endpoint_url="http://127.0.0.1:1")
    for call in (server.kill, server.restart, lambda: server.pid):
        with pytest.raises(RuntimeError, match="threads of this process"):
            call()


def test_without_moto_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo of a user without moto would end in a ModuleNotFoundError of a child process."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"moto.*cloudckpt\[testing\]"), servers.moto_server():
        pass


def test_the_environment_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own profile or proxy would send a test's requests to a real store."""
    dirty = {
        "API_ENDPOINT_OVERRIDE": "https://storage.example",
        "AWS_PROFILE": "prod",
        "CLOUDSDK_CORE_PROJECT": "prod",
        "GCSFS_DEFAULT_PROJECT": "prod",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
        "PATH": "/bin",
        "STORAGE_EMULATOR_HOST": "http://elsewhere",
        "aws_session_token": "x",
        "https_proxy": "http://proxy",
    }
    clean = servers.clean_environment(dirty)
    assert clean["PATH"] == "/bin"
    assert set(clean) & set(dirty) == {"PATH"}
    assert clean["AWS_EC2_METADATA_DISABLED"] == clean["NO_GCE_CHECK"] == "true"
    assert clean["AWS_CONFIG_FILE"] == clean["CLOUDSDK_CONFIG"] == os.devnull
    monkeypatch.setenv("AWS_PROFILE", "prod")
    assert "AWS_PROFILE" not in servers.clean_environment()
