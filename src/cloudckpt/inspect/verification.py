"""Verify that a stored checkpoint is what was saved."""

from __future__ import annotations

import logging
import os
import time

from cloudckpt.commit.manifest_log import list_folders, parse_ranks, resolve
from cloudckpt.errors import CheckpointChangedError, CheckpointNotFoundError, CorruptCheckpointError
from cloudckpt.format.model import Manifest
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.verify import VerifyJob
from cloudckpt.report import VerifyReport
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

_MAX_SHOWN = 10


def verify(uri: str | os.PathLike[str], *, options: Options | None = None) -> VerifyReport:
    """Read every byte of the checkpoint at `uri`, and compare it with the checksums of the save.

    Needs no model and no process group, and runs no code from the store. Checks the manifest, the existence and exact
    size of each object, the CRC32C of every tile with header and padding, and each safetensors header against the
    manifest. Takes `Options.connections` requests at once and at most `Options.read_bytes` of memory besides the
    manifest and the headers. Checkpoints that ranks saved separately are verified rank by rank.

    Args:
        uri: The checkpoint.
        options: How to reach the store.

    Returns:
        Counts and seconds of a verification that found no damage.

    Raises:
        CorruptCheckpointError: Something differs. ``problems`` has all differences, each with its object and tensors.
        CheckpointNotFoundError: No checkpoint exists at `uri`, or one of torch's own writer, which has no checksums.
        CheckpointChangedError: The checkpoint was overwritten twice during the call.
        UnsupportedFormatError: A newer cloudckpt wrote it.
        StoreError: A request failed, which proves no damage.

    Example::

        report = cloudckpt.verify("s3://bucket/run/step-100")
        print(report.num_bytes, report.verify_s)

    """
    options = options or Options()
    location = parse_location(uri)
    try:
        return _verify_once(location, options)
    except CheckpointChangedError:
        return _verify_once(location, options)


def _verify_once(location: Location, options: Options) -> VerifyReport:
    begun_s = time.monotonic()
    found, problems = _read_manifests(location, options)
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


def _read_manifests(location: Location, options: Options) -> tuple[list[tuple[Context, Manifest]], list[str]]:
    """Read the manifest at `location`, or one for each rank. Return them, and the problems of damaged ones."""
    context = Context(location, options, rank=0)
    try:
        return [(context, resolve(context.store, context.retrier).manifest)], []
    except CheckpointNotFoundError:
        found: list[tuple[Context, Manifest]] = []
        problems: list[str] = []
        for rank in parse_ranks(list_folders(context.store, context.retrier)):
            of_rank = Context(location.child(f"rank-{rank}"), options, rank=rank)
            try:
                found.append((of_rank, resolve(of_rank.store, of_rank.retrier).manifest))
            except CheckpointNotFoundError:
                continue  # an unfinished save
            except CorruptCheckpointError as error:
                problems.extend(error.problems)
        if not found and not problems:
            raise
        return found, problems


def has_changed(context: Context, manifest: Manifest) -> bool:
    """Return True if the checkpoint was removed or replaced."""
    try:
        return resolve(context.store, context.new_retrier()).manifest.attempt != manifest.attempt
    except (CheckpointNotFoundError, CheckpointChangedError):
        return True
