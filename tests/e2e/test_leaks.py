"""A job that saves for weeks: nothing of a save is left in the process when it is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.harness import run_ranks
from tests.e2e.leaks import check_growth, growth_of_rounds, most_copies_left
from tests.e2e.places import LocalPlace
from tests.resources import MIB

from cloudckpt.testing.servers import S3Server, clean_environment, moto_server

pytestmark = pytest.mark.faults


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """In a process of its own, so that what it remembers is not counted."""
    with moto_server() as server:
        for name, value in (clean_environment() | server.environment).items():
            monkeypatch.setenv(name, value)
        server.create_bucket("bucket")
        yield server


@pytest.mark.multirank
def test_repeated_saves_and_loads_leave_nothing_on_s3(moto: S3Server) -> None:
    """If this fails, it does so where connections are kept."""
    (growth,) = run_ranks(growth_of_rounds, "s3://bucket/run", 10, world_size=1)
    check_growth(growth, most_rss_bytes=16 * MIB)


@pytest.mark.multirank
def test_no_copy_of_the_model_outlives_its_save(local: LocalPlace) -> None:
    """If this fails, saves pile up copies of the model until Python happens to collect garbage (pytorch#170163)."""
    # The one that there is lies in memory that is kept, and the next save fills it again.
    assert run_ranks(most_copies_left, local.uri(), 3, world_size=1) == [1]
