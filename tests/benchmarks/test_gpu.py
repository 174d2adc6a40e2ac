"""The benchmark for GPUs, as far as it runs without one: on the CPU, where its figures mean nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks import figures, gpu

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_nothing_is_measured(capsys):
    """A figure of a CPU would be taken for a GPU's."""
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "no CUDA device here: nothing was measured" in said.err


def test_every_measure_runs():
    """The benchmark would break on the day that there is a GPU; or a save into the sink, or the load, be another."""
    sizes = gpu.Sizes(save_bytes=65 * gpu.MIB, load_bytes=3 * gpu.MIB, async_bytes=2 * gpu.MIB)
    bench = gpu.Bench(torch.device("cpu"), sizes=sizes, repetitions=2)
    found = list(bench.figures())
    asked = [(one.formula.split(" ")[0], one.sense, one.bar, len(one.values)) for one in found if one.bar is not None]
    assert asked == [("host", "≤", 768, 1), ("GB/s", "≥", 0.85, 2), ("seconds", "≤", 1.1, 2), ("GB/s", "≥", 0.8, 2)]
    (theirs,) = [one for one in found if one.bar is None]
    assert theirs.values or theirs.failed
    assert {name: len(values) for name, values in bench.gb_per_s.items() if "torch" not in name} == {
        "save": 2,
        "device to host": 4 + len(theirs.values),
        "async save, until staged": 2,
        "load": 2,
        "host to device": 2,
    }
    said = figures.text(found, bench.gb_per_s)
    assert said.count("host-to-device") == 1


def test_a_missed_bar_is_said():
    """A regression on GPUs would go unseen."""

    def verdict(values, sense, failed=None):
        return figures.Figure(name="n", formula="f", sense=sense, bar=2.0, values=values, failed=failed).verdict

    assert verdict((1.0, 2.0, 9.0), "≥") == verdict((1.0, 2.0, 9.0), "≤") == "met"
    assert verdict((1.0,), "≥") == verdict((3.0,), "≤") == "MISSED by 50%"
    assert verdict((), "≤", "there is no clock") == "not measured: there is no clock"
