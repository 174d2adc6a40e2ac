"""Ranks are killed in a save to a real server: what is there is one whole checkpoint, or none, and is gone on from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from tests.e2e.killing import check
from tests.e2e.kills import KILLS_ON_A_STORE, Kill
from tests.integration.servers import Servers
from tests.kit.places import BucketPlace, GCSPlace, S3Place

from cloudckpt.testing.servers import Server

pytestmark = pytest.mark.multirank


@pytest.fixture(params=["rgw", "fake-gcs", "ministack"])
def place(request: pytest.FixtureRequest, servers: Servers, use: Callable[[Server], str]) -> Iterator[BucketPlace]:
    """An empty bucket on each server in turn."""
    server = servers.up(request.param)
    bucket = urlsplit(use(server)).netloc
    with contextlib.ExitStack() as stack:
        if server.scheme == "s3":
            client: Any = stack.enter_context(contextlib.closing(boto3.client("s3")))
            yield S3Place(client, bucket)
        else:
            client = stack.enter_context(contextlib.closing(storage.Client(credentials=AnonymousCredentials())))
            yield GCSPlace(client, bucket)


@pytest.mark.parametrize("kill", KILLS_ON_A_STORE, ids=str)
def test_a_save_that_dies_leaves_one_whole_checkpoint_or_none(place: BucketPlace, tmp_path: Path, kill: Kill) -> None:
    """If this fails, a crash on this store mixes two saves, loses both, passes half of one for a whole one, blocks the
    job that starts again, or leaves what gc does not find, or has gc take what is needed.
    """
    check(place, kill, tmp_path / "scratch")
