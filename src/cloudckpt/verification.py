"""Whether what lies on the store is what was saved."""

from __future__ import annotations

import logging
import os
import time

from cloudckpt._commit.resolve import holds_torch_checkpoint, list_folders, ranks_of, resolve
from cloudckpt._manifest.model import Manifest
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.verify import VerifyJob
from cloudckpt._uri import Location, parse_location
from cloudckpt.errors import CheckpointChangedError, CheckpointNotFoundError, CorruptCheckpointError
from cloudckpt.options import Options
from cloudckpt.report import VerifyReport

_log = logging.getLogger("cloudckpt")

_MAX_SHOWN = 10


def verify(uri: str | os.PathLike[str], *, options: Options | None = None) -> VerifyReport:
    """Read every byte of the checkpoint at `uri`, and compare it with what the save recorded.

    Needs no model, no process group and no torch.distributed, and runs nothing that lies on the store. Checked are the
    manifest; that each object is there with its exact size; the CRC32C of every tile, header and padding included; and
    that each object's safetensors header says what the manifest says. Takes `Options.connections` requests at once and
    at most `Options.read_bytes` of memory, besides the manifest and the objects' headers. What ranks saved on their
    own, without collectives, is verified rank by rank.

    Raises `CorruptCheckpointError`, whose ``problems`` are all that was found, each with the object and the names of
    the tensors and values in it; `CheckpointNotFoundError`; `UnsupportedFormatError`; `CheckpointChangedError` where
    the checkpoint was overwritten twice meanwhile; and `StoreError` where the store could not be read, which says
    nothing about the checkpoint.
    """
    options = options or Options()
    location = parse_location(uri)
    try:
        return _verified(location, options)
    except CheckpointChangedError:
        return _verified(location, options)


def _verified(location: Location, options: Options) -> VerifyReport:
    begun_s = time.monotonic()
    found, problems = _manifests(location, options)
    for context, manifest in found:
        of_one = VerifyJob(context, manifest).run()
        if of_one and has_changed(context, manifest):
            raise CheckpointChangedError(
                f"{context.uri} was overwritten or removed while it was being verified. Verify again", uri=context.uri
            )
        problems.extend(of_one)
    if problems:
        more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise CorruptCheckpointError(
            f"{location.uri} is not what was saved: {'; '.join(problems[:_MAX_SHOWN])}{more}. Load an older checkpoint",
            uri=location.uri,
            problems=problems,
        )
    report = VerifyReport(
        uri=location.uri,
        attempts=tuple(manifest.attempt for _, manifest in found),
        num_objects=sum(len(manifest.objects) for _, manifest in found),
        num_tensors=sum(len(manifest.tensors) for _, manifest in found),
        num_values=sum(len(manifest.values) for _, manifest in found),
        num_bytes=sum(stored.size for _, manifest in found for stored in manifest.objects),
        num_requests=sum(context.retrier.num_requests for context, _ in found),
        num_retries=sum(context.retrier.num_retries for context, _ in found),
        verify_s=time.monotonic() - begun_s,
    )
    _log.info("verified %s", report)
    return report


def _manifests(location: Location, options: Options) -> tuple[list[tuple[Context, Manifest]], list[str]]:
    """What counts at `location`, or what each rank saved below it; and what is wrong with manifests themselves."""
    context = Context(location, options, rank=0)
    try:
        return [(context, resolve(context.store, context.retrier).manifest)], []
    except CheckpointNotFoundError as error:
        if holds_torch_checkpoint(context.store, context.retrier):
            raise CheckpointNotFoundError(
                f"{location.uri} holds a checkpoint of torch's own writer, which recorded no checksums: there is "
                "nothing to verify it against. Load it with allow_pickle=True and save it with cloudckpt",
                uri=location.uri,
            ) from error
        found, problems = _of_ranks(location, options, context)
        if not found and not problems:
            raise
        return found, problems


def _of_ranks(
    location: Location, options: Options, context: Context
) -> tuple[list[tuple[Context, Manifest]], list[str]]:
    folders = list_folders(context.store, context.retrier)
    found: list[tuple[Context, Manifest]] = []
    problems: list[str] = []
    for rank in ranks_of(folders):
        of_rank = Context(location.child(f"rank-{rank}"), options, rank=rank)
        try:
            found.append((of_rank, resolve(of_rank.store, of_rank.retrier).manifest))
        except CheckpointNotFoundError:
            continue  # an unfinished save
        except CorruptCheckpointError as error:
            problems.extend(error.problems)
    return found, problems


def has_changed(context: Context, manifest: Manifest) -> bool:
    """Whether something else counts there by now, or nothing."""
    try:
        return resolve(context.store, context.new_retrier()).manifest.attempt != manifest.attempt
    except (CheckpointNotFoundError, CheckpointChangedError):
        return True
