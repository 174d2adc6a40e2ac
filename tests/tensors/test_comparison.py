"""Comparisons of checkpoints with tolerances, next to the limit."""

from __future__ import annotations

import itertools

import pytest
import torch

import cloudckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
_names = itertools.count()


@pytest.mark.parametrize(
    ("before", "after", "rtol", "atol", "is_same"),
    [
        (100.0, 101.0, 0.01, 0.0, True),
        (100.0, 101.0078125, 0.01, 0.0, False),  # within 1 % of the later one
        (101.0078125, 100.0, 0.01, 0.0, True),  # beyond 1 % of the later one
        (100.0, 99.0, 0.01, 0.0, True),
        (100.0, 98.9921875, 0.01, 0.0, False),
        (-100.0, -101.0, 0.01, 0.0, True),
        (-100.0, -101.0078125, 0.01, 0.0, False),
        (0.0, 1e-30, 0.01, 0.0, False),
        (1e-30, 0.0, 0.99, 0.0, False),
        (1e-30, 0.0, 1.0, 0.0, True),
        (100.0, 101.5, 0.01, 0.5, True),
        (100.0, 101.5078125, 0.01, 0.5, False),
        (100.0, 100.5, 0.0, 0.5, True),
        (100.0, 100.5078125, 0.0, 0.5, False),
        (float("inf"), 1.0, 1.0, 1.0, False),
        (float("inf"), float("inf"), 0.0, 0.0, True),
        (float("nan"), float("nan"), 0.1, 0.0, True),
        (float("nan"), 1.0, 1.0, 1.0, False),
    ],
)
def test_the_limit_is_that_of_the_first_checkpoint(
    before: float, after: float, rtol: float, atol: float, *, is_same: bool
) -> None:
    """If this fails, `compare` is stricter or laxer than it says, or takes its tolerance from the other side."""
    root = f"memory://comparison-{next(_names)}"
    for name, value in (("before", before), ("after", after)):
        cloudckpt.save({"w": torch.tensor([0.0, value], dtype=torch.float64)}, f"{root}/{name}", no_dist=True)
    found = cloudckpt.compare(f"{root}/before", f"{root}/after", rtol=rtol, atol=atol)
    assert found.is_same == is_same
    assert [one.num_different for one in found.differences] == ([] if is_same else [1])
