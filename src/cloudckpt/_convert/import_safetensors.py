"""Imports of safetensors files, streamed."""

from __future__ import annotations

import contextlib
import functools
import platform
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone

import torch

from cloudckpt._commit.commit_time import draw_commit_time_ns
from cloudckpt._convert.bodies import TensorsBody
from cloudckpt._convert.names import checked_ties, chosen_names
from cloudckpt._convert.plan import Done, ImportPlan
from cloudckpt._convert.progress import Progress
from cloudckpt._convert.safetensors_header import FileTensor
from cloudckpt._convert.safetensors_source import SafetensorsSource
from cloudckpt._convert.sides import part_bytes_for, upload_session
from cloudckpt._convert.target import TargetJob
from cloudckpt._manifest.codec import pack_tiles
from cloudckpt._manifest.model import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    Chunk,
    Manifest,
    StoredObject,
    StoredTensor,
)
from cloudckpt._manifest.receipts import ObjectReceipt
from cloudckpt._manifest.validate import problems_of
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.layout import Entry, Layout, lay_out, storage_order
from cloudckpt._plan.packing import pack
from cloudckpt._stage.arena import Arena
from cloudckpt._version import __version__
from cloudckpt.errors import IncompleteSaveError


def import_safetensors(plan: ImportPlan, progress: Progress) -> Done:
    """See `cloudckpt.import_checkpoint`."""
    source = SafetensorsSource(plan.source, plan.options)
    target = Context(plan.target, plan.target_options, rank=0)
    tensors = source.tensors
    ties = {**source.ties, **checked_ties(plan.tie, tensors, uri=plan.source.uri)}
    names = chosen_names([*tensors, *ties], include=plan.include, add_prefix=plan.add_prefix, uri=plan.source.uri)
    names_of: dict[str, list[str]] = {}  # of what is stored, its own first
    for fqn, name in names.items():
        names_of.setdefault(ties.get(fqn, fqn), []).append(name)
    objects = _objects_of(tensors, names_of, object_bytes=plan.target_options.object_bytes)
    save_id = str(uuid.uuid4())
    job = TargetJob(target, save_id=save_id)
    job.check(overwrite=plan.overwrite)
    progress.expect(sum(layout.size_bytes for _, layout in objects))
    keys = [job.key(number) for number in range(len(objects))]
    try:
        receipts = _uploaded(objects, source, job, target, plan=plan, progress=progress)
        source.check_unchanged()
        manifest = _manifest_of(
            objects, receipts, names_of, tensors=tensors, attempt=job.attempt, save_id=save_id, plan=plan
        )
    except BaseException:
        job.remove(keys)
        raise
    job.commit_manifest(manifest, [receipt.key for receipt in receipts])
    return Done(num_tensors=len(names), num_values=0, files={each.key: each.size_bytes for each in receipts})


def _objects_of(
    tensors: dict[str, FileTensor], names_of: dict[str, list[str]], *, object_bytes: int
) -> list[tuple[list[str], Layout]]:
    """Of each data object, the source's names of the tensors in it, and where they lie. A header names each once."""
    fqns = list(names_of)
    sizes = [tensors[fqn].end - tensors[fqn].begin for fqn in fqns]
    objects = []
    for group in pack(sizes, object_bytes=object_bytes):
        members = [fqns[i] for i in group]
        entries = [_entry(names_of[fqn][0], tensors[fqn]) for fqn in members]
        order = storage_order(entries)
        objects.append(([members[i] for i in order], lay_out([entries[i] for i in order])))
    return objects


def _entry(name: str, tensor: FileTensor) -> Entry:
    num_bytes = tensor.end - tensor.begin
    return Entry(fqn=name, dtype=tensor.dtype, shape=tensor.shape, offsets=None, num_bytes=num_bytes)


def _uploaded(
    objects: Sequence[tuple[list[str], Layout]],
    source: SafetensorsSource,
    job: TargetJob,
    target: Context,
    *,
    plan: ImportPlan,
    progress: Progress,
) -> list[ObjectReceipt]:
    budget_bytes, tile_bytes = plan.options.read_bytes, plan.target_options.tile_bytes
    part_bytes = part_bytes_for(target, budget_bytes=budget_bytes, tile_bytes=tile_bytes)
    leftovers = job.leftovers()
    with (
        contextlib.closing(Arena(budget_bytes=budget_bytes)) as arena,
        upload_session(
            target, progress, part_bytes=part_bytes, tile_bytes=tile_bytes, resumable=target.options.resume
        ) as session,
    ):
        body_of = functools.partial(TensorsBody, reader=source, arena=arena)
        try:
            for number, (fqns, layout) in enumerate(objects):
                body = body_of(layout.header, fqns, layout.begins, size_bytes=layout.size_bytes)
                session.submit(job.key(number), body, leftovers.get(job.key(number), []))
            return session.finish()
        except BaseException:
            source.stop()
            raise


def _manifest_of(
    objects: Sequence[tuple[list[str], Layout]],
    receipts: Sequence[ObjectReceipt],
    names_of: dict[str, list[str]],
    *,
    tensors: dict[str, FileTensor],
    attempt: str,
    save_id: str,
    plan: ImportPlan,
) -> Manifest:
    stored: dict[str, StoredTensor] = {}
    for index, (fqns, layout) in enumerate(objects):
        for fqn, begin in zip(fqns, layout.begins, strict=True):
            tensor = tensors[fqn]
            end = begin + tensor.end - tensor.begin
            chunk = Chunk((0,) * len(tensor.shape), tensor.shape, index, begin, end)
            for name in names_of[fqn]:
                stored[name] = StoredTensor(dtype=tensor.dtype, shape=tensor.shape, chunks=[chunk])
    manifest = Manifest(
        format=FORMAT_NAME,
        version=(FORMAT_MAJOR, FORMAT_MINOR),
        attempt=attempt,
        created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        committed_at_ns=draw_commit_time_ns(),
        world_size=1,
        software={"cloudckpt": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        tile_bytes=plan.target_options.tile_bytes,
        objects=[
            StoredObject(key=each.key, size=each.size_bytes, crc32c=pack_tiles(each.tile_crc32cs)) for each in receipts
        ],
        tensors=stored,
        values={},
        save_id=save_id,
        metadata=dict(plan.target_options.metadata),
    )
    problems = problems_of(manifest)
    if problems:
        raise IncompleteSaveError(
            f"what was read from {plan.source.uri} makes no whole checkpoint: {'; '.join(problems[:3])}",
            uri=plan.target.uri,
        )
    return manifest
