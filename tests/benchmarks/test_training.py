"""A training loop beside a save: what counts of it, the line it goes over, and what the bars make of both."""

from __future__ import annotations

import pytest
from benchmarks.outcomes import Outcome, Settings
from benchmarks.payloads import KIB, uniform
from benchmarks.results.bars import CAPPED, verdicts
from benchmarks.results.model import parsed
from benchmarks.results.report import text
from benchmarks.state import State
from benchmarks.systems import system_named
from tests.benchmarks.test_results import cell, document

from benchmarks import training


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(training, "ALONE_S", 0.2)


def test_bars_of_saves_in_the_background():
    """A run would be held to other ratios than it should be: of other systems, or upside down."""
    alone = {"steps_per_s_alone": 100.0}
    rows = [
        cell("cloudckpt", "async_blocking", [9.0, 2.0, 2.0], blocking_s=0.22, copy_s=0.2),
        cell("cloudckpt-process", "async_blocking", [9.0, 2.0, 2.0], blocking_s=0.3, copy_s=0.2),
        cell("cloudckpt", "async_training", [9.0, 9.0], place=CAPPED, steps_per_s=96.0, **alone),
        cell(
            "cloudckpt-process", "async_training", [9.0, 9.0], place=CAPPED, steps_per_s=97.0, steps_per_s_alone=100.0
        ),
    ]
    results = document(*rows) | {"sweep": "background"}
    found = {
        (one.bar.name, one.bar.sense): (round(one.found.value, 3), one.is_met) for one in verdicts(parsed(results))
    }
    assert found == {
        ("async save, thread", "≤"): (1.1, True),
        ("async save, process", "≤"): (1.5, False),
        ("async save, thread", "≥"): (0.96, True),
        ("async save, process", "≥"): (0.97, False),
    }
    said = text(results)
    assert "Of 4 bars 2 are met, 2 missed and 0 not measured" in said
    assert "training's pace" in said
    assert "0.220" in said


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_save_beside_training_says_how_fast_it_went(short, tmp_path):
    """The cell would be empty, or a save that failed be counted."""
    state = State(uniform(2, 64 * KIB), "sharded", None)
    state.fill()
    settings = Settings(endpoint_url=None, region=None, ca_bundle=None, no_dist=True)
    for name in ("cloudckpt-path", "filesystem"):
        system = system_named(name)(settings)
        outcome = system.save_beside_training(state.state_dict, str(tmp_path / name))
        assert isinstance(outcome, Outcome)
        assert outcome.steps_per_s
        assert outcome.steps_per_s_alone
        state.zero()
        system.load(state.state_dict, str(tmp_path / name))
        state.verify()
    (tmp_path / "taken").write_text("")
    with pytest.raises(BaseException, match="taken"):
        system_named("cloudckpt-path")(settings).save_beside_training(state.state_dict, str(tmp_path / "taken" / "x"))
