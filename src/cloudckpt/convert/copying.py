"""Copy a checkpoint from store to store: whole, checked, and committed last."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Sequence

import msgspec

from cloudckpt.commit.commit_time import ns_of
from cloudckpt.commit.log import (
    holds_torch_checkpoint,
    manifest_key,
    parse_ranks,
    read_log,
    read_manifest,
    resolve,
    settle,
)
from cloudckpt.convert.copy_job import CopyJob, CopyOutcome
from cloudckpt.convert.endpoints import TargetJob, check_apart
from cloudckpt.convert.reports import CopyReport, OnProgress, Progress
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Hint,
    ObjectNotFoundError,
)
from cloudckpt.format.model import FORMAT_MAJOR, FORMAT_MINOR, Manifest
from cloudckpt.inspect.verification import has_changed
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.verify import VerifyJob
from cloudckpt.uri import parse_location

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
    """Copy the checkpoint at `source` to `target`, on any store.

    The copy has the same tensors, values and chunks, in objects of its own, and is committed last, as a save is. Every
    byte is compared with the checksums of the save. If one service has both places, with the same ``storage_options``,
    it is asked to copy, and its CRC32C of each object is compared; without one, the copy is read back. Everything else
    is read and written in at most ``options.read_bytes`` of memory; a target without uploads in parts takes whole
    objects. What a killed copy leaves, `gc` removes.

    With ``target_options.resume``, objects that an earlier copy of exactly this checkpoint left are read at the target,
    compared, and used. A copy that fails then removes nothing. If all of it is committed already, it is compared, and
    nothing is written (`CopyReport.was_there`).

    Args:
        source: URI of the checkpoint, or of the folders of ranks that saved separately.
        target: URI of the copy. It must not lie inside `source`, nor the reverse.
        overwrite: Replace a checkpoint at `target`, at the instant of the commit.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Raises:
        CorruptCheckpointError: The source is damaged, or the earlier copy that would be resumed.
        CheckpointChangedError: The source was overwritten twice during the copy.
        CheckpointExistsError: A checkpoint exists at `target`.
        CheckpointNotFoundError: No checkpoint exists at `source`.
        InvalidURIError: One place lies inside the other.
        StoreError: A request failed; ``key`` tells on which side.

    """
    begun_s = time.monotonic()
    options, target_options = options or Options(), target_options or Options()
    here, there = parse_location(source), parse_location(target)
    check_apart(here, there, options, target_options)
    progress = Progress(on_progress)
    of_source, of_target = Context(here, options, rank=0), Context(there, target_options, rank=0)
    pairs = [(of_source, of_target)]
    try:
        found = _read_manifest(of_source)
    except CheckpointNotFoundError:
        pairs = _pair_ranks(of_source, of_target, overwrite=overwrite)
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
        was_there=all(done.was_there for _, done in copied),
        num_requests=sum(context.retrier.num_requests for context in contexts),
        num_retries=sum(context.retrier.num_retries for context in contexts),
        copy_s=time.monotonic() - begun_s,
    )
    _log.info("copied %s", report)
    return report


def is_taken(target: str | os.PathLike[str], *, options: Options) -> bool:
    """Return True if a checkpoint is committed at `target`. Lists it, and reads no manifest."""
    there = Context(parse_location(target), options, rank=0)
    return read_log(there.store, there.retrier).counting is not None


def _pair_ranks(source: Context, target: Context, *, overwrite: bool) -> list[tuple[Context, Context]]:
    """Pair the folders of ranks that saved separately. Rank 0 is last, because readers find the others by it."""
    if holds_torch_checkpoint(source.store, source.retrier):
        raise CheckpointNotFoundError(
            f"{source.uri} holds a checkpoint of torch's own writer, which recorded no checksums to compare a copy "
            "with. Import it: cloudckpt import --format dcp",
            uri=source.uri,
        )
    ranks = _list_ranks(source)
    if not ranks:
        resolve(source.store, source.retrier)  # raises, and says what exists there instead
    lacking = sorted({*range(max(ranks, default=0))} - ranks)
    if lacking:
        raise CheckpointNotFoundError(
            f"ranks saved on their own at {source.uri}, up to rank-{max(ranks)}, and rank-{lacking[0]} is not there: "
            "nothing was copied. Copy another checkpoint, or each rank that is there by its own URI",
            uri=source.uri,
        )
    pairs = [(_context_of_rank(source, rank), _context_of_rank(target, rank)) for rank in sorted(ranks, reverse=True)]
    copied, strange = _classify_ranks(target, pairs)
    # If only copies of this save exist, and that of rank 0 is one of them, an earlier copy was complete.
    if 0 not in copied or strange or _holds_one(target):
        TargetJob(target, save_id="").check(overwrite=overwrite)
        for rank in () if overwrite else ranks & strange:  # before the other ranks are written
            TargetJob(_context_of_rank(target, rank), save_id="").check(overwrite=False)
    return pairs


def _classify_ranks(target: Context, pairs: Sequence[tuple[Context, Context]]) -> tuple[set[int], set[int]]:
    """Return the ranks committed at the target: those of an earlier copy of this save, and all others."""
    sources = {one.rank: one for one, _ in pairs}
    copied, strange = set[int](), set[int]()
    for rank in {*sources, *_list_ranks(target)}:
        there, source = _context_of_rank(target, rank), sources.get(rank)
        if read_log(there.store, there.retrier).counting is None:
            continue
        is_copied = target.options.resume and source is not None and _copy_at(there, _read_manifest(source)) is not None
        (copied if is_copied else strange).add(rank)
    return copied, strange


def _list_ranks(context: Context) -> set[int]:
    """List the ranks that have folders. Two listings must agree, because one may lack some."""

    def look() -> tuple[set[int], Hashable]:
        ranks = parse_ranks(context.retrier.collect(context.store.list_directories))
        return {*ranks}, ("ranks", *ranks)

    def changing() -> CheckpointChangedError:
        return CheckpointChangedError(f"{context.uri} lists other ranks each time. Copy again", uri=context.uri)

    return settle(look, changing=changing)


def _holds_one(context: Context) -> bool:
    """Return True if a checkpoint exists there that is not in folders of ranks."""
    return read_log(context.store, context.retrier).counting is not None or holds_torch_checkpoint(
        context.store, context.retrier
    )


def _context_of_rank(context: Context, rank: int) -> Context:
    return Context(context.location.child(f"rank-{rank}"), context.options, rank=rank)


def _read_manifest(source: Context) -> Manifest:
    """Read the manifest to copy. One without a commit time (format 1.0) gets the store's time."""
    found = resolve(source.store, source.retrier)
    if found.manifest.committed_at_ns is not None:
        return found.manifest
    try:
        info = source.retrier.call(source.store.head, manifest_key(found.number))
    except ObjectNotFoundError as error:
        raise CheckpointChangedError(
            f"{source.uri} was overwritten or removed while it was being looked at. Copy again", uri=source.uri
        ) from error
    version = max(found.manifest.version, (FORMAT_MAJOR, FORMAT_MINOR))
    return msgspec.structs.replace(found.manifest, version=version, committed_at_ns=ns_of(info.modified_at))


def _copy_resolved(
    source: Context, target: Context, progress: Progress, *, overwrite: bool, found: Manifest | None = None
) -> tuple[Manifest, CopyOutcome]:
    """Copy one manifest and its data; a second time if the source is overwritten meanwhile."""
    for is_last in (False, True):
        manifest = found or _read_manifest(source)
        there = _copy_at(target, manifest) if target.options.resume else None
        if there is not None and _is_whole(target, there, progress, overwrite=overwrite):
            num_bytes = sum(stored.size for stored in there.objects)
            return there, CopyOutcome(num_reused_bytes=num_bytes, was_there=True)
        try:
            return CopyJob(source, target, manifest, progress).run(overwrite=overwrite)
        except CorruptCheckpointError:
            found = _read_if_changed(source, manifest)
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
    """Return the manifest at the target if it is an earlier copy of exactly this one."""
    try:
        number = read_log(target.store, target.retrier).counting
        there = None if number is None else read_manifest(target.store, number, target.retrier)
    except CheckpointError:
        return None  # an unreadable manifest is no such copy
    if there is None:
        return None
    pairs = zip(there.objects, manifest.objects, strict=False)
    as_saved = msgspec.structs.replace(
        there,
        version=manifest.version,
        attempt=manifest.attempt,
        created_at=manifest.created_at,
        objects=[msgspec.structs.replace(mine, key=its.key) for mine, its in pairs],
    )
    return there if as_saved == manifest and len(there.objects) == len(manifest.objects) else None


def _is_whole(target: Context, there: Manifest, progress: Progress, *, overwrite: bool) -> bool:
    """Verify an earlier copy. Return True if it is whole, False if it is damaged and may be replaced.

    Raises `CorruptCheckpointError` if it is damaged and may not be replaced.
    """
    num_bytes, before_bytes = sum(stored.size for stored in there.objects), progress.done_bytes
    progress.expect(num_bytes)
    problems = VerifyJob(target, there, on_read=progress.add).run()
    if not problems:
        return True
    if has_changed(target, there):
        raise CheckpointChangedError(
            f"{target.uri} was overwritten or removed while it was being compared. Copy again",
            uri=target.uri,
        )
    told = f"{problems[0]}; and {len(problems) - 1} more" if len(problems) > 1 else problems[0]
    what = f"{target.uri}, which an earlier copy has committed, is damaged by now: {told}"
    if not overwrite:
        raise CorruptCheckpointError(
            what,
            uri=target.uri,
            problems=problems,
            hint=Hint(
                advice="Copy with {option}, which replaces it, or delete it and copy again.",
                option="overwrite",
                value="True",
            ),
        )
    _log.warning("%s. It is copied again", what)
    progress.add(before_bytes + num_bytes - progress.done_bytes)  # the rest is not read
    return False


def _read_if_changed(source: Context, manifest: Manifest) -> Manifest | None:
    """Return the manifest at the source if it is another one now."""
    try:
        source.retrier = source.new_retrier()
        now = _read_manifest(source)
    except CheckpointNotFoundError as error:
        raise CheckpointChangedError(
            f"{source.uri} was removed while it was being copied. Nothing was committed", uri=source.uri
        ) from error
    return None if now.attempt == manifest.attempt else now
