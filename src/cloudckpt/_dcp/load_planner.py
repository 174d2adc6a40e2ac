"""The planner that `cloudckpt.load` uses: torch's default, faster, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from cloudckpt._dcp.narrow import narrowed
from cloudckpt._flat import PLAIN_TENSORS, flattened, holds_parts
from cloudckpt._manifest.torch_views import StoredEntries
from cloudckpt._pipeline.items import GivesTensors, LoadItems, whole_item
from cloudckpt.errors import StateDictMismatchError

_MAX_SHOWN = 10
_MAX_COMPARED = 5000
_NEVER_STATEFUL = PLAIN_TENSORS | {DTensor, bool, int, float, str, bytes, dict, list, tuple, type(None)}


@contextlib.contextmanager
def planned(
    state_dict: dict[str, Any], planner: LoadPlanner | None, uri: str
) -> Iterator[tuple[dict[str, Any], LoadPlanner]]:
    """The state dict and planner for torch's `load`, to be called within the block.

    torch asks of each entry twice whether it is a ``Stateful``, which takes longer than all else that is done with a
    small tensor. Where none can be and `planner` is None, torch is handed an empty dict, and the planner knows better.
    """
    if planner is not None or not all(map(_is_never_stateful, state_dict.values())):
        yield state_dict, planner if planner is not None else ExplainingLoadPlanner(uri)
        return
    entries = {key: state_dict[key] for key in sorted(state_dict)}
    yield {}, ExplainingLoadPlanner(uri, entries=entries)
    state_dict.update(entries)  # as torch does, and as it does only after a load that succeeded


def _is_never_stateful(value: object) -> bool:
    return type(value) in _NEVER_STATEFUL and not hasattr(value, "state_dict")


class ExplainingLoadPlanner(DefaultLoadPlanner, GivesTensors):
    """Raises `StateDictMismatchError` with every entry that does not fit, not only the first.

    A plan takes time by what the rank asks for, not by how many ranks saved. Tensors that are wanted as they were
    saved, whole and in one chunk, are planned without torch's search for what overlaps.

    `entries`, if given, is what is loaded, whatever torch's `load` hands over: see `planned`.
    """

    def __init__(self, uri: str, *, entries: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._uri = uri
        self._entries = entries

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        if self._entries is not None:
            state_dict = self._entries
        flat = flattened(state_dict)
        self._containers = None if flat is None else flat.containers
        if flat is None:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat.entries, flat.paths
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        try:
            return self._local_plan()
        except (RuntimeError, ValueError) as error:
            missing, reshaped = self._mismatches()
            if not missing and not reshaped:
                raise
            # Looking for near names takes long, so only for those that are shown.
            problems = [*reshaped, *(self._missing_text(fqn) for fqn in missing[:_MAX_SHOWN])][:_MAX_SHOWN]
            num_more = len(missing) + len(reshaped) - len(problems)
            more = f"; and {num_more} more" if num_more else ""
            raise StateDictMismatchError(
                f"the state dict does not fit the checkpoint at {self._uri}: {'; '.join(problems)}{more}. Ask only for "
                "what was saved, or pass planner=DefaultLoadPlanner(allow_partial_load=True) to leave out what is "
                "missing",
                uri=self._uri,
            ) from error

    def _local_plan(self) -> LoadPlan:
        assert self.metadata is not None  # noqa: S101  # set up before it plans
        missing = self._saved.keys() - self.state_dict.keys()
        if missing and (self._containers is None or not self._containers.isdisjoint(missing)):
            return self._plan_of_torch()  # which also looks for the names of older versions
        if isinstance(self._saved, StoredEntries):
            return LoadPlan(self._items(self._saved))  # type: ignore[arg-type]  # torch reads them as a sequence
        items: list[ReadItem] = []
        rest: dict[str, Any] = {}
        for fqn, value in self.state_dict.items():
            item = _whole_tensor(fqn, value, self._saved.get(fqn))
            if item is None:
                rest[fqn] = value
            else:
                items.append(item)
        return LoadPlan([*items, *self._items_of(rest)])

    def _plan_of_torch(self) -> LoadPlan:
        whole = self.metadata
        assert whole is not None  # noqa: S101  # set up before it plans
        try:
            self.metadata = narrowed(whole, self.state_dict)
            return super().create_local_plan()
        finally:
            self.metadata = whole

    def _items(self, saved: StoredEntries) -> LoadItems:
        fqns: list[str] = []
        sizes: list[torch.Size] = []
        rest: dict[str, Any] = {}
        tensors = saved.tensors
        for fqn, value in self.state_dict.items():
            stored = tensors.get(fqn)
            if (
                stored is not None
                and len(stored.chunks) == 1
                and type(value) in PLAIN_TENSORS
                and not holds_parts(value)
            ):
                size = value.size()
                if size == stored.shape and 0 not in size:  # and so the chunk has this size, too
                    fqns.append(fqn)
                    sizes.append(size)
                    continue
            rest[fqn] = value
        return LoadItems(fqns, sizes, self._items_of(rest))

    def _items_of(self, rest: dict[str, Any]) -> list[ReadItem]:
        assert self.metadata is not None  # noqa: S101  # set up before it plans
        if not rest:
            return []
        metadata = narrowed(self.metadata, rest)
        return create_default_local_load_plan(rest, metadata, not self.allow_partial_load).items

    def tensors_of(self, fqns: Sequence[str]) -> list[torch.Tensor]:
        return [self.state_dict[fqn] for fqn in fqns]

    def _mismatches(self) -> tuple[list[str], list[str]]:
        """The FQNs that the checkpoint lacks, and a sentence for each that it has in another shape."""
        missing: list[str] = []
        reshaped: list[str] = []
        for fqn, value in self.state_dict.items():
            entry = self._saved.get(fqn)
            if entry is None:
                missing.append(fqn)
            elif (
                isinstance(entry, TensorStorageMetadata)
                and isinstance(value, torch.Tensor)
                and entry.size != value.size()
            ):
                reshaped.append(f"{fqn!r} was saved with shape {tuple(entry.size)}, not {tuple(value.size())}")
        return missing, reshaped

    def _missing_text(self, fqn: str) -> str:
        close = difflib.get_close_matches(fqn, list(self._saved)[:_MAX_COMPARED], n=1)
        return f"{fqn!r} is not in it" + (f" (but {close[0]!r} is)" if close else "")

    @property
    def _saved(self) -> Mapping[str, object]:
        assert self.metadata is not None  # noqa: S101  # set up before it plans
        return self.metadata.state_dict_metadata


def _whole_tensor(fqn: str, value: object, saved: object) -> ReadItem | None:
    """The one read of a plain tensor that was saved as one chunk; None where it is anything else."""
    if type(value) not in PLAIN_TENSORS or holds_parts(value):
        return None
    if not isinstance(saved, TensorStorageMetadata) or len(saved.chunks) != 1:
        return None
    assert isinstance(value, torch.Tensor)  # noqa: S101  # by its type
    (chunk,) = saved.chunks
    size = value.size()
    return whole_item(fqn, size) if size == saved.size == chunk.sizes and 0 not in size else None
