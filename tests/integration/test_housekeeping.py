"""gc and delete on servers that list and keep unfinished uploads as S3 and GCS do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.commit.gc.test_gc_on_stores import (
    test_a_checkpoint_that_cannot_be_judged_is_left_alone,
    test_a_damaged_checkpoint_can_be_deleted,
    test_a_deleted_checkpoint_is_gone_and_the_next_save_is_not,
    test_a_dry_run_lists_the_garbage_and_removes_nothing,
    test_gc_keeps_young_data_and_names_it,
    test_gc_removes_data_that_an_overwrite_left,
    test_gc_removes_exactly_the_garbage,
)
from tests.integration.servers import Servers

from cloudckpt.testing.servers import Server

__all__ = [
    "test_a_checkpoint_that_cannot_be_judged_is_left_alone",
    "test_a_damaged_checkpoint_can_be_deleted",
    "test_a_deleted_checkpoint_is_gone_and_the_next_save_is_not",
    "test_a_dry_run_lists_the_garbage_and_removes_nothing",
    "test_gc_keeps_young_data_and_names_it",
    "test_gc_removes_data_that_an_overwrite_left",
    "test_gc_removes_exactly_the_garbage",
]


@pytest.fixture(params=["rgw", "fake-gcs"])
def root(request: pytest.FixtureRequest, servers: Servers, use: Callable[[Server], str]) -> str:
    """A folder in a fresh bucket."""
    return f"{use(servers.up(request.param))}/run"
