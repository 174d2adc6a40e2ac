"""Copy the steps of a fast place to the root that is owed them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudckpt._clock import datetime_of
from cloudckpt._display import count, with_short_repr
from cloudckpt._messages import join_first
from cloudckpt.commit.attempts import rank_of_key
from cloudckpt.commit.log import resolve
from cloudckpt.convert.copying import has_all_objects, run_copy, run_shared_copy
from cloudckpt.convert.transfer import Transfer, check_apart
from cloudckpt.dcp.ranks.hosts import HostGroups
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    InvalidURIError,
    StoreError,
)
from cloudckpt.events import Event
from cloudckpt.manager.policies import RetentionPolicy, find_superseded
from cloudckpt.manager.steps import StepFolder, StepInfo, Steps, name_of, note_own_uris, parse_folder, raise_if_denied
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context, log_and_deliver
from cloudckpt.removal import KeptObject
from cloudckpt.report import FAST_KEY, record_of
from cloudckpt.stores import options_at
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

_MAX_SHOWN_OBJECTS = 3
_MIN_TIMEOUT_S = 1.0
"""The shortest `Options.timeout_s` of a `drain` with a deadline."""
_FINAL_FAILURES = (CorruptCheckpointError, CheckpointExistsError)
"""Failures of a copy after which another try is in vain."""


class _MissingSharesError(CheckpointError):
    """Other hosts have not sent their shares of a step, and this process has sent all that it has."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """Result of one run that copied owed steps from the fast place to the root."""

    drained: tuple[str, ...]
    """URIs under the root to which steps were copied, newest first."""
    failed: tuple[KeptObject, ...]
    """Steps of the fast place that the root is still owed, each with the reason. The next commit tries again, except
    for a damaged step, and for a step whose name another save has taken at the root."""


def make_record(
    root: Location, *, is_owed: bool, may_overwrite: bool, host_names: Sequence[str] = ()
) -> dict[str, Any]:
    """Make the record of a step in a fast place: its root, and whether the root is owed a copy.

    `host_names` are the names of the hosts by rank, for messages, if each host has a directory of its own.
    """
    record = {"root": root.uri, "is_owed": is_owed, "may_overwrite": may_overwrite}
    return {**record, "hosts": list(host_names)} if host_names else record


class Drain:
    """Copies the steps of a fast place to the root that is owed them.

    The root is owed a step until it has a copy, or needs none any more. The manifest of the step records it
    (`make_record`), so the next process knows it, too.

    Args:
        location: The fast place.
        root_steps: Steps of the root.
        root_policy: Checkpoints that the root keeps. It needs no copy of any other.
        get_damaged_uris: Returns the URIs that `restore` found damaged.
        on_drained: Called with the URI of each copy.

    Raises:
        InvalidURIError: One of the places is inside the other.

    """

    def __init__(
        self,
        location: Location,
        root_steps: Steps,
        *,
        root_policy: RetentionPolicy,
        get_damaged_uris: Callable[[], Collection[str]],
        on_drained: Callable[[str], None],
    ) -> None:
        metadata = {**root_steps.options.metadata, FAST_KEY: {"root": root_steps.location.uri}}  # for `place_of`
        options = dataclasses.replace(root_steps.options, storage_options={}, metadata=metadata)
        self.steps = Steps(location, options, is_shared=True)
        try:
            check_apart(*(Context(steps.location, steps.options, rank=0) for steps in (self.steps, root_steps)))
        except InvalidURIError:
            raise InvalidURIError(
                f"the fast place {location.uri} and the root {root_steps.location.uri} are the same, or one is inside "
                "the other. Choose a fast place beside the root, on a faster drive"
            ) from None
        self.steps.run_uris, self.steps.begun_uris = root_steps.run_uris, root_steps.begun_uris
        self.root_steps, self._root_policy = root_steps, root_policy
        self.get_damaged_uris, self._on_drained = get_damaged_uris, on_drained
        self._not_owed: set[tuple[datetime, str]] = set()
        """Commit time and URI of each step of which the root needs no copy any more."""
        self.owed_infos: dict[str, StepInfo | None] = {}
        """The owed steps by URI. None stands for a step that this process has committed and not listed yet."""
        self._final_failures: dict[tuple[datetime, str], CheckpointError] = {}
        """The failure of each step that cannot be copied."""
        self.hosts: HostGroups | None = None
        """The ranks that share a directory, if not all do. Each rank sends its share of what its directory has."""
        self._sent: dict[tuple[datetime, str], tuple[int, float]] = {}
        """The steps of which this process has sent its share, each with how much has arrived, and since when."""
        self._given_up: dict[tuple[datetime, str], int] = {}
        """The steps for which this process has waited in vain, each with how much had arrived then."""
        self._has_warned_of_others = False
        self.report: DrainReport | None = None
        """Report of the last run."""

    def list_own(self, *, excluded_uris: Collection[str] = ()) -> list[StepFolder]:
        """Return the committed steps of this run, including damaged ones, whose damage a restore names.

        Raises `StoreError`, also if access to a step is denied.
        """
        folders = self.steps.list_folders(excluded_uris=excluded_uris, with_metadata=True)
        raise_if_denied(folders)
        committed = [folder for folder in folders if folder.info is not None]
        others = [folder.uri for folder in committed if not folder.problem and not self.is_own(folder)]
        if others and not self._has_warned_of_others and self.leads:
            self._has_warned_of_others = True
            _log.warning(
                "ignoring %d steps in the fast place %s, because they are of another run than %s: %s",
                len(others), self.steps.location.uri, self._root.uri, ", ".join(others),
            )  # fmt: skip
        own = [folder for folder in committed if folder.uri not in others]
        self.record_owed(own)
        return own

    def record_owed(self, folders: Sequence[StepFolder]) -> None:
        """Record which steps in `folders` are owed."""
        own = [folder for folder in folders if self.is_own(folder)]
        note_own_uris(self._root.child(folder.uri.rpartition("/")[2]).uri for folder in own)  # this job may copy them
        self.owed_infos |= {folder.uri: folder.info for folder in own if self.is_owed(folder)}

    def check(self) -> None:
        """Raise `CheckpointError` if the root is still owed a step after the last run."""
        failed = () if self.report is None else self.report.failed
        if failed:
            reasons = "; ".join(f"{item.uri}: {item.reason}" for item in failed)
            raise CheckpointError(
                f"{self._root.uri} does not have all steps that were saved for it. Start the run again, or run "
                f"'cloudckpt drain {self.steps.location.uri} {self._root.uri}'. {reasons}",
                uri=self._root.uri,
            )

    @property
    def leads(self) -> bool:
        """True if this process looks after the directory that it sees."""
        return self.hosts is None or self.hosts.leads

    @property
    def is_behind(self) -> bool:
        """True if the root is owed more than one step that can be copied."""
        return len(self.owed_infos.keys() - {uri for _, uri in self._final_failures}) > 1

    def drain(
        self,
        *,
        ends_at_s: float = math.inf,
        get_connections: Callable[[int], int] = lambda most: most,
        pause: Callable[[], bool] = lambda: False,
    ) -> DrainReport:
        """Copy the steps that the root is owed, newest first, until `ends_at_s`, a time of ``time.monotonic``.

        `get_connections` takes the most requests that the options allow, and returns how many may be in flight now. It
        is called again and again. `pause` is called while other hosts send their shares of a step: it waits a little,
        and returns False if this call must not look again.

        Raises `CloudckptError` if the steps here cannot be listed. The report has all other failures.
        """
        drained: list[str] = []
        arrived, arrived_at_s = dict[tuple[datetime, str], int](), time.monotonic()
        while True:
            newly_drained, failed, arrived_now = self._drain_all(ends_at_s, get_connections)
            drained += newly_drained
            if arrived_now != arrived:
                arrived, arrived_at_s = arrived_now, time.monotonic()
            # Other ranks may wait for this one meanwhile, for `timeout_s`. A share that did not come is probably lost.
            is_hopeful = any(self._given_up.get(key) != number for key, number in arrived.items())
            wait_s = self.root_steps.options.timeout_s / (2 if is_hopeful else 20)
            if time.monotonic() - arrived_at_s > wait_s:
                self._given_up |= arrived
                break
            if not arrived or not pause():
                break
        return self._set_report(drained, failed)

    def try_to_drain(self, get_connections: Callable[[int], int], pause: Callable[[], bool]) -> None:
        """Run `drain`, and report its failure instead of raising it."""
        try:
            self.drain(get_connections=get_connections, pause=pause)
        except BaseException as error:  # noqa: BLE001  # no caller waits for this thread, so the report has it
            reason = str(error) or repr(error)
            if not self.owed_infos:
                _log.warning("could not look for steps that %s is owed: %s", self._root.uri, reason)
            self._set_report((), [KeptObject(uri=uri, reason=reason) for uri in sorted(self.owed_infos)])

    def _drain_all(
        self, ends_at_s: float, get_connections: Callable[[int], int]
    ) -> tuple[list[str], list[KeptObject], dict[tuple[datetime, str], int]]:
        """Copy each owed step.

        Return the copies, the failures, and the steps that rank 0 waits for, each with a number that changes when other
        hosts send more of it.
        """
        owed_before = dict(self.owed_infos)
        owed = self._find_owed()
        drained: list[str] = []
        failed: list[KeptObject] = []
        awaited: list[tuple[datetime, str]] = []
        for uri in sorted(owed_before.keys() - {folder.uri for folder in owed}):
            info, reason = owed_before[uri], "it is not there any more"
            if info is not None:
                key = info.committed_at, uri
                if self.hosts is not None:
                    reason = "only other hosts have its manifest, and they have not sent it"
                    self._sent.setdefault(key, (0, time.monotonic()))
                if self._forget_if_copied(uri, info):
                    drained += self._note_copied(uri, info)
                    continue
                awaited.append(key)
            failed.append(KeptObject(uri=uri, reason=reason))
        while owed:
            folder, *owed = owed
            try:
                drained += self._drain_one(folder, ends_at_s, get_connections)
            except _MissingSharesError as error:
                if self.hosts is None or self.hosts.rank == 0:  # any other host has sent its share
                    failed.append(KeptObject(uri=folder.uri, reason=str(error)))
                    awaited.append(_key_of(folder))
            except CloudckptError as error:
                failed.append(KeptObject(uri=folder.uri, reason=str(error)))
                if isinstance(error, StoreError) or time.monotonic() >= ends_at_s:  # the next one would fail, too
                    failed += [KeptObject(uri=other.uri, reason="not tried after the failure") for other in owed]
                    return drained, failed, {}
        awaited = [key for key in awaited if self.hosts is not None and key[1] not in self.get_damaged_uris()]
        return drained, failed, {key: self._sent[key][0] for key in awaited}

    def _set_report(self, drained: Sequence[str], failed: Sequence[KeptObject]) -> DrainReport:
        for item in failed:
            words = f"{self._root.uri} does not have the step that was saved to {item.uri} for it: {item.reason}"
            event = Event(name="drain.failed", uri=item.uri, rank=self._rank, place="fast")
            log_and_deliver(event, self.steps.options, words=words)
        self.report = DrainReport(drained=tuple(drained), failed=tuple(failed))
        return self.report

    @property
    def _root(self) -> Location:
        return self.root_steps.location

    @property
    def _rank(self) -> int:
        return 0 if self.hosts is None else self.hosts.rank

    def is_own(self, folder: StepFolder) -> bool:
        """Return True if the step in a folder belongs to the root."""
        return root_of(folder.metadata) == self._root.uri

    def is_owed(self, folder: StepFolder) -> bool:
        """Return True if the root is owed the step in a folder, as far as this process knows."""
        return is_recorded_as_owed(folder.metadata) and _key_of(folder) not in self._not_owed

    def _find_owed(self) -> list[StepFolder]:
        """Return the steps that the root may be owed, newest first."""
        owed = []
        # Each removed step leaves a fence for a day, and this look follows each save: skip the fences.
        for folder in self.list_own(excluded_uris=self.steps.fenced_at.keys() - self.owed_infos.keys()):
            if folder.problem and folder.uri not in self.owed_infos:
                _log.warning("cannot tell if %s is owed %s: %s", self._root.uri, folder.uri, folder.problem)
            elif folder.problem or self.is_owed(folder):
                owed.append(folder)
        return sorted(owed, key=_key_of, reverse=True)

    def _needs_no_copy(self, info: StepInfo) -> bool:
        """Return True if the root has the step, or a later one of its number, or would remove a copy at once.

        A step of which it is not known that this run has saved it is never removed, so it is copied.
        """
        policy = self._root_policy
        folders = self.root_steps.list_folders(
            step=info.step if policy.keeps_all else None, with_metadata=policy.keep_best is not None
        )
        raise_if_denied(folders)
        infos = [folder.info for folder in folders if folder.info is not None]
        # A later checkpoint of the step may stand beside a damaged one, under another name.
        has_it = any(copy.step == info.step and copy.committed_at >= info.committed_at for copy in infos)
        run_uris = self.root_steps.run_uris
        if info.uri in run_uris:
            run_uris.update(copy.uri for copy in infos if copy.committed_at == info.committed_at)
        if has_it or info.uri not in run_uris:
            return has_it
        of_run = [copy for copy in infos if copy.uri in run_uris]
        return info in find_superseded([*of_run, info], policy, damaged=self.get_damaged_uris())

    def _forget_if_copied(self, uri: str, info: StepInfo | None) -> bool:
        """Forget the step at `uri` if the root needs no copy any more. Return True if so."""
        if info is None or not self._needs_no_copy(info):
            return False
        self._forget(uri, info)
        return True

    def _forget(self, uri: str, info: StepInfo) -> None:
        self._not_owed.add((info.committed_at, uri))
        self.owed_infos.pop(uri, None)

    def _drain_one(
        self,
        folder: StepFolder,
        ends_at_s: float,
        get_connections: Callable[[int], int],
        *,
        damage: CorruptCheckpointError | None = None,
    ) -> list[str]:
        """Copy one step, unless the root needs no copy any more. Return the URI of the copy, or raise the failure.

        `damage` is that of some objects: all others are sent.
        """
        info, key = folder.committed, _key_of(folder)
        if self._forget_if_copied(folder.uri, info):
            return self._note_copied(folder.uri, info)
        if (failure := self._final_failures.get(key)) is not None:
            raise failure
        if folder.problem:
            raise CorruptCheckpointError(folder.problem, uri=folder.uri)

        def check_time(_done_bytes: int, _total_bytes: int) -> None:
            if time.monotonic() >= ends_at_s:
                raise CheckpointError("the deadline has passed; another drain sends only what is missing", uri=target)

        target, is_shared = self._root.child(name_of(info)).uri, False
        try:
            transfer = Transfer(
                folder.uri,
                target,
                options=self.steps.options,
                target_options=dataclasses.replace(self.root_steps.options, resume=True),
                overwrite=folder.metadata[FAST_KEY].get("may_overwrite") is True,
                on_progress=check_time,
            )
            hedger = transfer.target.client.hedger
            hedger.limit_connections(lambda: get_connections(hedger.configured_connections))
            is_shared = self.hosts is not None or not has_all_objects(transfer.source)
            if is_shared:
                self._send_share(transfer, folder, damage)
            else:
                run_copy(transfer, find_base=lambda: self._find_base(target))
        except _FINAL_FAILURES as error:
            if self._forget_if_copied(folder.uri, info):  # another process has copied it, or saved it again
                return self._note_copied(folder.uri, info)
            if is_shared and damage is None and isinstance(error, CorruptCheckpointError):
                return self._drain_one(folder, ends_at_s, get_connections, damage=error)
            self._final_failures[key] = error
            raise
        return self._record_copy(folder.uri, info, target)

    def _record_copy(self, uri: str, info: StepInfo, target: str) -> list[str]:
        self._forget(uri, info)
        self._sent.setdefault((info.committed_at, uri), (0, 0.0))
        self.root_steps.known_uris.add(target)
        if uri in self.root_steps.run_uris:
            self.root_steps.run_uris.add(target)
        return self._note_copied(uri, info)

    def _find_base(self, target: str) -> Location | None:
        """Return the newest other step of the root, to which a copy may refer; None after damage at the root."""
        if any(uri.rpartition("/")[0] == self._root.uri for uri in self.get_damaged_uris()):
            return None  # other steps may share the damaged data
        infos = self.root_steps.find_committed(with_metadata=False)
        return next((self._root.child(name_of(info)) for info in infos if info.uri != target), None)

    def _send_share(self, transfer: Transfer, folder: StepFolder, damage: CorruptCheckpointError | None) -> None:
        """Send what this directory has of a step, without what has `damage`.

        Raise `damage`, or else `_MissingSharesError`, if the step is not committed then.
        """
        key = _key_of(folder)
        num_before, since_s = self._sent.setdefault(key, (0, time.monotonic()))
        is_stalled = time.monotonic() - since_s > self.root_steps.options.timeout_s / 4
        missing, num_arrived = run_shared_copy(
            transfer,
            is_mine=(lambda _: True) if self.hosts is None else self.hosts.is_mine,
            sends_all=self.hosts is None or is_stalled or key[1] in self.get_damaged_uris(),
            skips_damage=damage is not None,
            # Other hosts may leave out what another base has. Who waits for them in vain sends all that it has.
            find_base=lambda: None if is_stalled else self._find_base(transfer.target.uri),
        )
        if not missing:
            return
        if damage is not None:
            raise damage
        if num_arrived != num_before:
            self._sent[key] = num_arrived, time.monotonic()
        shown = join_first([stored.key for stored in missing], _MAX_SHOWN_OBJECTS, separator=", ")
        names = record_of(folder.metadata).get("hosts", [])
        writers = {rank_of_key(stored.key) for stored in missing if not stored.folder}  # else ranks of an older save
        lost = sorted({names[rank] for rank in writers if rank < len(names)})
        drain_command = f"'cloudckpt drain {self.steps.location.uri} {self._root.uri}'"
        where = f"Start the job with the drive of {join_first(lost, _MAX_SHOWN_OBJECTS, separator=', ')}, or run"
        if not lost:
            where = "If each host has a directory of its own, run"
        raise _MissingSharesError(
            f"{len(missing)} of its objects are not here, and no other host has sent them: {shown}. {where} "
            f"{drain_command} there. If they are lost, replace step {folder.committed.step} by another save, or delete "
            f"it on each host: 'cloudckpt rm --force {folder.uri}'",
            uri=transfer.target.uri,
        )

    def _note_copied(self, uri: str, info: StepInfo) -> list[str]:
        """Tell of the copy of a step, if this process has sent a share of it. Return its URI, or nothing.

        If each host sends a share, rank 0 tells of the whole step.
        """
        target = self._root.child(name_of(info)).uri
        has_sent = self._sent.pop((info.committed_at, uri), None) is not None
        if not has_sent or self._rank or target not in self.root_steps.known_uris:
            return []
        words = f"copied {uri} to {target}"
        log_and_deliver(Event(name="drain.committed", uri=target, rank=0), self.steps.options, words=words)
        self._on_drained(target)
        return [target]


def drain(
    fast: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    deadline_s: float = math.inf,
    options: Options | None = None,
) -> DrainReport:
    """Copy the steps that `root` is owed from the fast place of a `CheckpointManager`, newest first.

    Every byte is compared with the checksums of the save. Objects and parts that an earlier copy has sent whole are not
    sent again. Safe beside a running manager: a step is committed once. `drain` does not know the manager's rules, so
    it can copy a step that these have removed at the root; the next run of the manager removes the copy.

    Args:
        fast: The fast place.
        root: Folder of all steps.
        deadline_s: Seconds after which nothing more is sent. A part in flight is sent to its end. A request without
            progress is given up after as many seconds, or after `Options.timeout_s`.
        options: Options for `root`.

    Returns:
        The steps that were copied, and those that `root` is still owed.

    Raises:
        CheckpointNotFoundError: `fast` has no step, or only steps of another root.
        InvalidURIError: One of the places is inside the other.
        StoreError: The steps in `fast` cannot be listed.

    Example::

        report = drain("/nvme/run", "s3://bucket/run", deadline_s=20)
        print(report.failed)

    """
    place, location = parse_location(fast), parse_location(root)
    options = options or Options()
    options = dataclasses.replace(options, timeout_s=min(options.timeout_s, max(deadline_s, _MIN_TIMEOUT_S)))
    drain_to_root = Drain(
        place,
        Steps(location, options),
        root_policy=RetentionPolicy(keep_last=None, keep_every=None, keep_best=None),
        get_damaged_uris=tuple,
        on_drained=lambda _: None,
    )
    committed = [folder for folder in drain_to_root.steps.list_folders(with_metadata=True) if folder.info is not None]
    roots = {root_of(folder.metadata) for folder in committed} - {""}
    if not committed:
        raise CheckpointNotFoundError(f"no step of a run is in {place.uri}: check the path", uri=place.uri)
    if roots and location.uri not in roots:
        raise CheckpointNotFoundError(
            f"the steps in {place.uri} are of {', '.join(sorted(roots))}, not of {location.uri}: pass the root as the "
            "run names it",
            uri=place.uri,
        )
    return drain_to_root.drain(ends_at_s=time.monotonic() + deadline_s)


def root_of(metadata: Mapping[str, Any]) -> str:
    """Return the root of a step in a fast place; empty for a step elsewhere."""
    return str(record_of(metadata).get("root", ""))


def is_recorded_as_owed(metadata: Mapping[str, Any]) -> bool:
    """Return True if a manifest with this `metadata` records that the root is owed a copy."""
    return record_of(metadata).get("is_owed") is True


def explain_owed(uri: str, metadata: Mapping[str, Any], committed_at: datetime, options: Options) -> str:
    """Return why the step at `uri` in a fast place must stay, if its root lacks the owed copy; otherwise "".

    Looks under the root, with `options` if it is a store of the same kind as the fast place.
    """
    place = uri.rpartition("/")[0]
    root = root_of(metadata)
    if not is_recorded_as_owed(metadata) or root in ("", place):
        return ""
    try:
        infos = _list_at_root(root, uri, options)
    except CloudckptError as error:
        return f"{root} was owed it, and cannot be asked for its copy: {error}"
    if any(info.committed_at >= committed_at for info in infos):
        return ""
    return f"{root} is owed it, and has no copy: run 'cloudckpt drain {place} {root}' first"


def _list_at_root(root: str, uri: str, options: Options) -> list[StepInfo]:
    """Return the checkpoints under `root` of the step at `uri` in its fast place. Raises `CloudckptError`."""
    location = parse_location(root)
    options = options_at(location, parse_location(uri), options)
    folders = Steps(location, options).list_folders(step=parse_folder(uri.rpartition("/")[2]))
    raise_if_denied(folders)
    return [folder.info for folder in folders if folder.info is not None]


def explain_damage(uri: str, num_problems: int, options: Options) -> str:
    """Return what the problems that `verify` has found mean for a step in a fast place; "" for a step elsewhere.

    Raises `CloudckptError` if the manifest is damaged.
    """
    client = Context(parse_location(uri), options, rank=0).client
    manifest = resolve(client).manifest
    root = root_of(manifest.metadata)
    if root in ("", uri.rpartition("/")[0]):
        return ""
    committed_at = datetime_of(manifest.committed_at_ns or 0)
    listed = {info.key for info in client.list("data/")}
    num_missing = sum(stored.key not in listed for stored in manifest.objects)
    what, advice = f"{uri} is damaged: {count(num_problems, 'problem')}", ""
    if num_missing == num_problems:
        what = f"{uri} lacks {num_missing} of its {len(manifest.objects)} objects, and the others are whole"
        advice = (
            f"If each host has a directory of its own at {uri.rpartition('/')[0]}, verify the step on each. Otherwise "
            "it is damaged: load an older checkpoint"
        )
    with contextlib.suppress(CloudckptError):
        if any(info.committed_at == committed_at for info in _list_at_root(root, uri, options)):
            copy_uri = f"{root}/{uri.rpartition('/')[2]}"
            advice = f"restore reads the rest from the copy: verify that, too (cloudckpt verify {copy_uri})"
    return f"{what}. {advice}" if advice else ""


def _key_of(folder: StepFolder) -> tuple[datetime, str]:
    return folder.committed.committed_at, folder.uri
