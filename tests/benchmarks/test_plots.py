"""A run as pictures and a page, which a person looks at: here, that they are there, whole, and of the right run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results.bars import LOCAL, SLOW
from tests.benchmarks.test_results import MIB, cell, document

from benchmarks import plot as command

RUN = document(
    cell("cloudckpt", "save", [1.0, 1.0, 1.1], cpu_s=0.5, peak_bytes=512 * MIB),
    cell("s3torchconnector", "save", [4.0, 4.0, 4.0], cpu_s=3.0),
    cell("limit", "send", [0.7, 0.7, 0.7]),
    cell("cloudckpt-path", "load", [1.0, 1.0], place=LOCAL),
    cell("s3fs", "save", [], place=SLOW, failed="not installed: <s3fs> & more"),
)


def test_the_command_writes_all_of_it(tmp_path: Path, capsys: Any) -> None:
    """If this fails, `python -m benchmarks.plot` does not work."""
    (tmp_path / "r.json").write_text(json.dumps(RUN))
    assert command.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "out" / "deep")]) == 0
    written = capsys.readouterr().out.split()
    assert sorted(map(str, (tmp_path / "out" / "deep").iterdir())) == sorted(written)
    assert {Path(name).suffix for name in written} == {".html", ".png"}
    assert command.main([str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
