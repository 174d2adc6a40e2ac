"""A whole state dict in memory, without a model to load it into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from cloudckpt._commit.resolve import holds_rank_checkpoints, resolve
from cloudckpt._convert.names import chosen_names, matches
from cloudckpt._flat import Nesting, flattened, name_of, nested
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location
from cloudckpt.api import load
from cloudckpt.errors import CorruptCheckpointError, UnsupportedValueError
from cloudckpt.options import Options
from cloudckpt.stores.open import open_store


def load_whole(
    source: Location,
    options: Options,
    *,
    include: tuple[str, ...],
    strip_prefix: str = "",
    add_prefix: str = "",
    allow_pickle: bool,
) -> dict[str, Any]:
    """What was saved at `source`, as it was nested; flat, where names are changed. Raises what `load` raises, and
    `CheckpointNotFoundError` for what ranks saved on their own, of which a load takes only one's.
    """
    store, retrier = open_store(source, options), Retrier(retries=options.retries, timeout_s=options.timeout_s)
    if holds_rank_checkpoints(store, retrier, is_confirmed=True):
        resolve(store, retrier)  # which says so, unless it is a folder beside a checkpoint
    planner = _Planner(source.uri, include)
    load({}, source.uri, planner=planner, no_dist=True, allow_pickle=allow_pickle, options=options)
    state_dict = planner.nested()
    if strip_prefix or add_prefix:
        return renamed(state_dict, strip_prefix=strip_prefix, add_prefix=add_prefix, uri=source.uri)
    return state_dict


def renamed(
    state_dict: Mapping[str, Any],
    *,
    include: tuple[str, ...] = (),
    strip_prefix: str = "",
    add_prefix: str = "",
    uri: str,
) -> dict[str, Any]:
    """Flat, with other names."""
    flat = entries_in(state_dict, uri=uri)
    names = chosen_names(flat, include=include, strip_prefix=strip_prefix, add_prefix=add_prefix, uri=uri)
    return {name: flat[fqn] for fqn, name in names.items()}


def entries_in(state_dict: Mapping[str, Any], *, uri: str) -> dict[str, Any]:
    """By the names that a save gives. Raises `UnsupportedValueError` for what has none, whatever a file may hold."""
    try:
        return flattened(state_dict, uri=uri).entries
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{uri} holds no state dict that can be saved: {error}", uri=uri) from error


class _Planner(DefaultLoadPlanner):
    """Loads what was saved under its names, and nests it once it is there."""

    def __init__(self, uri: str, include: tuple[str, ...]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._uri = uri
        self._include = include

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002  # torch's signature
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # likewise
    ) -> None:
        assert metadata is not None  # noqa: S101  # torch's loader gives it
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self.state_dict = {}
        for name in chosen_names(metadata.state_dict_metadata, include=self._include, uri=self._uri):
            entry = metadata.state_dict_metadata[name]
            value = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.empty(entry.size, dtype=entry.properties.dtype)
            self.state_dict[name] = value

    def nested(self) -> dict[str, Any]:
        """What was loaded, nested as it was saved: with its keys, as far as the checkpoint has kept their types."""
        assert self.metadata is not None  # noqa: S101  # as above
        saved = {} if self.metadata.planner_data is None else self.metadata.planner_data
        typed, empty = (saved.typed, saved.empty) if isinstance(saved, Nesting) else ({}, [])
        included = [path for path in empty if not self._include or self._is_included(name_of(path))]
        try:
            return nested(self.state_dict, {**saved, **typed}, included)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self._uri} cannot be nested as it was: {error}", uri=self._uri) from error

    def _is_included(self, name: str) -> bool:
        return any(matches(name, pattern) for pattern in self._include)
