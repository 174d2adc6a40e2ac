"""Finds loads that would leave an optimizer's state behind without a word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.errors import StateDictMismatchError
from cloudckpt.pipeline.consumers import LoadItems

_GROUPS = "param_groups."
_BEFORE_GROUPS = re.compile(r"(?:^|.*?\.)(?=param_groups\.)", re.DOTALL)
_RANK = re.compile(r"\.rank-[0-9]+\b")
_MAX_SHOWN = 5


def check_completeness(plans: Iterable[LoadPlan], saved: Mapping[str, Any], *, is_strict: bool, uri: str) -> None:
    """Compare what all ranks ask for with what was `saved`.

    A target that asks for the ``param_groups`` of an optimizer is to be resumed, so it must ask for all of its
    ``state``. A fresh optimizer's state dict asks for none.

    Args:
        plans: The load plans of all ranks.
        saved: torch's metadata of all entries of the checkpoint, by name.
        is_strict: Demand that all entries are asked for, but for those of other ranks (``dataloader.rank-3``) and for
            the random generators.
        uri: The checkpoint, for messages.

    Raises:
        StateDictMismatchError: Names what is not asked for, and the remedy.

    """
    asked = {fqn for plan in plans for fqn in _fqns_of(plan)}
    if is_strict and (left := _find_left(saved, asked)):
        raise StateDictMismatchError(
            f"the load asks for only a part of {uri}, which also holds {_quote(left)}. Ask for them, or load without "
            "strict=True",
            uri=uri,
        )
    for prefix in {match.group() for name in asked if _GROUPS in name and (match := _BEFORE_GROUPS.match(name))}:
        state = f"{prefix}state."
        if left := [name for name in saved if name.startswith(state) and name not in asked and _holds(saved[name])]:
            raise StateDictMismatchError(
                f"the load asks for the settings of an optimizer in {uri} ({prefix}param_groups), but not for "
                f"{_quote(left)}: training would go on without that state. An optimizer that has not taken a step has "
                "none in its state_dict(). Pass the objects instead (load(uri, model=…, optimizer=…), or the same with "
                "CheckpointManager.restore), make the state dict with "
                "torch.distributed.checkpoint.state_dict.get_state_dict, or pass strict=False if you want to lose it",
                uri=uri,
            )


def _fqns_of(plan: LoadPlan) -> Iterable[str]:
    items = plan.items
    if isinstance(items, LoadItems):
        yield from items.fqns
        items = items.others
    for item in items:
        yield item.storage_index.fqn


def _find_left(saved: Mapping[str, Any], asked: set[str]) -> list[str]:
    of_any_rank = {_RANK.sub(".rank", name) for name in asked}
    return [
        name
        for name in saved
        if name not in asked
        and _RANK.sub(".rank", name) not in of_any_rank
        and not name.startswith("random_state.")
        and _holds(saved[name])
    ]


def _holds(entry: Any) -> bool:
    """Return False for a tensor without elements, which no plan reads."""
    return not isinstance(entry, TensorStorageMetadata) or 0 not in entry.size


def _quote(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(map(repr, names[:_MAX_SHOWN])) + more
