"""All phases of one save and one load of a simulated job, on the coordinator and on one rank."""

from __future__ import annotations

import gc
import pickle
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.scaling.clock import Clock, Phase, resident_bytes
from benchmarks.scaling.job import ATTEMPT, TILE_BYTES, Job
from cloudckpt._this_process import rare_collections
from cloudckpt.dcp.content import content_of
from cloudckpt.dcp.load_planner import narrow_metadata
from cloudckpt.dcp.torch_metadata import make_metadata
from cloudckpt.format.build import build_manifest
from cloudckpt.format.codec import decode, encode
from cloudckpt.format.validation import find_problems

URI = "memory://simulated/job"

GATHER_PLANS = "gather plans (torch)"
GLOBAL_PLAN = "global plan (torch)"
GATHER_RECEIPTS = "gather receipts (torch)"
BUILD = "build the manifest"
ENCODE = "encode"
DECODE = "decode and validate"
VALIDATE = "of which validate"
METADATA = "metadata for planners"
PLAN_SAME = "plan of one rank"
PLAN_RESHARDED = "plan of one rank of twice as few"
PLAN_TORCH = "plan of one rank (torch's own way)"
LOAD_PHASES = frozenset({DECODE, VALIDATE, METADATA, PLAN_SAME, PLAN_RESHARDED, PLAN_TORCH})
MANIFEST_BYTES = "manifest on the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The phases' costs, and sizes by name."""

    phases: dict[str, Phase]
    sizes_bytes: dict[str, int]


class _Shard:
    """A rank's part of a tensor, as far as a planner looks at it."""

    def __init__(self, size: torch.Size, chunk: ChunkStorageMetadata) -> None:
        self._size, self._chunk = size, chunk

    def size(self) -> torch.Size:
        return self._size

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # torch's protocol
        return [self._chunk]


def simulate(job: Job, *, with_planning: bool) -> Outcome:
    """One save, then one load; what a phase leaves and the next needs no more is dropped between them.

    Without planning, the save begins where torch's planner has ended: most of the time and memory is its own.
    """
    torch.set_num_threads(1)
    clock = Clock()
    sizes_bytes: dict[str, int] = {}
    if (base_bytes := resident_bytes()) is not None:
        sizes_bytes["process at the start"] = base_bytes
    with rare_collections():  # as in a save and a load
        document = _save(job, clock, sizes_bytes, with_planning=with_planning)
        gc.collect()
        _load(job, document, clock)
    return Outcome(phases=clock.phases, sizes_bytes=sizes_bytes)


def _save(job: Job, clock: Clock, sizes_bytes: dict[str, int], *, with_planning: bool) -> bytes:
    if with_planning:
        plans, metadata = _planned(job, clock, sizes_bytes)
        results = _gathered((job.results_of(plan, rank) for rank, plan in enumerate(plans)), clock, sizes_bytes)
        del plans
    else:
        metadata = job.metadata()
        made = (job.results_of(job.plan_of(rank, with_values=not rank), rank) for rank in range(job.num_ranks))
        results = _gathered(made, clock, sizes_bytes)
    with clock.phase(BUILD):
        manifest = build_manifest(
            content_of(metadata, results, uri=URI),
            uri=URI,
            attempt=ATTEMPT,
            save_id="simulated",
            tile_bytes=TILE_BYTES,
            user_metadata={},
        )
    with clock.phase(ENCODE):
        document = encode(manifest)
    sizes_bytes[MANIFEST_BYTES] = len(document)
    with clock.phase("zlib level 1 (not done)"):
        sizes_bytes["under zlib level 1 (not done)"] = len(zlib.compress(document, 1))
    return document


def _planned(job: Job, clock: Clock, sizes_bytes: dict[str, int]) -> tuple[list[SavePlan], Metadata]:
    plans: list[SavePlan] = []
    for message in _sent((job.plan_of(rank) for rank in range(job.num_ranks)), "plan of one rank", sizes_bytes):
        with clock.phase(GATHER_PLANS):
            plans.append(pickle.loads(message))  # noqa: S301  # made here
    with clock.phase(GLOBAL_PLAN):
        return DefaultSavePlanner().create_global_plan(plans)


def _gathered(made: Iterable[list[WriteResult]], clock: Clock, sizes_bytes: dict[str, int]) -> list[list[WriteResult]]:
    """Return the results that the coordinator has before the commit, pickled and unpickled as torch sends them."""
    results: list[list[WriteResult]] = []
    for message in _sent(made, "receipts of one rank", sizes_bytes):
        with clock.phase(GATHER_RECEIPTS):
            results.append(pickle.loads(message))  # noqa: S301  # made here
    return results


def _sent(made: Iterable[Any], name: str, sizes_bytes: dict[str, int]) -> Iterable[bytes]:
    """One at a time: in a job they are made on all ranks."""
    for value in made:
        message = pickle.dumps(value)
        sizes_bytes[name] = max(sizes_bytes.get(name, 0), len(message))
        yield message


def _load(job: Job, document: bytes, clock: Clock) -> None:
    """Load as each rank does."""
    with clock.phase(DECODE):
        manifest = decode(document, uri=URI)
    with clock.phase(VALIDATE):
        find_problems(manifest)
    with clock.phase(METADATA):
        metadata = make_metadata(manifest, checkpoint_id=URI, load_id="simulated")
    for name, num_ranks in ((PLAN_SAME, job.num_ranks), (PLAN_RESHARDED, job.num_ranks // 2)):
        wanted = _shards(job, num_ranks // 2 + 3, num_ranks)
        with clock.phase(name):
            plan = create_default_local_load_plan(wanted, narrow_metadata(metadata, wanted))
            for item in plan.items:
                metadata.storage_data[item.storage_index]
    wanted = _shards(job, job.num_ranks // 2 + 3, job.num_ranks)
    with clock.phase(PLAN_TORCH):
        create_default_local_load_plan(wanted, metadata)


def _shards(job: Job, rank: int, num_ranks: int) -> dict[str, Any]:
    return {
        tensor.fqn: _Shard(job.shape_of(tensor), job.chunk_of(tensor, rank, num_ranks=num_ranks))
        for tensor in job.tensors
    }
