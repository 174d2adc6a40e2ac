"""The DCP storage writer."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cloudckpt._flat import check_names
from cloudckpt._manifest.stored_ranges import StoredRanges
from cloudckpt._manifest.torch_metadata import DCP_VERSION
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.lifecycle import Lifecycle, told
from cloudckpt._pipeline.save import SaveJob
from cloudckpt._process.host import UploadProcess
from cloudckpt._process.job import RemoteJob
from cloudckpt._process.job import Snapshot as SharedSnapshot
from cloudckpt._stage.body import Filled
from cloudckpt._stage.ties import estimated_total_bytes
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._steering import Steering
from cloudckpt._trace.recorder import new_recorder, now_ns
from cloudckpt._uri import is_valid_location, parse_location
from cloudckpt.errors import CloudckptError, InvalidOptionError, portable
from cloudckpt.options import Options
from cloudckpt.report import SaveReport


class Snapshot(Filled, Protocol):
    """A copy of the state dict, while it is made."""

    @property
    def completed(self) -> concurrent.futures.Future[None]:
        """When all of it is there; its exception if that failed."""


class ObjectStoreWriter(StorageWriter):
    """Writes checkpoints to `uri`: atomically, never over another one unless `overwrite` says so.

    For ``dcp.save(state_dict, storage_writer=ObjectStoreWriter("s3://bucket/run/step-100"))``. One writer can be used
    for several saves, one after the other, each with its ``checkpoint_id``. It can be pickled, and opens its store in
    the process that uses it.

    Its methods raise `CloudckptError` subclasses, which DCP carries to all ranks in a ``CheckpointException``.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        options: Options | None = None,
        overwrite: bool = False,
        _extensions: Sequence[StreamTransformExtension] | None = None,
    ) -> None:
        super().__init__()
        self._location = parse_location(uri)
        self._options = options or Options()
        self._overwrite = overwrite
        if _extensions and self._options.extensions:
            raise InvalidOptionError("Options: extensions are given twice, here and as torch's _extensions")
        self._transforms = WriteTransforms(_extensions or tuple(reversed(self._options.extensions)))
        self.save_id = str(uuid.uuid4())
        """The id of the save, as torch's writers have it: a new one after each `reset`."""
        self.lifecycle = Lifecycle("save", self._options)
        """Of the save that is under way."""
        self._job: SaveJob | RemoteJob | None = None
        self._process: UploadProcess | None = None
        self._shared_snapshot: SharedSnapshot | None = None
        self._begun_ns = 0
        self._steering = Steering()
        self._snapshot: Snapshot | None = None
        self._is_deciding = True

    @property
    def checkpoint_id(self) -> str:
        """The URI that is written to."""
        return self._location.uri

    @property
    def options(self) -> Options:
        """As they were given, or the defaults."""
        return self._options

    @property
    def has_transforms(self) -> bool:
        """Whether what is stored is made from the tensors' values."""
        return bool(self._transforms)

    @property
    def timeout_s(self) -> float:
        """`Options.timeout_s`."""
        return self._options.timeout_s

    @property
    def report(self) -> SaveReport | None:
        """Of this writer's last save on this rank, once it has written."""
        return self._job.report if self._job is not None else None

    def steer(self, steering: Steering | None, snapshot: Snapshot | None = None) -> None:
        """Let the next save be watched and cancelled, and read a `snapshot` that is still being made. None: no more."""
        self._steering, self._snapshot = steering or Steering(), snapshot

    def run_in(self, process: UploadProcess | None, snapshot: SharedSnapshot | None = None) -> None:
        """Let the next save be checked, written and committed by `process`, which reads the tensors of a `snapshot` in
        shared memory where they lie, once it is complete. None: by this process again.
        """
        self._process, self._shared_snapshot = process, snapshot

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for another save, to `checkpoint_id` if one is given."""
        if checkpoint_id is not None:
            self._location = parse_location(checkpoint_id)
        self.save_id = str(uuid.uuid4())
        self._job = None
        self.lifecycle = Lifecycle("save", self._options)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` can be written to, by its form alone."""
        return is_valid_location(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What torch keeps with the metadata. It asks for this first, so here the last save is over."""
        self._job = None
        return self._storage_meta()

    def _storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def begin(self, rank: int) -> None:
        """Let a save be known to have begun before `set_up_storage_writer`."""
        self.lifecycle.begin(self._location.uri, operation=self.save_id, rank=rank, is_set_up=False)

    @told
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001  # torch's signature; it looks for the name "kwargs"
        """Begin a save. Raises `CheckpointExistsError` before any byte moves."""
        rank = int(kwargs.get("rank") or 0)
        # Without collectives there is no coordinator: each rank commits a checkpoint of its own.
        is_alone = not kwargs.get("use_collectives", True)
        location = self._location.child(f"rank-{rank}") if is_alone else self._location
        self.lifecycle.begin(location.uri, operation=self.save_id, rank=rank, is_set_up=True)
        recorder = new_recorder(self._options.trace, verb="save", uri=location.uri, operation=self.save_id)
        recorder.open(rank)
        context = Context(location, self._options, rank=rank, recorder=recorder)
        self._steering.enter("planning")
        self._is_deciding = is_coordinator or is_alone
        self._job = self._new_job(context)
        self._begun_ns = now_ns()
        with recorder.step("set_up"), self._steering.heeded(self._job.stop):
            if is_alone:
                self._job.check_beside(Context(self._location, self._options, rank=rank, recorder=recorder))
            if is_coordinator or is_alone:
                self._job.check(overwrite=self._overwrite)
            context.emit("save.set_up")

    def _new_job(self, context: Context) -> SaveJob | RemoteJob:
        if self._process is None:
            return SaveJob(context, save_id=self.save_id, transforms=self._transforms)
        return RemoteJob(
            context,
            save_id=self.save_id,
            transforms=self._transforms,
            process=self._process,
            snapshot=self._shared_snapshot,
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Attach this save's ticket. Raises `UnsupportedValueError` for a name that no manifest can hold."""
        check_names((item.index.fqn for item in plan.items), uri=self.checkpoint_id)
        return dataclasses.replace(plan, storage_data=self._begun().ticket)

    @told
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Hand the attempt to all ranks."""
        job = self._begun()
        self._steering.check()
        return [dataclasses.replace(plan, storage_data=job.handed_out(plan.storage_data)) for plan in plans]

    @told
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items, all of them or none."""
        future: Future[list[WriteResult]] = Future()
        try:
            job = self._begun()
            job.recorder.span("plan", self._begun_ns)
            self._steering.enter("uploading", total_bytes=estimated_total_bytes(plan.items, planner))
            filled = self._snapshot
            if filled is not None and filled.completed.done():
                filled.completed.result()
                filled = None  # it need not be asked about each tensor
            with job.recorder.step("write"), self._steering.heeded(job.stop):
                results = job.write(plan, planner, filled=filled, on_sent=self._steering.count_uploaded)
            if filled is not None:
                filled.completed.result()  # what could not be copied was not sent either
            if not self._is_deciding:
                self._steering.consent(commits=False)
            future.set_result(results)
        except CloudckptError:
            raise
        except Exception as error:
            raise portable(error) from error
        return future

    @told
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator. Returns only once the checkpoint exists.

        Raises `CheckpointExistsError` if another save committed first, `IncompleteSaveError` if the ranks did not
        write what was planned; either way what all ranks wrote is removed. Raises `CommitUnknownError`, and removes
        nothing, if the outcome cannot be found out.
        """
        # Made before the commit: afterwards nothing may fail.
        storage_data = StoredRanges(result.storage_data for of_rank in results for result in of_rank)
        job = self._begun()
        self._steering.consent(commits=True)
        with job.recorder.step("commit"):
            job.commit(metadata, results)
        metadata.version = DCP_VERSION
        metadata.storage_data = storage_data
        metadata.storage_meta = self._storage_meta()
        self.lifecycle.end(job.report)

    def flush_trace(self) -> None:
        """Write what `Options.trace` has got since the last step: each of them does so at its end."""
        if self._job is not None:
            self._job.recorder.end()

    def discard(self) -> None:
        """Remove what this rank wrote in its last save.

        Only for a save that all ranks know to have failed: never after `CommitUnknownError`, or a lost rank.
        """
        if self._job is not None:
            self._job.discard()

    def __getstate__(self) -> dict[str, Any]:
        # A save that has begun belongs to its process.
        return {
            **self.__dict__,
            "_job": None,
            "_snapshot": None,
            "_shared_snapshot": None,
            "_process": None,
            "_steering": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._steering = Steering()

    def _begun(self) -> SaveJob | RemoteJob:
        if self._job is None:
            raise CloudckptError("set_up_storage_writer has to be called before each save, as torch's dcp.save does")
        return self._job
