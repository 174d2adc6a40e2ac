"""Try checkpoints in a given order until one can be loaded, on all ranks; `load_latest`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from cloudckpt._display import add_note
from cloudckpt._keywords import suggest_keywords
from cloudckpt._messages import join_first
from cloudckpt._this_process import is_first_warning
from cloudckpt.api import check_reader, load, resolve_state_dict
from cloudckpt.commit.log import read_log, resolve
from cloudckpt.dcp import LoadPlanner
from cloudckpt.dcp.live.entry import LiveEntry
from cloudckpt.dcp.live.objects import LiveObjects, Model, Optimizers
from cloudckpt.dcp.ranks.failures import SaveOrLoadError, causes_of
from cloudckpt.dcp.ranks.hosts import HostGroups, find_wanted_and_held
from cloudckpt.dcp.ranks.rank_calls import RankCalls
from cloudckpt.dcp.renaming import Rename
from cloudckpt.dcp.storage_reader import ObjectStoreReader
from cloudckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidURIError, StateDictMismatchError
from cloudckpt.events import Event
from cloudckpt.inspect.catalog import describe_deeper, list_checkpoints
from cloudckpt.inspect.verification import Verification, verify
from cloudckpt.io.client import MAX_LOOKS, open_client
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context, log_and_deliver
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.report import LoadReport, SkippedCheckpoint, place_of
from cloudckpt.uri import STEP_FOLDER, parse_location, redact

_log = logging.getLogger("cloudckpt")

_DAMAGED_OR_GONE = (CorruptCheckpointError, CheckpointNotFoundError)
_MAX_SHOWN_NAMES = 20


@suggest_keywords
def load_latest(
    state_dict: dict[str, Any] | str | os.PathLike[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    model: Model | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    dataloader: Any = None,
    extra: dict[str, Any] | None = None,
    random_state: bool = False,
    storage_reader: ObjectStoreReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    strict: bool | None = None,
    rename: Rename | None = None,
    verify_first: bool = False,
    options: Options | None = None,
) -> LoadReport:
    """Load the newest checkpoint directly under `root` that is whole, as `load` does.

    The coordinator lists the candidates, and all ranks try the same ones, newest first. If any rank finds a candidate
    damaged or gone, all ranks skip it with a warning. After one that is gone, `root` is listed again. Every other
    failure is raised as by `load`: a store that does not answer, a state dict that does not fit, a value that needs
    `allow_pickle`, a newer format.

    Tensors are filled while they are checked, and the next candidate overwrites all of them. A planner with
    ``allow_partial_load`` implies `verify_first`, because an older checkpoint may lack a tensor. So does
    ``strict=False`` with live objects.

    Args:
        state_dict: The state dict to fill in place; or `root`, if live objects are passed.
        root: Folder of the checkpoints.
        model: See `load`.
        optimizer: See `load`.
        scheduler: See `load`.
        dataloader: See `load`.
        extra: See `load`.
        random_state: See `load`.
        storage_reader: Reader to use. `options`, by default the reader's, then apply only to listing and verifying.
        planner: See `load`.
        process_group: See `load`.
        no_dist: See `load`.
        allow_pickle: See `load`.
        strict: See `load`.
        rename: See `load`.
        verify_first: Verify each candidate on the coordinator before any tensor is touched. The other ranks wait.
        options: See `load`.

    Returns:
        The report of this rank. Its ``skipped`` lists the candidates that were skipped.

    Raises:
        CheckpointException: See `load`. It is also a `CheckpointNotFoundError` if nothing is committed under `root`,
            and a `CorruptCheckpointError`, with the reason for each candidate, if none can be loaded.

    Example::

        report = cloudckpt.load_latest("s3://bucket/run", model=model)
        print(report.uri, report.skipped)

    """
    objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
    state_dict, root = resolve_state_dict(
        objects, state_dict, root, process_group, no_dist=no_dist, doing="loading", strict=strict
    )
    if root is None:
        raise InvalidURIError("no root was given: pass a URI such as 's3://bucket/run', or a path")
    if storage_reader is None:
        reader = ObjectStoreReader(
            root, options=options, allow_pickle=allow_pickle, strict=strict, rename=rename, _via=""
        )
    else:
        reader = check_reader(storage_reader, allow_pickle=allow_pickle, strict=strict, rename=rename)
    options = options or reader.options
    loaded = load_newest(
        state_dict,
        root,
        redact(root),
        lambda ranks: ranks.broadcast("find", functools.partial(_find_candidates, root, options)),
        reader_of=lambda _: reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        verify_first=verify_first,
        options=options,
    )
    assert loaded is not None  # noqa: S101  # `_find_candidates` raises if there is none
    return loaded[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint to load."""

    uri: str
    """URI of the checkpoint."""
    copy_uri: str | None = None
    """URI of a copy of the same save, for the objects that cannot be read at `uri`."""
    reaches_root: bool = True
    """The manager's root has it, or is owed a copy."""
    manifest_rank: int | None = None
    """The rank that has the manifest, for a step in a fast place."""


def load_newest(
    state_dict: dict[str, Any],
    root: str | os.PathLike[str],
    where: str,
    find_candidates: Callable[[RankCalls], list[Candidate]],
    *,
    reader_of: Callable[[Candidate], ObjectStoreReader],
    planner: LoadPlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    verify_first: bool,
    options: Options,
    on_skip: Callable[[SkippedCheckpoint], None] = lambda _: None,
) -> tuple[Candidate, LoadReport] | None:
    """Load the first candidate of `find_candidates` that is whole, as `load_latest` does.

    `where` names the places of the candidates. `find_candidates` runs on all ranks and returns the same candidates,
    newest first. It runs again after one turns out to be gone. `reader_of` returns the reader of a candidate; its
    options are those of the place. `on_skip` runs on all ranks for each skipped candidate and may raise. Returns the
    candidate and the report, or None if there is no candidate.
    """
    ranks = RankCalls(process_group, no_dist=no_dist, root=redact(root), timeout_s=options.timeout_s)
    has_live = any(isinstance(value, LiveEntry) for value in state_dict.values())
    is_partial = bool(getattr(planner, "allow_partial_load", False))
    skipped: list[SkippedCheckpoint] = []
    remaining = find_candidates(ranks)
    if not remaining:
        return None
    num_looks = 1
    while remaining:
        candidate, *remaining = remaining
        uri, reader = candidate.uri, reader_of(candidate)
        failure = None
        if verify_first or is_partial or (has_live and not reader.is_strict):
            failure = _verify_first(ranks, candidate, reader, copy_options=options)
        if failure is None:
            try:
                report = load(
                    state_dict,
                    uri,
                    storage_reader=reader,
                    planner=planner,
                    process_group=process_group,
                    no_dist=no_dist,
                )
            except SaveOrLoadError as error:
                # All ranks get the same failures, so all of them skip, or none.
                causes = list(causes_of(error))
                if not causes or not all(isinstance(cause, _DAMAGED_OR_GONE) for cause in causes):
                    _note_choice(error, causes, [candidate, *remaining])
                    raise
                failure = _make_skipped(uri, causes)
            else:
                report = reader.report = dataclasses.replace(report, skipped=tuple(skipped))
                return candidate, report
        if failure.is_gone and num_looks < MAX_LOOKS:
            num_looks += 1
            tried = {earlier.uri for earlier in skipped}
            remaining = [other for other in find_candidates(ranks) if other.uri not in tried]
            if any(other.uri == uri for other in remaining):  # another save has overwritten it, so it is not gone
                continue
        skipped.append(failure)
        on_skip(failure)
        kind = (CheckpointNotFoundError if failure.is_gone else CorruptCheckpointError).__name__
        place = place_of(reader.options.metadata)
        event = Event(name="load.skipped", uri=uri, rank=ranks.rank, place=place, error=kind, message=failure.why)
        log_and_deliver(event, options, words=f"skipping {uri} and trying the next checkpoint: {failure.why}")
    problems = [f"{earlier.uri}: {earlier.why}" for earlier in skipped]
    raise ranks.make_failure(
        CorruptCheckpointError(
            f"no checkpoint under {where} can be loaded. {'; '.join(problems)}",
            uri=redact(root),
            problems=problems,
        )
    )


def _note_choice(error: SaveOrLoadError, causes: Sequence[BaseException], candidates: Sequence[Candidate]) -> None:
    """Say which checkpoint was chosen, and which one is before it, if the newest of `candidates` does not fit."""
    if len(candidates) > 1 and any(isinstance(cause, StateDictMismatchError) for cause in causes):
        newest, earlier = (candidate.uri for candidate in candidates[:2])
        add_note(
            error,
            f"{newest} was chosen, because it was committed last. If it is not of this run, name the one before it, "
            f"{earlier}: restore(…, step=…), or cloudckpt.load",
        )


def _find_candidates(root: str | os.PathLike[str], options: Options) -> list[Candidate]:
    """Return the checkpoints under `root`, newest first."""
    infos = list_checkpoints(root, options=options)[::-1]
    if not infos:
        deeper = describe_deeper(root, options)
        hint = f": {deeper}" if deeper else ""
        if is_checkpoint(root, options):
            hint = ", which is itself a checkpoint (load it with cloudckpt.load)"
        raise CheckpointNotFoundError(
            f"no checkpoint is committed directly under {redact(root)}{hint}. Check the URI. A first run has nothing "
            "to load: check that with cloudckpt.latest(root) is None",
            uri=redact(root),
        )
    steps = [info.name for info in infos if STEP_FOLDER.fullmatch(info.name)]
    if steps and infos[0].name != steps[0] and is_first_warning("no step", infos[0].uri):
        _log.warning(
            "load_latest takes %s, which was committed last and is no step. The newest step beside it is %s: "
            "CheckpointManager(root).restore takes steps alone, and cloudckpt.load takes the URI of a checkpoint",
            infos[0].uri,
            steps[0],
        )
    return [Candidate(uri=info.uri) for info in infos]


def is_checkpoint(root: str | os.PathLike[str], options: Options) -> bool:
    """Return True if a checkpoint is committed at `root` itself. Raises `StoreError`, also for denied access."""
    return read_log(open_client(root, options), is_lenient=True).current_number is not None


def _verify_first(
    ranks: RankCalls, candidate: Candidate, reader: ObjectStoreReader, *, copy_options: Options
) -> SkippedCheckpoint | None:
    """Return what is wrong with a candidate, on all ranks, before any tensor is touched."""
    if reader.hosts is not None:
        skip = _find_damage_on_hosts(ranks, candidate, reader, reader.hosts)
        if skip is None or candidate.copy_uri is None:
            return skip
        copied = Candidate(uri=candidate.copy_uri)
        return ranks.broadcast("verify", functools.partial(_find_damage, copied, copy_options, copy_options))
    return ranks.broadcast("verify", functools.partial(_find_damage, candidate, reader.options, copy_options))


def _find_damage(candidate: Candidate, options: Options, copy_options: Options) -> SkippedCheckpoint | None:
    """Return what is wrong with a candidate, unless its copy is whole."""
    try:
        verify(candidate.uri, options=options)
    except _DAMAGED_OR_GONE as error:
        if candidate.copy_uri is None:
            return _make_skipped(candidate.uri, [error])
        return _find_damage(Candidate(uri=candidate.copy_uri), copy_options, copy_options)
    return None


class _HostProblems(NamedTuple):
    """The problems that the leader of a host has found in the objects of one save, by key."""

    attempt: str
    held: dict[str, list[str]]
    """Each object that this host has, without any text if it is whole."""
    missing: dict[str, list[str]]
    """The objects that another host may have."""


def _find_damage_on_hosts(
    ranks: RankCalls, candidate: Candidate, reader: ObjectStoreReader, hosts: HostGroups
) -> SkippedCheckpoint | None:
    """Return what is wrong with a candidate whose objects are in a directory of each host. All ranks call it."""

    def verify_here() -> _HostProblems | None:
        """Return None if this host has no manifest: its objects count as missing."""
        context = Context(parse_location(candidate.uri), reader.options, rank=ranks.rank)
        try:
            manifest = resolve(context.client).manifest if hosts.leads else None
        except _DAMAGED_OR_GONE:
            return None
        if manifest is None:
            return None
        indices_here = find_wanted_and_held(context, manifest, (), hosts).found
        problems = Verification(CheckpointReader(context, manifest)).run_each()
        keys = [stored.key for stored in manifest.objects]
        return _HostProblems(
            manifest.attempt,
            held={keys[index]: problems.get(index, []) for index in indices_here},
            missing={keys[index]: texts for index, texts in problems.items() if index not in indices_here},
        )

    hosts_problems = ranks.all_gather("verify", verify_here)
    chosen = hosts_problems[candidate.manifest_rank or 0]
    if chosen is None:
        return _make_skipped(candidate.uri, [CheckpointNotFoundError(f"{candidate.uri} is gone", uri=candidate.uri)])
    same_save = [host for host in hosts_problems if host is not None and host.attempt == chosen.attempt]
    problems = [text for host in same_save for texts in host.held.values() for text in texts]
    for key, texts in chosen.missing.items():
        if not any(key in host.held for host in same_save):
            problems += texts
    if not problems:
        return None
    why = f"{candidate.uri} is not whole: {join_first(problems, _MAX_SHOWN_NAMES)}"
    return _make_skipped(candidate.uri, [CorruptCheckpointError(why, uri=candidate.uri)])


def _make_skipped(uri: str, causes: Sequence[BaseException]) -> SkippedCheckpoint:
    is_gone = any(isinstance(cause, CheckpointNotFoundError) for cause in causes)
    return SkippedCheckpoint(uri=uri, why="; ".join(dict.fromkeys(map(str, causes))), is_gone=is_gone)
