"""A fast place in front of a manager's root: which saves it takes, and which of them the root is owed."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cloudckpt._display import shown, size
from cloudckpt._workers import RepeatedTask
from cloudckpt.convert.conversion import check_apart
from cloudckpt.convert.copying import copy
from cloudckpt.dcp.protocol import Coordinator
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    InvalidOptionError,
    InvalidURIError,
    StoreError,
    name_ranks,
)
from cloudckpt.events import Event
from cloudckpt.inspect.removal import KeptObject
from cloudckpt.io.client import open_client
from cloudckpt.manager.policies import (
    RetentionPolicy,
    SaveSchedule,
    StepInfo,
    find_superseded,
    is_positive,
    merge_places,
    name_of,
)
from cloudckpt.manager.retention import Retention
from cloudckpt.manager.steps import StepFolder, Steps, parse_folder
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context, log_and_deliver
from cloudckpt.stores.open import open_store
from cloudckpt.stores.probe import Scratch
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

FAST_KEY = "fast"
"""The key, in the ``metadata`` of a manifest, of what `make_record` makes."""
_TOKEN = b"cloudckpt looks whether all ranks see this place. Nothing needs this object: delete it.\n"
_FREE = 1.05
"""Free bytes that a save needs, relative to the largest step."""
_FINAL = (CorruptCheckpointError, CheckpointExistsError)
"""The failures of a copy that another try does not mend."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """Result of one run that copied owed steps from the fast place to the root."""

    drained: tuple[str, ...]
    """URIs under the root to which steps were copied, newest first."""
    failed: tuple[KeptObject, ...]
    """Steps of the fast place that the root is still owed, each with the reason. The next commit tries again, but for a
    damaged step, and for one whose name another save has taken at the root."""


def make_record(root: Location, *, is_owed: bool, may_overwrite: bool) -> dict[str, Any]:
    """Make the metadata by which a step in a fast place says whose it is, and if its root is owed a copy."""
    return {"root": root.uri, "is_owed": is_owed, "may_overwrite": may_overwrite}


class FastPlace:
    """The steps of a manager in a fast place, such as a local NVMe drive, in front of its root.

    A save is committed here, and training continues. The manifest says which root the step belongs to, and if that
    root is owed a copy, so a debt outlives the process. A thread of the coordinator copies what is owed, newest first.

    Args:
        location: The place.
        every: Steps that are saved here, besides those that are due at the root. None: no others.
        keep: Number of newest steps that stay here.
        root_steps: Steps of the root.
        root_policy: Checkpoints that the root keeps. It is not owed any other.
        options: Options of the manager.
        get_damaged_uris: Returns the URIs that `restore` found damaged.
        on_drained: Called in the thread with the URI of each copy.

    Raises:
        InvalidOptionError: An argument is invalid.
        InvalidURIError: One of the place and the root lies inside the other.

    """

    def __init__(
        self,
        location: Location,
        *,
        every: int | timedelta | None,
        keep: int,
        root_steps: Steps,
        root_policy: RetentionPolicy,
        options: Options,
        get_damaged_uris: Callable[[], Collection[str]],
        on_drained: Callable[[str], None],
    ) -> None:
        self._root_steps, self._root_policy, self._root_options = root_steps, root_policy, options
        self.options = dataclasses.replace(options, storage_options={})
        try:
            check_apart(Context(location, self.options, rank=0), Context(root_steps.root, options, rank=0))
        except InvalidURIError:
            raise InvalidURIError(
                f"the fast place {location.uri} and the root {root_steps.root.uri} are the same, or one is inside the "
                "other. Choose a fast place beside the root, on a drive that answers sooner"
            ) from None
        self.schedule = None if every is None else SaveSchedule(every, name="fast_every")
        self.steps = Steps(location, self.options)
        if not is_positive(keep):
            raise InvalidOptionError(f"CheckpointManager: fast_keep must be a positive whole number, not {keep!r}")
        policy = RetentionPolicy(keep_last=keep, keep_every=None, keep_best=None)
        self.retention = Retention(
            self.steps,
            self.options,
            policy,
            get_damaged_uris=get_damaged_uris,
            is_own=self._is_own,
            is_spared=self._is_unsettled,
        )
        self._get_damaged_uris, self._on_drained = get_damaged_uris, on_drained
        self._task = RepeatedTask(self._run, name="cloudckpt-drain")
        self._settled: set[tuple[datetime, str]] = set()
        """Commit time and URI of each step here that the root is known to have, or would not keep."""
        self._promised: dict[str, StepInfo | None] = {}
        """URIs of the steps that the root is owed: those that this process has seen here, and those that it has
        committed and not seen yet."""
        self.unowed_uris: frozenset[str] = frozenset()
        """URIs of the steps that the root is not owed, as of the last look by `merge`."""
        self._unread: frozenset[str] = frozenset()
        """URIs of the steps whose manifest could not be read in that look."""
        self._given_up: dict[tuple[datetime, str], CheckpointError] = {}
        """The failure of each step that cannot be copied."""
        self._has_looked, self._blind_ranks = False, list[int]()
        """The ranks that do not see the place, once `is_shared` has looked."""
        self._has_failed = False
        """The last save here failed because of the place, and none was made elsewhere since: the next one is."""
        self._has_warned_of_others = False
        self._problem = ""
        """Why the last save was not made here."""
        self.report: DrainReport | None = None
        """Report of the last run."""

    @property
    def uri(self) -> str:
        """URI of the place."""
        return self.steps.root.uri

    # All ranks call the next two together.

    def is_shared(self, coordinator: Coordinator) -> bool:
        """Return False if not all ranks see the place. Looks once, with an object that the coordinator puts there."""
        if not self._has_looked:
            scratch = Scratch(open_store(self.steps.root, self.options))
            try:
                key = coordinator.broadcast("find", lambda: _put_token(scratch))
                if key is None:  # nothing can be written, so `takes` refuses all saves; what is there may be readable
                    return True
                sees = coordinator.all_gather("find", lambda: self._sees(key))
            finally:
                scratch.clean_up()
            self._has_looked = True
            self._blind_ranks = [rank for rank, is_seen in enumerate(sees) if not is_seen]
            if self._blind_ranks and coordinator.rank == 0:
                _log.warning(
                    "not using the fast place %s, because %s cannot see what rank 0 writes there. It has to be one "
                    "directory for all ranks. All saves are sent to %s",
                    self.uri,
                    name_ranks(self._blind_ranks),
                    self._root.uri,
                )
        return not self._blind_ranks

    def takes(self, name: str, coordinator: Coordinator, *, is_owed: bool, may_overwrite: bool) -> tuple[bool, bool]:
        """Return whether the save of the step `name` is made here, and not at the root; and if the root is owed it.

        A save that replaces a step of the root, or one that the root is owed, is owed, too.
        """
        if self.schedule is not None:
            self.schedule.note_save()
        if not self.is_shared(coordinator):
            return False, is_owed
        found: tuple[bool, bool] = coordinator.broadcast(
            "find", lambda: self._decide(name, is_owed=is_owed, may_overwrite=may_overwrite)
        )
        return found

    def note_failure(self) -> None:
        """Take note that a save failed because of the place: the next one is made at the root."""
        self._has_failed = True

    def note_save_elsewhere(self) -> None:
        """Take note of a save at the root: the next one may be made here again."""
        self._has_failed = False

    def note_commit(self, uri: str, *, is_owed: bool) -> None:
        """Take note, on the coordinator, of a commit here. Starts to copy what the root is owed, and retention."""
        if is_owed:
            self._promised[uri] = None
        self.retention.start(uri)
        self.start()

    def has(self, uri: str) -> bool:
        """Return True if `uri` is that of a step here, committed or not."""
        return uri.rpartition("/")[0] == self.uri

    def merge(self, find_in_root: Callable[[], list[StepInfo]]) -> list[StepInfo]:
        """Return the steps of both places, newest first.

        A failure of this place is only logged if the root has steps: without any, the run would start from scratch.
        """
        if self._blind_ranks:
            found = find_in_root()
            if not found and (near := self._find_steps()):
                raise CheckpointNotFoundError(
                    f"{self._root.uri} has no step, and the fast place {self.uri} has some, such as {near[-1].uri}, "
                    f"which {name_ranks(self._blind_ranks)} cannot see. Let all ranks see that directory; or copy what "
                    f"is there with 'cloudckpt drain {self.uri} {self._root.uri}'; or pass another root to a new run",
                    uri=self._root.uri,
                )
            return found
        try:
            near = self._find_steps()
        except CloudckptError as error:
            found = find_in_root()
            if not found:
                told = f"the fast place {self.uri} cannot be read, and {self._root.uri} has no step: {error.message}"
                error.args = (told,)
                raise
            _log.warning("ignoring the fast place %s, and taking the steps of %s: %s", self.uri, self._root.uri, error)
            return found
        far = find_in_root()
        # A manifest here that cannot be read has no commit time by which to find its copy.
        in_root = {name_of(info) for info in far}
        return merge_places([one for one in near if one.uri not in self._unread or name_of(one) not in in_root], far)

    def _find_steps(self) -> list[StepInfo]:
        folders = self._list_own()
        self.unowed_uris = frozenset(one.uri for one in folders if not one.problem and not _is_owed(one))
        self._unread = frozenset(one.uri for one in folders if one.problem)
        return [one.info for one in folders if one.info is not None]

    def _list_own(self) -> list[StepFolder]:
        """Return the committed steps of this run. One whose manifest cannot be read counts: a restore names the damage.

        Raises `StoreError`, also if the access to one of them is denied.
        """
        folders = self.steps.list_folders(with_metadata=True)
        for one in folders:
            if one.denied is not None:
                raise one.denied
        committed = [one for one in folders if one.info is not None]
        others = [one.uri for one in committed if not one.problem and not self._is_own(one)]
        if others and not self._has_warned_of_others:
            self._has_warned_of_others = True
            _log.warning(
                "ignoring %d steps in the fast place %s, because they are of another run than %s: %s",
                len(others), self.uri, self._root.uri, ", ".join(others),
            )  # fmt: skip
        own = [one for one in committed if one.uri not in others]
        self._note_debts(own)
        return own

    def _note_debts(self, folders: Sequence[StepFolder]) -> None:
        self._promised |= {one.uri: one.info for one in folders if self._is_own(one) and self._is_unsettled(one)}

    def start(self) -> None:
        """Start to copy what the root is owed. Does not wait and never raises.

        If not all ranks see the place, what is there was not restored, so it must not get in the way of this run.
        """
        if self._blind_ranks:
            return
        try:
            self._task.request()
        except RuntimeError as error:
            _log.warning("did not look for steps that %s is owed: %s", self._root.uri, error)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no copy is in progress. Returns False after `timeout_s`."""
        return self._task.wait(timeout_s)

    def check(self) -> None:
        """Raise `CheckpointError` if the root does not have all that it is owed."""
        failed = () if self.report is None else self.report.failed
        if failed:
            reasons = "; ".join(f"{one.uri}: {one.reason}" for one in failed)
            raise CheckpointError(
                f"{self._root.uri} does not have all steps that were saved for it. Start the run again, or run "
                f"'cloudckpt drain {self.uri} {self._root.uri}'. {reasons}",
                uri=self._root.uri,
            )

    def drain(self, *, ends_at_s: float = math.inf) -> DrainReport:
        """Copy what the root is owed, newest first, until a time of ``time.monotonic``.

        Raises `CloudckptError` if the steps here cannot be listed. The report has all other failures.
        """
        promised = dict(self._promised)
        owed = self._find_owed()
        gone = sorted(promised.keys() - {one.uri for one in owed})
        drained: list[str] = []
        failed = [
            KeptObject(uri=uri, reason="it is not there any more")
            for uri in gone
            if not self._settle(uri, promised[uri])
        ]
        while owed:
            folder, *owed = owed
            try:
                drained += self._drain_one(folder, ends_at_s)
            except CloudckptError as error:
                failed.append(KeptObject(uri=folder.uri, reason=str(error)))
                if isinstance(error, StoreError) or time.monotonic() >= ends_at_s:  # so would the next one
                    failed += [KeptObject(uri=other.uri, reason="not tried after the failure") for other in owed]
                    break
        return self._report(drained, failed)

    def _report(self, drained: Sequence[str], failed: Sequence[KeptObject]) -> DrainReport:
        for one in failed:
            words = f"{self._root.uri} does not have the step that was saved to {one.uri} for it: {one.reason}"
            log_and_deliver(Event(name="drain.failed", uri=one.uri, rank=0), self.options, words=words)
        self.report = DrainReport(drained=tuple(drained), failed=tuple(failed))
        return self.report

    @property
    def _root(self) -> Location:
        return self._root_steps.root

    def _sees(self, key: str) -> bool:
        try:
            return open_client(self.steps.root, self.options).head(key) is not None
        except StoreError:
            return False

    def _decide(self, name: str, *, is_owed: bool, may_overwrite: bool) -> tuple[bool, bool]:
        """Decide, on the coordinator, as `takes`."""
        try:
            exists = (is_owed or may_overwrite) and self._is_in_root(name)
        except CloudckptError as error:  # the copy to the root finds out
            _log.warning("could not look if %s exists under %s: %s", name, self._root.uri, error)
            exists = may_overwrite
        if exists and not may_overwrite:
            return False, is_owed  # the save to the root raises that the step exists
        problem = "the last save there failed" if self._has_failed else self._find_problem(name)
        if problem and problem != self._problem:  # once, and not with each save
            words = f"saving {name}, and all others until this changes, to {self._root.uri}"
            _log.warning("%s and not to the fast place %s: %s", words, self.uri, problem)
        elif self._problem and not problem:
            _log.warning("saving %s to the fast place %s again", name, self.uri)
        self._problem = problem
        return not problem, is_owed or exists or self.steps.root.child(name).uri in self._promised

    def _find_problem(self, name: str) -> str:
        """Return why a save of the step `name` here would fail or do harm, or an empty text."""
        store = open_store(self.steps.root, self.options)
        scratch = Scratch(store)
        try:
            scratch.put(scratch.key, _TOKEN)
            committed = [one for one in self.steps.list_folders(with_metadata=True) if one.info is not None]
            self._note_debts(committed)
            free_bytes = store.free_bytes()
        except CloudckptError as error:
            return str(error).replace(scratch.key, "")
        finally:
            scratch.clean_up()
        mine = self.steps.root.child(name).uri
        if any(one.uri == mine and not one.problem and not self._is_own(one) for one in committed):
            return "another run has saved its step of this name there"
        num_bytes = max((one.info.num_bytes or 0 for one in committed if one.info is not None), default=0)
        if free_bytes is not None and free_bytes < _FREE * num_bytes:
            return f"less than {size(_FREE * num_bytes)} is free, which a step needs"
        return ""

    def _is_in_root(self, name: str) -> bool:
        folders = self._root_steps.list_folders(step=parse_folder(name))
        return any(one.info is not None and name_of(one.info) == name for one in folders)

    def _is_own(self, folder: StepFolder) -> bool:
        return _record_of(folder).get("root") == self._root.uri

    def _is_unsettled(self, folder: StepFolder) -> bool:
        return _is_owed(folder) and _key_of(folder) not in self._settled

    def _find_owed(self) -> list[StepFolder]:
        """Return the steps that the root may be owed, newest first."""
        owed = []
        for one in self._list_own():
            if one.problem and one.uri not in self._promised:
                _log.warning("cannot tell if %s is owed %s: %s", self._root.uri, one.uri, one.problem)
            elif one.problem or self._is_unsettled(one):
                owed.append(one)
        return sorted(owed, key=_key_of, reverse=True)

    def _is_settled(self, info: StepInfo) -> bool:
        """Return True if the root has a step, or a later one of its name, or would remove it at once."""
        policy = self._root_policy
        found = self._root_steps.list_folders(
            step=info.step if policy.keeps_all else None, with_metadata=policy.keep_best is not None
        )
        for one in found:
            if one.denied is not None:
                raise one.denied
        infos = [one.info for one in found if one.info is not None]
        # A later checkpoint of the step may stand beside a damaged one, under another name.
        has_it = any(one.step == info.step and one.committed_at >= info.committed_at for one in infos)
        return has_it or info in find_superseded([*infos, info], policy, damaged=self._get_damaged_uris())

    def _settle(self, uri: str, info: StepInfo | None) -> bool:
        """Return True, and forget the debt, if the root is not owed the step at `uri` any more."""
        if info is None or not self._is_settled(info):
            return False
        self._forget(uri, info)
        return True

    def _forget(self, uri: str, info: StepInfo) -> None:
        self._settled.add((info.committed_at, uri))
        self._promised.pop(uri, None)

    def _drain_one(self, folder: StepFolder, ends_at_s: float) -> list[str]:
        """Copy one step, unless the root is not owed it any more. Returns the URI of the copy, or raises the reason."""
        key = _key_of(folder)
        assert folder.info is not None  # noqa: S101  # `_list_own` returns committed steps alone
        if self._settle(folder.uri, folder.info):
            return []
        if (known := self._given_up.get(key)) is not None:
            raise known
        if folder.problem:
            raise CorruptCheckpointError(folder.problem, uri=folder.uri)

        def check_time(_done_bytes: int, _total_bytes: int) -> None:
            if time.monotonic() >= ends_at_s:
                raise CheckpointError("the deadline has passed; another drain sends only what is missing", uri=target)

        target = self._root.child(name_of(folder.info)).uri
        try:
            copy(
                folder.uri,
                target,
                options=self.options,
                target_options=dataclasses.replace(self._root_options, resume=True),
                overwrite=folder.metadata[FAST_KEY].get("may_overwrite") is True,
                on_progress=check_time,
            )
        except _FINAL as error:
            if self._settle(folder.uri, folder.info):  # another process has copied it, or saved it again
                return []
            self._given_up[key] = error
            raise
        self._forget(folder.uri, folder.info)
        words = f"copied {folder.uri} to {target}"
        log_and_deliver(Event(name="drain.committed", uri=target, rank=0), self.options, words=words)
        self._on_drained(target)
        return [target]

    def _run(self) -> None:
        try:
            self.drain()
        except BaseException as error:  # noqa: BLE001  # nobody can get it from this thread, so the report has it
            reason = str(error) or repr(error)
            if not self._promised:
                _log.warning("could not look for steps that %s is owed: %s", self._root.uri, reason)
            self._report((), [KeptObject(uri=uri, reason=reason) for uri in sorted(self._promised)])
        self.retention.start_again()


def drain(
    fast: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    deadline_s: float = math.inf,
    options: Options | None = None,
) -> DrainReport:
    """Copy the steps that `root` is owed from the fast place of a `CheckpointManager`, newest first.

    Every byte is compared with the checksums of the save. Objects and parts that an earlier copy has sent whole are not
    sent again. Safe beside a running manager: a step is committed once. It does not know the manager's rules, so it can
    copy a step that these have removed at the root; the next run of the manager removes it again.

    Args:
        fast: The fast place.
        root: Folder of all steps.
        deadline_s: Seconds after which no more is sent.
        options: Options for `root`.

    Returns:
        The steps that were copied, and those that `root` is still owed.

    Raises:
        CheckpointNotFoundError: `fast` has no step, or only steps of another root.
        InvalidURIError: One of the places lies inside the other.
        StoreError: The steps in `fast` cannot be listed.

    Example::

        report = drain("/nvme/run", "s3://bucket/run", deadline_s=20)
        print(report.failed)

    """
    options, location = options or Options(), parse_location(root)
    place = FastPlace(
        parse_location(fast),
        every=None,
        keep=1,
        root_steps=Steps(location, options),
        root_policy=RetentionPolicy(keep_last=None, keep_every=None, keep_best=None),
        options=options,
        get_damaged_uris=tuple,
        on_drained=lambda _: None,
    )
    committed = [one for one in place.steps.list_folders(with_metadata=True) if one.info is not None]
    roots = {str(_record_of(one)["root"]) for one in committed if "root" in _record_of(one)}
    if not committed:
        raise CheckpointNotFoundError(f"no step of a run is in {place.uri}: check the path", uri=place.uri)
    if roots and location.uri not in roots:
        raise CheckpointNotFoundError(
            f"the steps in {place.uri} are of {', '.join(sorted(roots))}, not of {location.uri}: pass the root as the "
            "run names it",
            uri=place.uri,
        )
    return place.drain(ends_at_s=time.monotonic() + deadline_s)


def _put_token(scratch: Scratch) -> str | None:
    """Put an object. Returns its key, or None if that fails."""
    try:
        scratch.put(scratch.key, _TOKEN)
    except StoreError:
        return None
    return scratch.key


def _record_of(folder: StepFolder) -> Mapping[str, Any]:
    record = folder.metadata.get(FAST_KEY)
    return record if isinstance(record, dict) else {}


def _is_owed(folder: StepFolder) -> bool:
    return _record_of(folder).get("is_owed") is True


def _key_of(folder: StepFolder) -> tuple[datetime, str]:
    assert folder.info is not None  # noqa: S101  # only committed steps are owed
    return folder.info.committed_at, folder.uri
