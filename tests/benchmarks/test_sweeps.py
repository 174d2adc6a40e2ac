"""The declared sweeps."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.sweeps import SWEEPS


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=lambda sweep: sweep.name)
def test_each_result_has_a_name_of_its_own(sweep):
    """Two cells of one sweep would be taken for one in its results, and their samples be mixed."""
    names = Counter(
        (cell.payload.name, verb, cell.server, cell.wire, cell.num_ranks, system)
        for cell in sweep.cells
        for verb in cell.verbs
        for system in cell.systems
    )
    assert [name for name, count in names.items() if count > 1] == []
