"""A run as pictures and a page, which a person looks at: here, that they are there, whole, and of the right run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.results.bars import LOCAL, SLOW, verdicts
from benchmarks.results.model import parsed
from benchmarks.results.plots import margin_of
from tests.benchmarks.test_results import MIB, cell, document

from benchmarks import plot as command

RUN = document(
    cell("cloudckpt", "save", [1.0, 1.0, 1.1], cpu_s=0.5, peak_bytes=512 * MIB),
    cell("s3torchconnector", "save", [4.0, 4.0, 4.0], cpu_s=3.0),
    cell("limit", "send", [0.7, 0.7, 0.7]),
    cell("cloudckpt-path", "load", [1.0, 1.0], place=LOCAL),
    cell("s3fs", "save", [], place=SLOW, failed="not installed: <s3fs> & more"),
)


def test_margins_say_how_far_a_bar_is_reached() -> None:
    """If this fails, a bar that was missed is drawn as one that was reached."""
    margins = {
        (one.bar.name, one.bar.formula.partition(",")[0]): margin_of(one)
        for one in verdicts(parsed(RUN))
        if one.found is not None
    }
    assert margins["save, HTTP", "GB/s ÷ s3torchconnector's"] == pytest.approx((4.0 + 4.0 / 1.1) / 2 / 3)
    assert margins["save, HTTP", "CPU s/GB"] == pytest.approx(0.30 / 0.25)
    assert margins["save, memory", "most MiB over the tensors"] == pytest.approx(0.5)
    assert margins["save, HTTP", "GB/s ÷ bare sockets'"] < 1  # only a stretch
    nothing = document(cell("cloudckpt", "save", [1.0, 1.0], cpu_s=1.0, peak_bytes=0))
    assert [margin_of(one) for one in verdicts(parsed(nothing)) if one.bar.name == "save, memory"] == [16.0]


def test_the_command_writes_all_of_it(tmp_path: Path, capsys: Any) -> None:
    """If this fails, `python -m benchmarks.plot` does not work."""
    (tmp_path / "r.json").write_text(json.dumps(RUN))
    assert command.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "out" / "deep")]) == 0
    written = capsys.readouterr().out.split()
    assert sorted(map(str, (tmp_path / "out" / "deep").iterdir())) == sorted(written)
    assert {Path(name).suffix for name in written} == {".html", ".png"}
    assert command.main([str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
