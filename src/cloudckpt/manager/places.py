"""A fast place in front of a manager's root: which saves are made there, and the steps of both places."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from cloudckpt._display import size
from cloudckpt._workers import RepeatedTask
from cloudckpt.dcp.save_and_load import RankCalls
from cloudckpt.errors import CheckpointNotFoundError, CloudckptError, InvalidOptionError, StoreError, name_ranks
from cloudckpt.io.client import open_client
from cloudckpt.manager.debts import Debts, is_debt
from cloudckpt.manager.policies import RetentionPolicy, SaveSchedule, is_positive
from cloudckpt.manager.retention import Retention
from cloudckpt.manager.steps import StepFolder, StepInfo, name_of, parse_folder, sort_newest_first
from cloudckpt.options import CONNECTIONS_BESIDE_TRAINING
from cloudckpt.stores.open import open_store
from cloudckpt.stores.probe import Scratch

_log = logging.getLogger("cloudckpt")

_TOKEN = b"cloudckpt looks whether all ranks see this place. Nothing needs this object: delete it.\n"
_FREE = 1.05
"""Free bytes that a save needs, relative to the largest step."""


class FastPlace:
    """The steps of a manager in a fast place, such as a local NVMe drive, in front of its root.

    A save is committed here, and training continues. A thread of the coordinator then copies to the root what that is
    owed.

    Args:
        debts: The steps of the place that the root is owed.
        every: Steps that are saved here, besides those that are due at the root. None: no others.
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
            is_spared=debts.is_unsettled,
        )
        self._task = RepeatedTask(self._drain, name="cloudckpt-drain")
        self._blind_ranks: list[int] | None = None
        """The ranks that do not see the place. None until `open` knows them."""
        self.has_failed = False
        """The last save here failed because of the place, and none was made at the root since: the next one is."""
        self._has_looked = False
        """True once all steps here were looked at."""
        self._problem = ""
        """Why the last save was not made here."""

    def open(self, ranks: RankCalls) -> bool:
        """Return True if all ranks see an object that the coordinator puts into the place. All ranks call it together.

        The result is kept. If nothing can be put there, this returns True, and the next call looks again: the steps
        there may still be readable, and `takes` refuses all saves.
        """
        if self._blind_ranks is None:
            scratch = Scratch(open_store(self.steps.location, self.steps.options))
            try:
                key = ranks.broadcast("find", lambda: _put_token(scratch))
                if key is None:
                    return True
                sees = ranks.all_gather("find", lambda: self._sees(key))
            finally:
                scratch.clean_up()
            self._blind_ranks = [rank for rank, is_seen in enumerate(sees) if not is_seen]
            if self._blind_ranks and ranks.rank == 0:
                _log.warning(
                    "not using the fast place %s, because %s cannot see what rank 0 writes there. It has to be one "
                    "directory for all ranks. All saves are sent to %s",
                    self.uri,
                    name_ranks(self._blind_ranks),
                    self._root.uri,
                )
        return not self._blind_ranks

    def takes(self, name: str, *, is_owed: bool, may_overwrite: bool) -> tuple[bool, bool]:
        """Decide, on the coordinator, if the step `name` is saved here, not at the root; and if the root is owed it.

        A save that replaces a step of the root, or one that the root is owed, is owed, too.
        """
        try:
            exists = (is_owed or may_overwrite) and self._root_steps.may_have(name)
        except CloudckptError as error:  # the copy to the root finds it out
            _log.warning("could not look if %s exists under %s: %s", name, self._root.uri, error)
            exists = may_overwrite
        if exists and not may_overwrite:
            return False, is_owed  # the save to the root raises that the step exists, unless it was removed since
        problem = "the last save there failed" if self.has_failed else self._find_problem(name)
        if problem and problem != self._problem:  # once, and not with each save
            words = f"saving {name}, and all others until this changes, to {self._root.uri}"
            _log.warning("%s and not to the fast place %s: %s", words, self.uri, problem)
        elif self._problem and not problem:
            _log.warning("saving %s to the fast place %s again", name, self.uri)
        self._problem = problem
        return not problem, is_owed or exists or self.steps.location.child(name).uri in self.debts.promised

    def note_commit(self, uri: str, *, is_owed: bool) -> None:
        """Record a commit here, on the coordinator. Starts retention, and the copies that the root is owed."""
        if is_owed:
            self.debts.promised[uri] = None
        self.retention.start(uri)
        self.start()

    def has(self, uri: str) -> bool:
        """Return True if `uri` is that of a step here, committed or not."""
        return uri.rpartition("/")[0] == self.uri

    def find_committed(self, step: int | None, *, with_metadata: bool) -> list[tuple[StepInfo, bool]]:
        """Return the committed steps of both places, newest first, each with True if the root has it or is owed it.

        `step` and `with_metadata` are those of `Steps.find_committed`.

        A failure of this place is only logged if the root has steps: without any, the run would start from scratch.
        """
        near: list[StepFolder] = []
        failure: CloudckptError | None = None
        if not self._blind_ranks:
            try:
                near = self.debts.list_own()
            except CloudckptError as error:
                failure = error
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
        return [found for found in _merge(near, far, self.debts.is_unsettled) if step in (None, found[0].step)]

    def start(self) -> None:
        """Start to copy what the root is owed. Does not wait and never raises.

        Does nothing if not all ranks see the place: its steps were not restored, so they must not replace those of this
        run.
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
            committed = [one for one in self.steps.list_folders(step=step, with_metadata=True) if one.info is not None]
            self._has_looked = True
            self.debts.note(committed)
            free_bytes = store.free_bytes()
        except CloudckptError as error:
            return str(error).replace(scratch.key, "")
        finally:
            scratch.clean_up()
        if self._blind_ranks is None:  # it could not be written when `open` looked
            return "it is not known if all ranks see it"
        mine = self.steps.location.child(name).uri
        if any(one.uri == mine and not one.problem and not self.debts.is_own(one) for one in committed):
            return "another run has saved its step of this name there"
        needed_bytes = _FREE * self.steps.most_bytes
        if free_bytes is not None and free_bytes < needed_bytes:
            return f"less than {size(needed_bytes)} is free, which a step needs"
        return ""

    def _drain(self) -> None:
        self.debts.try_to_drain(self._choose_connections)
        self.retention.start_again()

    def _choose_connections(self, most: int) -> int:
        """Return how many requests of a copy may be in flight now: few while training goes on, and nothing waits."""
        return most if self._task.is_awaited or self.debts.is_behind else min(most, CONNECTIONS_BESIDE_TRAINING)


def _merge(
    near: Sequence[StepFolder], far: Sequence[StepInfo], is_unsettled: Callable[[StepFolder], bool]
) -> list[tuple[StepInfo, bool]]:
    """Merge the committed steps of a fast place and those of its root, as `FastPlace.find_committed`.

    A save that both have is one step, that of the fast place: its copy has the same name and commit time. Steps that
    have one name and are of two saves stay two.
    """
    copies = {(name_of(info), info.committed_at): info for info in far}
    names = {name_of(info) for info in far}
    merged: list[StepInfo] = []
    unowed: set[str] = set()
    for folder in near:
        info = folder.info
        # A manifest here that cannot be read has no commit time by which to find its copy.
        if info is None or (folder.problem and name_of(info) in names):
            continue
        copy_info = copies.pop((name_of(info), info.committed_at), None)
        if copy_info is not None:
            merged.append(dataclasses.replace(info, place="both", copy_uri=copy_info.uri))
        else:
            merged.append(dataclasses.replace(info, place="owed" if is_unsettled(folder) else "fast"))
        if not folder.problem and not is_debt(folder):
            unowed.add(info.uri)
    return [(info, info.uri not in unowed) for info in sort_newest_first([*merged, *copies.values()])]


def _put_token(scratch: Scratch) -> str | None:
    """Put an object. Returns its key, or None if that fails."""
    try:
        scratch.put(scratch.key, _TOKEN)
    except StoreError:
        return None
    return scratch.key
