"""Finds loads that would leave an optimizer's state behind without a word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.dcp.load_items import LoadItems
from cloudckpt.errors import StateDictMismatchError, quote_names

_GROUPS = "param_groups."
_BEFORE_GROUPS = re.compile(r"(?:^|.*?\.)(?=param_groups\.)", re.DOTALL)
_RANK = re.compile(r"\.rank-[0-9]+\b")


def check_completeness(
    plans: Sequence[LoadPlan], saved: Mapping[str, Any], *, whole: Collection[str] | None, uri: str
) -> None:
    """Compare what all ranks ask for with what was saved.

    A target that asks for the ``param_groups`` of an optimizer is to be resumed, so it must ask for all of its
    ``state``. A fresh optimizer's state dict asks for none. If parameters are asked for beside it, the state of others
    may be left out: a stage of a pipeline may load its part in a process group of its own.

    Args:
        plans: The load plans of all ranks.
        saved: torch's metadata of all entries of the checkpoint, by name.
        whole: Top-level keys of which all must be asked for; None for all of them. Entries of other ranks
            (``dataloader.rank-3``) and random generators need not be.
        uri: The checkpoint, for messages.

    Raises:
        StateDictMismatchError: Names what is not asked for, and the remedy.

    """
    if whole is not None and not whole and not any(_GROUPS in name for name in saved):
        return  # nothing can be left behind, and plans of many ranks take long to go through
    asked = {fqn for plan in plans for fqn in _fqns_of(plan)}
    if left := _find_left(saved, asked, whole):
        is_sharded = len(plans) > 1 and any(len(getattr(saved[name], "chunks", ())) > 1 for name in left)
        hint = ". In the place of a tensor of which several ranks hold parts, hold a tensor of its layout"
        raise StateDictMismatchError(
            f"the load leaves behind a part of {uri}: {_summarize(left, saved)}. Ask for all that was saved (restore "
            f"takes the objects that save was given), or pass strict=False{hint if is_sharded else ''}",
            uri=uri,
        )
    for prefix in _prefixes_of_groups(asked):
        if left := _find_left_state(saved, asked, f"{prefix}state."):
            raise StateDictMismatchError(
                f"the load asks for {prefix}param_groups of an optimizer in {uri}, but not for {len(left)} entries of "
                f"its state: {quote_names(left)}. The optimizer would go on without them. One that has not taken a "
                "step has no state in its state_dict(). Pass the objects instead, as in load(uri, model=model, "
                "optimizer=optimizer), or pass strict=False to leave its state behind",
                uri=uri,
            )


def check_empty(plans: Sequence[LoadPlan], saved: Mapping[str, Any], *, uri: str) -> None:
    """Compare the empty dicts that ranks are to fill with what was saved in their places.

    torch's ``load`` gives a fresh ``Stateful`` nothing, and reports success.

    Raises:
        StateDictMismatchError: No rank asks for anything of what was saved there.

    """
    empty = dict.fromkeys(name for plan in plans for name in plan.planner_data or ())
    left = {name: below for name in empty if (below := [one for one in saved if one.startswith(f"{name}.")])}
    if not left:
        return
    asked = {fqn for plan in plans for fqn in _fqns_of(plan)}
    for name, below in left.items():
        if asked.isdisjoint(below):
            raise StateDictMismatchError(
                f"{uri} holds {quote_names(below)}, and {name!r} is empty in the state dict, so that it asks for none "
                "of it. Load with cloudckpt.load, which gives a Stateful what was saved; fill the dict with what to "
                "load; or pass strict=False to leave it behind",
                uri=uri,
            )


def find_left_of_objects(plans: Sequence[LoadPlan], saved: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """Return what was saved of the objects under the top-level `keys`, and no rank asks for.

    The ``state`` of an optimizer is not among it, as `check_completeness` refuses to leave that behind.
    """
    below = tuple(f"{key}." for key in keys)
    names = [name for name in saved if name.startswith(below)]
    asked: set[str] = set()
    for plan in plans:  # the first asks for nearly all
        asked.update(_fqns_of(plan))
        names = [name for name in names if name not in asked]
        if not names:
            return []
    of_any_rank = {_RANK.sub(".rank", name) for name in asked}
    states = tuple(f"{prefix}state." for prefix in _prefixes_of_groups(asked))
    return [
        name
        for name in names
        if not name.startswith(states) and _RANK.sub(".rank", name) not in of_any_rank and _holds(saved[name])
    ]


def _prefixes_of_groups(asked: Iterable[str]) -> set[str]:
    return {match.group() for name in asked if _GROUPS in name and (match := _BEFORE_GROUPS.match(name))}


def _fqns_of(plan: LoadPlan) -> Iterable[str]:
    items = plan.items
    if isinstance(items, LoadItems):
        yield from items.fqns
        items = items.others
    for item in items:
        yield item.storage_index.fqn


def _find_left(saved: Mapping[str, Any], asked: set[str], whole: Collection[str] | None) -> list[str]:
    if whole is not None and not whole:
        return []
    of_any_rank = {_RANK.sub(".rank", name) for name in asked}
    return [
        name
        for name in saved
        if name not in asked
        and (whole is None or _top_of(name) in whole)
        and _RANK.sub(".rank", name) not in of_any_rank
        and not name.startswith("random_state.")
        and _holds(saved[name])
    ]


def _find_left_state(saved: Mapping[str, Any], asked: set[str], state: str) -> list[str]:
    left = [name for name in saved if name.startswith(state) and name not in asked and _holds(saved[name])]
    if not left:
        return []
    of_asked_state = {_param_of(name, state) for name in asked if name.startswith(state)}
    # "model.up.weight" asks for the parameter "up.weight", and "weight" at that.
    params = {name[at:] for name in asked if not name.startswith(state) for at in _begins_of_parts(name)}
    if params.isdisjoint(of_asked_state | {_param_of(name, state) for name in left}):
        return left  # the optimizer is loaded apart from its model
    return [name for name in left if _param_of(name, state) in params | of_asked_state]


def _param_of(name: str, state: str) -> str:
    return name.removeprefix(state).rpartition(".")[0]


def _begins_of_parts(name: str) -> list[int]:
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]


def _summarize(left: list[str], saved: Mapping[str, Any]) -> str:
    """Name the top-level keys of which nothing is asked for, and single entries of the others."""
    num_saved = Counter(_top_of(name) for name in saved)
    num_left = Counter(_top_of(name) for name in left)
    whole = [f"{top} ({number} entries)" for top, number in num_left.items() if number == num_saved[top] > 1]
    single = [name for name in left if not (num_left[_top_of(name)] == num_saved[_top_of(name)] > 1)]
    return ", ".join([*whole, *([quote_names(single)] if single else [])])


def _top_of(name: str) -> str:
    return name.partition(".")[0]


def _holds(entry: Any) -> bool:
    """Return False for a tensor without elements, which no plan reads."""
    return not isinstance(entry, TensorStorageMetadata) or 0 not in entry.size
