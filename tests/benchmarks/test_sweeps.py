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


@pytest.mark.parametrize(
    ("payload", "verb", "server", "wire", "num_ranks", "systems"),
    [
        ("64x32MiB", "save", "fasts3", "http", 1, {"cloudckpt", "s3torchconnector", "s3fs", "s3fs-tuned", "limit"}),
        ("64x32MiB", "load", "fasts3", "http", 1, {"cloudckpt", "s3torchconnector", "s3fs", "s3fs-tuned", "limit"}),
        ("64x32MiB", "save", "fasts3", "tls", 1, {"cloudckpt", "s3torchconnector"}),
        ("64x32MiB", "load", "fasts3", "tls", 1, {"cloudckpt", "s3torchconnector"}),
        ("20000x64KiB", "save", "fasts3", "http", 1, {"cloudckpt"}),
        ("20000x64KiB", "load", "fasts3", "http", 1, {"cloudckpt"}),
        ("64x32MiB", "load", "fasts3", "slow", 1, {"cloudckpt", "limit"}),
        ("8x512MiB", "save", "fasts3", "http", 1, {"cloudckpt"}),
        ("64x32MiB", "resharded_load", "fasts3", "http", 1, {"cloudckpt"}),
        ("64x32MiB", "save", "path", "none", 1, {"cloudckpt-path", "filesystem", "limit"}),
        ("16x32MiB", "shared_load", "fasts3", "http", 2, {"cloudckpt"}),
    ],
)
def test_every_bar_is_measured(*, payload, verb, server, wire, num_ranks, systems):
    """A bar would be neither met nor missed."""
    (cell,) = (
        cell
        for cell in SWEEPS["bars"].cells
        if (cell.payload.name, cell.server, cell.wire, cell.num_ranks) == (payload, server, wire, num_ranks)
        and verb in cell.verbs
    )
    assert systems <= set(cell.systems)
