"""Loads of ``Stateful`` objects whose ``state_dict()`` asks for less than was saved of them.

An object that fills its state lazily, such as a sampler or a tracker of metrics, asks for nothing while it is fresh.
It gets what was saved all the same, unless another rank asks for it: a stage of a pipeline is not given the others.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from cloudckpt.dcp.live_entry import NO_PLACE, make_empty, nest_metadata
from cloudckpt.errors import StateDictMismatchError, quote_names

_log = logging.getLogger("cloudckpt")


class _OpenPlace(dict[Any, Any]):
    """The empty dict of `leave_open`, with what it stands for."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def leave_open(state: Any, name: str, saved: Mapping[str, Any]) -> Any:
    """Return `state` with an empty dict in place of each None, empty list or tuple that was saved as something larger.

    So a plan asks for nothing there, and `hand_over` can fill it. `close` takes back those that nothing has filled.
    """
    if isinstance(state, (Mapping, list)) and state:
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        changed = {key: made for key, one in pairs if (made := leave_open(one, f"{name}.{key}", saved)) is not one}
        return _replace(state, changed)
    if (state is None or (isinstance(state, (list, tuple)) and not state)) and not _is_value(saved.get(name)):
        below = f"{name}."
        if name in saved or any(other.startswith(below) for other in saved):
            return _OpenPlace(state)
    return state


def close(state: Any) -> Any:
    """Return `state` with what the object held in each place that nothing has filled."""
    if isinstance(state, _OpenPlace):
        return state.held
    if isinstance(state, (Mapping, list)):
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        return _replace(state, {key: made for key, one in pairs if (made := close(one)) is not one})
    return state


def hand_over(
    entries: dict[str, Any],
    objects: Mapping[str, Any],
    left: Collection[str],
    metadata: Metadata,
    *,
    is_strict: bool,
    num_ranks: int,
) -> None:
    """Add to `entries`, the states of `objects`, what was saved of them and no rank asks for: the names `left`.

    Without strictness, a state that asks for a part gets that part. A module has no place for more.
    """
    saved = {name: metadata.state_dict_metadata[name] for name in left}
    extra = nest_metadata(dataclasses.replace(metadata, state_dict_metadata=saved), num_ranks=num_ranks)
    for key, held in objects.items():
        if key in extra and not isinstance(held, nn.Module):
            entries[key] = _add(entries[key], extra[key], is_strict=is_strict)


def refuse_left(names: Iterable[str], objects: Mapping[str, Any], *, is_strict: bool, rank: int, uri: str) -> None:
    """Raise `StateDictMismatchError` for what was saved of `objects` and is not loaded, or warn of it."""
    kinds = {key: type(held).__name__ for key, held in objects.items()}
    left = {name: key for name in names for key in kinds if name.startswith(f"{key}.")}
    if left and is_strict:
        raise StateDictMismatchError(
            f"the load leaves behind {quote_names([*left])} of {uri}: the state_dict() of "
            f"{', '.join(sorted({kinds[key] for key in left.values()}))} does not ask for it, and it cannot be added, "
            "since it is sharded, in a tuple or for a module. Let state_dict() ask for all that was saved, or pass "
            "strict=False to leave it behind",
            uri=uri,
        )
    if left and rank == 0:  # one rank says it for all
        _log.warning("%s holds %s, for which the objects do not ask: it stays behind", uri, quote_names([*left]))


def _add(state: Any, extra: Any, *, is_strict: bool) -> Any:
    """Return `state` with `extra`, which was saved in its place. None in `extra` adds nothing."""
    if extra is None:
        return state
    if isinstance(state, Mapping) and state and isinstance(extra, Mapping):
        changed = {
            key: _add(state[key], one, is_strict=is_strict) if key in state else make_empty(one)
            for key, one in extra.items()
            if key in state or is_strict
        }
        return _replace(state, {key: one for key, one in changed.items() if one is not NO_PLACE})
    if isinstance(state, list) and state and isinstance(extra, list):
        made = [_add(*pair, is_strict=is_strict) for pair in zip(state, extra, strict=False)]
        beside = [NO_PLACE if one is None else make_empty(one) for one in extra[len(state) :] if is_strict]
        return [*made, *state[len(extra) :], *itertools.takewhile(lambda one: one is not NO_PLACE, beside)]
    made = NO_PLACE if isinstance(state, tuple) and state else make_empty(extra)
    return state if made is NO_PLACE else made


def _replace(state: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a dict or a list with other values under some keys; the object itself if there are none."""
    if not changed:
        return state
    made = copy.copy(state)
    for key, value in changed.items():
        made[key] = value
    return made


def _is_value(entry: object) -> bool:
    return isinstance(entry, BytesStorageMetadata)
