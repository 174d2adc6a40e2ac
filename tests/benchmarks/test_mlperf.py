"""MLPerf Storage's workload: the figures are those of the slowest rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.mlperf import line_of, samples_of


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """DLIO's output of two ranks, of which the other one is slower each time."""
    for rank, (save_s, load_s) in enumerate([(1.0, 4.0), (2.0, 3.0)]):
        blocks = {"save_ckpt1": {"duration": save_s}, "load_ckpt1": {"duration": load_s}, "duration": "9"}
        (tmp_path / f"{rank}_per_epoch_stats.json").write_text(json.dumps({"1": blocks}))
    (tmp_path / "summary.json").write_text(json.dumps({"metric": {"checkpoint_size_GB": 1e10 / 2**30}}))
    return tmp_path


def test_the_slowest_rank_counts(output: Path) -> None:
    """If this fails, a figure is that of rank 0, which is not what the rules count."""
    assert samples_of(output, 2)["seconds"] == {"save": [2.0], "load": [4.0]}


def test_throughput_is_in_decimal_units(output: Path) -> None:
    """If this fails, figures are lower by 7 % than those of the other benchmarks, as DLIO's GB are GiB."""
    assert (
        line_of("s3", [samples_of(output, 2)]) == "s3: GB/s of 10.00 GB: save 5.00 (5.00-5.00), load 2.50 (2.50-2.50)"
    )
