"""Saves that are killed and resumed, on servers that keep unfinished uploads as S3 and GCS do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from tests.e2e.places import BucketPlace, GCSPlace, S3Place
from tests.e2e.resuming import check_changed, check_kill, check_kills
from tests.integration.conftest import Servers

from cloudckpt.testing.servers import Server

pytestmark = pytest.mark.multirank


@pytest.fixture(params=["rgw", "fake-gcs"])
def bucket(request: pytest.FixtureRequest, servers: Servers, use: Callable[[Server], str]) -> Iterator[BucketPlace]:
    """An empty one."""
    uri = use(servers.up(request.param))
    scheme, _, name = uri.partition("://")
    if scheme == "s3":
        client: Any = boto3.client("s3")
        yield S3Place(client, name)
    else:
        with closing(storage.Client(credentials=AnonymousCredentials())) as gcs_client:
            yield GCSPlace(gcs_client, name)


@pytest.mark.parametrize(("victims", "after_num_parts"), [((1,), 4), ((0, 1), 1), ((0, 1), 8)], ids=str)
def test_a_save_that_was_killed_sends_only_what_is_missing(
    bucket: BucketPlace, tmp_path: Path, victims: tuple[int, ...], after_num_parts: int
) -> None:
    """If this fails, what was sent before the kill is sent again, or something else takes its place."""
    check_kill(bucket, tmp_path / "scratch", victims=victims, after_num_parts=after_num_parts)


def test_a_save_that_is_killed_while_it_goes_on_can_be_gone_on_from(bucket: BucketPlace, tmp_path: Path) -> None:
    """If this fails, a second kill costs all that was sent before the first."""
    check_kills(bucket, tmp_path / "scratch")


def test_what_has_changed_since_is_sent_again(bucket: BucketPlace, tmp_path: Path) -> None:
    """If this fails, a checkpoint is a mixture of two states of the model."""
    check_changed(bucket, tmp_path / "scratch")
