"""Plans of saves: what is made of plain tensors by a shorter way is what torch makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from cloudckpt.dcp.save_planner import BalancedSavePlanner, merge_plans
from cloudckpt.errors import UnsupportedValueError

tensors = st.builds(
    lambda shape, dtype, is_parameter: (
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype is torch.float32)
        if is_parameter
        else torch.zeros(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]),
    st.booleans(),
)


def with_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Two parts of a larger one, of which the rest is elsewhere; torch knows of such since 2.15."""
    rest, origin = tensor.shape, (0,) * tensor.dim()
    held: Any = torch.zeros(5, *rest, dtype=tensor.dtype)
    held.global_shape = (4, *rest)
    held.global_offsets, held.local_offsets = ((2, *origin), (0, *origin)), ((1, *origin), (3, *origin))
    held.local_sizes = ((2, *rest), (2, *rest))
    return held  # type: ignore[no-any-return]


tensors |= tensors.map(lambda tensor: tensor.detach().mT if tensor.dim() > 1 else tensor) | tensors.map(with_parts)
leaves = tensors | st.sampled_from([None, 7, "text", b"bytes", (1, 2), torch.zeros(4).to_sparse()])
names = st.text("ab.0", min_size=1, max_size=3)
states = st.dictionaries(
    names,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
    ),
    max_size=6,
)


def hints_of(plans: Sequence[SavePlan]) -> list[int | None]:
    """Return the part of the plans that their comparison leaves out."""
    return [item.index.index for plan in plans for item in plan.items]


@given(state=states)
def test_the_plan_of_one_rank_is_torchs(state: dict[str, Any]) -> None:
    """If this fails, something of a state dict is saved otherwise than torch would save it, or not at all."""
    torchs, ours = DefaultSavePlanner(), BalancedSavePlanner()
    try:
        torchs.set_up_planner(state, is_coordinator=True)
    except ValueError:
        with pytest.raises(UnsupportedValueError, match="two entries of the state dict"):
            ours.set_up_planner(state, is_coordinator=True)
        return
    ours.set_up_planner(state, is_coordinator=True)
    assert list(ours.state_dict) == list(torchs.state_dict)
    expected, local = torchs.create_local_plan(), ours.create_local_plan()
    assert local == expected
    assert [type(item) for item in local.items] == [WriteItem] * len(expected.items)
    expected_plans, expected_metadata = torchs.create_global_plan([expected])
    plans, metadata = ours.create_global_plan([local])
    assert (plans, metadata) == (expected_plans, expected_metadata)
    assert hints_of(plans) == hints_of(expected_plans)
    # The manifest has them in this order.
    assert list(metadata.state_dict_metadata) == list(expected_metadata.state_dict_metadata)
    assert list(metadata.planner_data) == list(expected_metadata.planner_data)
    assert pickle.loads(pickle.dumps(plans)) == expected_plans


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        ([], None),
        (["key:w is wrong"], "Failed to validate global plan: key:w is wrong"),
        (True, None),
        (False, "Failed to validate global plan: see torch's log"),
    ],
)
def test_the_verdict_of_every_torch_is_understood(
    monkeypatch: pytest.MonkeyPatch, verdict: object, message: str | None
) -> None:
    """If this fails, no save succeeds with the oldest torch, or what it finds wrong with a plan is overlooked."""
    monkeypatch.setattr("cloudckpt._torch_compat._validate_global_plan", lambda *_: verdict)
    if message is None:
        merge_plans([SavePlan([])])
        return
    with pytest.raises(ValueError) as raised:
        merge_plans([SavePlan([])])
    assert str(raised.value) == message
