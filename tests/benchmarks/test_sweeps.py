"""The declared sweeps, and what is left of one where not all of it is wanted."""

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


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=lambda sweep: sweep.name)
def test_rows_are_dealt_out_evenly(sweep):
    """A cell could not be measured, because its tensors do not divide by its ranks."""
    uneven = [
        (cell.path, group.name)
        for cell in sweep.cells
        for group in cell.payload.tensors
        if group.shape and group.shape[0] % cell.num_ranks
    ]
    assert uneven == []
