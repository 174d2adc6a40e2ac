"""The process group on which DCP's collectives run: none of them begins before all ranks have come to it.

A collective of gloo cannot be taken back: where a rank is missing, it waits for the group's own timeout, mostly half
an hour. So each is preceded by a meeting (`Meetings`), whose wait ends when a rank is lost; then gloo finds all of them
there. See ``docs/design/009-waiting-for-ranks.md``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._met_group import MetGroup, c10d, new_group
from cloudckpt._ranks import GivenUpError, Meetings
from cloudckpt._signs import GROUP_DESTROYED
from cloudckpt.errors import RankLostError

Purpose: TypeAlias = Literal["foreground", "background"]
"""What runs beside something else needs a group of its own."""

# Of others it is not known whether each rank is a process with a store in common.
_WATCHED_BACKENDS = {"gloo", "nccl", "xccl", "hccl", "ucc"}
_LONGEST_COLLECTIVE_S = 1800.0

_Key: TypeAlias = tuple[dist.ProcessGroup, Purpose]
_lock = threading.Lock()
_companies: dict[_Key, _Company] = {}
_groups: dict[_Key, MetGroup] = {}


def _forget_after_fork() -> None:
    """A child is none of its parent's ranks."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _companies.clear()
    _groups.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_after_fork)


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

    def __init__(self, key: _Key, *, doing: str, uri: str, timeout_s: float) -> None:
        self._key, self._uri, self._doing, self._timeout_s = key, uri, doing, timeout_s
        self._company: _Company | None = None
        self._number = 0
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
        if self._company is not None:
            self._company.meetings.heed(on_cancelled)

    def cancel(self) -> None:
        """Let all ranks know that this one wants this call, and no later one, to come to nothing."""
        if self._company is not None:
            self._company.meetings.cancel(self._number)

    def end(self, *, has_left: bool) -> None:
        """After DCP's call. `has_left` where this rank has not come to its end, and the others may be waiting."""
        if self._company is not None and self._company.meetings.next_call <= self._number + 1:
            self._company.meetings.end(has_left=has_left)
            if self._company.meetings.is_over:
                self._give_up(self._company)
            elif has_left:
                self._company.holds_until_s = time.monotonic() + self._timeout_s

    def without_group(self) -> RankLostError:
        """What to raise where the group was destroyed meanwhile."""
        ranks = () if self._company is None else (self._company.meetings.rank,)
        return RankLostError(f"{self._doing} {self._uri} has failed: {GROUP_DESTROYED}", uri=self._uri, ranks=ranks)

    def __del__(self) -> None:
        # Where an interrupt was faster than who was to end it, the others would wait as long as this process lives.
        if self._company is not None and self._pid == os.getpid():
            self._company.meetings.abandon(self._number)

    def _begin_anew(self) -> None:
        """Where nobody has met in it yet, and the ranks have given one another up in an earlier one."""
        self.end(has_left=False)
        self._founded()
        self.heed(self._on_cancelled)

    def _founded(self) -> MetGroup:
        while True:
            with _lock:
                _forget_destroyed()
                company = _companies.get(self._key) or _companies.setdefault(self._key, _Company(self._key))
            if company.meetings.is_over:  # an interrupt was faster
                company.meetings.end(has_left=True)
                self._give_up(company)
                continue
            self._company, self._number = company, company.meetings.next_call
            try:
                company.meetings.begin(
                    doing=self._doing, uri=self._uri, timeout_s=self._timeout_s, grace_s=self._grace_s()
                )
                group = company.found()
            except GivenUpError:
                self.end(has_left=False)
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

    def _give_up(self, company: _Company) -> None:
        with _lock:
            if _companies.get(self._key) is company:
                del _companies[self._key]


def begin(
    process_group: dist.ProcessGroup | None, purpose: Purpose, *, doing: str, uri: str, timeout_s: float
) -> Call | None:
    """Begin a call that all ranks of `process_group` make; None where there is nobody to wait for, or no way to.

    Raises `RankLostError` where not all ranks come, the first time; later, the collectives do.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return None
    source = process_group if process_group is not None else dist.group.WORLD
    assert source is not None  # noqa: S101  # it is initialised
    if dist.get_rank(source) < 0 or dist.get_world_size(source) == 1 or not _backends_of(source) <= _WATCHED_BACKENDS:
        return None
    return Call((source, purpose), doing=doing, uri=uri, timeout_s=timeout_s)


@contextlib.contextmanager
def in_company(
    process_group: dist.ProcessGroup | None, *, doing: str, uri: str, timeout_s: float
) -> Iterator[dist.ProcessGroup | None]:
    """The group for a call of DCP's in this context. A lost rank is a failure of the call, by torch's own exception."""
    try:
        call = begin(process_group, "foreground", doing=doing, uri=uri, timeout_s=timeout_s)
    except RankLostError as error:
        raise failure_by_loss(error) from None
    with accompanied(call):
        yield process_group if call is None else call.group


@contextlib.contextmanager
def accompanied(call: Call | None) -> Iterator[None]:
    """End `call` with this context, in the way in which DCP's call in it ended; see `in_company`."""
    has_left = True
    try:
        yield
        has_left = False
    except CheckpointException:
        has_left = False  # it is the same on all ranks
        raise
    except RankLostError as error:
        raise failure_by_loss(error) from None
    except Exception as error:
        if call is None or exists(call.group):
            raise
        raise failure_by_loss(call.without_group()) from error
    finally:
        if call is not None:
            call.end(has_left=has_left)


def failure_by_loss(error: RankLostError) -> CheckpointException:
    """`error` in the form in which DCP reports failures by rank."""
    return CheckpointException("meeting", dict.fromkeys(error.ranks or (0,), (error, None)))  # type: ignore[arg-type]


def _backends_of(group: dist.ProcessGroup) -> set[str]:
    config = dist.get_backend_config(group)
    return {pair.rpartition(":")[2] for pair in str(config).lower().split(",")}


def _forget_destroyed() -> None:
    for key in [key for key in _companies if not exists(key[0])]:
        del _companies[key]
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
