"""The process group on which DCP's collectives run: none of them begins before all ranks have come to it.

A collective of gloo cannot be taken back: where a rank is missing, it waits for the group's own timeout, mostly half
an hour. So each is preceded by a meeting (`Meetings`), whose wait ends when a rank is lost; then gloo finds all of them
there. See ``docs/design/009-waiting-for-ranks.md``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from cloudckpt._forks import in_child, never_free
from cloudckpt._ranks.meetings import Meetings
from cloudckpt._ranks.met_group import MetGroup, c10d, new_group
from cloudckpt._ranks.signs import GROUP_DESTROYED
from cloudckpt._ranks.waiting import GivenUpError
from cloudckpt.errors import RankLostError

Purpose: TypeAlias = Literal["foreground", "background", "asking"]
"""What runs beside something else needs a group of its own."""

# Of others it is not known whether each rank is a process with a store in common.
_WATCHED_BACKENDS = {"gloo", "nccl", "nccl2", "nccl-lazy", "nccl-legacy", "xccl", "hccl", "ucc"}
_LONGEST_COLLECTIVE_S = 1800.0

_Key: TypeAlias = tuple[dist.ProcessGroup, Purpose]
_lock = threading.RLock()  # a signal's handler may come while its own thread holds it
_of_the_parent: dist.ProcessGroup | None = None
"""In a child that was forked from a rank: the group of all ranks there."""
_companies: dict[_Key, _Company] = {}
_groups: dict[_Key, MetGroup] = {}
_num_calls: dict[_Key, int] = {}
"""How many this rank has been asked for; whatever became of them, the others count alike."""


@in_child
def _forget_after_fork() -> None:
    """A child is none of its parent's ranks."""
    global _lock, _of_the_parent  # noqa: PLW0603
    never_free((_of_the_parent, dict(_companies), dict(_groups), dict(_num_calls)))
    _of_the_parent = dist.group.WORLD if dist.is_available() else None
    _lock = threading.RLock()
    _companies.clear()
    _groups.clear()
    _num_calls.clear()


def check_is_rank(*, uri: str) -> None:
    """Raise `RankLostError` in a child of a rank, which has none of the threads and connections of its groups."""
    if _of_the_parent is not None and _of_the_parent is dist.group.WORLD:
        raise RankLostError(
            f"process {os.getpid()} was forked from a rank (process {os.getppid()}) and is none itself: it would wait "
            "for the others for ever. Save and load in the ranks, or, to do it alone, with no_dist=True",
            uri=uri,
            ranks=(dist.get_rank(),),
        )


class _Company:
    """The ranks of a group, from call to call, as long as none gives another up."""

    def __init__(self, key: _Key) -> None:
        self._key = key
        source, purpose = key
        self._ranks = sorted(dist.get_process_group_ranks(source))
        store = source.get_group_store()
        self.meetings = Meetings(
            c10d().PrefixStore(f"cloudckpt/{purpose}", store),
            rank=self._ranks.index(dist.get_rank()),
            num_ranks=len(self._ranks),
            store_keeper=self._keeper_of(store),
        )
        self.holds_until_s = 0.0
        """How long others may be held in a collective of a call that this rank has left: gloo lets go of nobody."""

    def meet_anew(self, after: Meetings) -> None:
        """Once `after` are over."""
        with _lock:
            if self.meetings is after:
                self.meetings, self.holds_until_s = after.anew(), 0.0

    def found(self) -> MetGroup:
        """The group, of which the ranks that are there now have met."""
        group = _groups.get(self._key)
        if group is None or group.meetings is not self.meetings:
            self.meetings.meet()
            try:
                if group is None:
                    group = _groups[self._key] = new_group(self._ranks, self.meetings)
                else:
                    # Not another one: torch names a group by how many there are, so its name may be taken.
                    group.meet_by(self.meetings)
            except RuntimeError as error:
                raise self.meetings.explain(error) from None
        # All have met, so what is left is the transfer.
        group.wait_at_most(min(self.meetings.timeout_s, _LONGEST_COLLECTIVE_S))
        return group

    def _keeper_of(self, store: Any) -> tuple[int, ...]:
        while isinstance(store, c10d().PrefixStore):
            store = store.underlying_store
        # Under torchrun its agent keeps it, else the first rank of all does.
        is_a_ranks = isinstance(store, c10d().TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return (self._ranks.index(0),) if is_a_ranks and 0 in self._ranks else ()


class Call:
    """One save or load that the ranks make together: `group` is for DCP, and `end` must be called."""

    # Even where an interrupt comes before the first line of __init__.
    _company: _Company | None = None
    _meetings: Meetings | None = None

    def __init__(self, key: _Key, *, doing: str, uri: str, timeout_s: float) -> None:
        with _lock:
            _forget_destroyed()
            self._number = _num_calls[key] = _num_calls.get(key, 0) + 1
        self._key, self._uri, self._doing, self._timeout_s = key, uri, doing, timeout_s
        self._pid = os.getpid()
        self._on_cancelled: Callable[[tuple[int, ...]], object] | None = None
        try:
            self.group = self._founded()
        except BaseException:
            self.end(has_left=True)
            raise

    def heed(self, on_cancelled: Callable[[tuple[int, ...]], object] | None) -> None:
        """See `Meetings.heed`."""
        self._on_cancelled = on_cancelled
        if self._meetings is not None:
            self._meetings.heed(on_cancelled)

    def cancel(self) -> None:
        """Let all ranks know that this one wants this call, and no later one, to come to nothing."""
        if self._meetings is not None:
            self._meetings.cancel(self._number)

    def end(self, *, has_left: bool) -> None:
        """After DCP's call. `has_left` where this rank has not come to its end, and the others may be waiting."""
        company, meetings = self._company, self._meetings
        if company is not None and meetings is not None and meetings.call <= self._number:
            meetings.end(has_left=has_left)
            if meetings.is_over:
                company.meet_anew(meetings)
            if has_left and company.meetings.call < self._number:  # the others are to know of it
                company.meetings.leave(self._number, doing=self._doing, uri=self._uri, timeout_s=self._timeout_s)
            if has_left and not meetings.is_over:
                company.holds_until_s = time.monotonic() + self._timeout_s

    def without_group(self) -> RankLostError:
        """What to raise where the group was destroyed meanwhile."""
        ranks = () if self._meetings is None else (self._meetings.rank,)
        return RankLostError(f"{self._doing} {self._uri} has failed: {GROUP_DESTROYED}", uri=self._uri, ranks=ranks)

    def __del__(self) -> None:
        # Where an interrupt was faster than who was to end it, the others would wait as long as this process lives.
        if self._meetings is not None and self._pid == os.getpid():
            self._meetings.abandon(self._number)

    def _begin_anew(self) -> None:
        """Where nobody has met in it yet, and the ranks have given one another up in an earlier one."""
        self._give_up()
        self._founded()
        self.heed(self._on_cancelled)

    def _give_up(self) -> None:
        self.end(has_left=False)
        if self._meetings is not None:
            with _lock:  # the others may have been asked for more
                number = max(self._number, self._meetings.known_call + 1)
                _num_calls[self._key] = _num_calls.get(self._key, self._number) + number - self._number
                self._number = number

    def _founded(self) -> MetGroup:
        while True:
            with _lock:
                _forget_destroyed()
                company = _companies.get(self._key) or _companies.setdefault(self._key, _Company(self._key))
            meetings = company.meetings
            if meetings.is_over:  # an interrupt was faster
                meetings.end(has_left=True)
                company.meet_anew(meetings)
                continue
            self._company, self._meetings = company, meetings
            try:
                meetings.begin(
                    self._number,
                    doing=self._doing,
                    uri=self._uri,
                    timeout_s=self._timeout_s,
                    grace_s=self._grace_s(),
                )
                group = company.found()
            except GivenUpError:
                self._give_up()
                continue
            group.begin_anew = weakref.WeakMethod(self._begin_anew)  # the group outlives the call
            return group

    def _grace_s(self) -> float:
        """For those who are held in a call of the other purpose; in one of this purpose they show that they live."""
        with _lock:
            until_s = [
                one.holds_until_s for key, one in _companies.items() if key[0] is self._key[0] and key != self._key
            ]
        return max([0.0, *(until - time.monotonic() for until in until_s)])


def begin(
    process_group: dist.ProcessGroup | None, purpose: Purpose, *, doing: str, uri: str, timeout_s: float
) -> Call | None:
    """Begin a call that all ranks of `process_group` make; None where there is nobody to wait for, or no way to.

    Raises `RankLostError` where not all ranks come, the first time; later, the collectives do.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    check_is_rank(uri=uri)
    source = _watched(process_group)
    return None if source is None else Call((source, purpose), doing=doing, uri=uri, timeout_s=timeout_s)


def pass_over(process_group: dist.ProcessGroup | None, purpose: Purpose) -> None:
    """Count a call that this rank was asked for, and has left before it began: the others count it, too."""
    with _lock:
        _forget_destroyed()
        source = _watched(process_group)
        if source is not None and exists(source):
            _num_calls[source, purpose] = _num_calls.get((source, purpose), 0) + 1


def _watched(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group whose ranks wait for one another."""
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return None
    source = process_group if process_group is not None else dist.group.WORLD
    assert source is not None  # noqa: S101  # it is initialised
    if dist.get_rank(source) < 0 or dist.get_world_size(source) == 1 or not _backends_of(source) <= _WATCHED_BACKENDS:
        return None
    return source


def _backends_of(group: dist.ProcessGroup) -> set[str]:
    config = dist.get_backend_config(group)
    return {pair.rpartition(":")[2] for pair in str(config).lower().split(",")}


def _forget_destroyed() -> None:
    for key in [key for key in _companies if not exists(key[0])]:
        del _companies[key]
    for key in [key for key in _num_calls if not exists(key[0])]:
        del _num_calls[key]
    for key in [key for key in _groups if not exists(key[0])]:
        group = _groups.pop(key)
        if exists(group):
            dist.destroy_process_group(group)


def exists(group: dist.ProcessGroup) -> bool:
    """Whether the group has not been destroyed, as all are with the default one."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
