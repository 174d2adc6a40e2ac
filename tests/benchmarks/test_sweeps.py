"""The declared sweeps, and what is left of one where not all of it is wanted."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.payloads import KIB, MIB, Payload, Tensors, transformer, uniform
from benchmarks.sweeps import SWEEPS, Cell, Sweep
from benchmarks.systems import SYSTEM_NAMES, system_named
from benchmarks.turns import num_bytes_of

SMALL = uniform(2, 64 * KIB)


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


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=lambda sweep: sweep.name)
def test_systems_can_do_what_is_declared(sweep):
    """A sweep would name a system that is not there, or an S3 client for a path."""
    for cell in sweep.cells:
        scheme = "" if cell.server == "path" else "s3"
        assert [name for name in cell.systems if scheme not in system_named(name).schemes] == [], cell.path


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


def test_choosing_leaves_no_empty_cell():
    """`--cells`, `--verbs` and `--systems` would measure something else, or cells with nothing in them."""
    sweep = Sweep(
        name="two",
        about="",
        cells=(Cell(payload=SMALL), Cell(payload=SMALL, wire="tls", systems=("cloudckpt", "limit"))),
    )
    (tls,) = sweep.chosen(cells=["fasts3/tls"]).cells
    assert tls == sweep.cells[1]
    (limited,) = sweep.chosen(systems=["limit"], verbs=["load"]).cells
    assert (limited.systems, limited.verbs, limited.wire) == (("limit",), ("load",), "tls")
    assert sweep.chosen(cells=["2x64KiB/*/http"]).cells == sweep.cells[:1]
    assert sweep.chosen(verbs=["shared_load"]).cells == ()
    assert sweep.chosen() == sweep


def test_on_a_given_store_each_cell_is_measured_once():
    """Cells that differ by a wire that is ours alone would be measured twice, or bare sockets write to a bucket."""
    cells = (
        Cell(payload=SMALL, systems=("cloudckpt", "limit")),
        Cell(payload=SMALL, wire="slow", systems=("s3fs",), connections=8),
        Cell(payload=SMALL, server="path", wire="none", systems=("filesystem",)),
    )
    (only,) = Sweep(name="three", about="", cells=cells).on_given().cells
    assert (only.server, only.wire, only.systems, only.connections) == ("given", "http", ("cloudckpt", "s3fs"), None)


def test_sizes_of_payloads():
    """GB/s would be off: the bytes are the divisor of every figure."""
    assert uniform(64, 32 * MIB).num_bytes == 64 * 32 * MIB
    assert uniform(64, 32 * MIB).name == "64x32MiB"
    assert uniform(20_000, 64 * KIB).name == "20000x64KiB"
    small = transformer("small", num_layers=1, width=8, hidden=16, vocabulary=32)
    num_weights = 32 * 8 + 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8
    assert small.num_bytes == 4 * (3 * num_weights + 11)
    assert small.num_tensors == 4 * 11
    payload = Payload(
        name="p", tensors=(Tensors(name="a", count=3, shape=(16, 2)), Tensors(name="s", count=2, shape=()))
    )
    assert num_bytes_of("load", payload) == 3 * 128 + 2 * 4
    assert num_bytes_of("resharded_load", payload) == 3 * 128 // 8 + 2 * 4


@pytest.mark.parametrize("tensor_bytes", [0, 4 * KIB + 4])
def test_uneven_sizes_are_refused(tensor_bytes):
    """A payload would have other bytes than its name says."""
    with pytest.raises(ValueError, match="whole rows"):
        uniform(2, tensor_bytes)


def test_a_resharded_load_is_of_one_process():
    """Several ranks would meet in a job that is only pretended."""
    with pytest.raises(ValueError, match="one process"):
        Cell(payload=SMALL, verbs=("resharded_load",), num_ranks=2)


def test_all_systems_are_known_by_name():
    """A system that the command line offers could not be started."""
    assert [system_named(name).name for name in SYSTEM_NAMES] == list(SYSTEM_NAMES)
