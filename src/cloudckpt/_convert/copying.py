"""Copying a checkpoint from store to store: whole, checked, and committed last."""

from __future__ import annotations

import logging
import os
import time

import msgspec

from cloudckpt._commit.resolve import holds_torch_checkpoint, ranks_of, resolve
from cloudckpt._convert.copy_job import Copied, CopyJob
from cloudckpt._convert.progress import OnProgress, Progress
from cloudckpt._convert.reports import CopyReport
from cloudckpt._convert.sides import check_apart
from cloudckpt._convert.target import TargetJob
from cloudckpt._manifest.model import Manifest
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.verify import VerifyJob
from cloudckpt._uri import parse_location
from cloudckpt.errors import CheckpointChangedError, CheckpointNotFoundError, CorruptCheckpointError
from cloudckpt.options import Options

_log = logging.getLogger("cloudckpt")


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> CopyReport:
    """Copy the checkpoint at `source` to `target`, which may be any other store.

    The copy has the same tensors, values and chunks, in objects of its own. It is committed last, as a save is: until
    then nothing is at `target`, or what was there before, and a checkpoint that is there makes it fail unless
    `overwrite`. Every byte is compared with the checksums of the save. Where one service has both places (the same
    ``storage_options``), it is asked to copy; then its own CRC32C of each copied object is compared, and where it says
    none, the copy is read back. What is not good is read and written after all. So is all else: in at most
    ``options.read_bytes`` of memory, or in whole objects where the target has no uploads in parts.

    `options` are for the source, `target_options` for the target. With ``resume`` in these, what an earlier copy with
    it of this very checkpoint left there is read, compared with the checksums, and used; and a copy that fails removes
    nothing. `on_progress` is told the bytes done and their total. What a copy that is killed leaves, `cloudckpt.gc`
    removes.

    Raises `CorruptCheckpointError` where the source is damaged, `CheckpointChangedError` where it was overwritten twice
    meanwhile, `CheckpointExistsError`, `CheckpointNotFoundError`, `InvalidURIError` where one place lies in the other,
    `StoreError`, whose ``key`` tells which side it is about, and what saves raise.
    """
    begun_s = time.monotonic()
    options, target_options = options or Options(), target_options or Options()
    here, there = parse_location(source), parse_location(target)
    check_apart(here, there, options, target_options)
    progress = Progress(on_progress)
    of_source, of_target = Context(here, options, rank=0), Context(there, target_options, rank=0)
    pairs = [(of_source, of_target)]
    try:
        found = resolve(of_source.store, of_source.retrier).manifest
    except CheckpointNotFoundError:
        pairs = _of_ranks(of_source, of_target, overwrite=overwrite)
        copied = [_copy_resolved(one, other, progress, overwrite=overwrite) for one, other in pairs]
    else:
        copied = [_copy_resolved(of_source, of_target, progress, overwrite=overwrite, found=found)]
    contexts = [context for pair in pairs for context in pair]
    report = CopyReport(
        source=here.uri,
        target=there.uri,
        attempts=tuple(manifest.attempt for manifest, _ in copied),
        num_objects=sum(len(manifest.objects) for manifest, _ in copied),
        num_bytes=sum(stored.size for manifest, _ in copied for stored in manifest.objects),
        num_service_bytes=sum(done.num_service_bytes for _, done in copied),
        num_read_back_bytes=sum(done.num_read_back_bytes for _, done in copied),
        num_reused_bytes=sum(done.num_reused_bytes for _, done in copied),
        num_requests=sum(context.retrier.num_requests for context in contexts),
        num_retries=sum(context.retrier.num_retries for context in contexts),
        copy_s=time.monotonic() - begun_s,
    )
    _log.info("copied %s", report)
    return report


def _of_ranks(source: Context, target: Context, *, overwrite: bool) -> list[tuple[Context, Context]]:
    """What ranks saved on their own. Rank 0 comes last: by it the others are found."""
    if source.retrier.call(lambda: holds_torch_checkpoint(source.store)):
        raise CheckpointNotFoundError(
            f"{source.uri} holds a checkpoint of torch's own writer, which recorded no checksums to compare a copy "
            "with. Import it: cloudckpt import --format dcp, or cloudckpt.import_checkpoint",
            uri=source.uri,
        )
    ranks = ranks_of(source.retrier.call(lambda: list(source.store.list_directories())))
    if not ranks:
        resolve(source.store, source.retrier)  # which says what lies there instead
    TargetJob(target, save_id="").check(overwrite=overwrite)
    return [(_at_rank(source, rank), _at_rank(target, rank)) for rank in sorted(ranks, reverse=True)]


def _at_rank(context: Context, rank: int) -> Context:
    return Context(context.location.child(f"rank-{rank}"), context.options, rank=rank)


def _copy_resolved(
    source: Context, target: Context, progress: Progress, *, overwrite: bool, found: Manifest | None = None
) -> tuple[Manifest, Copied]:
    """The copy of one manifest and its data; once more where the source was overwritten meanwhile."""
    for is_last in (False, True):
        manifest = found or resolve(source.store, source.retrier).manifest
        if found is None and target.options.resume and not overwrite:
            there = _copy_at(target, manifest)
            if there is not None:
                _check_whole(target, there)
                num_bytes = sum(stored.size for stored in there.objects)
                progress.expect(num_bytes)
                progress.add(num_bytes)
                return there, Copied(num_reused_bytes=num_bytes)
        try:
            return CopyJob(source, target, manifest, progress).run(overwrite=overwrite)
        except CorruptCheckpointError:
            found = _changed(source, manifest)
            if found is None:
                raise
            if is_last:
                break
            source.retrier, target.retrier = source.new_retrier(), target.new_retrier()
    raise CheckpointChangedError(
        f"{source.uri} was overwritten twice while it was being copied. Nothing was committed at {target.uri}; copy "
        "again",
        uri=source.uri,
    )


def _copy_at(target: Context, manifest: Manifest) -> Manifest | None:
    """What an earlier copy of all ranks has committed of this one, before it ended at another."""
    try:
        there = resolve(target.store, target.retrier).manifest
    except CheckpointNotFoundError:
        return None
    pairs = zip(there.objects, manifest.objects, strict=False)
    as_saved = msgspec.structs.replace(
        there,
        attempt=manifest.attempt,
        created_at=manifest.created_at,
        objects=[msgspec.structs.replace(mine, key=its.key) for mine, its in pairs],
    )
    return there if as_saved == manifest and len(there.objects) == len(manifest.objects) else None


def _check_whole(target: Context, there: Manifest) -> None:
    """Raises `CorruptCheckpointError` unless what is committed there still has the bytes that its manifest tells."""
    problems = VerifyJob(target, there).run()
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CorruptCheckpointError(
            f"{target.uri}, which an earlier copy has committed, is damaged by now: {problems[0]}{more}. Copy with "
            "overwrite=True, which replaces it, or delete it and copy again",
            uri=target.uri,
            problems=problems,
        )


def _changed(source: Context, manifest: Manifest) -> Manifest | None:
    """What is there now, if it is another."""
    try:
        now = resolve(source.store, source.new_retrier()).manifest
    except CheckpointNotFoundError as error:
        raise CheckpointChangedError(
            f"{source.uri} was removed while it was being copied. Nothing was committed", uri=source.uri
        ) from error
    return None if now.attempt == manifest.attempt else now
