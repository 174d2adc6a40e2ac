"""Medians, ratios, bars and their text."""

# ruff: noqa: RUF001  # the signs are those of the table

from __future__ import annotations

import pytest

from benchkit.table import MIB, Sample, Spread, markdown, ratio, ratios_table, results_table, verdicts

LABELS = {"cloudckpt": "ours", "s3torchconnector": "theirs", "s3fs": "slow"}


def sample(system, operation="save", *, repetition=1, wall_s=1.0, num_ranks=1, cpu_s=0.5, extra_peak_bytes=MIB):
    return Sample(
        system=system,
        num_ranks=num_ranks,
        operation=operation,
        repetition=repetition,
        num_bytes=2_000_000_000,
        wall_s=wall_s,
        cpu_s=cpu_s,
        extra_peak_bytes=extra_peak_bytes,
    )


def test_sample_units():
    """Figures would be off by a factor: GB are 1e9 bytes, as networks count, MiB are 2**20, as memory does."""
    one = sample("cloudckpt", wall_s=4.0, cpu_s=1.0, extra_peak_bytes=3 * MIB)
    assert one.gb_per_s == pytest.approx(0.5)
    assert one.cpu_s_per_gb == pytest.approx(0.5)
    assert one.extra_peak_mib == pytest.approx(3)


def test_spread_is_median_and_range():
    """A single slow repetition would move the figure that is reported."""
    assert Spread.of([3.0, 1.0, 100.0]) == Spread(median=3.0, low=1.0, high=100.0)
    assert Spread.of([1.0, 2.0]).median == pytest.approx(1.5)


def test_ratio_pairs_repetitions():
    """Noise that slows a whole repetition would show as a difference between systems."""
    samples = [
        sample("cloudckpt", repetition=1, wall_s=1.0),
        sample("s3fs", repetition=1, wall_s=5.0),
        sample("cloudckpt", repetition=2, wall_s=10.0),
        sample("s3fs", repetition=2, wall_s=50.0),
    ]
    assert ratio(samples, "cloudckpt", "s3fs", "save", 1) == Spread(median=5.0, low=5.0, high=5.0)


def test_ratio_needs_both_systems_at_that_world_size():
    """A ratio would be made up from another world size, operation or system."""
    samples = [
        sample("cloudckpt"),
        sample("s3fs", num_ranks=2),
        sample("s3fs", "load"),
        sample("s3torchconnector"),
    ]
    assert ratio(samples, "cloudckpt", "s3fs", "save", 1) is None


@pytest.mark.parametrize(("factor", "met"), [(1.9, False), (2.1, True)])
def test_speed_bar(factor, met):
    """A missed bar would be reported as met, or the other way round."""
    samples = [sample("cloudckpt"), sample("s3torchconnector", wall_s=factor)]
    (speed,) = [verdict for verdict in verdicts(samples) if "s3torchconnector" in verdict.text]
    assert speed.met is met
    assert f"{factor:.1f}×" in speed.text


@pytest.mark.parametrize(("extra_mib", "met"), [(99, True), (101, False)])
def test_memory_bar_counts_the_worst_repetition(extra_mib, met):
    """A save that needs too much memory every now and then would pass by its median."""
    samples = [
        sample("cloudckpt", repetition=1, extra_peak_bytes=MIB),
        sample("cloudckpt", repetition=2, extra_peak_bytes=MIB),
        sample("cloudckpt", repetition=3, extra_peak_bytes=extra_mib * MIB),
    ]
    (memory,) = verdicts(samples)
    assert memory.met is met


def test_warm_up_counts_for_memory_alone():
    """A cold first save would slow the figure, or one that does not fit in memory would pass."""
    samples = [
        sample("cloudckpt", repetition=0, wall_s=100.0, extra_peak_bytes=500 * MIB),
        sample("cloudckpt", repetition=1, wall_s=1.0),
        sample("s3fs", repetition=0, wall_s=1.0),
        sample("s3fs", repetition=1, wall_s=7.0),
    ]
    assert ratio(samples, "cloudckpt", "s3fs", "save", 1) == Spread(median=7.0, low=7.0, high=7.0)
    assert [verdict.met for verdict in verdicts(samples)] == [True, False]
    assert "2.00 (2.00–2.00)" in results_table(samples, LABELS)
    assert "(1–500)" in results_table(samples, LABELS)


def test_no_verdict_without_measurement():
    """A bar that was never measured would count as met."""
    assert verdicts([sample("s3fs"), sample("cloudckpt", "load", extra_peak_bytes=None)]) == []


def test_results_table_rows_and_gaps():
    """A system would be missing from the table, or an unmeasured peak shown as 0."""
    samples = [
        sample("cloudckpt", wall_s=0.5, extra_peak_bytes=None),
        sample("cloudckpt", "load", wall_s=0.4, extra_peak_bytes=7 * MIB),
    ]
    lines = results_table(samples, LABELS).splitlines()
    assert len(lines) == 3
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:2] == ["1", "ours"]
    assert cells[2] == "4.00 (4.00–4.00)"
    assert cells[4] == "–"
    assert cells[5] == "5.00 (5.00–5.00)"
    assert cells[7] == "7 (7–7)"


def test_ratios_table_only_where_there_is_a_pair():
    """A run without rivals would end in an empty table, or one with rivals in none."""
    assert ratios_table([sample("cloudckpt")], LABELS) == ""
    with_rival = ratios_table([sample("cloudckpt"), sample("s3fs", wall_s=8.0)], LABELS)
    assert "ours ÷ slow" in with_rival
    assert "8.0 (8.0–8.0)" in with_rival


def test_markdown_lines_up():
    """The table would not be readable in a terminal."""
    lines = markdown(["a", "long header"], [["wide cell", "x"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].replace("-", "").replace(" ", "") == "|||"
