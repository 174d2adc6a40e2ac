"""50 ranks in one job save, overwrite, save in the background, fail and load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from tests.e2e.many_ranks import check_many_ranks
from tests.e2e.places import LocalPlace, S3Place

from cloudckpt.testing.servers import Server

NUM_RANKS = 50
TIMEOUT_S = 400.0

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_fifty_ranks_on_a_path(tmp_path: Path) -> None:
    """If this fails, a job of many ranks hangs, blames the wrong rank, or leaves what it replaced."""
    check_many_ranks(LocalPlace(tmp_path), num_ranks=NUM_RANKS, timeout_s=TIMEOUT_S)


def test_fifty_ranks_on_ceph(rgw: Server, use: Callable[[Server], str]) -> None:
    """If this fails, they do so on an object store."""
    bucket = use(rgw).removeprefix("s3://")
    check_many_ranks(S3Place(boto3.client("s3"), bucket), num_ranks=NUM_RANKS, timeout_s=TIMEOUT_S)
