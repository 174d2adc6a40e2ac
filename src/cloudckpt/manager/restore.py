"""Load one step, or the newest checkpoint that can be loaded, on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from cloudckpt._display import to_html
from cloudckpt.api import check_reader, entries_of, load
from cloudckpt.commit.log import read_log, resolve
from cloudckpt.dcp import LoadPlanner
from cloudckpt.dcp.hosts import HostGroups, find_held
from cloudckpt.dcp.live_entry import LiveEntry
from cloudckpt.dcp.live_objects import LiveObjects, Model, Optimizers
from cloudckpt.dcp.reader import ObjectStoreReader
from cloudckpt.dcp.renaming import Rename
from cloudckpt.dcp.save_and_load import RankCalls, SaveOrLoadError, causes_of
from cloudckpt.errors import (
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    InvalidURIError,
    join_first,
    name_all,
)
from cloudckpt.events import Event
from cloudckpt.inspect.catalog import describe_deeper, list_checkpoints
from cloudckpt.inspect.verification import Verification, verify
from cloudckpt.io.client import MAX_LOOKS, open_client
from cloudckpt.manager.steps import StepInfo, Steps
from cloudckpt.options import Options, naming_keywords
from cloudckpt.pipeline.context import Context, log_and_deliver
from cloudckpt.pipeline.reader import Reader
from cloudckpt.report import LoadReport, SkippedCheckpoint
from cloudckpt.uri import parse_location, redact

_log = logging.getLogger("cloudckpt")

_DAMAGED_OR_GONE = (CorruptCheckpointError, CheckpointNotFoundError)
_MAX_SHOWN_NAMES = 20


@naming_keywords
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
    state_dict, root = entries_of(
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
    if loaded is None:
        raise RuntimeError("_find_candidates returned no candidate; it raises instead")
    return loaded[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint to load."""

    uri: str
    """URI of the checkpoint."""
    copy_uri: str | None = None
    """URI of a copy of the same save, for the objects that cannot be had at `uri`."""
    reaches_root: bool = True
    """The manager's root has it, or is owed a copy."""
    holder: int | None = None
    """The rank that has the manifest, for a step in a fast place."""


def load_newest(
    state_dict: dict[str, Any],
    root: str | os.PathLike[str],
    where: str,
    find: Callable[[RankCalls], list[Candidate]],
    *,
    reader_of: Callable[[Candidate], ObjectStoreReader],
    planner: LoadPlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    verify_first: bool,
    options: Options,
    on_skip: Callable[[SkippedCheckpoint], None] = lambda _: None,
) -> tuple[Candidate, LoadReport] | None:
    """Load the first candidate of `find` that is whole, as `load_latest` does.

    `where` names the places of the candidates. `find` runs on all ranks and returns the same candidates, newest first.
    It runs again after one turns out to be gone. `reader_of` returns the reader of a candidate; its options are those
    of the place. `on_skip` runs on all ranks for each skipped candidate and may raise. Returns the candidate and the
    report, or None if `find` returns nothing.
    """
    ranks = RankCalls(process_group, no_dist=no_dist, root=redact(root), timeout_s=options.timeout_s)
    has_live = any(isinstance(value, LiveEntry) for value in state_dict.values())
    is_partial = bool(getattr(planner, "allow_partial_load", False))
    skipped: list[SkippedCheckpoint] = []
    waiting = find(ranks)
    if not waiting:
        return None
    num_looks = 1
    while waiting:
        candidate, *waiting = waiting
        uri, reader = candidate.uri, reader_of(candidate)
        skip = None
        if verify_first or is_partial or (has_live and not reader.is_strict):
            skip = _verify_first(ranks, candidate, reader, copy_options=options)
        if skip is None:
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
                    raise
                skip = _make_skipped(uri, causes)
            else:
                report = reader.report = dataclasses.replace(report, skipped=tuple(skipped))
                return candidate, report
        if skip.is_gone and num_looks < MAX_LOOKS:
            num_looks += 1
            tried = {earlier.uri for earlier in skipped}
            waiting = [other for other in find(ranks) if other.uri not in tried]
            if any(other.uri == uri for other in waiting):  # another save has overwritten it, so it is not gone
                continue
        skipped.append(skip)
        on_skip(skip)
        kind = CheckpointNotFoundError if skip.is_gone else CorruptCheckpointError
        log_and_deliver(
            Event(name="load.skipped", uri=uri, rank=ranks.rank, error=kind.__name__, message=skip.why),
            options,
            words=f"skipped {uri} and tries the next checkpoint: {skip.why}",
        )
    problems = [f"{earlier.uri}: {earlier.why}" for earlier in skipped]
    raise ranks.make_failure(
        CorruptCheckpointError(
            f"no checkpoint under {where} can be loaded. {'; '.join(problems)}",
            uri=redact(root),
            problems=problems,
        )
    )


def _find_candidates(root: str | os.PathLike[str], options: Options) -> list[Candidate]:
    """Return the checkpoints under `root`, newest first."""
    candidates = [Candidate(uri=info.uri) for info in reversed(list_checkpoints(root, options=options))]
    if not candidates:
        deeper = describe_deeper(root, options)
        hint = f": {deeper}" if deeper else ""
        if is_checkpoint(root, options):
            hint = ", which is itself a checkpoint (load it with cloudckpt.load)"
        raise CheckpointNotFoundError(
            f"no checkpoint is committed directly under {redact(root)}{hint}. Check the URI. A first run has nothing "
            "to load: check that with cloudckpt.latest(root) is None",
            uri=redact(root),
        )
    return candidates


def is_checkpoint(root: str | os.PathLike[str], options: Options) -> bool:
    """Return True if a checkpoint is committed at `root` itself. Raises `StoreError`, also for denied access."""
    return read_log(open_client(root, options), is_lenient=True).current_number is not None


def _verify_first(
    ranks: RankCalls, candidate: Candidate, reader: ObjectStoreReader, *, copy_options: Options
) -> SkippedCheckpoint | None:
    """Return what is wrong with a candidate, on all ranks, before any tensor is touched."""
    if reader.hosts is None:
        return ranks.broadcast("verify", functools.partial(_find_damage, candidate, reader.options, copy_options))
    return _find_damage_on_hosts(ranks, candidate, reader, reader.hosts)


def _find_damage(candidate: Candidate, options: Options, copy_options: Options) -> SkippedCheckpoint | None:
    """Return what is wrong with a candidate, unless its copy is whole."""
    try:
        verify(candidate.uri, options=options)
    except _DAMAGED_OR_GONE as error:
        if candidate.copy_uri is None:
            return _make_skipped(candidate.uri, [error])
        return _find_damage(Candidate(uri=candidate.copy_uri), copy_options, copy_options)
    return None


def _find_damage_on_hosts(
    ranks: RankCalls, candidate: Candidate, reader: ObjectStoreReader, hosts: HostGroups
) -> SkippedCheckpoint | None:
    """Return what is wrong with a candidate whose objects are in a directory of each host. All ranks call it."""

    def verify_here() -> tuple[str, dict[str, list[str]], dict[str, list[str]]] | None:
        """Return the attempt here, and the problems of its objects by key: of those that are here, and of the others.

        None if this host has no manifest: its objects count as missing.
        """
        context = Context(parse_location(candidate.uri), reader.options, rank=ranks.rank)
        try:
            manifest = resolve(context.client).manifest if hosts.leads else None
        except _DAMAGED_OR_GONE:
            return None
        if manifest is None:
            return None
        here = find_held(context.client, manifest, (), hosts).found
        problems = Verification(Reader(context, manifest)).run_each()
        keys = [stored.key for stored in manifest.objects]
        damaged = {keys[index]: problems.get(index, []) for index in here}
        missing = {keys[index]: texts for index, texts in problems.items() if index not in here}
        return manifest.attempt, damaged, missing

    answers = ranks.all_gather("verify", verify_here)
    wanted = answers[candidate.holder or 0]
    if wanted is None:
        return _make_skipped(candidate.uri, [CheckpointNotFoundError(f"{candidate.uri} is gone", uri=candidate.uri)])
    attempt, _, missing = wanted
    held = [answer[1] for answer in answers if answer is not None and answer[0] == attempt]
    texts = [text for of_host in held for problems in of_host.values() for text in problems]
    texts += [text for key in missing if not any(key in of_host for of_host in held) for text in missing[key]]
    if not texts:
        return None
    why = f"{candidate.uri} is not whole: {join_first(texts, _MAX_SHOWN_NAMES)}"
    return _make_skipped(candidate.uri, [CorruptCheckpointError(why, uri=candidate.uri)])


def _make_skipped(uri: str, causes: Sequence[BaseException]) -> SkippedCheckpoint:
    is_gone = any(isinstance(cause, CheckpointNotFoundError) for cause in causes)
    return SkippedCheckpoint(uri=uri, why="; ".join(dict.fromkeys(map(str, causes))), is_gone=is_gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of `CheckpointManager.restore`."""

    step: int
    """Number of the loaded step."""
    uri: str
    """URI of the loaded step."""
    report: LoadReport
    """Report of this rank."""

    def __repr__(self) -> str:
        skipped = f", skipped={self.skipped!r}" if self.skipped else ""
        return f"Restored(step={self.step}, uri={self.uri!r}{skipped})"

    _repr_html_ = to_html

    @property
    def skipped(self) -> tuple[SkippedCheckpoint, ...]:
        """Newer checkpoints that could not be loaded, and why."""
        return self.report.skipped


def check_fresh_start(steps: Steps, options: Options) -> None:
    """Raise `CheckpointNotFoundError` if no step is committed, but something is there that this run may have saved."""
    root = steps.location.uri
    if is_checkpoint(root, options):
        raise CheckpointNotFoundError(
            f"{root} is itself a checkpoint and has no steps below it. Pass the folder of all steps to the "
            "manager, or load this checkpoint with cloudckpt.load",
            uri=root,
        )
    if torch_steps := steps.find_torch_steps():
        raise CheckpointNotFoundError(
            f"no step is committed under {root}, but torch's own writer has saved {_name_steps(torch_steps)}. Import "
            "what it saved with cloudckpt.import_checkpoint(…, format='dcp'); or load one with restore(state_dict, "
            "step=…) and a manager with allow_pickle=True, if you trust its author; "
            "or pass another root to a new run",
            uri=root,
        )
    if half_deleted := steps.find_half_deleted():
        raise CheckpointNotFoundError(
            f"no step is committed under {root}, but the deletion of {_name_steps(half_deleted)} has begun and not "
            "ended, and hides what is there. Delete it again (cloudckpt rm), or pass another root to a new run. To "
            "load one whose data is all there, remove its last manifest.<n>.json, if that has at most 128 bytes",
            uri=root,
        )
    if of_ranks := steps.find_steps_of_ranks():
        raise CheckpointNotFoundError(
            f"no step is committed under {root}, but in {_name_steps(of_ranks)} each rank has a checkpoint "
            "of its own. Load those with cloudckpt.load(…, f'{uri}/rank-{rank}', no_dist=True), or pass another root "
            "to a new run",
            uri=root,
        )
    if others := _find_other_names(root, options):
        _log.warning(
            "no step is committed under %s, but checkpoints with other names are: %s. To go on with one of them, copy "
            "it to the name of a step first: cloudckpt cp %s/%s %s/step-<n>",
            root,
            join_first(others, _MAX_SHOWN_NAMES, separator=", "),
            root,
            others[0],
            root,
        )
    elif deeper := describe_deeper(root, options):
        _log.warning("no step is committed under %s: %s", root, deeper)


def _find_other_names(root: str, options: Options) -> list[str]:
    """Return the names of checkpoints that are not steps. The result is a hint, so failures are ignored."""
    try:
        return [info.name for info in list_checkpoints(root, options=options)]
    except CloudckptError:
        return []


def raise_missing(uri: str, step: int, infos: Sequence[StepInfo], *, where: str) -> NoReturn:
    """Raise `CheckpointNotFoundError`, which lists the committed steps, `infos` in the places `where`.

    `uri` is where the step would be.
    """
    committed = sorted({info.step for info in infos})
    there = f"committed there: {_name_steps(committed)}" if committed else "no step is committed"
    raise CheckpointNotFoundError(
        f"step {step} is not committed under {where}: {there}. Pass one that is, or no step for the newest",
        uri=uri,
    )


def _name_steps(steps: Sequence[int]) -> str:
    """Name `steps`, which are sorted, the highest first if there are many."""
    return name_all("step", steps if len(steps) <= _MAX_SHOWN_NAMES else steps[::-1], _MAX_SHOWN_NAMES)
