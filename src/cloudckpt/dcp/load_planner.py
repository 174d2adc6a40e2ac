"""The load planners of `cloudckpt.load` and `cloudckpt.read`: torch's default, with errors that say what to do.

`ExplainingLoadPlanner` chooses the stored chunks that a rank needs. `tensors.load_targets` finds the ranges in them.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from cloudckpt._messages import did_you_mean, find_near_entry, quote_names
from cloudckpt._torch_compat import ShardedTensor, chunks_wanted_by, materialize_meta_tensors
from cloudckpt.dcp.live.entry import MISSING, make_empty, nest_metadata, value_at
from cloudckpt.dcp.load_items import LoadItems, whole_item
from cloudckpt.dcp.renaming import Renaming, is_below, offer_renames, suggest_renames
from cloudckpt.dcp.torch_metadata import StoredChunks, StoredEntries, stored_nesting, stored_wrappers
from cloudckpt.errors import CorruptCheckpointError, Hint, StateDictMismatchError, raised_via
from cloudckpt.format.model import StoredWrapper
from cloudckpt.format.nesting import (
    PLAIN_TENSORS,
    FlatStateDict,
    Nesting,
    assign,
    flatten,
    has_planner_hooks,
    name_path,
    unflatten,
)
from cloudckpt.format.wrappers import Registry, collapse, describe_difference
from cloudckpt.tensors.tensor_bytes import refuse_target

_MAX_SHOWN_PROBLEMS = 10
_MIN_CHUNKS = 64  # for fewer chunks, torch's visits take less time than the search


def is_default_planner(planner: LoadPlanner) -> TypeGuard[DefaultLoadPlanner]:
    """Return True for torch's default planner with its default flattening."""
    return type(planner) is DefaultLoadPlanner and planner.flatten_state_dict and planner.flatten_sharded_tensors


def find_absent(planner: LoadPlanner) -> list[str]:
    """Return the names that a partial load asks for, if the checkpoint has none of them."""
    metadata = getattr(planner, "metadata", None)  # a planner of the user's may not keep it
    if not isinstance(planner, DefaultLoadPlanner) or not planner.allow_partial_load or metadata is None:
        return []
    saved = metadata.state_dict_metadata
    return [] if any(name in saved for name in planner.state_dict) else [*planner.state_dict]


class ExplainingLoadPlanner(DefaultLoadPlanner):
    """Raises `StateDictMismatchError` with every entry that does not fit, not only the first.

    The time of a plan depends on the tensors that the rank asks for, not on the number of ranks that saved. Whole
    tensors that were saved in one chunk are planned without torch's search for overlapping chunks.
    """

    def __init__(
        self,
        uri: str,
        *,
        allow_partial_load: bool = False,
        has_live_objects: bool = False,
        is_renamed: bool = False,
        via: str = "",
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._uri = uri
        self._has_live_objects = has_live_objects
        self._is_renamed = is_renamed
        self._via = via
        self.num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.renaming: Renaming | None = None
        """The new names of the checkpoint; those of files of one model, if the caller gives no `rename`."""
        self.whole_keys: Collection[str] | None = ()
        """Top-level keys below which the load must ask for all that was saved. None means all keys."""
        self._saved: Mapping[str, Any] = {}
        self._empty: list[str] = []
        self._wrappers: dict[str, StoredWrapper] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # torch's signature
    ) -> None:
        self._saved = {} if metadata is None else metadata.state_dict_metadata
        flat = flatten(state_dict, uri=self._uri, is_value=self._holds_value)
        if metadata is not None and self._open_tuples(state_dict, flat, metadata):
            flat = flatten(state_dict, uri=self._uri, is_value=self._holds_value)
        self._containers = flat.containers
        self._empty = [name_path(path) for path in flat.empty]
        self._wrappers, self._saved_wrappers = flat.wrappers, stored_wrappers(metadata)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat.entries, flat.paths
        self.metadata, self.is_coordinator = metadata, is_coordinator
        for fqn, value in flat.entries.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.is_meta:
                if (wrapper := flat.wrappers.get(fqn.rpartition(".")[0])) is not None:
                    raise StateDictMismatchError(
                        f"{fqn!r} of a {wrapper.kind} is on the meta device, which has no memory. Make it on "
                        "a device (to_empty(device=…)) before the load",
                        uri=self._uri,
                    )
                materialized = {fqn: value}
                materialize_meta_tensors(materialized)
                flat.entries[fqn] = materialized[fqn]
                assign(state_dict, flat.paths[fqn], materialized[fqn])

    def _open_tuples(self, state_dict: dict[str, Any], flat: FlatStateDict, metadata: Metadata) -> bool:
        """Put an empty tuple where a tuple was saved and another value is now. Returns True if any was put."""
        if (nesting := stored_nesting(metadata)) is None:
            return False
        paths = {name_path(path): path for path in nesting.tuples}
        names_of_tuples = [
            name for name in paths.keys() & flat.entries.keys() if not isinstance(flat.entries[name], torch.Tensor)
        ]
        below = tuple(f"{name}." for name in names_of_tuples)
        saved = {name: self._saved[name] for name in self._saved if name.startswith(below)} if names_of_tuples else {}
        narrowed = dataclasses.replace(metadata, state_dict_metadata=saved, planner_data=nesting)
        nested = nest_metadata(narrowed, num_ranks=self.num_ranks)
        for name in names_of_tuples:
            saved_value: Any = nested
            for step in paths[name]:
                saved_value = value_at(saved_value, step[0] if isinstance(step, tuple) else step)
            if (empty := make_empty(saved_value)) is MISSING:
                kind = type(flat.entries[name]).__name__
                raise StateDictMismatchError(
                    f"{name!r} of {self._uri} is a tuple with tensors of which several ranks hold parts, and a {kind} "
                    "is to take it. Put a tuple with tensors of their layout there",
                    uri=self._uri,
                )
            assign(state_dict, flat.paths[name], empty)
        return bool(names_of_tuples)

    def create_local_plan(self) -> LoadPlan:
        try:
            plan = self._create_plan()
            # The coordinator's reader, which gets all plans, checks if any rank asks for the entries saved there.
            return dataclasses.replace(plan, planner_data=self._empty) if self._empty else plan
        except (RuntimeError, ValueError) as error:
            missing, reshaped, mistyped = self._find_mismatches()
            if not missing and not reshaped and not mistyped:
                raise
            if missing and self.renaming and (text := self.renaming.explain_unasked(self.state_dict.keys())):
                raise StateDictMismatchError(text, uri=self._uri) from error
            # The search for similar names takes long, so only shown ones get it.
            missing_texts = (self._describe_missing(fqn) for fqn in missing[:_MAX_SHOWN_PROBLEMS])
            problems = [*mistyped, *reshaped.values(), *missing_texts][:_MAX_SHOWN_PROBLEMS]
            num_more = len(missing) + len(reshaped) + len(mistyped) - len(problems)
            more = f"; and {num_more} more" if num_more else ""
            if unasked := self._find_unasked(missing):
                more += f"; and nothing asks for {quote_names(unasked)} in it"
            subject, partial = "the state dict does", "planner=DefaultLoadPlanner(allow_partial_load=True)"
            keep = "leave these entries out of the state dict, which keeps them as they are"
            if self._has_live_objects:
                subject, partial = "the objects do", "strict=False"
                is_alone = not any(".param_groups." in name for name in self.state_dict)
                renaming = self.renaming or Renaming({}, (), uri=self._uri)
                keep = (
                    f"{'' if is_alone else 'load the model without its optimizer, and '}keep these as they are with "
                    + renaming.advise_leaving_out(reshaped)
                )
            # If many shapes differ, the model is another one.
            few = 0 < len(reshaped) <= _MAX_SHOWN_PROBLEMS
            advice = ". Build the model as it was saved" + (f", or {keep}" if few else "") if reshaped else ""
            if missing:
                advice += ". Ask only for what was saved"
            if missing and len(missing) < len(self.state_dict):  # else nothing would be loaded
                advice += f", or pass {partial} to leave out what is missing"
            lacking = {} if self._is_renamed else {name: self.state_dict[name] for name in missing}
            old_names = {} if self.renaming is None else self.renaming.old_names
            saved = {old_names.get(name, name): self._saved[name] for name in unasked}
            offers = offer_renames(
                suggest_renames(saved, lacking),
                [old_names.get(name, name) for name in self._saved],
                self.state_dict,
                whole_keys=self.whole_keys,
                partial=partial,
                say_rename=lambda renames: Hint(advice="{option}", option="rename", value=renames).as_python(self._via),
            )
            if offers:
                advice += f". To load under other names, {offers}"
            with raised_via(self._via):
                raise StateDictMismatchError(
                    f"{subject} not fit the checkpoint at {self._uri}: {'; '.join(problems)}{more}{advice}",
                    uri=self._uri,
                ) from error

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.take_value(read_item, torch.load(value, weights_only=False))  # the reader made these bytes

    def take_value(self, read_item: ReadItem, loaded: object) -> None:
        """Put a value into the state dict, without torch's conversion to bytes of ``torch.save`` and back."""
        # torch's method would add the value under the text of a key that is no str.
        fqn = read_item.dest_index.fqn
        try:
            assign(self.original_state_dict, self.mappings[fqn], loaded)
        except TypeError as error:  # of a class of containers
            raise StateDictMismatchError(
                f"{fqn!r} of {self._uri} cannot be put into the state dict: {error}. Load into a dict in its place",
                uri=self._uri,
            ) from error

    def tensors_of(self, fqns: Sequence[str]) -> list[torch.Tensor]:
        """Return the plain tensors that `LoadItems.fqns` of the plan fill."""
        return [self.state_dict[fqn] for fqn in fqns]

    def _create_plan(self) -> LoadPlan:
        if any(self._find_wrapper_problems()):
            raise ValueError  # `create_local_plan` says why
        missing = self._saved.keys() - self.state_dict.keys()
        if not self._containers.keys().isdisjoint(missing):
            return self._create_plan_of_torch()  # which also knows the names of older versions
        fqns: list[str] = []
        sizes: list[torch.Size] = []
        others: dict[str, Any] = {}
        tensors = self._saved.tensors if isinstance(self._saved, StoredEntries) else None
        for fqn, value in self.state_dict.items():
            if type(value) in PLAIN_TENSORS and not has_planner_hooks(value):
                size = value.size()
                stored = tensors.get(fqn) if tensors is not None else None
                is_whole = (
                    _is_whole(self._saved.get(fqn), size)
                    if tensors is None
                    else stored is not None and len(stored.chunks) == 1 and size == stored.shape
                )
                if is_whole and 0 not in size:
                    fqns.append(fqn)
                    sizes.append(size)
                    continue
            others[fqn] = value
        if tensors is None:  # a reader that is not cloudckpt's may change the list of items
            return LoadPlan([*map(whole_item, fqns, sizes), *self._plan_others(others)])
        return LoadPlan(LoadItems(fqns, sizes, self._plan_others(others)))  # type: ignore[arg-type]  # torch reads them as a sequence

    def _create_plan_of_torch(self) -> LoadPlan:
        metadata, paths = self.metadata, self.mappings
        assert metadata is not None  # noqa: S101  # set up before it plans
        try:
            self.metadata = narrow_metadata(metadata, self.state_dict)
            plan = super().create_local_plan()
        finally:
            self.metadata = metadata
        if self.mappings is not paths:  # torch took older names, and its paths have text for every key
            self.mappings = {fqn: self._containers.get(fqn) or paths[fqn] for fqn in self.mappings}
        self._check_kinds(self.state_dict)
        return plan

    def _plan_others(self, others: dict[str, Any]) -> list[ReadItem]:
        if not others:
            return []
        assert self.metadata is not None  # noqa: S101  # set up before it plans
        self._check_kinds(others)
        metadata = narrow_metadata(self.metadata, others)
        return create_default_local_load_plan(others, metadata, not self.allow_partial_load).items

    def _check_kinds(self, wanted: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if a tensor is to take a Python value: torch would replace the tensor."""
        for fqn, value in wanted.items():
            if isinstance(value, torch.Tensor) and self._holds_value(fqn):
                raise ValueError(f"{fqn!r} is not a tensor")

    def _find_mismatches(self) -> tuple[list[str], dict[str, str], list[str]]:
        """Return the FQNs that the checkpoint lacks, and a sentence for each entry of another shape or kind."""
        missing: list[str] = []
        reshaped: dict[str, str] = {}
        mistyped = list(self._find_wrapper_problems())
        explained = tuple(f"{name}." for name in self._wrappers if name in self._saved)
        for fqn, value in self.state_dict.items():
            entry = self._saved.get(fqn)
            if isinstance(value, torch.Tensor) and (is_lazy(value) or value.is_nested):  # it has no shape
                refuse_target(value, fqn, uri=self._uri)
            is_tensor = isinstance(value, torch.Tensor) or hasattr(value, "__create_chunk_list__")
            if entry is None:
                if not self.allow_partial_load and fqn not in self._saved_wrappers and not fqn.startswith(explained):
                    missing.append(fqn)
            elif not isinstance(entry, TensorStorageMetadata):
                if isinstance(value, torch.Tensor):
                    mistyped.append(f"{fqn!r} was saved as a Python value: hold one there, or None, not a tensor")
            elif not is_tensor:
                kind, shape = type(value).__name__, tuple(entry.size)
                mistyped.append(f"{fqn!r} was saved as a tensor: hold torch.empty({shape}) there, not a value ({kind})")
            elif isinstance(value, torch.Tensor) and entry.size != value.size():
                shape = tuple(value.size())
                reshaped[fqn] = f"{fqn!r} was saved with shape {tuple(entry.size)}, and has shape {shape} here"
        return missing, reshaped, mistyped

    def _find_wrapper_problems(self) -> Iterator[str]:
        """Yield a sentence for each tensor that consists of others here or in the checkpoint, and does not fit."""
        for name, wanted in self._wrappers.items():
            saved = self._saved_wrappers.get(name)
            if saved is not None:
                if (difference := describe_difference(saved, wanted)) is not None:
                    yield f"{name!r} was saved with {difference}"
            elif name in self._saved:
                yield f"{name!r} was saved as a plain tensor or value, and a {wanted.kind} is to take it"
        for name, saved in self._saved_wrappers.items():
            if name in self.state_dict:
                kind = type(self.state_dict[name]).__name__
                yield (
                    f"{name!r} was saved as a {saved.kind}, and a {kind} is to take it (cloudckpt.read gives what was "
                    "saved, which can be dequantized)"
                )

    def _holds_value(self, fqn: str) -> bool:
        if isinstance(self._saved, StoredEntries):
            return self._saved.holds_value(fqn)
        return isinstance(self._saved.get(fqn), BytesStorageMetadata)

    def _find_unasked(self, missing: Collection[str]) -> list[str]:
        """Return saved names that are not asked for: those below the top-level keys of `missing` names, or all.

        Names below other keys tell nothing if the checkpoint has the key of a missing name.
        """
        tops = {str(self.mappings[name][0]) for name in missing}
        saved = [name for name in self._saved if any(is_below(name, top) for top in tops)] or self._saved
        return [name for name in saved if name not in self.state_dict] if missing else []

    def _describe_missing(self, fqn: str) -> str:
        return f"{fqn!r} is not in it{did_you_mean(find_near_entry(fqn, self._saved))}"


def _is_whole(saved: object, size: torch.Size) -> bool:
    """Return True if a tensor of this size was saved as one chunk."""
    if not isinstance(saved, TensorStorageMetadata) or len(saved.chunks) != 1:
        return False
    return size == saved.size == saved.chunks[0].sizes


def narrow_metadata(metadata: Metadata, state_dict: Mapping[str, Any]) -> Metadata:
    """Return `metadata` with only those chunks of each tensor that this rank's `state_dict` needs.

    torch's planner visits all chunks of every tensor that a rank asks for, on every rank. A plan of the narrowed
    metadata is the same, except for the hints in its storage indices. Metadata of other readers is returned as it is.
    """
    entries = metadata.state_dict_metadata
    changed = {
        fqn: dataclasses.replace(entry, chunks=chunks)
        for fqn, wanted in state_dict.items()
        if isinstance(entry := entries.get(fqn), TensorStorageMetadata)
        and isinstance(entry.chunks, StoredChunks)
        and len(entry.chunks) >= _MIN_CHUNKS
        and (chunks := _wanted_chunks(entry.chunks, entry, wanted)) is not None
    }
    return dataclasses.replace(metadata, state_dict_metadata={**entries, **changed}) if changed else metadata


def _wanted_chunks(
    chunks: StoredChunks, entry: TensorStorageMetadata, wanted: Any
) -> list[ChunkStorageMetadata] | None:
    """Return the chunks to look at; None if torch has to look at all chunks, or looks at none."""
    size = getattr(wanted, "size", None)
    if size is None or size() != entry.size:
        return None
    if isinstance(wanted, DTensor) and wanted.device_mesh.get_coordinate() is None:
        return None
    boxes = chunks_wanted_by(wanted)
    if boxes is None:
        return None
    chunks_by_offsets: dict[tuple[int, ...], ChunkStorageMetadata] = {}
    for box in boxes:
        overlapping = chunks.find_overlapping(box)
        if overlapping is None:
            return None
        chunks_by_offsets.update((tuple(chunk.offsets), chunk) for chunk in overlapping)
    return list(chunks_by_offsets.values())


class WholePlanner(DefaultLoadPlanner):
    """Loads every chosen entry without a state dict to fill, and nests the result."""

    def __init__(
        self, choose_names: Callable[[Iterable[str]], Iterable[str]], takes: Callable[[str], bool], *, uri: str
    ) -> None:
        """`choose_names` returns the names to load among all names; `takes` returns True for such a name."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._choose_names = choose_names
        self._takes = takes
        self._uri = uri

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # torch's signature
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # torch's signature
    ) -> None:
        assert metadata is not None  # noqa: S101  # torch's loader gives it
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self._registry = Registry(uri=self._uri)
        self.state_dict = {}
        for name in self._choose_names(metadata.state_dict_metadata):
            entry = metadata.state_dict_metadata[name]
            value = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            self.state_dict[name] = value
        # Before anything is read, find out whether all classes are known.
        collapse(
            stored_wrappers(metadata), self.state_dict, {}, lambda name, stored, _: self._registry.find(name, stored)
        )

    def nest(self) -> dict[str, Any]:
        """Return the loaded entries, nested as they were saved. Keys have the types that the checkpoint recorded."""
        assert self.metadata is not None  # noqa: S101  # torch sets it before a load ends
        saved = {} if self.metadata.planner_data is None else self.metadata.planner_data
        typed, empty, tuples = (saved.typed, saved.empty, saved.tuples) if isinstance(saved, Nesting) else ({}, [], {})
        included = [path for path in empty if self._takes(name_path(path))]
        try:
            entries, paths = collapse(
                stored_wrappers(self.metadata), self.state_dict, {**saved, **typed}, self._registry.rebuild
            )
            return unflatten(entries, paths, included, tuples)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self._uri} cannot be nested as it was: {error}", uri=self._uri) from error
