"""Copying a checkpoint from store to store: whole, checked, and committed last."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Sequence

import msgspec

from cloudckpt._commit.commit_time import ns_of
from cloudckpt._commit.resolve import (
    holds_torch_checkpoint,
    manifest_key,
    ranks_of,
    read_log,
    read_manifest,
    resolve,
    settle,
)
from cloudckpt._convert.copy_job import Copied, CopyJob
from cloudckpt._convert.progress import OnProgress, Progress
from cloudckpt._convert.reports import CopyReport
from cloudckpt._convert.sides import check_apart
from cloudckpt._convert.target import TargetJob
from cloudckpt._manifest.model import FORMAT_MAJOR, FORMAT_MINOR, Manifest
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.verify import VerifyJob
from cloudckpt._uri import parse_location
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from cloudckpt.options import Options
from cloudckpt.verification import has_changed

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
    nothing. Where all of it is committed there already, it is read and compared, and nothing is written
    (`CopyReport.was_there`); what is damaged of it is an error, or with `overwrite` copied again. `on_progress` is told
    the bytes done and their total. What a copy that is killed leaves, `cloudckpt.gc` removes.

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
        found = _saved_at(of_source)
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
        was_there=all(done.was_there for _, done in copied),
        num_requests=sum(context.retrier.num_requests for context in contexts),
        num_retries=sum(context.retrier.num_retries for context in contexts),
        copy_s=time.monotonic() - begun_s,
    )
    _log.info("copied %s", report)
    return report


def is_taken(target: str | os.PathLike[str], *, options: Options) -> bool:
    """Whether a checkpoint is committed at `target`. One listing; of manifests nothing is read."""
    there = Context(parse_location(target), options, rank=0)
    return read_log(there.store, there.retrier).counting is not None


def _of_ranks(source: Context, target: Context, *, overwrite: bool) -> list[tuple[Context, Context]]:
    """What ranks saved on their own. Rank 0 comes last: by it the others are found."""
    if holds_torch_checkpoint(source.store, source.retrier):
        raise CheckpointNotFoundError(
            f"{source.uri} holds a checkpoint of torch's own writer, which recorded no checksums to compare a copy "
            "with. Import it: cloudckpt import --format dcp, or cloudckpt.import_checkpoint",
            uri=source.uri,
        )
    ranks = _ranks_at(source)
    if not ranks:
        resolve(source.store, source.retrier)  # which says what lies there instead
    lacking = sorted({*range(max(ranks, default=0))} - ranks)
    if lacking:
        raise CheckpointNotFoundError(
            f"ranks saved on their own at {source.uri}, up to rank-{max(ranks)}, and rank-{lacking[0]} is not there: "
            "nothing was copied. Copy another checkpoint, or each rank that is there by its own URI",
            uri=source.uri,
        )
    pairs = [(_at_rank(source, rank), _at_rank(target, rank)) for rank in sorted(ranks, reverse=True)]
    copied, strange = _lying_at(target, pairs)
    # An earlier copy had come to its end where rank 0's is there, and nothing else.
    if 0 not in copied or strange or _holds_one(target):
        TargetJob(target, save_id="").check(overwrite=overwrite)
        for rank in () if overwrite else ranks & strange:  # before any other is written beside what is refused
            TargetJob(_at_rank(target, rank), save_id="").check(overwrite=False)
    return pairs


def _lying_at(target: Context, pairs: Sequence[tuple[Context, Context]]) -> tuple[set[int], set[int]]:
    """The ranks that are committed at the target: those that an earlier copy may have left, and those of others."""
    sources = {one.rank: one for one, _ in pairs}
    copied, strange = set[int](), set[int]()
    for rank in {*sources, *_ranks_at(target)}:
        there, source = _at_rank(target, rank), sources.get(rank)
        if read_log(there.store, there.retrier).counting is None:
            continue
        is_copied = target.options.resume and source is not None and _copy_at(there, _saved_at(source)) is not None
        (copied if is_copied else strange).add(rank)
    return copied, strange


def _ranks_at(context: Context) -> set[int]:
    """The ranks that have folders there, as two looks in a row list them: one may lack some."""

    def look() -> tuple[set[int], Hashable]:
        ranks = ranks_of(context.retrier.call(lambda: list(context.store.list_directories())))
        return {*ranks}, ("ranks", *ranks)

    def changing() -> CheckpointChangedError:
        return CheckpointChangedError(f"{context.uri} lists other ranks each time. Copy again", uri=context.uri)

    return settle(look, changing=changing)


def _holds_one(context: Context) -> bool:
    """Whether a checkpoint lies there itself, and not in folders of ranks."""
    return read_log(context.store, context.retrier).counting is not None or holds_torch_checkpoint(
        context.store, context.retrier
    )


def _at_rank(context: Context, rank: int) -> Context:
    return Context(context.location.child(f"rank-{rank}"), context.options, rank=rank)


def _saved_at(source: Context) -> Manifest:
    """Return the manifest to copy, with the time of its commit: where it has none, as before 1.1, the store's."""
    found = resolve(source.store, source.retrier)
    if found.manifest.committed_at_ns is not None:
        return found.manifest
    try:
        info = source.retrier.call(lambda: source.store.head(manifest_key(found.number)))
    except ObjectNotFoundError as error:
        raise CheckpointChangedError(
            f"{source.uri} was overwritten or removed while it was being looked at. Copy again", uri=source.uri
        ) from error
    version = max(found.manifest.version, (FORMAT_MAJOR, FORMAT_MINOR))
    return msgspec.structs.replace(found.manifest, version=version, committed_at_ns=ns_of(info.modified_at))


def _copy_resolved(
    source: Context, target: Context, progress: Progress, *, overwrite: bool, found: Manifest | None = None
) -> tuple[Manifest, Copied]:
    """The copy of one manifest and its data; once more where the source was overwritten meanwhile."""
    for is_last in (False, True):
        manifest = found or _saved_at(source)
        there = _copy_at(target, manifest) if target.options.resume else None
        if there is not None and _is_whole(target, there, progress, overwrite=overwrite):
            num_bytes = sum(stored.size for stored in there.objects)
            return there, Copied(num_reused_bytes=num_bytes, was_there=True)
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
    """What an earlier copy has committed of this very save, by all that the two manifests say."""
    try:
        number = read_log(target.store, target.retrier).counting
        there = None if number is None else read_manifest(target.store, number, target.retrier)
    except CheckpointError:
        return None  # what lies there cannot be read, and so is something else
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
    """Whether what is committed there still has the bytes that its manifest tells.

    Where not, raises `CorruptCheckpointError` unless it may be replaced.
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
            f"{what}. Copy with overwrite=True, which replaces it, or delete it and copy again",
            uri=target.uri,
            problems=problems,
        )
    _log.warning("%s. It is copied again", what)
    progress.add(before_bytes + num_bytes - progress.done_bytes)  # of the rest there is nothing to be read
    return False


def _changed(source: Context, manifest: Manifest) -> Manifest | None:
    """What is there now, if it is another."""
    try:
        source.retrier = source.new_retrier()
        now = _saved_at(source)
    except CheckpointNotFoundError as error:
        raise CheckpointChangedError(
            f"{source.uri} was removed while it was being copied. Nothing was committed", uri=source.uri
        ) from error
    return None if now.attempt == manifest.attempt else now
