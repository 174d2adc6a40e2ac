"""A fast place in front of a manager's root: which saves are made there, and the steps of both places."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from cloudckpt._display import size
from cloudckpt._workers import RepeatedTask
from cloudckpt.commit.times import newest_commit_time_ns, note_commit_time_ns, ns_of
from cloudckpt.dcp.hosts import HostGroups, choose_groups
from cloudckpt.dcp.save_and_load import RankCalls
from cloudckpt.errors import CheckpointNotFoundError, CloudckptError, InvalidOptionError, StoreError, name_ranks
from cloudckpt.io.client import open_client
from cloudckpt.manager.debts import Debts, is_recorded_debt
from cloudckpt.manager.policies import RetentionPolicy, SaveSchedule, is_positive
from cloudckpt.manager.retention import Retention
from cloudckpt.manager.steps import StepFolder, StepInfo, name_of, parse_folder, sort_newest_first
from cloudckpt.options import CONNECTIONS_BESIDE_TRAINING
from cloudckpt.stores.open import open_store
from cloudckpt.stores.probe import KEY_PREFIX, Scratch

_log = logging.getLogger("cloudckpt")

_TOKEN = b"cloudckpt looks whether all ranks see this place. Nothing needs this object: delete it.\n"
_FREE = 1.05
"""Free bytes that a save needs, relative to the largest step."""
Found: TypeAlias = tuple[list[StepFolder], CloudckptError | None]
"""The steps of one directory, or why they cannot be listed."""


class FastPlace:
    """The steps of a manager in a fast place, such as a local NVMe drive, in front of its root.

    A save is committed here, and training continues. A thread of the coordinator then copies to the root the steps that
    it is owed.

    Args:
        debts: The steps of the place that the root is owed.
        every: Schedule of the steps that are saved here, besides the steps that are due at the root. None: no others.
        keep: Number of newest steps that stay here.

    """

    def __init__(self, debts: Debts, *, every: int | timedelta | None, keep: int) -> None:
        self.debts, self.steps, self.uri = debts, debts.steps, debts.steps.location.uri
        self._root_steps, self._root = debts.root_steps, debts.root_steps.location
        self.schedule = None if every is None else SaveSchedule(every, name="fast_every")
        if not is_positive(keep):
            raise InvalidOptionError(f"CheckpointManager: fast_keep must be a positive whole number, not {keep!r}")
        self.retention = Retention(
            self.steps,
            RetentionPolicy(keep_last=keep, keep_every=None, keep_best=None),
            get_damaged_uris=debts.get_damaged_uris,
            is_own=debts.is_own,
            is_spared=debts.is_open,
        )
        self._task = RepeatedTask(self._drain, name="cloudckpt-drain")
        self._blind_ranks: list[int] | None = None
        """The ranks that cannot use the place. None until `open` knows them."""
        self.hosts: HostGroups | None = None
        """The ranks that share a directory, if not all do."""
        self._holders: dict[str, int] = {}
        """The rank whose directory has the manifest of a step, by URI, on the coordinator."""
        self.has_failed = False
        """True if the last save here failed because of the place: the next save is made at the root."""
        self._has_looked = False
        """True once all steps here were looked at."""
        self._problem = ""
        """The reason why the last save was not made here; empty if it was."""

    def open(self, ranks: RankCalls) -> bool:
        """Find out which ranks see the same directory. Returns False if the place is not used. All ranks call it.

        All ranks look for an object that the coordinator puts. If some do not see it, each rank puts one, and looks
        for all. The result is kept. If a rank can put nothing, this returns True, and the next call looks again: the
        steps there may still be readable, and `choose_place` refuses all saves.
        """
        if self._blind_ranks is None:
            scratch = Scratch(open_store(self.steps.location, self.steps.options))
            self.hosts = None
            try:
                key = ranks.broadcast("find", lambda: _put_token(scratch))
                sees = ranks.all_gather("find", lambda: key is not None and self._sees(key))
                keys = [key]
                if not all(sees):
                    keys = ranks.all_gather("find", lambda: _put_token(scratch))
                    views = ranks.all_gather("find", lambda: self._find_visible(keys, ranks.rank))
                    self.hosts = choose_groups(ranks.rank, views) if any(keys) else None
            finally:
                scratch.clean_up()
            if None in keys:
                return True
            is_used = all(sees) or (self.hosts is not None and ranks.is_guarded)
            self._blind_ranks = [] if is_used else [rank for rank, is_seen in enumerate(sees) if not is_seen]
            if self._blind_ranks and ranks.rank == 0:
                _log.warning(
                    "not using the fast place %s, because %s cannot see what rank 0 writes there, and the ranks cannot "
                    "exchange what each host has. All saves are sent to %s",
                    self.uri,
                    name_ranks(self._blind_ranks),
                    self._root.uri,
                )
        return not self._blind_ranks

    def choose_place(self, ranks: RankCalls, name: str, *, is_owed: bool, may_overwrite: bool) -> tuple[bool, bool]:
        """Decide as `_decide`, on all ranks together.

        A directory of each host takes no step that the root is owed, since no host has all of it to copy.
        """
        hosts = self.hosts
        find_problem: Callable[[str], str] = self._find_problem
        if hosts is not None:
            if is_owed:
                return False, True
            answers = ranks.all_gather(
                "find", lambda: (self._find_problem(name) if hosts.leads else "", newest_commit_time_ns())
            )
            for _, newest_ns in answers:
                note_commit_time_ns(newest_ns)
            problem = next((f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(answers) if problem), "")
            find_problem = lambda _name: problem  # noqa: E731
        decide = functools.partial(
            self._decide, name, is_owed=is_owed, may_overwrite=may_overwrite, find_problem=find_problem
        )
        return ranks.broadcast("find", decide)

    def _decide(
        self, name: str, *, is_owed: bool, may_overwrite: bool, find_problem: Callable[[str], str]
    ) -> tuple[bool, bool]:
        """Return, on the coordinator, if the step `name` is saved here, not at the root; and if the root is owed it.

        The root is also owed a step that replaces a step of the root, or an owed one.
        """
        try:
            exists = (is_owed or may_overwrite) and self._root_steps.may_have(name)
        except CloudckptError as error:  # the copy to the root finds it out
            _log.warning("could not look if %s exists under %s: %s", name, self._root.uri, error)
            exists = may_overwrite
        if exists and not may_overwrite:
            return False, is_owed  # the save to the root raises that the step exists, unless it was removed since
        problem = "the last save there failed" if self.has_failed else find_problem(name)
        if problem and problem != self._problem:  # once, and not with each save
            words = f"saving {name}, and all others until this changes, to {self._root.uri}"
            _log.warning("%s and not to the fast place %s: %s", words, self.uri, problem)
        elif self._problem and not problem:
            _log.warning("saving %s to the fast place %s again", name, self.uri)
        self._problem = problem
        is_owed = is_owed or exists or self.steps.location.child(name).uri in self.debts.known
        return not problem and not (is_owed and self.hosts is not None), is_owed

    def leads(self, rank: int) -> bool:
        """Return True if `rank` looks after a directory of the place: rank 0, or the lowest rank of each host."""
        return rank == 0 if self.hosts is None else self.hosts.leaders[rank] == rank

    def note_commit(self, uri: str, *, is_owed: bool) -> None:
        """Record a commit here, on a rank that `leads`. Starts retention, and the copies that the root is owed."""
        if is_owed:
            self.debts.known[uri] = None
        self.retention.start(uri)
        self.start()

    def has(self, uri: str) -> bool:
        """Return True if `uri` belongs to a step here, committed or not."""
        return uri.rpartition("/")[0] == self.uri

    def gather(self, ranks: RankCalls) -> list[Found] | None:
        """Return the steps in the directory of each host; None if all ranks share one. All ranks call it together."""
        hosts = self.hosts
        if hosts is None:
            return None
        return ranks.all_gather("find", lambda: self._list_here() if hosts.leads else ([], None))

    def holder_of(self, uri: str) -> int:
        """Return, on the coordinator, the rank whose directory has the manifest of a step that was found here."""
        return self._holders.get(uri, 0)

    def find_committed(
        self, step: int | None, *, with_metadata: bool, gathered: Sequence[Found] | None = None
    ) -> list[tuple[StepInfo, bool]]:
        """Return the committed steps of both places, newest first, each with True if the root has it or is owed it.

        `step` and `with_metadata` are those of `Steps.find_committed`, and `gathered` is what `gather` has returned.

        A failure of this place, or of one host's directory, is only logged if the root has steps: without any, the run
        would start from scratch.
        """
        near, failure = ([], None) if self._blind_ranks else self._merge_hosts(gathered or [self._list_here()])
        far = self._root_steps.find_committed(step, with_metadata=with_metadata)
        if failure is not None:
            if not far:
                words = f"the fast place {self.uri} cannot be read, and {self._root.uri} has no step: {failure.message}"
                failure.args = (words,)
                raise failure
            _log.warning(
                "ignoring the fast place %s, and taking the steps of %s: %s", self.uri, self._root.uri, failure
            )
        if self._blind_ranks and not far and (unseen := self.debts.list_own()):
            raise CheckpointNotFoundError(
                f"{self._root.uri} has no step, and the fast place {self.uri} has some, such as {unseen[-1].uri}, "
                f"which {name_ranks(self._blind_ranks)} cannot see. Let all ranks see that directory; or copy what "
                f"is there with 'cloudckpt drain {self.uri} {self._root.uri}'; or pass another root to a new run",
                uri=self._root.uri,
            )
        return [pair for pair in _merge(near, far, self.debts.is_open) if step in (None, pair[0].step)]

    def start(self) -> None:
        """Start to copy the steps that the root is owed. Does not wait and never raises.

        Does nothing if not all ranks see the place: its steps were not restored, so they must not replace those of this
        run.
        """
        if self._blind_ranks or (self.hosts is not None and self.hosts.rank):
            return
        try:
            self._task.request()
        except RuntimeError as error:
            _log.warning("did not look for steps that %s is owed: %s", self._root.uri, error)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no copy is in progress. Returns False after `timeout_s`."""
        return self._task.wait(timeout_s)

    def _list_here(self) -> Found:
        try:
            return self.debts.list_own(), None
        except CloudckptError as error:
            return [], error

    def _merge_hosts(self, gathered: Sequence[Found]) -> Found:
        """Merge the steps of all hosts as if all were in the directory of this one, of one name the newest save."""
        newest: dict[str, tuple[StepFolder, int]] = {}
        for rank, (folders, _) in enumerate(gathered):
            for folder in folders:
                info = folder.info
                if info is None:
                    continue
                note_commit_time_ns(ns_of(info.committed_at))
                uri = self.steps.location.child(name_of(info)).uri
                if rank and self.debts.is_open(folder):
                    _log.warning(
                        "%s is owed %s, which the host of rank %d has. Run 'cloudckpt drain' there",
                        self._root.uri, folder.uri, rank,
                    )  # fmt: skip
                known = newest.get(uri)
                if known is None or _age_of(known[0]) < _age_of(folder):
                    newest[uri] = dataclasses.replace(folder, uri=uri, info=dataclasses.replace(info, uri=uri)), rank
        self._holders = {uri: rank for uri, (_, rank) in newest.items()}
        failures = [failure for _, failure in gathered if failure is not None]
        if failures:  # the steps need the objects of all hosts
            return [], failures[0]
        return [folder for folder, _ in newest.values()], None

    def _find_visible(self, keys: Sequence[str | None], rank: int) -> frozenset[int]:
        """Return the ranks whose objects this one sees. If a rank could put none, each one counts as a host alone."""
        try:
            listed = {info.key for info in open_client(self.steps.location, self.steps.options).list(KEY_PREFIX)}
        except StoreError:
            listed = set()
        visible = {other for other, key in enumerate(keys) if key in listed and None not in keys}
        return frozenset({rank, *visible})

    def _sees(self, key: str) -> bool:
        try:
            return open_client(self.steps.location, self.steps.options).head(key) is not None
        except StoreError:
            return False

    def _find_problem(self, name: str) -> str:
        """Return why a save of the step `name` here would fail or do harm, or an empty text."""
        store = open_store(self.steps.location, self.steps.options)
        scratch = Scratch(store)
        try:
            scratch.put(scratch.key, _TOKEN)
            # All steps once, and then that of the name alone: training waits, and each removed step leaves a folder.
            step = parse_folder(name) if self._has_looked else None
            committed = [
                folder for folder in self.steps.list_folders(step=step, with_metadata=True) if folder.info is not None
            ]
            self._has_looked = True
            self.debts.note(committed)
            free_bytes = store.free_bytes()
        except CloudckptError as error:
            return str(error).replace(scratch.key, "")
        finally:
            scratch.clean_up()
        if self._blind_ranks is None:  # it could not be written when `open` looked
            return "it is not known if all ranks see it"
        own_uri = self.steps.location.child(name).uri
        if any(folder.uri == own_uri and not folder.problem and not self.debts.is_own(folder) for folder in committed):
            return "another run has saved its step of this name there"
        needed_bytes = _FREE * self.steps.most_bytes
        if free_bytes is not None and free_bytes < needed_bytes:
            return f"less than {size(needed_bytes)} is free, which a step needs"
        return ""

    def _drain(self) -> None:
        self.debts.try_to_drain(self._choose_connections)
        self.retention.start_again()

    def _choose_connections(self, most: int) -> int:
        """Return how many requests of a copy may be in flight now: few, unless a call waits or debts pile up."""
        return most if self._task.is_awaited or self.debts.is_behind else min(most, CONNECTIONS_BESIDE_TRAINING)


def _merge(
    near: Sequence[StepFolder], far: Sequence[StepInfo], is_open: Callable[[StepFolder], bool]
) -> list[tuple[StepInfo, bool]]:
    """Merge the committed steps of a fast place and those of its root, as `FastPlace.find_committed`.

    If both places have a save, the result has the step in the fast place: the copy has the same name and commit time.
    Two saves with one name stay two steps.
    """
    copies = {(name_of(info), info.committed_at): info for info in far}
    names = {name_of(info) for info in far}
    merged: list[StepInfo] = []
    without_debt: set[str] = set()
    for folder in near:
        info = folder.info
        # A manifest here that cannot be read has no commit time by which to find its copy.
        if info is None or (folder.problem and name_of(info) in names):
            continue
        copy_info = copies.pop((name_of(info), info.committed_at), None)
        if copy_info is not None:
            merged.append(dataclasses.replace(info, place="both", copy_uri=copy_info.uri))
        else:
            merged.append(dataclasses.replace(info, place="owed" if is_open(folder) else "fast"))
        if not folder.problem and not is_recorded_debt(folder):
            without_debt.add(info.uri)
    return [(info, info.uri not in without_debt) for info in sort_newest_first([*merged, *copies.values()])]


def _age_of(folder: StepFolder) -> tuple[bool, datetime]:
    """Return a key that is higher for a newer save. One whose manifest cannot be read has no time of its own."""
    assert folder.info is not None  # noqa: S101  # only committed steps are merged
    return not folder.problem, folder.info.committed_at


def _put_token(scratch: Scratch) -> str | None:
    """Put an object. Returns its key, or None if that fails."""
    try:
        scratch.put(scratch.key, _TOKEN)
    except StoreError:
        return None
    return scratch.key
