"""A training loop beside a save."""

from __future__ import annotations

import pytest
from benchmarks.outcomes import Outcome, Settings
from benchmarks.payloads import KIB, uniform
from benchmarks.state import State
from benchmarks.systems import system_named

from benchmarks import training


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_save_beside_training_says_how_fast_it_went(monkeypatch, tmp_path):
    """The cell would be empty, or a save that failed be counted."""
    monkeypatch.setattr(training, "ALONE_S", 0.2)
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
