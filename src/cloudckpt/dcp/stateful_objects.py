"""Loads of ``Stateful`` objects whose ``state_dict()`` asks for less than was saved of them.

An object that fills its state lazily, such as a sampler or a tracker of metrics, asks for nothing while it is fresh.
It gets what was saved all the same. A wrapper that asks for a part of a model on purpose gets that part.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from cloudckpt.dcp.live_entry import make_empty, nest_metadata
from cloudckpt.errors import StateDictMismatchError, quote_names
from cloudckpt.format.wrappers import SavedWrapper

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
    max_bytes: int,
    num_ranks: int,
    rank: int,
    uri: str,
) -> None:
    """Add to `entries`, the states of `objects`, what was saved of them and no rank asks for: the names `left`.

    Where a state asks for nothing, all of it is added. A state that asks for a part gets the rest up to `max_bytes` in
    all; a warning names what stays behind.

    Raises:
        StateDictMismatchError: The object is a module, which has no place for more; or it asks for nothing yet, and
            its tensors are sharded, so that nobody knows their layout.

    """
    saved = metadata.state_dict_metadata
    extra = nest_metadata(dataclasses.replace(metadata, state_dict_metadata={name: saved[name] for name in left}))
    adding = _Adding(is_strict=is_strict, max_bytes=max_bytes, num_ranks=num_ranks)
    for key, held in objects.items():
        if key not in extra:
            continue
        if isinstance(held, nn.Module):
            (adding.refused if is_strict else adding.left).extend(_names_below(key, left))
        else:
            entries[key] = adding.add(entries[key], extra[key], key)
    if adding.refused and is_strict:
        kinds = ", ".join(sorted({type(objects[_object_of(name, objects)]).__name__ for name in adding.refused}))
        raise StateDictMismatchError(
            f"the load leaves behind {quote_names(adding.refused)} of {uri}: the state_dict() of {kinds} does not ask "
            "for it, and it cannot be added, since it is sharded or for a module. Let state_dict() ask for all that "
            "was saved, or pass strict=False to leave it behind",
            uri=uri,
        )
    if rank == 0 and (behind := [*adding.refused, *adding.left]):  # one rank says it for all
        _log.warning("%s holds %s, for which the objects do not ask: it stays behind", uri, quote_names(behind))


class _Adding:
    """Adds saved entries to states, and keeps the names of those that it cannot add."""

    def __init__(self, *, is_strict: bool, max_bytes: int, num_ranks: int) -> None:
        self.refused: list[str] = []
        """Entries below a place for which a state asks for nothing."""
        self.left: list[str] = []
        """Entries beside those for which a state asks."""
        self._is_strict, self._rest_bytes, self._num_ranks = is_strict, max_bytes, num_ranks

    def add(self, state: Any, extra: Any, name: str) -> Any:
        """Return `state` with `extra`, which was saved under the same `name`. None in `extra` adds nothing."""
        if extra is None:
            return state
        if isinstance(state, Mapping) and state and isinstance(extra, Mapping):
            return _replace(
                state,
                {
                    key: self.add(state[key], one, f"{name}.{key}") if key in state else make_empty(one)
                    for key, one in extra.items()
                    if key in state or self._takes_beside(one, f"{name}.{key}")
                },
            )
        if isinstance(state, list) and state and isinstance(extra, list):
            made = [self.add(*pair, f"{name}.{index}") for index, pair in enumerate(zip(state, extra, strict=False))]
            made += state[len(extra) :]
            for index, one in enumerate(extra[len(state) :], len(state)):
                if not self._takes_beside(one, f"{name}.{index}"):
                    break
                made.append(make_empty(one))
            return made
        if self._is_sharded(extra) or (isinstance(state, tuple) and state):  # a shorter one
            self.refused.append(name)
            return state
        return make_empty(extra)

    def _takes_beside(self, extra: Any, name: str) -> bool:
        num_bytes = sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors_in(extra))
        is_taken = self._is_strict and not self._is_sharded(extra) and num_bytes <= self._rest_bytes
        if is_taken:
            self._rest_bytes -= num_bytes
        else:
            self.left.append(name)
        return is_taken

    def _is_sharded(self, extra: Any) -> bool:
        return self._num_ranks > 1 and any(len(one.chunks) > 1 for one in tensors_in(extra))


def tensors_in(extra: Any) -> Iterator[TensorStorageMetadata]:
    """Give torch's metadata of the tensors in a nested state dict of metadata."""
    if isinstance(extra, TensorStorageMetadata):
        yield extra
    elif isinstance(extra, SavedWrapper):
        yield from tensors_in(extra.parts)
    elif isinstance(extra, (Mapping, list, tuple)):
        for one in extra.values() if isinstance(extra, Mapping) else extra:
            yield from tensors_in(one)


def _replace(state: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a dict or a list with other values under some keys; the object itself if there are none."""
    if not changed:
        return state
    made = copy.copy(state)
    for key, value in changed.items():
        made[key] = value
    return made


def _names_below(key: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name == key or name.startswith(f"{key}.")]


def _object_of(name: str, objects: Mapping[str, Any]) -> str:
    return next(key for key in objects if name == key or name.startswith(f"{key}."))


def _is_value(entry: object) -> bool:
    return isinstance(entry, BytesStorageMetadata)
