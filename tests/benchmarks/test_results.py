"""A run's results as tables, ratios, verdicts and comparisons, by documents whose figures were worked out by hand."""

# ruff: noqa: RUF001  # the signs are those of the tables

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from benchmarks.results.bars import BARS, LARGE, LOCAL, SHARED, SLOW, SMALL, TLS, verdicts
from benchmarks.results.comparison import compare, compared
from benchmarks.results.model import MIB, MalformedResultsError, Place, parsed, read
from benchmarks.results.report import failures, text
from benchmarks.runner import Row
from benchmarks.sweeps import SWEEPS

from benchmarks import compare as command
from benchmarks import show

GB = 10**9


def sample(repetition: int, wall_s: float, *, cpu_s: float = 1.0, **more: Any) -> dict[str, Any]:
    found = {"repetition": repetition, "wall_s": wall_s, "cpu_s": cpu_s}
    return {**found, "peak_bytes": None, "num_bytes_read": None, "blocking_s": None, **more}


def cell(
    system: str,
    verb: str,
    walls_s: list[float],
    *,
    place: Place = LARGE,
    num_bytes: int = 2 * GB,
    failed: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The first of `walls_s` is the warm-up's."""
    return {
        "cell": place.cell,
        "verb": verb,
        "system": system,
        "server": place.server,
        "wire": place.wire,
        "num_ranks": place.num_ranks,
        "num_bytes": num_bytes,
        "samples": [sample(number, wall_s, **more) for number, wall_s in enumerate(walls_s)],
        "failed": failed,
    }


def document(*cells: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    machine = {"cpu_model": "A processor", "num_cores": 2, "memory_bytes": 8 << 30, "kernel": "Linux"}
    about = {"git_commit": "abc", "time": "2030-01-01T00:00:00+00:00", "machine": machine}
    return {
        "schema": 1,
        "provenance": {**about, "versions": {"cloudckpt": {"torch": "2.11"}}},
        "sweep": "bars",
        "parameters": parameters,
        "cells": list(cells),
    }


def verdict(results: dict[str, Any], name: str, formula: str) -> Any:
    (found,) = [
        one for one in verdicts(parsed(results)) if one.bar.name == name and one.bar.formula.startswith(formula)
    ]
    return found


# --- reading


def test_what_is_no_result_is_refused_with_all_that_is_wrong() -> None:
    """If this fails, a file of another program becomes a table of nonsense, or a KeyError."""
    good = document(cell("cloudckpt", "save", [1.0, 1.0]))
    assert len(parsed(good).rows) == 1
    for wrong, why in (
        ([], "the document is list, not an object"),
        ({**good, "schema": 2}, "the document.schema must be 1, the only format known, not 2"),
        ({**good, "cells": {}}, "the document.cells must be a list"),
        ({**good, "cells": [3]}, r"cells\[0\] is int, not an object"),
        ({key: value for key, value in good.items() if key != "sweep"}, "the document has no 'sweep'"),
    ):
        with pytest.raises(MalformedResultsError, match=why):
            parsed(wrong)
    broken = document(cell("cloudckpt", "save", [1.0, 0.0]), cell("s3fs", "save", [1.0], num_bytes=0))
    broken["cells"][0]["samples"][0]["cpu_s"] = "much"
    with pytest.raises(MalformedResultsError) as caught:
        parsed(broken)
    assert "cells[0].samples[0].cpu_s must be a number, not 'much'" in str(caught.value)
    assert "cells[0].samples[1].wall_s must be positive, not 0.0" in str(caught.value)
    assert "cells[1].num_bytes must be a positive whole number, not 0" in str(caught.value)


def test_a_file_that_is_no_json_is_named(tmp_path: Any) -> None:
    """If this fails, one of two files to be compared is broken, and nobody says which."""
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(MalformedResultsError, match=r"a\.json cannot be read as JSON"):
        read(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(MalformedResultsError, match=r"b\.json: not the results of a run"):
        read(tmp_path / "b.json")
    with pytest.raises(MalformedResultsError, match=r"c\.json cannot be read"):
        read(tmp_path / "c.json")


# --- tables


def test_figures_are_medians_without_the_warm_up_and_peaks_with_it() -> None:
    """If this fails, one slow repetition, or the first, decides a figure; or a peak of a first save is not seen."""
    row = cell("cloudckpt", "save", [100.0, 1.0, 2.0, 4.0], cpu_s=0.5)
    for one, peak in zip(row["samples"], (300 * MIB, None, 10 * MIB, 20 * MIB), strict=True):
        one["peak_bytes"] = peak
    shown = text(document(row))
    assert "1.00 (0.50–2.00)" in shown  # 2 GB in 2, 1 and 4 seconds
    assert "0.25 (0.25–0.25)" in shown  # half a second for 2 GB
    assert "| 300 " in shown


def test_ratios_are_taken_within_a_repetition() -> None:
    """If this fails, noise that slows a whole repetition shows as a difference between systems."""
    shown = text(
        document(
            cell("cloudckpt", "save", [1.0, 1.0, 10.0, 3.0]),
            cell("s3torchconnector", "save", [1.0, 4.0, 40.0, 6.0], cpu_s=4.0),
            cell("limit", "send", [1.0, 0.5, 5.0, 3.0]),
        )
    )
    assert "cloudckpt ÷ s3torchconnector | 4.00 (2.00–4.00) | 0.25 (0.25–0.25)" in " ".join(shown.split())
    assert "cloudckpt ÷ limit | 0.50 (0.50–1.00)" in " ".join(shown.split())


def test_repetitions_that_a_rival_lacks_are_left_out() -> None:
    """If this fails, a rival that failed half-way is compared by repetitions that it never made."""
    shown = text(document(cell("cloudckpt", "save", [1.0, 1.0, 1.0, 9.0]), cell("s3fs", "save", [1.0, 5.0, 7.0])))
    assert "6.00 (5.00–7.00)" in shown


def test_what_failed_is_said() -> None:
    """If this fails, a rival that could not be measured is not in the tables, and nobody knows why."""
    broken = document(cell("s3fs", "save", [], failed="not installed:\n  s3fs"))
    assert failures(parsed(broken)) == ["s3fs, save, 64x32MiB, fasts3, http, 1 process: not installed: s3fs"]
    assert "not installed: s3fs" in text(broken)


# --- bars


def test_bars_are_those_that_were_asked_for() -> None:
    """If this fails, a bar was lowered, or forgotten."""
    asked = {(bar.name, bar.formula.split(",")[0]): (bar.sense, bar.bar, bar.stretch) for bar in BARS}
    assert len(asked) == len(BARS) == 24
    assert asked["save, HTTP", "GB/s ÷ s3torchconnector's"] == ("≥", 3, None)
    assert asked["save, HTTP", "GB/s ÷ fsspec + s3fs's"] == ("≥", 8, None)
    assert asked["load, HTTP", "GB/s ÷ s3torchconnector's"] == ("≥", 5, None)
    assert asked["load, HTTP", "GB/s ÷ fsspec + s3fs's"] == ("≥", 12, None)
    assert asked["save, HTTP", "CPU s/GB"] == ("≤", 0.30, None)
    assert asked["load, HTTP", "CPU s/GB"] == ("≤", 0.25, None)
    assert asked["save, TLS", "CPU s/GB ÷ s3torchconnector's"] == ("≤", 0.5, None)
    assert asked["load, TLS", "CPU s/GB ÷ s3torchconnector's"] == ("≤", 0.6, None)
    assert asked["save, TLS", "CPU s/GB"] == ("≤", None, 0.25)
    assert asked["load, TLS", "CPU s/GB"] == ("≤", None, 0.45)
    for verb in ("save", "load"):
        assert asked[f"{verb}, HTTP", "GB/s ÷ bare sockets'"] == ("≥", None, 0.8)
        assert asked[f"{verb}, 20,000 × 64 KiB", "GB/s ÷ that of 64 tensors"] == ("≥", 0.5, 0.7)
        assert asked[f"{verb}, 60 ms, 80 MB/s", "GB/s ÷ bare sockets' over such connections"] == ("≥", 0.9, None)
        assert asked[f"{verb}, memory", "most MiB over the tensors"] == ("≤", 256, 128)
        assert asked[f"{verb}, local path", "GB/s ÷ torch FileSystemWriter's or Reader's"] == ("≥", 1.5, None)


def test_the_sweep_of_the_bars_measures_each_of_them() -> None:
    """If this fails, a bar looks for a cell that no run has, and is never judged."""
    rows = []
    for one in SWEEPS["bars"].cells:
        for system, verb in itertools.product(one.systems, one.verbs):
            row = Row(cell=one, verb=verb, system=system).to_json()
            rows.append({**row, "samples": [sample(1, 1.0, peak_bytes=1, num_bytes_read=1)], "failed": None})
    unmeasured = [one.bar.name for one in verdicts(parsed(document(*rows))) if one.found is None]
    assert unmeasured == []


def test_a_bar_that_is_missed_says_by_how_much() -> None:
    """If this fails, a table of figures leaves the reader to find out what they mean."""
    run = document(
        cell("cloudckpt", "save", [9.0, 1.0, 1.0, 1.0], cpu_s=0.7),
        cell("s3torchconnector", "save", [1.0, 2.0, 2.7, 3.5], cpu_s=1.0),
        cell("s3fs", "save", [1.0, 8.0, 8.0, 8.0], cpu_s=1.0),
        cell("limit", "send", [1.0, 0.5, 0.9, 1.0]),
    )
    missed = verdict(run, "save, HTTP", "GB/s ÷ s3torchconnector")
    assert (missed.is_met, missed.found.value) == (False, 2.7)
    assert missed.text == "MISSED by 0.30× (10%)"
    met = verdict(run, "save, HTTP", "GB/s ÷ fsspec")
    assert (met.is_met, met.text) == (True, "met")  # a bar that is just reached is met
    cpu = verdict(run, "save, HTTP", "CPU")
    assert cpu.text == "MISSED by 0.05 s/GB (17%)"
    socket = verdict(run, "save, HTTP", "GB/s ÷ bare")
    assert (socket.is_met, socket.is_stretched, socket.text) == (None, True, "stretch met")
    assert verdict(run, "load, HTTP", "CPU").text == "not measured"
    assert "MISSED by 0.30× (10%)" in text(run)
    assert "Of 18 bars 1 are met, 2 missed and 15 not measured; 1 of 10 stretches are met." in text(run)


def test_another_sweep_shows_the_bars_that_it_can_judge() -> None:
    """If this fails, a short look at the machine ends in a page of bars that were not measured."""
    run = document(cell("cloudckpt", "save", [1.0, 1.0], peak_bytes=MIB)) | {"sweep": "short"}
    assert "save, memory" in text(run)
    assert "not measured" not in text(run)
    assert "| bar " not in text(document(cell("s3fs", "save", [1.0, 1.0])) | {"sweep": "short"})


def test_small_tensors_are_held_to_the_large_ones() -> None:
    """If this fails, the cost of an item is held to the wrong figure."""
    run = document(
        cell("cloudckpt", "load", [1.0, 1.0, 1.0, 2.0]),
        cell("cloudckpt", "load", [1.0, 2.0, 1.6, 1.0], place=SMALL),
    )
    found = verdict(run, "load, 20,000 × 64 KiB", "GB/s")
    assert found.found.value == pytest.approx(0.625)
    assert (found.is_met, found.is_stretched) == (True, False)
    assert found.text == "met, stretch missed by 0.07 (11%)"


def test_each_bar_looks_at_its_own_place() -> None:
    """If this fails, a figure over HTTP is given for TLS, or that of a slow wire for a fast one."""
    run = document(
        cell("cloudckpt", "save", [1.0, 1.0], place=TLS, cpu_s=0.8),
        cell("s3torchconnector", "save", [1.0, 1.0], place=TLS, cpu_s=2.0),
        cell("cloudckpt", "load", [1.0, 4.0], place=SLOW),
        cell("limit", "receive", [1.0, 3.8], place=SLOW),
        cell("cloudckpt-path", "load", [1.0, 1.0], place=LOCAL),
        cell("filesystem", "load", [1.0, 1.4], place=LOCAL),
        cell("limit", "memcpy", [1.0, 0.4], place=LOCAL),
        cell("cloudckpt", "shared_load", [1.0, 1.0], place=SHARED, num_bytes=512 * MIB, num_bytes_read=600 * MIB),
    )
    tls = verdict(run, "save, TLS", "CPU s/GB ÷")
    assert (tls.found.value, tls.is_met) == (0.4, True)
    slow = verdict(run, "load, 60 ms, 80 MB/s", "GB/s")
    assert slow.found.value == pytest.approx(0.95)
    assert slow.is_met
    local = verdict(run, "load, local path", "GB/s ÷ torch")
    assert local.found.value == pytest.approx(1.4)
    assert local.text == "MISSED by 0.10× (7%)"
    assert verdict(run, "load, local path", "GB/s ÷ one").found.value == pytest.approx(0.4)
    shared = verdict(run, "two ranks want the same", "bytes")
    assert shared.found.value == pytest.approx(600 / 512)
    assert shared.text == "MISSED by 0.07 (7%)"
    assert verdict(run, "save, HTTP", "CPU").found is None


def test_the_largest_peak_of_all_cells_counts() -> None:
    """If this fails, memory that grows with the checkpoint is not seen, since one cell of it was small."""
    run = document(
        cell("cloudckpt", "save", [1.0, 1.0], peak_bytes=100 * MIB),
        cell("cloudckpt", "save", [1.0, 1.0], place=SMALL, peak_bytes=300 * MIB),
        cell("s3fs", "save", [1.0, 1.0], peak_bytes=9000 * MIB),
    )
    found = verdict(run, "save, memory", "most")
    assert found.found.value == 300
    assert found.found.of == "cloudckpt, 20000x64KiB, fasts3, http, 1 process"
    assert found.text == "MISSED by 44 MiB (17%), stretch missed by 172 MiB (134%)"


def test_a_resharded_load_may_read_its_tiles() -> None:
    """If this fails, a load is held to bytes that it cannot but read, or may read what it likes."""
    wanted_bytes, tiles_bytes = 256 * MIB, 64 * 2 * MIB
    just = int(1.1 * wanted_bytes) + tiles_bytes
    for read_bytes, tile_bytes, is_met in ((just, MIB, True), (just + MIB, MIB, False), (just, MIB // 2, False)):
        row = cell("cloudckpt", "resharded_load", [1.0, 1.0], num_bytes=wanted_bytes, num_bytes_read=read_bytes)
        run = document(row, option=[["tile_bytes", tile_bytes]])
        assert verdict(run, "resharded load, 1/8 of each shard", "bytes").is_met is is_met


# --- comparison


def test_a_change_beyond_both_ranges_is_one() -> None:
    """If this fails, noise is reported as a regression, or a regression as noise."""
    before = document(
        cell("cloudckpt", "save", [1.0, 1.0, 1.1, 0.9], cpu_s=1.0), cell("cloudckpt", "load", [1.0, 1.0, 1.5, 0.8])
    )
    after = document(
        cell("cloudckpt", "save", [1.0, 2.0, 2.2, 1.8], cpu_s=0.5), cell("cloudckpt", "load", [1.0, 1.2, 1.4, 0.9])
    )
    changes = {(one.row.split(",")[0], one.quantity): one for one in compared(parsed(before), parsed(after)).changes}
    assert changes["save", "GB/s"].relative == pytest.approx(-0.5)
    assert changes["save", "GB/s"].verdict == "WORSE"
    assert changes["save", "CPU s/GB"].verdict == "better"
    assert changes["load", "GB/s"].verdict == "within noise"
    assert changes["load", "CPU s/GB"].verdict == "within noise"
    shown = compare(before, after)
    assert "-50.0%" in shown
    assert "1 better, 1 worse, 2 within noise" in shown
    assert "The runs differ in" not in shown


def test_memory_and_waiting_are_compared_too() -> None:
    """If this fails, a save that takes twice the memory, or stops training for longer, looks like before."""
    before = document(cell("cloudckpt", "async_blocking", [1.0, 1.0, 1.0], blocking_s=0.5, peak_bytes=10 * MIB))
    after = document(cell("cloudckpt", "async_blocking", [1.0, 1.0, 1.0], blocking_s=1.0, peak_bytes=20 * MIB))
    verdicts_of = {one.quantity: one.verdict for one in compared(parsed(before), parsed(after)).changes}
    assert verdicts_of["blocks s"] == verdicts_of["peak MiB"] == "WORSE"


def test_runs_that_cannot_be_compared_say_why() -> None:
    """If this fails, a faster machine looks like a faster program."""
    before, after = document(cell("cloudckpt", "save", [1.0, 1.0])), document(cell("cloudckpt", "load", [1.0, 1.0]))
    after["provenance"] = {**after["provenance"], "machine": {"cpu_model": "Another", "num_cores": 64}}
    shown = " ".join(compare(before, after).split())
    assert "| processor | A processor, 2 cores | Another, 64 cores |" in shown
    assert "Only before: - save, 64x32MiB, fasts3, http, 1 process: cloudckpt" in shown
    assert "Only after: - load" in shown


def test_the_command_prints_the_comparison_or_what_is_wrong(tmp_path: Any, capsys: Any) -> None:
    """If this fails, `python -m benchmarks.compare` does not work."""
    for name, wall_s in (("a.json", 1.0), ("b.json", 2.0)):
        (tmp_path / name).write_text(json.dumps(document(cell("cloudckpt", "save", [1.0, wall_s]))))
    assert command.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "WORSE" in capsys.readouterr().out
    (tmp_path / "b.json").write_text("[]")
    assert command.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "b.json: not the results of a run" in capsys.readouterr().err


def test_results_of_an_earlier_run_are_shown_again(tmp_path: Any, capsys: Any) -> None:
    """If this fails, the bars of a run that took an hour are gone with the terminal."""
    (tmp_path / "a.json").write_text(json.dumps(document(cell("cloudckpt", "save", [1.0, 1.0]))))
    assert show.main([str(tmp_path / "a.json")]) == 0
    assert "Of 18 bars" in capsys.readouterr().out
    assert show.main([str(tmp_path / "b.json")]) == 2
    assert "b.json cannot be read" in capsys.readouterr().err
