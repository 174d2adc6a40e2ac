"""A fast place in front of a manager's root: its steps, and which saves are made there."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from cloudckpt._clock import newest_commit_time_ns, note_commit_time_ns, ns_of
from cloudckpt._display import size
from cloudckpt._messages import name_ranks
from cloudckpt._workers import RepeatedTask
from cloudckpt.commit.log import resolve
from cloudckpt.dcp.ranks.hosts import HostGroups, choose_groups, mend_manifest
from cloudckpt.dcp.ranks.rank_calls import RankCalls
from cloudckpt.errors import CheckpointNotFoundError, CloudckptError, InvalidOptionError, StoreError
from cloudckpt.format.codec import encode
from cloudckpt.io.client import open_client
from cloudckpt.manager.drain import Drain, is_recorded_as_owed
from cloudckpt.manager.policies import RetentionPolicy, SaveSchedule, is_positive
from cloudckpt.manager.retention import Retention
from cloudckpt.manager.steps import StepFolder, name_of, parse_folder, parse_step_uri
from cloudckpt.options import CONNECTIONS_BESIDE_TRAINING
from cloudckpt.pipeline.context import Context
from cloudckpt.stores import open_store
from cloudckpt.stores.probe import KEY_PREFIX, Scratch

_log = logging.getLogger("cloudckpt")

_TOKEN = b"cloudckpt looks whether all ranks see this place. Nothing needs this object: delete it.\n"
_FREE_SPACE_FACTOR = 1.05
"""Free bytes that a save needs, relative to the largest step."""
_FIRST_DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Between the looks of rank 0 for the shares of other hosts."""
_LAST_DELAY_S = 5.0
StepsOfHost: TypeAlias = tuple[list[StepFolder], CloudckptError | None]
"""The steps of one directory, or why they cannot be listed."""


class FastPlace:
    """The steps of a manager in a fast place, such as a local NVMe drive, in front of its root.

    A save is committed here, and training continues. A thread of rank 0 then copies to the root the steps that
    it is owed; if each host has a directory of its own, a thread of each rank.

    Args:
        drain: Copies the steps here to the root.
        every: Schedule of the steps that are saved here, besides the steps that are due at the root. None: no others.
        keep: Number of newest steps that stay here.

    """

    def __init__(self, drain: Drain, *, every: int | timedelta | None, keep: int) -> None:
        self.drain, self.steps, self.uri = drain, drain.steps, drain.steps.location.uri
        self._root_steps, self._root = drain.root_steps, drain.root_steps.location
        self.schedule = None if every is None else SaveSchedule(every, name="fast_every")
        if not is_positive(keep):
            raise InvalidOptionError(f"CheckpointManager: fast_keep must be a positive whole number, not {keep!r}")
        self.retention = Retention(
            self.steps,
            RetentionPolicy(keep_last=keep, keep_every=None, keep_best=None),
            get_damaged_uris=drain.get_damaged_uris,
            is_own=drain.is_own,
            is_spared=drain.is_owed,
        )
        self._task = RepeatedTask(self._run_drain, name="cloudckpt-drain")
        self._blind_ranks: list[int] | None = None
        """The ranks that cannot use the place. None until `open` knows them."""
        self._device: int | None = None
        """The device of the directory, once a step was committed here."""
        self._last_uri = ""
        """The step that was committed here last."""
        self._has_looked = False
        """True once all steps here were looked at."""
        self._problem = ""
        """The reason why the last save was not made here; empty if it was."""

    @property
    def hosts(self) -> HostGroups | None:
        """The ranks that share a directory, if not all do."""
        return self.drain.hosts

    def open(self, ranks: RankCalls) -> bool:
        """Find out which ranks see the same directory. Returns False if the place is not used. All ranks call it.

        All ranks look for an object that the coordinator puts. If some do not see it, each rank puts one, and looks
        for all. The result is kept. If a rank can put nothing, this returns True, and the next call looks again: the
        steps there may still be readable, and `choose_place` refuses all saves.
        """
        if self._blind_ranks is None:
            scratch = Scratch(open_store(self.steps.location, self.steps.options))
            self.drain.hosts = None
            try:
                key = ranks.broadcast("find", lambda: _put_token(scratch))
                sees = ranks.all_gather("find", lambda: key is not None and self._sees(key))
                keys = [key]
                if not all(sees):
                    keys = ranks.all_gather("find", lambda: _put_token(scratch))
                    looks = ranks.all_gather(
                        "find", lambda: (self._find_visible(keys, ranks.rank), socket.gethostname())
                    )
                    views, names = zip(*looks, strict=True)
                    self.drain.hosts = choose_groups(ranks.rank, views, names) if any(keys) else None
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
        """Decide, on all ranks together, if the step `name` is saved here, not at the root; and if the root is owed it.

        The root is also owed a step that replaces a step of the root, or an owed one.
        """
        looks = ranks.rank == 0 if self.hosts is None else self.hosts.leads
        answers = ranks.all_gather(
            "find", lambda: (self._find_loss() or (self._find_problem(name) if looks else ""), newest_commit_time_ns())
        )
        for _, newest_ns in answers:
            note_commit_time_ns(newest_ns)
        rank, problem = next(((rank, text) for rank, (text, _) in enumerate(answers) if text), (0, ""))
        if problem and len(answers) > 1:
            problem = f"rank {rank}: {problem}"
        decide = functools.partial(self._decide, name, is_owed=is_owed, may_overwrite=may_overwrite, problem=problem)
        return ranks.broadcast("find", decide)

    def _decide(self, name: str, *, is_owed: bool, may_overwrite: bool, problem: str) -> tuple[bool, bool]:
        """Decide on the coordinator, for `choose_place`.

        `problem` keeps steps from being saved here; "" if there is none.
        """
        try:
            exists = (is_owed or may_overwrite) and self._root_steps.may_have(name)
        except CloudckptError as error:  # the copy to the root finds it out
            _log.warning("could not look if %s exists under %s: %s", name, self._root.uri, error)
            exists = may_overwrite
        if exists and not may_overwrite:
            return False, is_owed  # the save to the root raises that the step exists, unless it was removed since
        if problem and problem != self._problem:  # once, and not with each save
            words = f"saving {name}, and all others until this changes, to {self._root.uri}"
            _log.warning("%s and not to the fast place %s: %s", words, self.uri, problem)
        elif self._problem and not problem:
            _log.warning("saving %s to the fast place %s again", name, self.uri)
        self._problem = problem
        is_owed = is_owed or exists or self.steps.location.child(name).uri in self.drain.owed_infos
        return not problem, is_owed

    def note_commit(self, uri: str, rank: int, *, is_owed: bool) -> None:
        """Record a commit here, on each rank. Starts retention, and the copies that the root is owed."""
        self._device, self._last_uri = self._find_device(), uri
        if rank and self.hosts is None:
            return
        if is_owed:
            self.drain.owed_infos[uri] = None
        if self.drain.leads:
            self.retention.start(uri)
        self.start(rank)

    def warn_of_no_step(self) -> None:
        """Warn if no step of this run is here, although the root has some. Call it on the coordinator."""
        if not self._blind_ranks:
            _log.warning(
                "no step of this run is in the fast place %s, so the steps of %s are taken. If its drive was not "
                "lost, pass the path of the earlier start",
                self.uri,
                self._root.uri,
            )

    def has_step(self, uri: str) -> bool:
        """Return True if `uri` belongs to a step here, committed or not."""
        return uri.rpartition("/")[0] == self.uri

    def gather_and_mend(self, ranks: RankCalls) -> list[StepsOfHost] | None:
        """Return the steps in the directory of each host; None if all ranks share one. All ranks call it together.

        Commits the manifest of an owed step in the directories that lack it.
        """
        hosts = self.hosts
        if hosts is None:
            return None
        gathered = ranks.all_gather("find", lambda: self._list_here() if hosts.leads else ([], None))
        here = self.steps.location
        self.steps.known_uris |= {here.child(name).uri for name in find_newest_saves(gathered)}
        lacking = _find_lacking(gathered, hosts)
        if not lacking:
            return gathered
        documents = ranks.all_gather(
            "find", lambda: {name: self._encode_manifest(name) for name in lacking[ranks.rank]}
        )
        for of_rank in documents if hosts.leads else ():
            for name, document in of_rank.items():
                if document is not None:
                    mend_manifest(self._open_step(name), document, hosts)
        return gathered

    def _open_step(self, name: str) -> Context:
        return Context(self.steps.location.child(name), self.steps.options, rank=0)

    def _encode_manifest(self, name: str) -> bytes | None:
        """Return the manifest of a step here; None if it cannot be read, which its restore says."""
        try:
            return encode(resolve(self._open_step(name).client).manifest)
        except CloudckptError:
            return None

    def list_committed(self, gathered: Sequence[StepsOfHost] | None) -> StepsOfHost:
        """Return the committed steps here; none if not all ranks see the place. `gather_and_mend` returns `gathered`.

        A step that several hosts have counts once, by its newest save, as if it were in the directory of this one.
        """
        if self._blind_ranks:
            return [], None
        gathered = gathered or [self._list_here()]
        folders: list[StepFolder] = []
        for name, (folder, _) in find_newest_saves(gathered).items():
            note_commit_time_ns(ns_of(folder.committed.committed_at))
            uri = self.steps.location.child(name).uri
            folders.append(dataclasses.replace(folder, uri=uri, info=dataclasses.replace(folder.committed, uri=uri)))
        self.drain.record_owed(folders)
        failures = [failure for _, failure in gathered if failure is not None]
        return ([], failures[0]) if failures else (folders, None)  # the steps need the objects of all hosts

    def refuse_unseen(self) -> None:
        """Raise `CheckpointNotFoundError` if not all ranks see the steps here, and so cannot load them."""
        if self._blind_ranks and (unseen := self.drain.list_own()):
            raise CheckpointNotFoundError(
                f"{self._root.uri} has no step, and the fast place {self.uri} has some, such as {unseen[-1].uri}, "
                f"which {name_ranks(self._blind_ranks)} cannot see. Let all ranks see that directory; or copy what "
                f"is there with 'cloudckpt drain {self.uri} {self._root.uri}'; or pass another root to a new run",
                uri=self._root.uri,
            )

    def start(self, rank: int) -> None:
        """Start to copy the steps that the root is owed. Does not wait and never raises.

        Does nothing if not all ranks see the place: its steps were not restored, so they must not replace those of this
        run. If all ranks share one directory, rank 0 copies.
        """
        if self._blind_ranks or (rank and self.hosts is None):
            return
        try:
            self._task.request()
        except RuntimeError as error:
            _log.warning("did not look for steps that %s is owed: %s", self._root.uri, error)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no copy is in progress. Returns False after `timeout_s`."""
        return self._task.wait(timeout_s)

    def _list_here(self) -> StepsOfHost:
        try:
            return self.drain.list_own(), None
        except CloudckptError as error:
            return [], error

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

    def _find_device(self) -> int | None:
        try:
            return os.stat(self.steps.location.local_path or "").st_dev  # noqa: PTH116  # "" is no path: no directory
        except OSError:
            return None

    def _find_loss(self) -> str:
        """Return why this rank must not make the directory anew, or an empty text."""
        device = self._find_device()
        if not self._last_uri or device == self._device or self._has_last_step():
            self._device = device
            return ""
        return (
            "its directory, where this run has saved, was removed, or its drive is no longer mounted. Mount the drive, "
            "or make the directory, to use it again"
        )

    def _has_last_step(self) -> bool:
        """Return True if the directory has the last step of this run: its drive may have another device by now."""
        try:
            folders = self.steps.list_folders(step=parse_step_uri(self._last_uri), with_metadata=True)
        except CloudckptError:
            return False
        return any(folder.uri == self._last_uri and self.drain.is_own(folder) for folder in folders)

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
            self.drain.record_owed(committed)
            free_bytes = store.free_bytes()
        except CloudckptError as error:
            return str(error).replace(scratch.key, "")
        finally:
            scratch.clean_up()
        if self._blind_ranks is None:  # it could not be written when `open` looked
            return "it is not known if all ranks see it"
        own_uri = self.steps.location.child(name).uri
        if any(folder.uri == own_uri and not folder.problem and not self.drain.is_own(folder) for folder in committed):
            return "another run has saved its step of this name there"
        needed_bytes = _FREE_SPACE_FACTOR * self.steps.most_bytes
        if free_bytes is not None and free_bytes < needed_bytes:
            return f"less than {size(needed_bytes)} is free, which a step needs"
        return ""

    def _run_drain(self) -> None:
        delays_s = itertools.chain(_FIRST_DELAYS_S, itertools.repeat(_LAST_DELAY_S))
        self.drain.try_to_drain(self._choose_connections, lambda: self._task.pause(next(delays_s)))
        if self.drain.leads:
            self.retention.request_run()

    def _choose_connections(self, most: int) -> int:
        """Return how many requests of a copy may be in flight now: few, unless a call waits or steps wait."""
        return most if self._task.is_awaited or self.drain.is_behind else min(most, CONNECTIONS_BESIDE_TRAINING)


def find_newest_saves(gathered: Sequence[StepsOfHost]) -> dict[str, tuple[StepFolder, int]]:
    """Return, by its name, the newest save of each committed step, and the lowest rank that has it."""
    newest: dict[str, tuple[StepFolder, int]] = {}
    for rank, (folders, _) in enumerate(gathered):
        for folder in folders:
            if folder.info is not None:
                known = newest.get(name_of(folder.info))
                if known is None or _age_of(known[0]) < _age_of(folder):
                    newest[name_of(folder.info)] = folder, rank
    return newest


def _find_lacking(gathered: Sequence[StepsOfHost], hosts: HostGroups) -> defaultdict[int, list[str]]:
    """Return, by the rank that has them, the names of the owed steps that not all hosts have."""
    lacking: defaultdict[int, list[str]] = defaultdict(list)
    ages = [{name_of(folder.info): _age_of(folder) for folder in folders if folder.info} for folders, _ in gathered]
    for name, (folder, rank) in find_newest_saves(gathered).items():
        is_everywhere = all(ages[leader].get(name) == _age_of(folder) for leader in hosts.leaders)
        if is_recorded_as_owed(folder.metadata) and not is_everywhere:
            lacking[rank].append(name)
    return lacking


def _age_of(folder: StepFolder) -> tuple[bool, datetime]:
    """Return a key that is higher for a newer save. One whose manifest cannot be read has no time of its own."""
    return not folder.problem, folder.committed.committed_at


def _put_token(scratch: Scratch) -> str | None:
    """Put an object. Returns its key, or None if that fails."""
    try:
        scratch.put(scratch.key, _TOKEN)
    except StoreError:
        return None
    return scratch.key
