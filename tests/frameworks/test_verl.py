"""verl with its real package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.frameworks.conftest import Jobs


def test_verl(place: str, jobs: Jobs) -> None:
    """verl's workers would go on with other weights, optimizer, learning rate or random numbers; or keep the wrong
    checkpoints.
    """
    found = jobs.at(place, "verl_fsdp")
    assert found["resumed"] == found["whole"]
    assert found["kept"] == [0, 1, 1]
    assert found["refused"].startswith("hf_model and save_lora_only are not saved")


def test_verl_on_fewer_ranks(one_place: str, jobs: Jobs) -> None:
    """What two of verl's workers saved would not load on one, as it does not with verl's own manager."""
    jobs.at(one_place, "verl_fsdp")
    alone = jobs.at(one_place, "verl_fsdp", num_ranks=1)
    assert alone["lr"] == [1e-2 / 8]
    assert alone["kept"] == [0, 1, 1]
