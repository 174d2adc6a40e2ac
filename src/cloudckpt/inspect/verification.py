"""Verify that a stored checkpoint is what was saved."""

from __future__ import annotations

import logging
import os
import time

from cloudckpt.commit.log import resolve
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
    manifest and the headers.

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
    context = Context(location, options, rank=0)
    manifest = resolve(context.client).manifest
    problems = VerifyJob(context, manifest).run()
    if problems and has_changed(context, manifest):
        raise CheckpointChangedError(
            f"{location.uri} was overwritten or removed while it was being verified. Verify again", uri=location.uri
        )
    if problems:
        more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise CorruptCheckpointError(
            f"{location.uri} is not what was saved: {'; '.join(problems[:_MAX_SHOWN])}{more}. Load an older checkpoint",
            uri=location.uri,
            problems=problems,
        )
    report = VerifyReport(
        uri=location.uri,
        attempt=manifest.attempt,
        num_objects=len(manifest.objects),
        num_tensors=len(manifest.tensors),
        num_values=len(manifest.values),
        num_bytes=sum(stored.size for stored in manifest.objects),
        num_requests=context.client.num_requests,
        num_retries=context.client.num_retries,
        verify_s=time.monotonic() - begun_s,
    )
    _log.info("verified %s", report)
    return report


def has_changed(context: Context, manifest: Manifest) -> bool:
    """Return True if the checkpoint was removed or replaced."""
    try:
        return resolve(context.client.restarted()).manifest.attempt != manifest.attempt
    except (CheckpointNotFoundError, CheckpointChangedError):
        return True
