"""The planner that `cloudckpt.load` uses: torch's default, faster, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from cloudckpt._dcp.narrow import narrowed
from cloudckpt._dcp.save_planner import is_stateful, state_of
from cloudckpt._flat import PLAIN_TENSORS, flattened, holds_parts, put
from cloudckpt._manifest.torch_views import StoredEntries
from cloudckpt._pipeline.items import GivesTensors, LoadItems, whole_item
from cloudckpt.errors import StateDictMismatchError

_MAX_SHOWN = 10
_MAX_COMPARED = 5000


@contextlib.contextmanager
def planned(
    state_dict: dict[str, Any], planner: LoadPlanner | None, uri: str
) -> Iterator[tuple[dict[str, Any], LoadPlanner]]:
    """The state dict and planner for torch's `load`, to be called within the block.

    torch asks of each entry twice whether it is a ``Stateful``, which takes longer than all else that is done with a
    small tensor. So torch is handed an empty dict; the planner has the entries, and they are put back here.

    A ``DefaultLoadPlanner`` with torch's flattening is replaced by the planner of this package. Any other is used.
    """
    if planner is not None and not _is_default(planner):
        yield state_dict, planner
        return
    entries = {key: state_of(state_dict[key]) for key in sorted(state_dict, key=str)}
    is_partial = planner is not None and planner.allow_partial_load
    yield {}, ExplainingLoadPlanner(uri, entries=entries, allow_partial_load=is_partial)
    for key, value in entries.items():  # as torch does, and as it does only after a load that succeeded
        if key not in state_dict:
            continue
        held = state_dict[key]
        if is_stateful(held):
            held.load_state_dict(value)
        else:
            state_dict[key] = value


def _is_default(planner: LoadPlanner) -> TypeGuard[DefaultLoadPlanner]:
    return type(planner) is DefaultLoadPlanner and planner.flatten_state_dict and planner.flatten_sharded_tensors


class ExplainingLoadPlanner(DefaultLoadPlanner, GivesTensors):
    """Raises `StateDictMismatchError` with every entry that does not fit, not only the first.

    A plan takes time by what the rank asks for, not by how many ranks saved. Tensors that are wanted as they were
    saved, whole and in one chunk, are planned without torch's search for what overlaps.

    `entries`, if given, is what is loaded, whatever torch's `load` hands over: see `planned`.
    """

    def __init__(self, uri: str, *, entries: dict[str, Any] | None = None, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
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
        flat = flattened(state_dict, uri=self._uri)
        self._containers = flat.containers
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat.entries, flat.paths
        self.metadata, self.is_coordinator = metadata, is_coordinator
        for fqn, value in flat.entries.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.is_meta:
                made = {fqn: value}
                _init_state_dict(made)  # of torch's, on the device that the process group is for
                flat.entries[fqn] = made[fqn]
                put(state_dict, flat.paths[fqn], made[fqn])

    def create_local_plan(self) -> LoadPlan:
        try:
            return self._local_plan()
        except (RuntimeError, ValueError) as error:
            missing, unlike = self._mismatches()
            if not missing and not unlike:
                raise
            # Looking for near names takes long, so only for those that are shown.
            problems = [*unlike, *(self._missing_text(fqn) for fqn in missing[:_MAX_SHOWN])][:_MAX_SHOWN]
            num_more = len(missing) + len(unlike) - len(problems)
            more = f"; and {num_more} more" if num_more else ""
            raise StateDictMismatchError(
                f"the state dict does not fit the checkpoint at {self._uri}: {'; '.join(problems)}{more}. Ask only for "
                "what was saved, or pass planner=DefaultLoadPlanner(allow_partial_load=True) to leave out what is "
                "missing",
                uri=self._uri,
            ) from error

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's would put it beside, under the text of a key that is not a str.
        loaded = torch.load(value, weights_only=False)  # the reader has seen to it that it is harmless
        put(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)

    def _local_plan(self) -> LoadPlan:
        assert self.metadata is not None  # noqa: S101  # set up before it plans
        missing = self._saved.keys() - self.state_dict.keys()
        if not self._containers.keys().isdisjoint(missing):
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
        whole, paths = self.metadata, self.mappings
        assert whole is not None  # noqa: S101  # set up before it plans
        try:
            self.metadata = narrowed(whole, self.state_dict)
            plan = super().create_local_plan()
        finally:
            self.metadata = whole
        if self.mappings is not paths:  # older names, with paths of torch's, which have text for every key
            self.mappings = {fqn: self._containers.get(fqn) or paths[fqn] for fqn in self.mappings}
        self._check_kinds(self.state_dict)
        return plan

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
        self._check_kinds(rest)
        metadata = narrowed(self.metadata, rest)
        return create_default_local_load_plan(rest, metadata, not self.allow_partial_load).items

    def tensors_of(self, fqns: Sequence[str]) -> list[torch.Tensor]:
        return [self.state_dict[fqn] for fqn in fqns]

    def _check_kinds(self, wanted: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where a tensor stands in the place of a Python value, which torch would replace."""
        for fqn, value in wanted.items():
            if isinstance(value, torch.Tensor) and self._holds_value(fqn):
                raise ValueError(f"{fqn!r} is not a tensor")

    def _mismatches(self) -> tuple[list[str], list[str]]:
        """The FQNs that the checkpoint lacks, and a sentence for each that it has as something else."""
        missing: list[str] = []
        unlike: list[str] = []
        for fqn, value in self.state_dict.items():
            entry = self._saved.get(fqn)
            is_tensor = isinstance(value, torch.Tensor) or hasattr(value, "__create_chunk_list__")
            if entry is None:
                if not self.allow_partial_load:
                    missing.append(fqn)
            elif not isinstance(entry, TensorStorageMetadata):
                if isinstance(value, torch.Tensor):
                    shape = tuple(value.size())
                    unlike.append(f"{fqn!r} was saved as a Python value, and a tensor of shape {shape} is to take it")
            elif not is_tensor:
                kind, shape = type(value).__name__, tuple(entry.size)
                unlike.append(f"{fqn!r} was saved as a tensor of shape {shape}, and a value ({kind}) is to take it")
            elif isinstance(value, torch.Tensor) and entry.size != value.size():
                unlike.append(f"{fqn!r} was saved with shape {tuple(entry.size)}, not {tuple(value.size())}")
        return missing, unlike

    def _holds_value(self, fqn: str) -> bool:
        saved = self._saved
        if isinstance(saved, StoredEntries):
            return saved.holds_value(fqn)
        return isinstance(saved.get(fqn), BytesStorageMetadata)

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
