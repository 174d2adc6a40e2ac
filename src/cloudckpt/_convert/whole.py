"""A whole state dict in memory, without a model to load it into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt._commit.resolve import holds_rank_checkpoints, resolve
from cloudckpt._convert.names import chosen_names
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import Location
from cloudckpt.api import load
from cloudckpt.errors import UnsupportedValueError
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
    if retrier.call(lambda: holds_rank_checkpoints(store)):
        resolve(store, retrier)  # which says so, unless it is a folder beside a checkpoint
    planner = _Planner(source.uri, include)
    load({}, source.uri, planner=planner, no_dist=True, allow_pickle=allow_pickle, options=options)
    state_dict: dict[str, Any] = planner.original_state_dict
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
    flat = flattened(state_dict, uri=uri)
    names = chosen_names(flat, include=include, strip_prefix=strip_prefix, add_prefix=add_prefix, uri=uri)
    return {name: flat[fqn] for fqn, name in names.items()}


def flattened(state_dict: Mapping[str, Any], *, uri: str) -> dict[str, Any]:
    """By the names that a save gives. Raises `UnsupportedValueError` for what has none, whatever a file may hold."""
    try:
        flat, _ = flatten_state_dict(dict(state_dict))
    except (ValueError, RecursionError) as error:  # one name twice; what holds itself
        raise UnsupportedValueError(f"{uri} holds no state dict that can be saved: {error}", uri=uri) from error
    return flat


class _Planner(_EmptyStateDictLoadPlanner):
    """Makes the state dict of what was saved."""

    def __init__(self, uri: str, include: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._uri = uri
        self._include = include
        self._chosen: dict[str, str] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        assert metadata is not None  # noqa: S101  # torch's loader gives it
        self._chosen = chosen_names(metadata.state_dict_metadata, include=self._include, uri=self._uri)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _should_include_key(self, key: str, metadata: Metadata) -> bool:  # noqa: ARG002  # torch's signature
        return key in self._chosen
