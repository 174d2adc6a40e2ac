"""The DCP storage reader."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import uuid
from typing import Any

from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt._commit.resolve import resolve
from cloudckpt._legacy import TorchCheckpointReader, read_torch_metadata
from cloudckpt._manifest.codec import decode
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.torch_metadata import metadata_of
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.lifecycle import Lifecycle, told
from cloudckpt._pipeline.load import LoadJob, wanted_by
from cloudckpt._pipeline.reporting import report_of
from cloudckpt._ranks.met_group import MetGroup
from cloudckpt._share.manifest import ManifestLookup, broadcast_lookup, find_manifest
from cloudckpt._share.session import RankPlanData, ShareSession, assign_groups
from cloudckpt._stage.transforms import ReadTransforms, registry_with
from cloudckpt._trace.recorder import new_recorder
from cloudckpt._uri import is_valid_location, parse_location
from cloudckpt.errors import CheckpointChangedError, CheckpointNotFoundError, CloudckptError, portable
from cloudckpt.options import Options
from cloudckpt.report import LoadReport


class ObjectStoreReader(StorageReader):
    """Reads checkpoints from `uri`, every byte checked, and only the bytes that are needed.

    For ``dcp.load(state_dict, storage_reader=ObjectStoreReader("s3://bucket/run/step-100"))``. Only plain
    Python and numpy values load, and classes that ``torch.serialization.add_safe_globals`` has allowed, whatever the
    planner does; `allow_pickle` lifts that, and with it also reads the checkpoints of torch's own writers. It can be
    pickled, and opens its store in the process that uses it.
    """

    load_id: str
    """The id of the load, as torch's readers have it: a new one after each `reset`."""
    failure: Exception | None
    """Why no metadata could be read, if so."""
    report: LoadReport | None
    """Of this reader's last load on this rank."""
    _context: Context | None
    _manifest: Manifest | None
    _torch_reader: TorchCheckpointReader | None

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        options: Options | None = None,
        allow_pickle: bool = False,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        self._location = parse_location(uri)
        self._options = options or Options()
        self._allow_pickle = allow_pickle
        self._registry = registry_with(_extension_registry, self._options.extensions)
        self._reporting_rank: int | None = None
        self._is_lazy = False
        self._session: ShareSession | None = None
        self.reset()

    @property
    def checkpoint_id(self) -> str:
        """The URI that is read."""
        return self._location.uri

    @property
    def timeout_s(self) -> float:
        """`Options.timeout_s`."""
        return self._options.timeout_s

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for another load, from `checkpoint_id` if one is given."""
        if checkpoint_id is not None:
            self._location = parse_location(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._started_s = time.monotonic()
        self._metadata: Metadata | None = None
        self._context = self._manifest = self._torch_reader = None
        self.end_together()
        self._found: ManifestLookup | None = None
        self._found_here: tuple[Context, Manifest] | None = None
        self.report = self.failure = None
        self._is_of_ranks = False
        self._manifest_s = 0.0
        self.lifecycle = Lifecycle("load", self._options)
        self._recorder = new_recorder(self._options.trace, verb="load", uri=self._location.uri, operation=self.load_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` can be read from, by its form alone."""
        return is_valid_location(checkpoint_id)

    def report_failures_in_set_up(self, *, rank: int | None, own_planner: bool = False) -> None:
        """For `cloudckpt.load`: let `read_metadata` succeed, and `set_up_storage_reader` raise its error; None ends it.

        torch turns what `read_metadata` raises into a log entry and an ``AssertionError`` with its text. With
        `own_planner`, no other code sees the metadata, so that entries of tensors need not be made beforehand.
        """
        self._reporting_rank = rank
        self._is_lazy = own_planner and type(self) is ObjectStoreReader
        if rank is None:
            self._recorder.end()

    def find_together(self, group: MetGroup) -> None:
        """For `cloudckpt.load`: have the coordinator of `group` find the manifest, once, for all of its ranks.

        It counts for the next `read_metadata`: also that there is none, and why not. A rank that reads from elsewhere
        looks for itself. Raises `RankLostError` where not all ranks come.
        """
        self._started_s = time.monotonic()
        found = broadcast_lookup(group, self._find(is_broadcast=True) if group.rank() == 0 else None)
        self._found = found if found.uri == self._location.uri else None
        self._session = ShareSession(group) if self._found is not None else None

    def end_together(self) -> None:
        """After the load that `find_together` began, on this rank and all others."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # torch's signature; it looks for the name "kwargs"
        """Torch's view of the checkpoint.

        With ``rank=``, of what that rank saved for itself, without collectives. Raises `CheckpointNotFoundError`,
        `CorruptCheckpointError`, `UnsupportedFormatError` or `UnsafePickleError`. torch calls it again, with ``rank=``,
        after any error. That call returns nothing, and `set_up_storage_reader` raises the error as what it is, but
        where ranks did save on their own.
        """
        rank: int | None = kwargs.get("rank")
        if rank is None:
            self._begin()
            try:
                return self._read_metadata()
            except Exception as error:
                self.failure = portable(error)
                if self._reporting_rank is None:
                    raise
            rank = self._reporting_rank
        elif self.failure is None:
            return self._read_metadata_of_rank(rank)
        if self._is_of_ranks:
            try:
                return self._read_metadata_of_rank(rank)
            except CheckpointNotFoundError:
                pass  # what was said of the whole stands
            except Exception as error:  # noqa: BLE001  # set_up_storage_reader raises it
                self.failure = portable(error)
        return Metadata(state_dict_metadata={})  # never used: set_up_storage_reader raises

    @told
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # torch's signature
        """Begin a load."""
        if self.failure is not None:
            raise self.failure
        self._metadata = metadata
        self._recorder.open(int(kwargs.get("rank") or 0))
        if self._torch_reader is not None:
            self._torch_reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        elif self._context is not None:
            self._context.rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Attach which commit this rank found."""
        manifest, metadata, session = self._manifest, self._metadata, self._session
        # What each rank saved for itself differs, of course.
        if manifest is None or self._context is None or self._context.location != self._location:
            return dataclasses.replace(plan, storage_data=RankPlanData(attempt=""))
        offer = None
        if session is not None and metadata is not None:
            wanted = functools.partial(wanted_by, plan, manifest, metadata.storage_data, self._options)
            offer = session.offer(wanted, scheme=self._location.scheme, options=self._options)
        return dataclasses.replace(plan, storage_data=RankPlanData(attempt=manifest.attempt, offer=offer))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse to mix: raises `CheckpointChangedError` where the ranks found different commits."""
        attempts = {plan.storage_data.attempt for plan in plans if isinstance(plan.storage_data, RankPlanData)}
        if len(attempts) > 1:
            raise CheckpointChangedError(
                f"{self.checkpoint_id} was overwritten while the ranks looked at it: they found {len(attempts)} "
                "different saves. Nothing was loaded; load again",
                uri=self.checkpoint_id,
            )
        if self._manifest is None:
            return plans
        found = [plan.storage_data if isinstance(plan.storage_data, RankPlanData) else None for plan in plans]
        extended = assign_groups(found, tile_bytes=self._manifest.tile_bytes, options=self._options)
        pairs = zip(plans, extended, strict=True)
        return [plan if one is None else dataclasses.replace(plan, storage_data=one) for plan, one in pairs]

    @told
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for. After an error, what the tensors hold is undefined."""
        future: Future[None] = Future()
        try:
            if self._torch_reader is not None:
                return self._torch_reader.read_data(plan, planner)
            self._load(plan, planner)
        except CloudckptError:
            raise
        except Exception as error:
            raise portable(error) from error
        future.set_result(None)
        return future

    def __getstate__(self) -> dict[str, Any]:
        # A load that has begun belongs to its process.
        return {**self.__dict__, "_context": None, "_torch_reader": None, "_found_here": None, "_session": None}

    def _load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        begun_s = time.monotonic()
        if self._context is None or self._manifest is None or self._metadata is None:
            raise CloudckptError("read_metadata has to be called before each load, as torch's dcp.load does")
        context = self._context
        context.emit("load.planned")
        recorder = self._recorder
        recorder.span("plan", int(self._started_s * 1e9))
        staged_s, transferred_s = recorder.seconds("stage"), recorder.seconds("transfer")
        exchange = None
        if self._session is not None and isinstance(plan.storage_data, RankPlanData):
            exchange = self._session.join(plan.storage_data.group, rank=context.rank, timeout_s=self._options.timeout_s)
        job = LoadJob(
            context,
            self._manifest,
            self._metadata.storage_data,
            transforms=ReadTransforms(self._registry, self._options.extensions),
            allow_pickle=self._allow_pickle,
            exchange=exchange,
        )
        with recorder.step("read"):
            loaded = job.run(plan, planner)
        self.report = report_of(
            loaded,
            context,
            attempt=self._manifest.attempt,
            plan_s=begun_s - self._started_s,
            manifest_s=self._manifest_s,
            read_s=time.monotonic() - begun_s,
            transfer_s=recorder.seconds("transfer") - transferred_s,
            stage_s=recorder.seconds("stage") - staged_s,
        )
        self.lifecycle.end(self.report)

    def _begin(self) -> None:
        self.failure, self._is_of_ranks = None, False
        if self._found is None:
            self._started_s = time.monotonic()
        self.lifecycle.begin(self._location.uri, operation=self.load_id, rank=self._reporting_rank, is_set_up=True)
        if self._reporting_rank is not None:
            self._recorder.open(self._reporting_rank)

    def _find(self, *, is_broadcast: bool) -> ManifestLookup:
        context = Context(self._location, self._options, rank=0, recorder=self._recorder)
        found, manifest = find_manifest(context.uri, lambda: context.store, context.retrier, is_broadcast=is_broadcast)
        self._found_here = None if manifest is None else (context, manifest)
        return found

    def _read_metadata(self) -> Metadata:
        self._context = self._manifest = self._torch_reader = None
        found = self._found or self._find(is_broadcast=False)
        found_here, self._found, self._found_here = self._found_here, None, None
        self._is_of_ranks = found.is_of_ranks
        if found_here is not None:
            return self._metadata_of(*found_here)
        context = Context(self._location, self._options, rank=0, recorder=self._recorder)
        if found.is_torchs:
            return self._read_torch_metadata(context)
        if found.error is not None:
            raise found.error
        assert found.document is not None  # noqa: S101  # a coordinator that found neither had an error
        return self._metadata_of(context, decode(found.document, uri=context.uri))

    def _read_metadata_of_rank(self, rank: int) -> Metadata:
        """Of what that rank saved for itself."""
        self._context = self._manifest = self._torch_reader = None
        context = Context(self._location.child(f"rank-{rank}"), self._options, rank=rank, recorder=self._recorder)
        return self._metadata_of(context, resolve(context.store, context.retrier).manifest)

    def _metadata_of(self, context: Context, manifest: Manifest) -> Metadata:
        metadata = metadata_of(manifest, checkpoint_id=self.checkpoint_id, load_id=self.load_id, is_lazy=self._is_lazy)
        self._manifest_s = time.monotonic() - self._started_s
        self._recorder.span("manifest", int(self._started_s * 1e9))
        self._context, self._manifest, self.failure = context, manifest, None
        return metadata

    def _read_torch_metadata(self, context: Context) -> Metadata:
        self._torch_reader, metadata = read_torch_metadata(
            context.store, context.retrier, self._registry, allow_pickle=self._allow_pickle
        )
        self.failure = None
        return metadata
