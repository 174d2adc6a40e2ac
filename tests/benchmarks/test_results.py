"""A run's results as tables, ratios, verdicts and comparisons, by documents whose figures were worked out by hand."""
# ruff: noqa: RUF001  # the signs are those of the tables

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.results.bars import LARGE, LOCAL, SLOW, TLS, verdicts
from benchmarks.results.comparison import compare, compared
from benchmarks.results.model import MIB, MalformedResultsError, Place, parsed
from benchmarks.results.report import text
from benchmarks.runner import Row
from benchmarks.scaling.simulate import BUILD, GLOBAL_PLAN, MANIFEST_BYTES
from benchmarks.sweeps import SWEEPS
from tests.docs.tables import ROOT

from benchmarks import compare as compare_command
from benchmarks import pictures, publish, scale
from benchmarks import plot as plot_command

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


# --- bars


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
    assert "1 of 17 bars are met, 2 missed and 14 not measured; 1 of 10 stretches are met." in text(run)


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


def test_the_command_prints_the_comparison_or_what_is_wrong(tmp_path: Any, capsys: Any) -> None:
    """If this fails, `python -m benchmarks.compare` does not work."""
    for name, wall_s in (("a.json", 1.0), ("b.json", 2.0)):
        (tmp_path / name).write_text(json.dumps(document(cell("cloudckpt", "save", [1.0, wall_s]))))
    assert compare_command.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "WORSE" in capsys.readouterr().out
    (tmp_path / "b.json").write_text("[]")
    assert compare_command.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "b.json: not the results of a run" in capsys.readouterr().err


RUN = document(
    cell("cloudckpt", "save", [1.0, 1.0, 1.1], cpu_s=0.5, peak_bytes=512 * MIB),
    cell("cloudckpt", "load", [1.0, 1.0], cpu_s=0.5),
    cell("s3torchconnector", "save", [4.0, 4.0, 4.0], cpu_s=3.0),
    cell("s3torchconnector", "load", [4.0, 4.0], cpu_s=3.0),
    cell("limit", "send", [0.7, 0.7, 0.7]),
    *(cell("cloudckpt", verb, [2.0, 2.0], place=TLS) for verb in ("save", "load")),
    cell("cloudckpt-path", "load", [1.0, 1.0], place=LOCAL),
    cell("s3fs", "save", [], place=SLOW, failed="not installed: <s3fs> & more"),
)


def test_the_command_writes_all_of_it(tmp_path: Path, capsys: Any) -> None:
    """If this fails, `python -m benchmarks.plot` does not work."""
    (tmp_path / "r.json").write_text(json.dumps(RUN))
    assert plot_command.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "out" / "deep")]) == 0
    written = capsys.readouterr().out.split()
    assert sorted(map(str, (tmp_path / "out" / "deep").iterdir())) == sorted(written)
    assert {Path(name).suffix for name in written} == {".html", ".png"}
    page = Path(written[0]).read_text()
    first = "<img alt='Saves and loads of cloudckpt, s3torchconnector, cloudckpt over TLS in GB/s and processor seconds"
    assert page.index(first) < page.index("<h2>Bars</h2>")
    assert plot_command.main([str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


def test_a_run_is_published_whole(tmp_path: Path) -> None:
    """If this fails, the README's figures and picture, the targets and the samples of the repository differ."""
    docs, published = tmp_path / "docs", ROOT / "docs" / "benchmarks"
    (docs / "benchmarks").mkdir(parents=True)
    for name in ("README.md", "docs/index.md", "docs/benchmarks/README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert (published / "targets.md").read_text() == publish.targets_page(published)
    publish.publish(published / "bars.json", docs)
    assert (docs / "benchmarks/README.md").read_text() == (published / "README.md").read_text()
    (tmp_path / "r.json").write_text(json.dumps(RUN))
    written = {path.name for path in publish.publish(tmp_path / "r.json", docs)}
    assert written >= {"bars.json", "headline.png", "headline-dark.png"}
    assert "| save, HTTP | GB/s ÷ s3torchconnector's | 3.82" in (docs / "benchmarks/targets.md").read_text()
    assert "| **cloudckpt, S3** | 1.91 | 2.00 | 0.25 / 0.25 | 512 / – |" in (docs / "benchmarks/README.md").read_text()
    assert "cloudckpt 1.91 and 2.00, s3torchconnector 0.50 and 0.50" in (tmp_path / "README.md").read_text()
    (tmp_path / "r.json").write_text(json.dumps({**RUN, "sweep": "headline"}))
    with pytest.raises(MalformedResultsError, match="only runs of bars and background"):
        publish.publish(tmp_path / "r.json", docs)


def test_the_pictures_of_places_and_weights_show_what_is_published() -> None:
    """If this fails, `python -m benchmarks.pictures` does not read the files that the benchmarks write."""
    drawn = {plot.name: plot for plot in pictures.draw()}
    assert set(drawn) == {"places", "places-dark", "weights", "weights-dark"}
    published = json.loads((pictures.FOLDER / "publication.json").read_text())["figures"]
    (pulled,) = [figure["values"] for figure in published if figure["formula"] == "seconds to pull"]
    assert f"cloudckpt.pull {statistics.median(pulled):.2f}" in drawn["weights"].about
    assert all(plot.png.startswith(b"\x89PNG") for plot in drawn.values())


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


def test_the_job_is_one_that_torch_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """If this fails, what is simulated is no checkpoint, or the figures of a run are lost."""
    results = tmp_path / "scale.json"
    assert scale.main(["--ranks", "16", "--json", str(results)]) == 0
    printed = capsys.readouterr().out
    assert BUILD in printed
    assert "1 M chunks: build and encode" in printed
    (size,) = json.loads(results.read_text())["sizes"]
    assert size["num_chunks"] == 16 * 300
    assert GLOBAL_PLAN in size["phases"]
    assert size["sizes_bytes"][MANIFEST_BYTES] < 100 * size["num_chunks"]
