"""The DCP storage reader: it finds the manifest, shows it to torch as metadata, and fills the items of a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt._messages import quote_names
from cloudckpt._this_process import rare_collections
from cloudckpt._torch_compat import DistWrapper, ExtensionRegistry
from cloudckpt.commit.log import has_torch_checkpoint, resolve
from cloudckpt.dcp.live.completeness import (
    check_completeness,
    check_empty,
    check_hidden,
    check_used,
    find_unasked_entries,
    warn_of_frozen,
)
from cloudckpt.dcp.load_items import find_wanted_items, log_dropped
from cloudckpt.dcp.load_planner import ExplainingLoadPlanner
from cloudckpt.dcp.ranks.collectives import CollectiveCall, refuse_other_calls
from cloudckpt.dcp.ranks.hosts import HostGroups, WantedAndHeld, find_wanted_and_held, plan_transfers, run_transfers
from cloudckpt.dcp.renaming import Rename, Renaming, check_rename, find_needed_rename
from cloudckpt.dcp.torch_checkpoints import TorchCheckpointReader, read_torch_metadata
from cloudckpt.dcp.torch_metadata import make_metadata
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudckptError,
    StateDictMismatchError,
    make_picklable,
    raised_via,
)
from cloudckpt.format.codec import decode, encode
from cloudckpt.format.model import FilesManifest, ItemLocation, Manifest, refuse_differences
from cloudckpt.options import Options, require_options
from cloudckpt.pipeline.context import Context, Lifecycle
from cloudckpt.pipeline.reader import CheckpointReader, FallbackCopy, is_no_answer
from cloudckpt.pipeline.safetensors_files import find_source, folder_of
from cloudckpt.pipeline.wanted_items import WantedItems
from cloudckpt.report import LoadReport, place_of
from cloudckpt.telemetry.timeline import new_recorder
from cloudckpt.tensors.extensions import ReadTransforms, extend_registry
from cloudckpt.tensors.values import EncodedValue
from cloudckpt.uri import is_valid_location, parse_location

if TYPE_CHECKING:
    from cloudckpt.pipeline.shared_reads import SharedReads

_log = logging.getLogger("cloudckpt")
_MODEL = "model"
"""The key of the argument `model` of `load` and `save`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLookup:
    """The result of looking for a manifest at `uri`: the stored manifest, or an error."""

    uri: str
    document: bytes | None = None
    error: Exception | None = None
    """The reason why there is no manifest: none is committed, or the lookup failed."""
    is_of_copy: bool = False
    """True if the copy in another place has the manifest."""
    is_of_torch: bool = False
    """True if no manifest is committed, but a checkpoint of torch's own writer exists."""
    files: FilesManifest | None = None
    """The safetensors files at `uri`, if there is no checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LoadCall:
    """The arguments of one call of `cloudckpt.load` (`ObjectStoreReader.begin_call`)."""

    lookup: ManifestLookup
    """The coordinator's lookup."""
    is_lazy: bool
    whole_keys: Collection[str] | None
    keys: Collection[str]

    @property
    def has_live_model(self) -> bool:
        """True if the caller of `load` has passed a live object as the model."""
        return _MODEL in (self.keys if self.whole_keys is None else self.whole_keys)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPlanData:
    """The message of a rank to the coordinator, which travels with its plan (``storage_data``)."""

    attempt: str
    """The attempt of the checkpoint that the rank found."""
    names_checksum: int = 0
    """`Renaming.checksum` of the new names on this rank; 0 without `rename`."""
    unused: Sequence[str] = ()
    """Paths in the checkpoint that this rank's objects do not use."""
    objects: Sequence[str] = ()
    """Top-level keys of this rank's ``Stateful`` objects, which can take more entries than they ask for."""
    lacking: Sequence[str] = ()
    """`Renaming.lacking` of this rank."""
    absent: Sequence[str] = ()
    """The names that this rank asks for, if the checkpoint has none of them and the rank's planner allows that."""
    is_empty: bool = False
    """The rank asks for nothing: its state dict is empty, or has only empty dicts."""
    unasked: Sequence[str] = ()
    """Saved entries of ``Stateful`` objects that no rank has asked for. If there are any, all ranks plan again."""
    shares_reads: bool = False
    """The rank would share reads. In the coordinator's answer: some ranks share, and all make the steps for it."""


class ObjectStoreReader(StorageReader):
    """Reads checkpoints from `uri` for torch's own calls (`torch.distributed.checkpoint.StorageReader`).

    Every byte is checked, and only the needed bytes are read. One reader can be used for several loads, one after the
    other. It can be pickled, and opens its store in the process that uses it.

    Args:
        uri: Place of the checkpoint.
        options: Options of its loads.
        allow_pickle: See `cloudckpt.load`.
        strict: See `cloudckpt.load`.
        rename: See `cloudckpt.load`.

    Raises:
        InvalidURIError: `uri` cannot name a checkpoint.
        InvalidOptionError: `rename` is neither a dict nor a function.

    Example::

        reader = cloudckpt.ObjectStoreReader("s3://bucket/run/step-100")
        dcp.load(state_dict, storage_reader=reader)
        print(reader.report.num_bytes_read)

    """

    load_id: str
    """Identifier of the load, as torch's readers have it: a new one after each `reset`."""
    report: LoadReport | None
    """Report of this reader's last load on this rank; None before it has read."""
    lifecycle: Lifecycle
    _metadata: Metadata | None
    _context: Context | None
    _manifest: Manifest | None
    _torch_reader: TorchCheckpointReader | None
    _fallback_copy: FallbackCopy | None
    _shared: SharedReads | None
    _failure: Exception | None
    """The error of `read_metadata`, which torch calls twice. `set_up_storage_reader` raises it."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        options: Options | None = None,
        allow_pickle: bool = False,
        strict: bool | None = None,
        rename: Rename | None = None,
        _extension_registry: ExtensionRegistry | None = None,
        _is_part: bool = False,  # read on purpose: nothing is resumed from it
        _via: str = "reader",  # `CloudckptError.via`
        _copy: tuple[str, Options] | None = None,  # of the same save, for objects that cannot be read at `uri`
        _may_be_renamed: bool = False,  # a run that starts again, whose own steps have the new names already
        _hosts: HostGroups | None = None,  # `uri` is a directory of each host
        _manifest_rank: int = 0,  # the rank whose directory has the manifest
    ) -> None:
        super().__init__()
        self._location = parse_location(uri)
        self._options = require_options(options)
        self._copy = None if _copy is None else (parse_location(_copy[0]), _copy[1])
        self._allow_pickle = allow_pickle
        self._strict = strict
        check_rename(rename)
        self._rename = rename
        self._is_part = _is_part
        self._may_be_renamed = _may_be_renamed
        self.hosts, self._manifest_rank = _hosts, _manifest_rank
        self._registry = extend_registry(_extension_registry, self._options.extensions)
        self._call: _LoadCall | None = None
        self.lifecycle = Lifecycle("load", self._options, via=_via)
        self.is_alone = False
        """True if this process loads without others. `run_load` sets it."""
        self.reset()

    @property
    def is_strict(self) -> bool:
        """False if a load may leave behind entries that its objects do not ask for."""
        return self._strict is not False

    @property
    def takes_all(self) -> bool:
        """True if a load must ask for all that was saved."""
        return bool(self._strict)

    @property
    def is_renamed(self) -> bool:
        """True if loads see the checkpoint under other names."""
        return self._rename is not None

    @property
    def renaming(self) -> Renaming | None:
        """The new names of the checkpoint that is loaded, once the load has begun; None if they are the same."""
        return self._renaming

    @property
    def checkpoint_id(self) -> str:
        """URI of the checkpoint to read."""
        return self._location.uri

    @property
    def options(self) -> Options:
        """Options that were given, or the defaults."""
        return self._options

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load.

        Args:
            checkpoint_id: Place of that load. None keeps the place.

        """
        if checkpoint_id is not None:
            self._location = parse_location(checkpoint_id)
        self.end_call()
        self.load_id = str(uuid.uuid4())
        self.report = None
        self.lifecycle = Lifecycle("load", self._options, via=self.lifecycle.via)
        uri, place = self._location.uri, place_of(self._options.metadata)
        self._recorder = new_recorder(self._options.trace, verb="load", uri=uri, place=place, operation=self.load_id)
        self._started_s, self._manifest_s = time.monotonic(), 0.0
        self._found_here: tuple[Context, Manifest] | None = None
        self._forget()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if `checkpoint_id` has the form of a place that can be read."""
        return is_valid_location(checkpoint_id)

    def begin_call(
        self, ranks: DistWrapper, *, is_lazy: bool, whole_keys: Collection[str] | None = (), keys: Collection[str] = ()
    ) -> None:
        """Begin a load of `cloudckpt.load` on all `ranks`. The coordinator reads the manifest once for all of them.

        Args:
            ranks: The collectives of the load.
            is_lazy: Make the metadata of a tensor on access. Only if no code of the user sees the metadata.
            whole_keys: Top-level keys below which the load must ask for all saved entries. None means all keys.
            keys: Keys of the entries that this rank loads.

        """
        self._begin(ranks.rank)
        self._recorder.open(ranks.rank)
        self._has_common_place = isinstance(ranks, CollectiveCall) and self.hosts is None
        if self.hosts is not None and isinstance(ranks, CollectiveCall):
            own_lookup = self._look_up(is_sent=True) if ranks.rank == self._manifest_rank else None
            lookup = ranks.broadcast_object(own_lookup, self._manifest_rank)
        else:
            is_sent = ranks.get_world_size() > 1
            lookup = ranks.broadcast_object(self._look_up(is_sent=is_sent) if ranks.is_coordinator else None)
            if self._copy is None and lookup.uri != self.checkpoint_id:  # this rank reads from a place of its own
                self._has_common_place = False
                lookup = self._look_up(is_sent=False)
        self._call = _LoadCall(
            lookup=lookup,
            is_lazy=is_lazy and type(self) is ObjectStoreReader,
            whole_keys=whole_keys,
            keys=keys,
        )

    def fetch_from_hosts(self, plan: LoadPlan, ranks: DistWrapper) -> None:
        """Copy the objects that this rank's plan needs from other hosts to the directory of its host. Collective.

        Args:
            plan: The plan of this rank.
            ranks: The collectives of the load.

        """
        hosts, context, manifest, metadata = self.hosts, self._context, self._manifest, self._metadata
        if hosts is None or context is None or manifest is None or metadata is None:
            return
        if context.location != self._location:
            return  # all ranks decide alike
        assert isinstance(ranks, CollectiveCall)  # noqa: S101  # else there are no `HostGroups`

        def find() -> WantedAndHeld:
            locations = map(metadata.storage_data.get, (item.storage_index for item in plan.items))
            needed = {location.object_index for location in locations if location is not None}
            return find_wanted_and_held(context, manifest, needed, hosts)

        held = ranks.all_gather("read", find)
        run_transfers(ranks, context, manifest, plan_transfers(held, hosts.leaders))

    @contextlib.contextmanager
    def sharing_reads(self, plan: LoadPlan, ranks: DistWrapper) -> Iterator[None]:
        """Let `read_data` share reads in the body. If the body raises, the other ranks learn it before the next step.

        Args:
            plan: The plan of this rank. It says whether ranks share reads.
            ranks: The collectives of the load.

        Returns:
            The context in which the ranks share.

        """
        data = plan.storage_data
        if not (isinstance(data, RankPlanData) and data.shares_reads and isinstance(ranks, CollectiveCall)):
            yield
            return
        from cloudckpt.pipeline.shared_reads import SharedReads  # noqa: PLC0415  # few loads share

        self._shared = shared = SharedReads(ranks, takes_part=self._can_share())
        try:
            yield
        except BaseException:
            shared.leave()
            raise
        finally:
            self._shared = None
        if shared.leave():
            raise CloudckptError(f"the load of {self.checkpoint_id} on rank {ranks.rank} did not read what it planned")

    def end_call(self) -> Exception | None:
        """End the load that `begin_call` began, on all ranks. Returns the error of the lookup, if it failed."""
        call, self._call = self._call, None
        if call is None:
            return None
        self._recorder.end()
        failure, self._failure = self._failure, None
        return failure

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # torch's signature; it looks for the name "kwargs"
        """Return torch's view of the checkpoint.

        Raises `CheckpointNotFoundError`, `CorruptCheckpointError`, `UnsupportedFormatError` or `UnsafePickleError`.

        torch's ``load`` calls it again, with ``rank=``, after any error, and would turn a second error into text. So
        the second call returns empty metadata, and `set_up_storage_reader` raises.
        """
        call = self._call
        if call is None and self._failure is not None and "rank" in kwargs:
            return Metadata(state_dict_metadata={})
        if call is None:
            self._begin(None)
        try:
            with raised_via(self.lifecycle.via):
                return self._read_metadata(self._look_up(is_sent=False) if call is None else call.lookup)
        except Exception as error:
            self._failure = make_picklable(error)
            raise self._failure from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load."""
        rank = int(kwargs.get("rank") or 0)
        with self.lifecycle.ending_on_error():
            if self._failure is not None:
                raise self._failure
            self._metadata = metadata
            self._recorder.open(rank)
            if self._torch_reader is not None:
                self._torch_reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
            if self._context is not None:
                self._context.rank = rank
            if self._fallback_copy is not None:
                self._fallback_copy.context.rank = rank

    def prepare_local_plan(
        self,
        plan: LoadPlan,
        *,
        unused: Sequence[str] = (),
        objects: Sequence[str] = (),
        absent: Sequence[str] = (),
        is_empty: bool = False,
    ) -> LoadPlan:
        """Attach this rank's `RankPlanData` to its plan.

        `objects` are the top-level keys of objects that can take more than they ask for.
        """
        data = RankPlanData(
            attempt="" if self._manifest is None else self._manifest.attempt,
            names_checksum=0 if self._renaming is None else self._renaming.checksum,
            unused=unused,
            objects=objects,
            lacking=() if self._renaming is None else self._renaming.lacking,
            absent=absent,
            is_empty=is_empty,
            shares_reads=self._can_share(),
        )
        return dataclasses.replace(plan, storage_data=data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check the plans of all ranks, on the coordinator.

        If an object asks for a part of its saved entries, the returned plans name the others (`RankPlanData.unasked`),
        and all ranks plan again.

        Raises:
            CheckpointChangedError: The ranks found different saves, and would mix them.
            StateDictMismatchError: All ranks together ask for less than they must, or rename differently.

        """
        refuse_other_calls(plans, uri=self.checkpoint_id)
        plan_data = [plan.storage_data if isinstance(plan.storage_data, RankPlanData) else None for plan in plans]
        if len({rank_data.names_checksum for rank_data in plan_data if rank_data is not None}) > 1:
            raise StateDictMismatchError(
                f"the ranks pass different `rename` for {self.checkpoint_id}, and would mix what they load. Pass the "
                "same on all ranks",
                uri=self.checkpoint_id,
            )
        unasked = self._find_unasked(
            plans, {key for rank_data in plan_data if rank_data is not None for key in rank_data.objects}
        )
        self._check_completeness(plans, unasked=unasked)
        if self._renaming is not None and not unasked:
            lacking = [name for rank_data in plan_data if rank_data is not None for name in rank_data.lacking]
            check_used(plans, self._renaming, lacking=lacking, uri=self.checkpoint_id)
        if unasked:
            return [
                plan
                if rank_data is None
                else dataclasses.replace(plan, storage_data=dataclasses.replace(rank_data, unasked=unasked))
                for plan, rank_data in zip(plans, plan_data, strict=True)
            ]
        absent = dict.fromkeys(name for rank_data in plan_data if rank_data is not None for name in rank_data.absent)
        saved = [] if self._metadata is None else [*self._metadata.state_dict_metadata]
        is_empty = all(rank_data is not None and rank_data.is_empty for rank_data in plan_data)
        if saved and is_empty and not self._is_part and not any(plan.items for plan in plans):
            raise StateDictMismatchError(
                f"the state dict asks for nothing of {self.checkpoint_id}, so nothing would be loaded. A load fills "
                "what is in the dict, such as {'model': model.state_dict()}. To get what was saved, call "
                f"cloudckpt.read({self.checkpoint_id!r}), or pass live objects: model=…, extra={{}}",
                uri=self.checkpoint_id,
            )
        if absent and not any(plan.items for plan in plans):
            raise StateDictMismatchError(
                f"{self.checkpoint_id} has none of {quote_names([*absent])}, only {quote_names(saved)}, so nothing "
                "would be loaded. Ask for names that were saved. Without allow_partial_load, the error suggests some",
                uri=self.checkpoint_id,
            )
        attempts = {rank_data.attempt for rank_data in plan_data if rank_data is not None}
        if len(attempts) > 1:
            raise CheckpointChangedError(
                f"{self.checkpoint_id} was overwritten while the ranks looked at it: they found {len(attempts)} "
                "different saves. Nothing was loaded; load again",
                uri=self.checkpoint_id,
            )
        shares_reads = sum(rank_data is not None and rank_data.shares_reads for rank_data in plan_data) > 1
        return [
            plan
            if rank_data is None
            else dataclasses.replace(plan, storage_data=dataclasses.replace(rank_data, shares_reads=shares_reads))
            for plan, rank_data in zip(plans, plan_data, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the items of the plan. After an error, the content of the tensors is undefined."""
        future: Future[None] = Future()
        with self.lifecycle.ending_on_error():
            try:
                self._read_data(plan, planner)
            except CloudckptError:
                raise
            except Exception as error:
                raise make_picklable(error) from error
        future.set_result(None)
        return future

    def __getstate__(self) -> dict[str, Any]:
        # A load that has begun belongs to its process.
        begun = ("_context", "_torch_reader", "_fallback_copy", "_found_here", "_call")
        return {**self.__dict__, **dict.fromkeys(begun)}

    def nested_metadata(self) -> Metadata:
        """Return the metadata of the load that has begun, with the paths, which lazy metadata leaves out."""
        assert self._metadata is not None  # noqa: S101  # read_metadata has made it
        return self._metadata if self._manifest is None else self._make_metadata(self._manifest, is_lazy=False)

    def _find_unasked(self, plans: list[LoadPlan], objects: Collection[str]) -> list[str]:
        if self._metadata is None or not objects:
            return []
        return find_unasked_entries(plans, self._metadata.state_dict_metadata, objects)

    def _check_completeness(self, plans: list[LoadPlan], *, unasked: Collection[str]) -> None:
        """Check the entries that the ranks ask for, without those `unasked` for a second plan."""
        if self._metadata is None or self._is_part:
            return
        whole = None if self._strict else self._call.whole_keys if self._call is not None else ()
        plan_data = [plan.storage_data for plan in plans]
        unused = {path for rank_data in plan_data if isinstance(rank_data, RankPlanData) for path in rank_data.unused}
        saved: Mapping[str, Any] = self._metadata.state_dict_metadata
        if unused:
            of_unused = tuple(f"{path}." for path in unused)
            left = {name for name in saved if name in unused or name.startswith(of_unused)}
            warn_of_frozen(plans, left, uri=self.checkpoint_id)
            saved = {name: entry for name, entry in saved.items() if name not in left}
        if unasked_names := set(unasked):
            saved = {name: entry for name, entry in saved.items() if name not in unasked_names}
        hidden = self._renaming.hidden if self._strict and self._renaming is not None else []
        try:
            with raised_via(self.lifecycle.via):
                check_hidden(hidden, uri=self.checkpoint_id)
                check_completeness(plans, saved, whole=whole, uri=self.checkpoint_id)
                if self._call is None:  # torch's load, which cannot give objects more than they ask for
                    check_empty(plans, saved, uri=self.checkpoint_id)
        except StateDictMismatchError as error:
            if self._strict is not False:
                raise
            _log.warning("strict=False: %s", error.message)

    def _can_share(self) -> bool:
        """Return True if this rank would share its reads. It must verify what it gets."""
        options, manifest = self._options, self._manifest
        can_verify = manifest is not None and manifest.has_checksums and options.verify
        return options.share_reads == "always" and self._has_common_place and can_verify

    def _forget(self) -> None:
        self._has_common_place, self._shared = False, None
        self._failure = self._metadata = self._context = self._manifest = self._torch_reader = None
        self._fallback_copy = None
        self._renaming: Renaming | None = None

    def _begin(self, rank: int | None) -> None:
        self._forget()
        self._started_s = time.monotonic()
        self.lifecycle.begin(self._location.uri, operation=self.load_id, rank=rank, is_set_up=True)

    def _look_up(self, *, is_sent: bool) -> ManifestLookup:
        """Look for the manifest. If the result `is_sent` to other ranks, it holds the document.

        Returns an error instead of raising it, since the other ranks wait for the result. Looks for a checkpoint of
        torch's own writer only after the absence of a manifest is confirmed.
        """
        uri, failure = self.checkpoint_id, None
        for is_of_copy in (False,) if self._copy is None else (False, True):
            context = self._new_context(is_of_copy=is_of_copy)
            try:
                try:
                    if self._copy is None:
                        context, resolved = find_source(context)
                    else:
                        resolved = resolve(context.client)
                except CheckpointNotFoundError as error:
                    if self._copy is None and has_torch_checkpoint(context.client):
                        return ManifestLookup(uri=uri, error=error, is_of_torch=True)
                    raise
            except Exception as error:  # each rank raises it
                if failure is None or (is_no_answer(error) and not is_no_answer(failure)):
                    failure = make_picklable(error)
                continue
            if failure is not None:
                _log.warning("reading the copy in %s, because of this failure: %s", context.uri, failure)
            self._found_here, manifest = (context, resolved.manifest), resolved.manifest
            if isinstance(manifest, FilesManifest):
                return ManifestLookup(uri=uri, files=manifest)
            return ManifestLookup(uri=uri, document=encode(manifest) if is_sent else None, is_of_copy=is_of_copy)
        return ManifestLookup(uri=uri, error=failure)

    def _read_metadata(self, lookup: ManifestLookup) -> Metadata:
        found_here, self._found_here = self._found_here, None
        if found_here is not None:
            return self._use(*found_here)
        context = self._new_context(is_of_copy=lookup.is_of_copy)
        if lookup.is_of_torch:
            self._torch_reader, metadata = read_torch_metadata(
                context.client, self._registry, allow_pickle=self._allow_pickle
            )
            self._context = context
            renaming = self._renaming = self._new_renaming(metadata.state_dict_metadata, uri=context.uri)
            return metadata if renaming is None else renaming.apply_to_torchs(metadata)
        if lookup.files is not None:
            return self._use(folder_of(context)[0], lookup.files)
        if lookup.document is None:
            raise lookup.error or CloudckptError(f"the manifest of {self.checkpoint_id} was not looked for")
        return self._use(context, decode(lookup.document, uri=context.uri))

    def _new_context(self, *, is_of_copy: bool) -> Context:
        copy_place = self._copy if is_of_copy else None
        location, options = (self._location, self._options) if copy_place is None else copy_place
        return Context(location, options, rank=0, recorder=self._recorder)

    def _use(self, context: Context, manifest: Manifest) -> Metadata:
        refuse_differences(manifest, uri=context.uri)
        self._fallback_copy = None
        if self._copy is not None and context.location == self._location:
            self._fallback_copy = FallbackCopy(self._new_context(is_of_copy=True), manifest)
        names, is_of_model = [*manifest.tensors, *manifest.values], isinstance(manifest, FilesManifest)
        self._renaming = self._new_renaming(names, uri=context.uri, is_of_model=is_of_model)
        if self._renaming is not None:
            manifest = self._renaming.apply(manifest)
        self._context, self._manifest = context, manifest
        self._manifest_s = time.monotonic() - self._started_s
        self._recorder.span("manifest", int(self._started_s * 1e9))
        return self._make_metadata(manifest, is_lazy=self._call is not None and self._call.is_lazy)

    def _new_renaming(self, names: Collection[str], *, uri: str, is_of_model: bool = False) -> Renaming | None:
        """Return the new names. Without `rename`, the names in safetensors files are put below ``model``."""
        rename = self._rename
        if rename is None and is_of_model and names and self._call is not None and self._call.has_live_model:
            rename = {"": _MODEL}
        keys = () if self._call is None else self._call.keys
        if rename is not None and self._may_be_renamed:
            rename = find_needed_rename(rename, names, uri=uri, keys=keys)
        return None if rename is None else Renaming(rename, names, uri=uri, keys=keys, is_given=self.is_renamed)

    def _make_metadata(self, manifest: Manifest, *, is_lazy: bool) -> Metadata:
        return make_metadata(manifest, checkpoint_id=self.checkpoint_id, load_id=self.load_id, is_lazy=is_lazy)

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        context = self._context
        metadata, manifest = self._metadata, self._manifest
        if context is None or metadata is None:
            raise CloudckptError("read_metadata has to be called before each load, as torch's dcp.load does")
        wrappers = {} if manifest is None else manifest.wrappers
        left_out = wrappers.keys() & getattr(planner, "state_dict", {}).keys()
        if left_out:
            raise StateDictMismatchError(
                f"{type(planner).__name__} leaves {quote_names(sorted(left_out))} out of the load of "
                f"{self.checkpoint_id}, which has them in parts. Load with cloudckpt.load, or without a planner",
                uri=self.checkpoint_id,
            )
        context.emit("load.planned")
        wanted = None
        if manifest is not None:
            wanted = self._find_wanted_items(plan, planner, manifest, metadata, is_logged=context.rank == 0)
        context.emit("load.reading", num_bytes=0 if wanted is None else wanted.num_bytes)
        planned_s = time.monotonic()
        self._recorder.span("plan", int(self._started_s * 1e9))
        if self._torch_reader is not None:
            report = self._torch_reader.load(
                plan,
                planner,
                metadata,
                rank=context.rank,
                allows_lossy_casts=self._options.allow_lossy_casts is True,
            )
        else:
            assert manifest is not None and wanted is not None  # noqa: S101, PT018  # read_metadata has found it
            transforms = ReadTransforms(self._registry, self._options.extensions)
            reader = CheckpointReader(
                context,
                manifest,
                fallback_copy=self._fallback_copy,
                transforms=transforms,
                is_of_other_host=self.hosts is not None,
            )
            try:
                report = reader.read(wanted, shared=self._shared)
            except CheckpointError:
                if self._shared is None or not self._shared.is_stopped:
                    raise
                return  # all ranks raise the error of the rank that has failed
            reader.check_unchanged()
            log_dropped(wanted, uri=self.checkpoint_id)
        report = dataclasses.replace(report, plan_s=planned_s - self._started_s, manifest_s=self._manifest_s)
        if isinstance(manifest, FilesManifest):  # the context is that of the folder
            report = dataclasses.replace(report, uri=self._location.uri)
        self.report = report
        self.lifecycle.end(self.report)

    def _find_wanted_items(
        self, plan: LoadPlan, planner: LoadPlanner, manifest: Manifest, metadata: Metadata, *, is_logged: bool
    ) -> WantedItems:
        with rare_collections():
            return find_wanted_items(
                plan.items,
                planner,
                manifest,
                metadata.storage_data,
                tensors_of=planner.tensors_of if isinstance(planner, ExplainingLoadPlanner) else None,
                on_value=functools.partial(self._load_value, planner),
                allows_lossy_casts=self._options.allow_lossy_casts,
                uri=self.checkpoint_id,
                is_logged=is_logged,
            )

    def _load_value(
        self, planner: LoadPlanner, item: ReadItem, location: ItemLocation, content: bytes | bytearray
    ) -> None:
        value = EncodedValue(
            content=content,
            is_json=location.is_json,
            allow_pickle=self._allow_pickle,
            fqn=item.storage_index.fqn,
            uri=self.checkpoint_id,
            is_verified=self._options.verify,
        )
        if isinstance(planner, ExplainingLoadPlanner):
            planner.take_value(item, value.load())
        else:
            planner.load_bytes(item, value.to_torch())
