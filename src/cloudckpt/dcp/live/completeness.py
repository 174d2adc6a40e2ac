"""Find loads that would leave saved entries behind, and fill ``Stateful`` objects that do not ask for all of theirs.

An object that fills its state lazily, such as a sampler or a tracker of metrics, asks for nothing while it is fresh.
A load gives it the entries that were saved of it all the same. Entries that another rank asks for are left out: a stage
of a pipeline must not get the state of the other stages.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt._messages import quote_names
from cloudckpt.dcp.live.entry import MISSING, make_empty, nest_metadata
from cloudckpt.dcp.load_items import LoadItems
from cloudckpt.dcp.renaming import Renaming, advise_extra
from cloudckpt.errors import Hint, StateDictMismatchError

_GROUPS = "param_groups."
_BEFORE_GROUPS = re.compile(r"(?:^|.*?\.)(?=param_groups\.)", re.DOTALL)
_RANK = re.compile(r"\.rank-[0-9]+\b")
_log = logging.getLogger("cloudckpt")


def check_completeness(
    plans: Sequence[LoadPlan], saved: Mapping[str, Any], *, whole: Collection[str] | None, uri: str
) -> None:
    """Refuse a load in which no rank asks for some of the saved entries.

    A target that asks for the ``param_groups`` of an optimizer is to be resumed, so it must ask for all of its
    ``state``. A fresh optimizer's state dict asks for none. If parameters are asked for beside it, the state of others
    may be left out: a stage of a pipeline may load its part in a process group of its own.

    Args:
        plans: The load plans of all ranks.
        saved: torch's metadata of all entries of the checkpoint, by name.
        whole: Top-level keys whose entries must all be asked for, except for those of other ranks
            (``dataloader.rank-3``) and of random generators. None stands for all keys.
        uri: The checkpoint, for messages.

    Raises:
        StateDictMismatchError: Names what is not asked for, and the remedy.

    """
    if whole is not None and not whole and not any(_GROUPS in name for name in saved):
        return  # nothing can be left behind, and the plans of many ranks would take long to read
    asked = {fqn for plan in plans for fqn in _fqns_of(plan)}
    if unasked := _find_unasked(saved, asked, whole):
        is_sharded = len(plans) > 1 and any(len(getattr(saved[name], "chunks", ())) > 1 for name in unasked)
        hint = ". In the place of a tensor of which several ranks hold parts, hold a tensor of its layout"
        outside = [name for name in unasked if "." not in name and any(name.startswith("model.") for name in asked)]
        advice = advise_extra(outside).replace("{", "{{").replace("}", "}}")  # the hint is a format
        raise _make_error(
            f"the load leaves behind a part of {uri}: {_summarize(unasked, saved)}",
            "Ask for all that was saved (restore takes the objects that save was given), or {option}"
            f"{advice}{hint if is_sharded else ''}",
            uri=uri,
        )
    for prefix in _prefixes_of_groups(asked):
        if unasked := _find_unasked_state(saved, asked, f"{prefix}state."):
            raise _make_error(
                f"the load asks for {prefix}param_groups of an optimizer in {uri}, but not for {len(unasked)} entries "
                f"of its state: {quote_names(unasked)}. The optimizer continues without them",
                "One that has not taken a step has no state in its state_dict(). Pass the objects instead, as in "
                "cloudckpt.load(uri, model=model, optimizer=optimizer), or {option} to leave its state behind",
                uri=uri,
            )


def warn_of_frozen(plans: Sequence[LoadPlan], left: Collection[str], *, uri: str) -> None:
    """Warn of saved state that no rank asks for, because its parameters are frozen now and in no optimizer."""
    lost = {*left}.difference(fqn for plan in plans for fqn in _fqns_of(plan)) if left else ()
    if lost:
        _log.warning(
            "the load leaves %s of %s behind: these parameters are frozen, and no optimizer has them. Later saves do "
            "not have this state",
            quote_names(sorted({name.rpartition(".")[0] for name in lost})),
            uri,
        )


def check_empty(plans: Sequence[LoadPlan], saved: Mapping[str, Any], *, uri: str) -> None:
    """Raise `StateDictMismatchError` for an empty dict if no rank asks for the entries that were saved in its place.

    torch's ``load`` gives a fresh ``Stateful`` nothing, and reports success.
    """
    empty = dict.fromkeys(name for plan in plans for name in plan.planner_data or ())
    unasked = {
        name: below
        for name in empty
        if (below := [saved_name for saved_name in saved if saved_name.startswith(f"{name}.")])
    }
    if not unasked:
        return
    asked = {fqn for plan in plans for fqn in _fqns_of(plan)}
    for name, below in unasked.items():
        if asked.isdisjoint(below):
            raise _make_error(
                f"{uri} holds {quote_names(below)}, and {name!r} is empty in the state dict, so that it asks for none "
                "of it",
                "Load with cloudckpt.load, which gives a Stateful what was saved; fill the dict with what to load; or "
                "{option} to leave it behind",
                uri=uri,
            )


def check_hidden(names: Collection[str], *, uri: str) -> None:
    """Raise `StateDictMismatchError` if the dict of `rename` hides entries from a load that must take all."""
    if unasked := [name for name in names if not name.startswith("random_state.")]:
        raise _make_error(
            f"rename hides a part of {uri} from the load, and strict=True asks for all: {quote_names(unasked)}",
            "Give them other names, too, or {option}",
            uri=uri,
        )


def _make_error(problem: str, advice: str, *, uri: str) -> StateDictMismatchError:
    """Return an error. A load with ``strict=False`` logs its problem, without the advice."""
    return StateDictMismatchError(problem, uri=uri, hint=Hint(advice=advice, option="strict", value="False"))


def check_used(plans: Sequence[LoadPlan], renaming: Renaming, *, lacking: Collection[str], uri: str) -> None:
    """Raise `StateDictMismatchError` if a part of `rename` gives only names that no rank asks for.

    `lacking` are names that ranks would have asked for.
    """
    asked = {fqn for plan in plans for fqn in _fqns_of(plan)}
    if text := renaming.explain_unasked(asked, lacking):
        raise StateDictMismatchError(text, uri=uri)


def find_unasked_entries(plans: Sequence[LoadPlan], saved: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """Return the saved entries of the objects under the top-level `keys` that no rank asks for.

    The ``state`` of an optimizer is left out, because `check_completeness` refuses a load that leaves it behind.
    """
    below = tuple(f"{key}." for key in keys)
    names = [name for name in saved if name.startswith(below)]
    asked: set[str] = set()
    for plan in plans:  # the first asks for nearly all
        asked.update(_fqns_of(plan))
        names = [name for name in names if name not in asked]
        if not names:
            return []
    rankless = {_RANK.sub(".rank", name) for name in asked}
    states = tuple(f"{prefix}state." for prefix in _prefixes_of_groups(asked))
    return [
        name
        for name in names
        if not name.startswith(states) and _RANK.sub(".rank", name) not in rankless and _has_elements(saved[name])
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


def _find_unasked(saved: Mapping[str, Any], asked: set[str], whole: Collection[str] | None) -> list[str]:
    if whole is not None and not whole:
        return []
    rankless = {_RANK.sub(".rank", name) for name in asked}
    return [
        name
        for name in saved
        if name not in asked
        and (whole is None or _top_of(name) in whole)
        and _RANK.sub(".rank", name) not in rankless
        and not name.startswith("random_state.")
        and _has_elements(saved[name])
    ]


def _find_unasked_state(saved: Mapping[str, Any], asked: set[str], state: str) -> list[str]:
    unasked = [name for name in saved if name.startswith(state) and name not in asked and _has_elements(saved[name])]
    if not unasked:
        return []
    of_asked_state = {_param_of(name, state) for name in asked if name.startswith(state)}
    # "model.up.weight" may ask for the parameter "up.weight", or for "weight".
    params = {name[position:] for name in asked if not name.startswith(state) for position in _begins_of_parts(name)}
    if params.isdisjoint(of_asked_state | {_param_of(name, state) for name in unasked}):
        return unasked  # the optimizer is loaded apart from its model
    return [name for name in unasked if _param_of(name, state) in params | of_asked_state]


def _param_of(name: str, state: str) -> str:
    return name.removeprefix(state).rpartition(".")[0]


def _begins_of_parts(name: str) -> list[int]:
    return [0, *(position + 1 for position, letter in enumerate(name) if letter == ".")]


def _summarize(unasked: list[str], saved: Mapping[str, Any]) -> str:
    """Name the top-level keys of which nothing is asked for, and single entries of the others."""
    num_saved = Counter(_top_of(name) for name in saved)
    num_left = Counter(_top_of(name) for name in unasked)
    whole = [f"{top} ({number} entries)" for top, number in num_left.items() if number == num_saved[top] > 1]
    single = [name for name in unasked if not (num_left[_top_of(name)] == num_saved[_top_of(name)] > 1)]
    return ", ".join([*whole, *([quote_names(single)] if single else [])])


def _top_of(name: str) -> str:
    return name.partition(".")[0]


def _has_elements(entry: Any) -> bool:
    """Return False for a tensor without elements, which no plan reads."""
    return not isinstance(entry, TensorStorageMetadata) or 0 not in entry.size


class _Placeholder(dict[Any, Any]):
    """The empty dict that `add_placeholders` puts in place of `value`."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def add_placeholders(state: Any, name: str, saved: Mapping[str, Any]) -> Any:
    """Return `state` with an empty dict in place of each None, empty list or tuple that was saved as something larger.

    A plan asks for nothing there. `fill_placeholders` can fill such a dict, and `restore_placeholders` puts back the
    value of each dict that stays empty.
    """
    if isinstance(state, (Mapping, list)) and state:
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        changed = {
            key: new for key, value in pairs if (new := add_placeholders(value, f"{name}.{key}", saved)) is not value
        }
        return _replace(state, changed)
    is_empty = state is None or (isinstance(state, (list, tuple)) and not state)
    if is_empty and not isinstance(saved.get(name), BytesStorageMetadata):
        below = f"{name}."
        if name in saved or any(other.startswith(below) for other in saved):
            return _Placeholder(state)
    return state


def restore_placeholders(state: Any) -> Any:
    """Return `state` with the object's own value in place of each placeholder that is still empty."""
    if isinstance(state, _Placeholder):
        return state.value
    if isinstance(state, (Mapping, list)):
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        return _replace(state, {key: new for key, value in pairs if (new := restore_placeholders(value)) is not value})
    return state


def fill_placeholders(
    entries: dict[str, Any],
    objects: Mapping[str, Any],
    unasked: Collection[str],
    metadata: Metadata,
    *,
    is_strict: bool,
    num_ranks: int,
) -> None:
    """Add the saved entries `unasked`, which no rank asks for, to `entries`, the states of `objects`.

    Without strictness, a state that asks for some entries gets no others. A module cannot take more entries.
    """
    saved = {name: metadata.state_dict_metadata[name] for name in unasked}
    extra = nest_metadata(dataclasses.replace(metadata, state_dict_metadata=saved), num_ranks=num_ranks)
    for key, value in objects.items():
        if key in extra and not isinstance(value, nn.Module):
            entries[key] = _add(entries[key], extra[key], is_strict=is_strict)


def refuse_unloaded(names: Iterable[str], objects: Mapping[str, Any], *, is_strict: bool, rank: int, uri: str) -> None:
    """Raise `StateDictMismatchError`, or warn, if saved entries of `objects` are not loaded."""
    kinds = {key: type(value).__name__ for key, value in objects.items()}
    unasked = {name: key for name in names for key in kinds if name.startswith(f"{key}.")}
    if unasked and is_strict:
        raise StateDictMismatchError(
            f"the load leaves behind {quote_names([*unasked])} of {uri}: the state_dict() of "
            f"{', '.join(sorted({kinds[key] for key in unasked.values()}))} does not ask for it, and it cannot be "
            "added, since it is sharded, in a tuple or for a module. Let state_dict() ask for all that was saved, or "
            "pass strict=False to leave it behind",
            uri=uri,
        )
    if unasked and rank == 0:  # one rank warns for all
        _log.warning("%s holds %s, for which the objects do not ask: it stays behind", uri, quote_names([*unasked]))


def _add(state: Any, extra: Any, *, is_strict: bool) -> Any:
    """Return `state` with the entries of `extra` added, which were saved in its place. None in `extra` adds nothing."""
    if extra is None:
        return state
    if isinstance(state, Mapping) and state and isinstance(extra, Mapping):
        changed = {
            key: _add(state[key], value, is_strict=is_strict) if key in state else make_empty(value)
            for key, value in extra.items()
            if key in state or is_strict
        }
        return _replace(state, {key: value for key, value in changed.items() if value is not MISSING})
    if isinstance(state, list) and state and isinstance(extra, list):
        added = [_add(*pair, is_strict=is_strict) for pair in zip(state, extra, strict=False)]
        appended = [MISSING if value is None else make_empty(value) for value in extra[len(state) :] if is_strict]
        return [*added, *state[len(extra) :], *itertools.takewhile(lambda value: value is not MISSING, appended)]
    added = MISSING if isinstance(state, tuple) and state else make_empty(extra)
    return state if added is MISSING else added


def _replace(state: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a dict or a list with other values under some keys; the object itself if there are none."""
    if not changed:
        return state
    copied = copy.copy(state)
    for key, value in changed.items():
        copied[key] = value
    return copied
