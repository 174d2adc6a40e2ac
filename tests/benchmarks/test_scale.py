"""The simulation of large jobs: it runs, and its verdicts can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.scaling.growth import growth_of, verdicts
from benchmarks.scaling.simulate import BUILD, DECODE, ENCODE, GLOBAL_PLAN, MANIFEST_BYTES

from benchmarks import scale


def size_of(num_chunks: int, seconds: float) -> dict[str, Any]:
    return {
        "num_ranks": num_chunks // 300,
        "num_chunks": num_chunks,
        "phases": {name: {"cpu_s": seconds, "peak_bytes": 1} for name in (BUILD, ENCODE, DECODE)},
        "sizes_bytes": {MANIFEST_BYTES: 50 * num_chunks},
    }


def test_quadratic_growth_misses_the_bar() -> None:
    """If this fails, a bar is met by jobs of any cost."""
    linear = [size_of(n, n * 1e-6) for n in (300_000, 600_000, 1_200_000)]
    quadratic = [size_of(n, n * n * 1e-12) for n in (300_000, 600_000, 1_200_000)]
    assert all(is_met for is_met, _ in verdicts(linear))
    assert [is_met for is_met, _ in verdicts(quadratic)] == [True, True, True, False, False, False]
    assert not verdicts([size_of(1_000_000, 6.0)])[0][0]
    assert growth_of(quadratic)[BUILD] == pytest.approx(2.0)


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
