"""The fixtures for users' own tests, in a test run such as a user's, and the servers that they start."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from cloudckpt.testing import servers

pytest_plugins = ["pytester"]

WAIT_S = 120.0
CONFTEST = 'pytest_plugins = ["cloudckpt.testing.fixtures"]\n'
# torch says so at every save without a process group. Everything else is an error, an open socket included.
OPTIONS = ("-W", "error", "-W", "ignore:torch.distributed is disabled:UserWarning", "-p", "no:cacheprovider")

SAVING = """
import pytest
import torch
import cloudckpt

@pytest.fixture(params=["cloudckpt_s3_uri", "cloudckpt_gcs_uri"])
def uri(request):
    return request.getfixturevalue(request.param)

@pytest.mark.parametrize("turn", range(2))
def test_a_model_comes_back(uri, turn):
    assert cloudckpt.list_checkpoints(uri) == []
    state = {"weights": torch.arange(100.0) + turn, "step": turn}
    cloudckpt.save(state, f"{uri}/step-1")
    assert [info.name for info in cloudckpt.list_checkpoints(uri)] == ["step-1"]
    loaded = {"weights": torch.zeros(100), "step": -1}
    cloudckpt.load(loaded, f"{uri}/step-1")
    assert torch.equal(loaded["weights"], state["weights"])
    assert loaded["step"] == turn

def test_a_test_can_use_the_servers_of_both_stores(cloudckpt_s3_uri, cloudckpt_gcs_uri):
    for uri in (cloudckpt_s3_uri, cloudckpt_gcs_uri):
        cloudckpt.save({"weights": torch.ones(3)}, f"{uri}/step-1")
"""

ENVIRONMENT = """
import os

def test_the_users_own_credentials_are_not_seen(cloudckpt_s3_uri, cloudckpt_s3_server):
    assert not {"AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "HTTPS_PROXY"} & os.environ.keys()
    assert os.environ["AWS_ENDPOINT_URL_S3"] == cloudckpt_s3_server.endpoint_url

def test_the_environment_is_restored_after_a_fixture(cloudckpt_s3_server):
    assert os.environ["AWS_PROFILE"] == "prod"
    assert "AWS_ENDPOINT_URL_S3" not in os.environ
"""

KILLING = """
import boto3
import pytest
from google.cloud import storage

def test_a_test_may_kill_the_servers(cloudckpt_s3_server, cloudckpt_gcs_server):
    cloudckpt_s3_server.kill()
    cloudckpt_gcs_server.kill()

def test_killed_servers_run_again_for_the_next_test(cloudckpt_s3_uri, cloudckpt_gcs_uri):
    bucket = cloudckpt_s3_uri.removeprefix("s3://")
    assert bucket in {found["Name"] for found in boto3.client("s3").list_buckets()["Buckets"]}
    client = storage.Client()
    client.bucket(cloudckpt_gcs_uri.removeprefix("gs://")).blob("kept").upload_from_string(b"body")

def test_data_of_gcs_outlive_a_kill(cloudckpt_gcs_uri, cloudckpt_gcs_server):
    bucket = storage.Client().bucket(cloudckpt_gcs_uri.removeprefix("gs://"))
    bucket.blob("kept").upload_from_string(b"body")
    cloudckpt_gcs_server.restart()
    assert bucket.blob("kept").download_as_bytes() == b"body"
"""

MOCKING = """
import boto3
import pytest
import torch
from moto import mock_aws
import cloudckpt

@pytest.mark.parametrize("turn", range(2))
@mock_aws
def test_saves_and_loads_within_moto(turn, monkeypatch):
    monkeypatch.delenv("AWS_PROFILE")
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
    with cloudckpt.CheckpointManager("s3://bucket/run", keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, {"weights": torch.full((5_000_000,), float(step + turn)), "empty": torch.zeros(0)})
    assert [info.name for info in cloudckpt.list_checkpoints("s3://bucket/run")] == ["step-2"]
    assert torch.equal(cloudckpt.read("s3://bucket/run/step-2")["weights"], torch.full((5_000_000,), 2.0 + turn))
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.save({"weights": torch.zeros(1)}, "s3://bucket/run/step-2")
"""


def test_a_user_saves_and_loads_offline(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a user's test needs a bucket that is paid for, uses credentials of theirs, or spoils the next."""
    monkeypatch.setenv("AWS_PROFILE", "prod")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_environment=ENVIRONMENT, test_killing=KILLING, test_mocking=MOCKING, test_saving=SAVING)
    # A process of its own, as a user's is: with these settings, and nothing that this one has imported.
    result = pytester.runpytest_subprocess(*OPTIONS, timeout=WAIT_S)
    result.assert_outcomes(passed=12)


MAKERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "moto_server": servers.moto_server,
    "fake_gcs_server": servers.fake_gcs_server,
}
_WAIT_S = 30.0


@pytest.mark.parametrize("maker", MAKERS)
def test_a_server_ends_with_its_killed_owner(maker: str) -> None:
    """A demo killed with SIGKILL would leave its server behind."""
    source = (
        f"from cloudckpt.testing.servers import {maker} as maker\n"
        "with maker() as server:\n"
        "    print(server.endpoint_url, flush=True)\n"
        "    input()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner, owner.stdin, owner.stdout:
        endpoint_url = owner.stdout.readline().decode().strip()
        port = int(endpoint_url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as connection:
            owner.send_signal(signal.SIGKILL)
            owner.wait(_WAIT_S)
            # Ends when the server does: it keeps a connection open that has not asked for anything.
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
