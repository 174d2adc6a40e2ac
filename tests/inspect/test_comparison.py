"""Comparisons of checkpoints with tolerances, next to the limit."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit.options import make_options

import cloudckpt
from cloudckpt.format.plain_values import encode_plain
from cloudckpt.inspect import comparison
from cloudckpt.inspect.comparison import compare_values
from cloudckpt.stores.base import Store

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


def test_the_largest_difference_is_that_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the report of a large tensor says how far its last 64 MiB are apart, and passes over the rest."""
    monkeypatch.setattr(comparison, "BATCH_BYTES", 64)
    monkeypatch.setattr(comparison, "SLICE_ELEMENTS", 4)
    root = f"memory://comparison-{next(_names)}"
    before = torch.ones(100, dtype=torch.float64)
    after = before.clone()
    after[[3, 6, 40, 41, 99]] = torch.tensor([2.0, 9.0, 1.5, 3.0, 1.25], dtype=torch.float64)
    for name, value in (("before", before), ("after", after)):
        cloudckpt.save({"w": value, "n": 3}, f"{root}/{name}", no_dist=True)
    seen: list[tuple[int, int]] = []
    found = cloudckpt.compare(f"{root}/before", f"{root}/after", on_progress=lambda *one: seen.append(one))
    (one,) = found.differences
    assert (one.num_different, one.num_elements, one.max_absolute, one.max_relative) == (5, 100, 8.0, 8 / 9)
    assert (found.num_same, seen[-1]) == (1, (found.num_bytes_compared,) * 2)
    assert seen == sorted(seen)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_are_compared_as_integers(dtype: torch.dtype) -> None:
    """If this fails, counters that are one apart pass for equal above 2 ** 53, where floats have gaps."""
    root = f"memory://comparison-{next(_names)}"
    for name, value in (("before", 2**60), ("after", 2**60 + 1)):
        cloudckpt.save({"n": torch.tensor([7, value], dtype=dtype)}, f"{root}/{name}", no_dist=True)
    (one,) = cloudckpt.compare(f"{root}/before", f"{root}/after").differences
    assert one.num_different == 1


def test_each_side_is_opened_with_its_own_options() -> None:
    """If this fails, a checkpoint on another store is read with the credentials of the first one, or not at all."""
    root = f"memory://comparison-{next(_names)}"
    for name in ("before", "after"):
        cloudckpt.save({"w": torch.ones(1)}, f"{root}/{name}", no_dist=True)
    opened: list[tuple[str, str]] = []

    def opens(side: str) -> cloudckpt.Options:
        def wrap_store(store: Store) -> Store:
            opened.append((side, store.url("")))
            return store

        return make_options(wrap_store=wrap_store)

    one, other = (f"{root}/{name}" for name in ("before", "after"))
    assert cloudckpt.compare(one, other, options=opens("first"), options_after=opens("second")).is_same
    assert cloudckpt.compare(one, other, options=opens("both")).is_same
    sides = {(side, url.strip("/").rpartition("/")[2]) for side, url in opened}
    assert sides == {("first", "before"), ("second", "after"), ("both", "before"), ("both", "after")}


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ({"a": [1, 2.5]}, {"a": [1, 2.5]}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (1, 1.0, False),
        (True, 1, False),
        ([1, 2], (1, 2), False),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"a": 1, "b": None}, False),
        (np.zeros((2, 3)), np.zeros((3, 2)), False),
        (np.zeros(2, np.int32), np.zeros(2, np.float32), False),
        (np.float64("nan"), np.float64("nan"), True),
        ([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)], False),
        ([torch.zeros(2, 3)], [torch.zeros(3, 2)], False),
        ([torch.ones(2, 3).t()], [torch.ones(3, 2)], True),
        ([torch.tensor([float("nan")])], [torch.tensor([float("nan")])], True),
    ],
    ids=repr,
)
def test_values_are_the_same_if_type_and_content_are(before: Any, after: Any, *, is_same: bool) -> None:
    """If this fails, a changed setting of a run goes unseen, or each order of a dict is a change."""

    def stored(value: Any) -> tuple[bytes, bool]:
        encoded = encode_plain(value)
        if encoded is not None:
            return encoded, True
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue(), False

    for pair in ((before, after), (after, before)):
        contents, are_json = zip(*map(stored, pair), strict=True)
        assert (compare_values(*contents, are_json=are_json)[0] is None) == is_same
