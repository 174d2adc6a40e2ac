"""The simulation of large jobs: it runs, and its verdicts can be trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.scaling.simulate import BUILD, GLOBAL_PLAN, MANIFEST_BYTES

from benchmarks import scale


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
