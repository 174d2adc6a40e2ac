"""Remove superseded checkpoints in a background thread after each commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cloudckpt import _clock
from cloudckpt._display import with_short_repr
from cloudckpt._messages import name_all
from cloudckpt._workers import RepeatedTask
from cloudckpt.commit.garbage_plan import attempt_time
from cloudckpt.commit.garbage_removal import WalkedLocation, delete_checkpoint
from cloudckpt.commit.log import resolve
from cloudckpt.commit.references import find_claimed
from cloudckpt.errors import AccessDeniedError, CheckpointError, CloudckptError, StoreError
from cloudckpt.events import Event, EventName
from cloudckpt.manager.policies import RetentionPolicy, explain_missing_metric, find_superseded
from cloudckpt.manager.steps import StepFolder, StepInfo, Steps, parse_step_uri, sort_newest_first
from cloudckpt.options import Options
from cloudckpt.pipeline.context import log_and_deliver
from cloudckpt.removal import KeptObject, gc, remove_spent_claims, walk_checkpoint
from cloudckpt.report import place_of
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")

_root_locks: dict[str, threading.Lock] = {}
ALIVE = timedelta(days=1)
"""Time after its last write for which a save counts as running, as in `gc`."""
_MAX_DENIED = 8
"""Denied removals after which a run stops. A few steps may be protected; after this many, the next is denied too."""
_NOT_TRIED = "not tried, since the removals before it failed"
_MAX_FENCES = 64
"""Fences of deleted checkpoints that one run removes. The bound keeps a run short."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """Result of one retention run of a `CheckpointManager`."""

    kept: tuple[str, ...]
    """URIs of the checkpoints that stay, newest first. The run touched none of them."""
    removed: tuple[str, ...]
    """URIs of the removed checkpoints, oldest first."""
    failed: tuple[KeptObject, ...]
    """Checkpoints that could not be removed, and steps without read access, each with the reason. The reason says if a
    checkpoint is half removed and can no longer be loaded. The next save tries again."""


def lock_root(root: str) -> threading.Lock:
    """Return the lock of `root`, to hold while a step is removed or restored.

    The lock keeps a manager of this process from removing a step that another manager reads.
    """
    return _root_locks.setdefault(root, threading.Lock())


class Retention:
    """Removes superseded checkpoints of one manager, in at most one thread.

    It runs on the coordinator; in a fast place of each host, on the rank that leads the host.

    Args:
        steps: Steps of the manager.
        policy: Checkpoints to keep.
        get_damaged_uris: Returns the URIs that `restore` found damaged.
        is_own: Returns True for a folder of this manager's run, given with its metadata. A step for which it returns
            False, or that is not in `Steps.run_uris`, is neither counted nor removed. None: `run_uris` decides.
        is_spared: Returns True for a folder, given with its metadata, that must stay. The policy counts it as any
            other. None: no folder must.

    """

    def __init__(
        self,
        steps: Steps,
        policy: RetentionPolicy,
        *,
        get_damaged_uris: Callable[[], Collection[str]],
        is_own: Callable[[StepFolder], bool] | None = None,
        is_spared: Callable[[StepFolder], bool] | None = None,
    ) -> None:
        self._steps = steps
        self.policy = policy
        self._get_damaged_uris = get_damaged_uris
        self._is_own, self._is_spared = is_own, is_spared
        self._lock = threading.Lock()
        self._task = RepeatedTask(self._run_and_report, name="cloudckpt-retention")
        self._report: RetentionReport | None = None
        self._own_step: int | None = None
        """Step that this manager committed last."""
        self._denied_uris: set[str] = set()
        """URIs whose removal was denied. A run tries them after all others."""
        self._has_warned_of_metric = self._has_looked_for_others = False
        self._claims_removed_at: datetime | None = None

    @property
    def report(self) -> RetentionReport | None:
        """Report of the last run."""
        with self._lock:
            return self._report

    def start(self, uri: str) -> None:
        """Start a run after a step was committed at `uri`. Does not wait and never raises."""
        with self._lock:
            self._steps.fenced_at.pop(uri, None)
            self._own_step = parse_step_uri(uri)
        self.request_run()

    def request_run(self) -> None:
        """Start a run. Does not wait and never raises."""
        if self.policy.keeps_all:
            return
        try:
            self._task.request()
        except RuntimeError as error:
            _log.warning("did not look for superseded checkpoints under %s: %s", self._steps.location.uri, error)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no run is in progress or wanted. Returns False after `timeout_s`."""
        return self._task.wait(timeout_s)

    def _run_and_report(self) -> None:
        report = self._run()
        with self._lock:
            self._report = report

    def _run(self) -> RetentionReport:
        failed: list[KeptObject] = []
        removed: list[str] = []
        infos: list[StepInfo] = []
        superseded: list[StepInfo] = []
        try:
            with self._lock:
                excluded, own_step = set(self._steps.fenced_at), self._own_step
            folders = self._list_folders(excluded_uris=excluded)
            infos = [folder.info for folder in folders if folder.info is not None]
            failed += [
                KeptObject(uri=folder.uri, reason=str(folder.denied)) for folder in folders if folder.denied is not None
            ]
            # A step whose metrics cannot be read may be one of the best, so it stays.
            unknown = [folder for folder in folders if folder.problem]
            failed += [KeptObject(uri=folder.uri, reason=folder.problem) for folder in unknown]
            damaged = {*self._get_damaged_uris(), *(folder.uri for folder in unknown)}
            spared = {folder.uri for folder in folders if self._is_spared is not None and self._is_spared(folder)}
            superseded = find_superseded(infos, self.policy, damaged=damaged, own_step=own_step)
            superseded = [info for info in superseded if info.uri not in spared]
            if superseded:
                self._warn_of_missing_metric(infos)
            self._remove_all(superseded, removed, failed)
            with self._lock:
                self._steps.fenced_at |= {
                    folder.uri: folder.fenced_at for folder in folders if folder.fenced_at is not None
                }
            self._remove_fences()
            if removed and self._steps.options.unchanged == "reference":
                self._remove_claims()
        except BaseException as error:  # noqa: BLE001  # no caller waits for this thread, so the report has it
            failed.append(KeptObject(uri=self._steps.location.uri, reason=str(error) or repr(error)))
        for item in failed:
            if item.reason == _NOT_TRIED:
                continue
            is_superseded = any(info.uri == item.uri for info in superseded)
            failure = "did not remove the superseded checkpoint" if is_superseded else "retention failed at"
            words = f"{failure} {item.uri}: {item.reason}"
            self._tell("retention.failed", item.uri, words)
        tried = {*removed, *(item.uri for item in failed)}
        kept = [info.uri for info in sort_newest_first(infos) if info.uri not in tried]
        return RetentionReport(kept=tuple(kept), removed=tuple(removed), failed=tuple(failed))

    def _warn_of_missing_metric(self, infos: Sequence[StepInfo]) -> None:
        """Warn once if `keep_best` keeps nothing, because no step has its metric."""
        keep_best = self.policy.keep_best
        if keep_best is None or self._has_warned_of_metric:
            return
        # Without any metrics, the first evaluation may be still to come.
        if (missing := explain_missing_metric(infos, keep_best[0])) is not None:
            self._has_warned_of_metric = True
            _log.warning("keep_best keeps no step under %s: %s", self._steps.location.uri, missing)

    def _warn_of_others(self, uris: Sequence[str]) -> None:
        """Warn once of steps that are neither counted nor removed, because this manager does not know their run.

        Those that come later are of another job, and `Steps` warns of that.
        """
        has_looked, self._has_looked_for_others = self._has_looked_for_others, True
        if has_looked or not uris:
            return
        _log.warning(
            "%s has %s, which this manager has neither restored nor saved: its rules neither count nor remove them. If "
            "this run has saved them, call restore before the first save. Otherwise pass another root, or delete them "
            "(cloudckpt rm)",
            self._steps.location.uri,
            name_all("step", sorted({parse_step_uri(uri) for uri in uris})),
        )

    def _remove_all(self, superseded: list[StepInfo], removed: list[str], failed: list[KeptObject]) -> None:
        num_denied = 0
        in_order = sorted(superseded, key=lambda info: info.uri in self._denied_uris)
        for number, info in enumerate(in_order, start=1):
            try:
                reason = self._remove(info)
            except StoreError as error:
                failed.append(KeptObject(uri=info.uri, reason=str(error)))
                if isinstance(error, AccessDeniedError):
                    self._denied_uris.add(info.uri)
                    num_denied += 1
                    if num_denied < _MAX_DENIED:
                        continue
                # The next removal would fail in the same way.
                failed += [KeptObject(uri=other.uri, reason=_NOT_TRIED) for other in in_order[number:]]
                return
            if reason is None:
                removed.append(info.uri)
            else:
                failed.append(KeptObject(uri=info.uri, reason=reason))

    def _list_folders(self, *, excluded_uris: set[str]) -> list[StepFolder]:
        """List the steps, with metadata if it is needed. Raises `StoreError` if all of them are denied."""
        needs_metadata = self.policy.keep_best is not None or self._is_own is not None or self._is_spared is not None
        folders = self._steps.list_folders(excluded_uris=excluded_uris, with_metadata=needs_metadata)
        if (is_own := self._is_own) is not None:
            folders = [folder for folder in folders if folder.info is None or folder.problem or is_own(folder)]
        run_uris = self._steps.run_uris
        own_uris = run_uris | self._steps.begun_uris
        others = [folder.uri for folder in folders if folder.info and folder.uri not in own_uris]
        if others or not any(folder.denied for folder in folders):  # they may be others, too
            self._warn_of_others(others)
        folders = [folder for folder in folders if folder.info is None or folder.uri in run_uris]
        denied = [folder.denied for folder in folders if folder.denied is not None]
        if denied and len(denied) == len(folders):
            raise denied[0]
        return folders

    def _remove(self, info: StepInfo) -> str | None:
        """Remove a checkpoint. Returns the reason if it stays. Raises `StoreError`."""
        with lock_root(self._steps.location.uri):
            try:
                reason = remove_step(info.uri, self._steps.options)
            except CheckpointError as error:
                return str(error)
        if reason is None:
            with self._lock:
                self._steps.fenced_at[info.uri] = _clock.now()
            self._tell("retention.removed", info.uri, f"removed the superseded checkpoint {info.uri}")
        return reason

    def _tell(self, name: EventName, uri: str, words: str) -> None:
        options = self._steps.options
        log_and_deliver(Event(name=name, uri=uri, rank=0, place=place_of(options.metadata)), options, words=words)

    def _remove_claims(self) -> None:
        """Remove, once a day, the claims of removed steps: without it, the data that they claimed stays for ever.

        It looks at the folders of steps alone: other runs may save under the same root.
        """
        now = _clock.now()
        if self._claims_removed_at is not None and now < self._claims_removed_at + ALIVE:
            return
        self._claims_removed_at = now
        try:
            for uri in self._steps.list_uris():
                remove_spent_claims(parse_location(uri), self._steps.options, older_than=ALIVE)
        except CloudckptError as error:
            root = self._steps.location.uri
            _log.warning("did not remove what removed steps under %s have claimed: %s", root, error)

    def _remove_fences(self) -> None:
        """Remove the fences of deleted checkpoints once no save can be running that began before the deletion."""
        before = _clock.now() - ALIVE
        with self._lock:
            old = [uri for uri, since in self._steps.fenced_at.items() if since < before]
        for uri in old[:_MAX_FENCES]:
            try:
                gc(uri, older_than=ALIVE, dry_run=False, options=self._steps.options)
            except CloudckptError as error:
                _log.warning("did not remove the fence of the deleted checkpoint %s: %s", uri, error)
                return
            with self._lock:
                self._steps.fenced_at.pop(uri, None)


def remove_step(uri: str, options: Options) -> str | None:
    """Remove the checkpoint at `uri` as `cloudckpt.delete` does. One that is gone already counts as removed.

    Returns the reason, and removes nothing, if another save has written there within `ALIVE`: it overwrites the step.
    A save that begins later fails, because the fence takes its number. Raises as `cloudckpt.delete` does.
    """
    alive_since = _clock.now() - ALIVE
    walked = walk_checkpoint(parse_location(uri), options)
    if _has_other_writer(walked, alive_since=alive_since):
        return "another save writes there, or was killed: gc removes its data after 24 h, or with --older-than 1s"
    delete_checkpoint(walked, conditional=options.commit == "conditional")
    return None


def _has_other_writer(walked: WalkedLocation, *, alive_since: datetime) -> bool:
    claimed = find_claimed(walked.client) if any(item.kind == "claim" for item in walked.items) else frozenset()
    kept = {walked.prefix + key for key in claimed or ()}  # what an overwrite has left to those who refer to it
    items = [item for item in walked.items if item.attempt and item.kind != "claim" and item.key not in kept]
    attempts = {item.attempt for item in items}
    if len(attempts) <= 1:
        return False  # the only attempt is the committed one; the manifest, which may be large, need not be read
    try:
        manifest = resolve(walked.client).manifest
    except CheckpointError:
        own: set[str] = set()
    else:
        named = {walked.prefix + key for key in manifest.own_keys}
        own = {item.attempt for item in items if item.key in named}
    return any(max(item.moment, attempt_time(item.attempt)) >= alive_since for item in items if item.attempt not in own)
