"""Ranks are killed at a step of a save to a real server: what is there afterwards is one whole checkpoint, or none.

Each step once on each server; with ``CLOUDCKPT_KILLS=all``, the whole matrix. On a path and on moto:
``tests/e2e/test_crash.py``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from tests.e2e.killing import check
from tests.e2e.kills import ALL_KILLS, KILLS_IN_A_PROCESS, QUICK_KILLS, Kill, covering
from tests.e2e.places import BucketPlace, GCSPlace, S3Place
from tests.integration.conftest import Servers
from tests.tried import Tried

from cloudckpt.testing.servers import Server

pytestmark = pytest.mark.multirank

RUNS_ALL = os.environ.get("CLOUDCKPT_KILLS") == "all"
KILLS = [*ALL_KILLS, *KILLS_IN_A_PROCESS] if RUNS_ALL else covering(QUICK_KILLS, num_together=1)


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


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_a_save_that_dies_leaves_one_whole_checkpoint_or_none(
    place: BucketPlace, tmp_path: Path, kill: Kill, tried: Tried
) -> None:
    """If this fails, a crash on this store mixes two saves, loses both, passes half of one for a whole one, blocks the
    job that starts again, or leaves what gc does not find, or has gc take what is needed.
    """
    check(place, kill, tmp_path / "scratch")
    tried("kills")
