"""Restore a step of a manager's run: the newest one that can be loaded, or one that the caller names."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from cloudckpt._display import to_html
from cloudckpt._messages import find_near, join_first, name_all
from cloudckpt.api import load
from cloudckpt.commit.log import find_newest_step
from cloudckpt.dcp import LoadPlanner
from cloudckpt.dcp.ranks.failures import SaveOrLoadError, causes_of
from cloudckpt.dcp.ranks.rank_calls import RankCalls
from cloudckpt.dcp.renaming import Rename
from cloudckpt.dcp.storage_reader import ObjectStoreReader
from cloudckpt.errors import CheckpointNotFoundError, CloudckptError, CorruptCheckpointError
from cloudckpt.inspect.catalog import describe_deeper, list_checkpoints
from cloudckpt.io.client import open_client
from cloudckpt.manager.candidates import Candidate, is_checkpoint, load_newest
from cloudckpt.manager.fast_place import find_newest_saves
from cloudckpt.manager.places import Places
from cloudckpt.manager.steps import Steps, name_of
from cloudckpt.options import Options
from cloudckpt.report import LoadReport, SkippedCheckpoint
from cloudckpt.uri import Location

_log = logging.getLogger("cloudckpt")

_MAX_SHOWN_NAMES = 20
_MAX_LISTED = 1000
_MIN_SIMILARITY = 0.8
_NUMBER = re.compile(r"\d+")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Loads steps of a manager's run. All ranks call each method together."""

    places: Places
    make_rank_calls: Callable[[], RankCalls]
    """Returns the calls by which the ranks agree."""
    process_group: dist.ProcessGroup | None
    no_dist: bool
    verify_first: bool
    allow_pickle: bool
    skips_damage: bool
    """False: the damage of the newest step is raised."""
    note_damage: Callable[[str], None]
    """Takes the URI of a damaged step."""

    def load_newest(
        self, state_dict: dict[str, Any], *, planner: LoadPlanner | None, strict: bool | None, rename: Rename | None
    ) -> tuple[Candidate, LoadReport] | None:
        """Load the newest step that can be loaded. Returns None if there is no step."""
        return load_newest(
            state_dict,
            self.places.root.location.uri,
            str(self.places),
            self._find_candidates,
            reader_of=functools.partial(self._open_reader, strict=strict, rename=rename),
            planner=planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
            verify_first=self.verify_first,
            options=self.places.root.options,
            on_skip=self._handle_skipped,
        )

    def load_step(
        self,
        state_dict: dict[str, Any],
        step: int,
        *,
        planner: LoadPlanner | None,
        strict: bool | None,
        rename: Rename | None,
    ) -> tuple[Candidate, LoadReport]:
        """Load one step. Raises `CheckpointNotFoundError`, which lists the committed steps, if it is not committed."""
        ranks = self.make_rank_calls()
        candidates = self._find_candidates(ranks, step)
        candidate = candidates[0] if candidates else Candidate(uri=self.places.root.uri_of(step))
        try:
            report = load(
                state_dict,
                candidate.uri,
                storage_reader=self._open_reader(candidate, strict=strict, rename=rename),
                planner=planner,
                process_group=self.process_group,
                no_dist=self.no_dist,
            )
        except SaveOrLoadError as error:
            # All ranks get the same failures, so all of them take the same branch.
            causes = causes_of(error)
            if causes and all(isinstance(cause, CheckpointNotFoundError) for cause in causes):
                ranks.broadcast("find", lambda: self._raise_missing(step))
            if isinstance(error, CorruptCheckpointError):
                self.note_damage(candidate.uri)
            raise
        return candidate, report

    def _find_candidates(self, ranks: RankCalls, step: int | None = None) -> list[Candidate]:
        """Return the committed steps of all places, newest first, by their URIs on this rank. All ranks call it."""
        fast = self.places.fast
        gathered = None if fast is None else fast.gather_and_mend(ranks)
        manifest_ranks = {name: rank for name, (_, rank) in find_newest_saves(gathered or ()).items()}

        def find() -> list[Candidate]:
            placed = self.places.find_placed(step, with_metadata=False, gathered=gathered)
            if not placed and step is None:
                check_fresh_start(self.places.root)
            if fast is not None and step is None and placed and not any(fast.has_step(info.uri) for info, _ in placed):
                fast.warn_of_no_step()
            return [
                Candidate(
                    uri=info.uri,
                    copy_uri=info.copy_uri,
                    reaches_root=reaches_root,
                    manifest_rank=(
                        None if fast is None or not fast.has_step(info.uri) else manifest_ranks.get(name_of(info), 0)
                    ),
                )
                for info, reaches_root in placed
            ]

        candidates = ranks.broadcast("find", find)
        if fast is None:
            return candidates
        here = fast.steps.location  # hosts may have their directories under different paths
        return [
            candidate
            if candidate.manifest_rank is None
            else dataclasses.replace(candidate, uri=here.child(candidate.uri.rpartition("/")[2]).uri)
            for candidate in candidates
        ]

    def _open_reader(self, candidate: Candidate, *, strict: bool | None, rename: Rename | None) -> ObjectStoreReader:
        root, fast = self.places.root, self.places.fast if candidate.manifest_rank is not None else None
        return ObjectStoreReader(
            candidate.uri,
            options=root.options if fast is None else fast.steps.options,
            allow_pickle=self.allow_pickle,
            strict=strict,
            rename=rename,
            _via="",
            _copy=None if candidate.copy_uri is None else (candidate.copy_uri, root.options),
            _may_be_renamed=True,
            _hosts=None if fast is None else fast.hosts,
            _manifest_rank=candidate.manifest_rank or 0,
        )

    def _handle_skipped(self, skipped: SkippedCheckpoint) -> None:
        if skipped.is_gone:
            return
        self.note_damage(skipped.uri)
        if not self.skips_damage:
            raise self.make_rank_calls().make_failure(
                CorruptCheckpointError(
                    f"the newest step, {skipped.uri}, is damaged, and on_damaged='raise' does not skip it: "
                    f"{skipped.why}. Restore an older step with restore(state_dict, step=…), or skip damaged steps "
                    "with on_damaged='skip'",
                    uri=skipped.uri,
                )
            )

    def _raise_missing(self, step: int) -> NoReturn:
        committed = sorted({info.step for info in self.places.find_committed(with_metadata=False)})
        there = f"committed there: {_name_steps(committed)}" if committed else "no step is committed"
        raise CheckpointNotFoundError(
            f"step {step} is not committed under {self.places}: {there}. Pass one that is, or no step for the newest",
            uri=self.places.root.uri_of(step),
        )


def check_fresh_start(steps: Steps) -> None:
    """Raise `CheckpointNotFoundError` if no step is committed, but something is there that this run may have saved."""
    root, options = steps.location.uri, steps.options
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
    elif files := _find_files(root, options):
        _log.warning(
            "no step is committed under %s, but files of another program are: %s. To go on with one, load it into the "
            "model before the first save, or make a step of it: cloudckpt import %s/%s %s/step-<n>%s",
            root,
            join_first(files, _MAX_SHOWN_NAMES, separator=", "),
            root,
            files[-1],
            root,
            " --add-prefix model, and pass strict=False" if files[-1].endswith(".safetensors") else " --format torch",
        )
    elif deeper := describe_deeper(root, options):
        _log.warning("no step is committed under %s: %s", root, deeper)
    elif near := _find_near_root(steps.location, options):
        _log.warning(
            "no step is committed under %s, but %s has steps. If this is no new run, correct the root", root, near
        )


def _find_other_names(root: str, options: Options) -> list[str]:
    """Return the names of checkpoints that are not steps. The result is a hint, so failures are ignored."""
    try:
        return [info.name for info in list_checkpoints(root, options=options)]
    except CloudckptError:
        return []


def _find_near_root(location: Location, options: Options) -> str:
    """Return the URI of the folder for whose name that of `location` may be a slip, if it has steps; else "".

    Names that differ in their numbers alone are those of other runs. The result is a hint, so failures are ignored.
    """
    if not location.name:
        return ""
    try:
        names = open_client(location.parent, options).list_directories()
        others = [name for name in names if _NUMBER.sub("", name) != _NUMBER.sub("", location.name)]
        if name := find_near(location.name, others, cutoff=_MIN_SIMILARITY):
            near = location.parent.child(name)
            return near.uri if find_newest_step(open_client(near, options)) else ""
    except CloudckptError:
        pass
    return ""


def _find_files(root: str, options: Options) -> list[str]:
    """Return the names of files in which other programs keep models. The result is a hint, so failures are ignored."""
    try:
        names = [info.key for info in open_client(root, options).list(max_results=_MAX_LISTED)]
    except CloudckptError:
        return []
    return sorted(name for name in names if "/" not in name and name.endswith(_SUFFIXES))


def _name_steps(steps: Sequence[int]) -> str:
    """Name `steps`, which are sorted, the highest first if there are many."""
    return name_all("step", steps if len(steps) <= _MAX_SHOWN_NAMES else steps[::-1], _MAX_SHOWN_NAMES)
