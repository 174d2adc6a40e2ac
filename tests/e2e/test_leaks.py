"""A job that saves for weeks: nothing of a save is left in the process when it is over."""

from __future__ import annotations

import pytest
from tests.e2e.harness import run_ranks
from tests.e2e.leaks import most_copies_left
from tests.e2e.places import LocalPlace

pytestmark = pytest.mark.faults


@pytest.mark.multirank
def test_no_copy_of_the_model_outlives_its_save(local: LocalPlace) -> None:
    """If this fails, saves pile up copies of the model until Python happens to collect garbage (pytorch#170163)."""
    # The one that there is lies in memory that is kept, and the next save fills it again.
    assert run_ranks(most_copies_left, local.uri(), 3, world_size=1) == [1]
