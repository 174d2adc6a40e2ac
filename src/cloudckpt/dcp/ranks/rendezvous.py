"""Barriers whose wait ends when a rank is lost. See ``docs/design/009-waiting-for-ranks.md``.

The ranks exchange heartbeats and decisions over the key-value store of their process group. Calls to that store may
hang, so a thread of its own makes them for each save or load, and callers only wait for that thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch.distributed as dist

from cloudckpt._messages import limit_text, name_ranks
from cloudckpt.errors import RankLostError

TRANSFER_FRACTION = 0.75
"""Fraction of `timeout_s` after which a transfer between the ranks has failed. In the rest, the lost rank is found."""
_BEATS_WITHIN_TIMEOUT = 8
_MAX_BEAT_INTERVAL_S = 5.0
_MIN_POLL_S = 0.0005
_MAX_POLL_S = 0.05
_MAX_FAREWELL_S = 2.0
_STORE_FAREWELL_S = 20 * _MAX_POLL_S
_STATE_KEY = "state"
_FILLED = ". The objects may hold a part of what was loaded: load again before you continue training"
_ADVICE = {
    "saving": ". The data of this save was not removed. It may have been committed: look at what is there",
    "loading": _FILLED,
    "finding": _FILLED,
    "pulling": ". The model may hold a part of a version: pull again before you use it",
}
"""The advice after a failed call, by the first word of `doing`. Other calls leave nothing."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank. The rank posts it again and again, under its number as the key."""

    beat: int = 0
    call: int = 0
    """Number of the save or load that the rank is in, from 1."""
    barrier: int = 0
    """The last barrier of this call that the rank has come to, counted from 1."""
    task: str = ""
    """Digest of `doing` and, except for a load, the URI: ranks with different tasks fail the call."""
    doing: str = ""
    """The task in words, such as ``saving s3://bucket/run/step-1``."""
    has_ended: bool = False
    """True once the rank has ended this call, with or without an error."""


class Failure(msgspec.Struct, frozen=True):
    """The reason why a call fails on all ranks."""

    ranks: tuple[int, ...] = ()
    reason: str = ""
    is_final: bool = False
    """True once a rank is lost: no later call in this process group succeeds."""


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions that hold for all ranks: one value on the store, which changes by compare-and-set alone."""

    call: int = 0
    barrier: int = 0
    """The last barrier that all ranks may leave, in `call`."""
    failed_call: int = 0
    """The last call that failed. All calls up to it have ended, or fail on every rank."""
    failure: Failure = Failure()
    cancelled_call: int = 0
    cancelled_by: tuple[int, ...] = ()

    def permits(self, call: int, barrier: int) -> bool:
        """Return True if all ranks have come to this barrier, even if the call has failed afterwards."""
        return (self.call, self.barrier) >= (call, barrier)

    def permit(self, call: int, barrier: int) -> GroupState:
        """Let all ranks leave this barrier, unless the call has failed."""
        if self.has_failed(call):
            return self
        return msgspec.structs.replace(self, call=call, barrier=barrier)

    def has_failed(self, call: int) -> bool:
        """Return True if the call has failed for all ranks. A rank first leaves a barrier that was permitted before."""
        return self.failure.is_final or self.failed_call >= call

    def fail(self, call: int, failure: Failure) -> GroupState:
        """Fail the call, unless it has failed."""
        if self.failure.is_final or (self.failed_call >= call and not failure.is_final):
            return self
        return msgspec.structs.replace(self, failed_call=call, failure=failure)

    def cancel(self, call: int, rank: int) -> GroupState:
        """Return the state in which `rank` also cancels this call."""
        others = self.cancelled_by if self.cancelled_call == call else ()
        return msgspec.structs.replace(self, cancelled_call=call, cancelled_by=tuple(sorted({*others, rank})))


c10d: Any = dist  # with names that torch's stubs leave out


class Rendezvous:
    """The calls of one rank in one process group, one after the other, and their barriers.

    A call is one save or load, from `begin` to `end`. Rank 0 watches the heartbeats of all ranks, and permits each
    barrier; the others watch rank 0. Any rank can fail a call. A permission and a failure change the same key by
    compare-and-set, so a barrier is permitted for all ranks or for none.

    Args:
        store: The process group's key-value store, under a prefix that nothing else uses.
        rank: This rank.
        num_ranks: Number of ranks in the group.
        store_keeper: The rank whose process holds the store; None if no rank's does.

    """

    def __init__(self, store: Any, *, rank: int, num_ranks: int, store_keeper: int | None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = 0.0
        self.store = store
        """The store of the group; after the first call has begun, with a prefix that nothing else uses."""
        self._store_keeper = store_keeper
        self._connection: Any = None
        self._known_keys = {_STATE_KEY}
        self._changed = threading.Condition()
        # The lock of `_changed` guards everything below.
        self._own = Heartbeat()
        self._posted = Heartbeat()
        self._others: dict[int, Heartbeat] = {}
        self._heard_s: dict[int, float] = {}
        """Time of the last new heartbeat of each rank that this one watches."""
        self._state = GroupState()
        self._answered_s = 0.0
        """Time of the last answer of the store."""
        self._store_failure = ""
        """Reason why the store can no longer be used."""
        self._failure: Failure | None = None
        """A failure that this rank wants to post."""
        self._wants_cancel = False
        self._on_cancel: Callable[[tuple[int, ...]], object] | None = None
        self._thread: threading.Thread | None = None
        self.uri = self._doing = ""

    @property
    def call(self) -> int:
        """The number of the latest call."""
        return self._own.call

    def begin(self, call: int, *, doing: str, uri: str, timeout_s: float) -> None:
        """Begin the call with this number, which is the same on all ranks, and post heartbeats until `end`.

        Raises `RankLostError` if the call has failed on another rank already, or if the group has lost a rank.
        """
        self.end(self.call, InterruptedError("the call was interrupted"))  # unless it has ended
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, timeout_s)
            self._doing, self.uri, self.timeout_s = doing, uri, timeout_s
            if self._thread is not None:
                self._lose_store("has not answered since the call before")
            self._raise_if_failed(call)
            # Ranks may load from copies on disks of their own; the commit that they find is compared with the plans.
            has_own_uri = doing.startswith("loading")
            task = f"{doing}\0{'' if has_own_uri else uri}".encode(errors="surrogatepass")
            digest = hashlib.sha256(task).hexdigest()[:16]
            self._own = Heartbeat(beat=self._own.beat, call=call, task=digest, doing=limit_text(f"{doing} {uri}"))
            self._failure = self._on_cancel = None
            self._wants_cancel = False
            self._answered_s = begun_s = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="cloudckpt-ranks", daemon=True)
            self._thread.start()
            self._wait_until(lambda: self._answered_s > begun_s)
            self._raise_if_failed(call)

    def barrier(self, *, is_after_transfer: bool = False) -> None:
        """Wait until all ranks have come to this barrier of the call.

        Raises `RankLostError` on all ranks if a rank has failed, has gone on to another call, does another task
        (`Heartbeat.task`), or gave no sign of life for `timeout_s`. In the last case, the group cannot be used any
        more. With `is_after_transfer`, that time includes a transfer, in which no heartbeats are read.
        """
        with self._changed:
            barrier = self._own.barrier + 1
            self._own = msgspec.structs.replace(self._own, barrier=barrier)
            self._answered_s = now_s = time.monotonic()
            since_s = now_s - TRANSFER_FRACTION * self.timeout_s if is_after_transfer else now_s
            self._heard_s = {rank: max(self._heard_s.get(rank, now_s), since_s) for rank in self._watched}
            self._changed.notify_all()
            self._wait_until(lambda: self._state.permits(self._own.call, barrier))

    def fail(self, error: BaseException) -> None:
        """Fail this call on all ranks because of `error` on this one. Ranks first leave a barrier that is permitted."""
        text = limit_text(f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0])
        with self._changed:
            self._failure = self._failure or Failure((self.rank,), f"rank {self.rank} left before the end ({text})")
            self._changed.notify_all()

    def explain(self, error: Exception) -> RankLostError:
        """Return the error to raise for a broken collective. It names the lost rank, if found within `timeout_s`."""
        try:
            self.barrier(is_after_transfer=True)
            with self._changed:
                self._failure = Failure((), f"the connection between the ranks broke ({error})", is_final=True)
            self.barrier()
        except RankLostError as lost:
            return lost
        raise AssertionError("a barrier was permitted in a call that had failed")

    def set_on_cancel(self, call: int, on_cancel: Callable[[tuple[int, ...]], object] | None) -> None:
        """Have `on_cancel` called with the ranks that cancel this call, perhaps repeatedly."""
        with self._changed:
            if self._own.call == call:
                self._on_cancel = on_cancel

    def cancel(self, call: int) -> None:
        """Tell all ranks that this one cancels the call, unless the call has ended."""
        with self._changed:
            self._wants_cancel = self._wants_cancel or self._own.call == call
            self._changed.notify_all()

    def end(self, call: int, error: BaseException | None) -> None:
        """End the call, unless it has ended. With `error`, fail it on the other ranks. Takes seconds at most."""
        with self._changed:
            thread = self._thread
            if thread is None or self._own.call != call or self._own.has_ended:
                return
            if error is not None:
                self.fail(error)
            if self.rank == self._store_keeper and (self._failure is not None or self._state.failed_call == call):
                # The store may end with this process. So the other ranks, which poll, get time to read the failure.
                self._changed.wait_for(lambda: self._store_failure, min(self.timeout_s, _STORE_FAREWELL_S))
            self._own = msgspec.structs.replace(self._own, has_ended=True)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is not thread, min(self.timeout_s, _MAX_FAREWELL_S))

    @property
    def _watched(self) -> range:
        return range(1, self.num_ranks) if self.rank == 0 else range(1)

    @property
    def _is_waiting(self) -> bool:
        return self._own.barrier > 0 and not self._state.permits(self._own.call, self._own.barrier)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._raise_if_failed(self._own.call)
            if self._store_failure:
                self._lose_store(f"is out of reach ({self._store_failure})")
            elif time.monotonic() - self._answered_s >= self.timeout_s:
                self._lose_store(f"did not answer for {self.timeout_s:g} s")
            else:
                self._changed.wait(self.timeout_s)

    def _raise_if_failed(self, call: int) -> None:
        if not self._state.has_failed(call):
            return
        failure = self._state.failure
        text = f"{self._doing} {self.uri} failed: {failure.reason}"
        text += _ADVICE.get(self._doing.partition(" ")[0], "")
        if failure.is_final:
            text += ". This process group cannot be used any more: make a new one, or restart the job"
        raise RankLostError(text, uri=self.uri, ranks=failure.ranks)

    def _lose_store(self, why: str) -> None:
        """Fail this and all later calls on this rank. Other ranks that cannot reach the store do the same."""
        keeper = self._store_keeper
        kept_by = "" if keeper is None else f", which rank {keeper} keeps,"
        failure = Failure(
            () if keeper is None else (keeper,), f"the process group's store{kept_by} {why}", is_final=True
        )
        self._state = self._state.fail(self._own.call, failure)

    def _run(self) -> None:
        """Post heartbeats, read the heartbeats of other ranks, and decide, until the call ends."""
        thread, due_s, poll_s = self._thread, 0.0, _MIN_POLL_S
        interval_s = min(_MAX_BEAT_INTERVAL_S, self.timeout_s / _BEATS_WITHIN_TIMEOUT)
        try:
            store = self._connection = self._connection or self._connect()
            while True:
                with self._changed:
                    is_new = self._own != self._posted
                    if is_new or time.monotonic() >= due_s:
                        due_s = time.monotonic() + interval_s
                        self._own = msgspec.structs.replace(self._own, beat=self._own.beat + 1)
                    own = self._own
                    keys = [*map(str, self._watched)] if self._is_waiting else []
                # Post a failure before the heartbeat that ends the call: no rank may see the end without its reason.
                self._decide(store)
                if own != self._posted:
                    store.set(str(self.rank), msgspec.json.encode(own).decode())
                    self._posted = own
                # Read the state last, so that it is no older than the heartbeats on which the next decision depends.
                answers = self._read(store, [*keys, _STATE_KEY])
                with self._changed:
                    self._note_heartbeats(answers)
                    if own.has_ended:
                        return
                    cancelled_by = self._state.cancelled_by if self._state.cancelled_call == own.call else ()
                    on_cancel = self._on_cancel
                if cancelled_by and on_cancel is not None:
                    on_cancel(cancelled_by)
                poll_s = _MIN_POLL_S if is_new else min(_MAX_POLL_S, 1.5 * poll_s)
                with self._changed:
                    wait_s = min(poll_s, interval_s) if self._is_waiting else interval_s
                    self._changed.wait_for(self._has_news, wait_s)
        except BaseException as error:  # a waiter raises it
            with self._changed:
                self._store_failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        finally:
            with self._changed:
                if self._thread is thread:
                    self._thread = None
                self._changed.notify_all()

    def _connect(self) -> Any:
        """Open a new connection: calls over one connection wait for each other, and training may use the group's."""
        connection = self.store
        with contextlib.suppress(AttributeError):
            connection = self.store.clone()
        # The store may outlive a group, and the next one of the same name has the same keys.
        life = str(connection.add(f"life-{self.rank}", 1))
        self.store = c10d.PrefixStore(life, self.store)
        connection = c10d.PrefixStore(life, connection)
        self._set_state(connection.compare_set(_STATE_KEY, "", _encode(GroupState())))
        return connection

    def _read(self, store: Any, keys: list[str]) -> dict[str, bytes]:
        """Read the `keys` that exist. A store would wait for a key that does not exist."""
        self._known_keys.update(key for key in keys if key not in self._known_keys and store.check([key]))
        existing = [key for key in keys if key in self._known_keys]
        if store.has_extended_api():
            return dict(zip(existing, store.multi_get(existing), strict=True))
        return {key: store.get(key) for key in existing}

    def _note_heartbeats(self, answers: dict[str, bytes]) -> None:
        now_s = self._answered_s = time.monotonic()
        for key, text in answers.items():
            if key == _STATE_KEY:
                self._set_state(text)
            elif self._others.get(int(key)) != (heartbeat := msgspec.json.decode(text, type=Heartbeat)):
                self._others[int(key)], self._heard_s[int(key)] = heartbeat, now_s
        self._changed.notify_all()

    def _set_state(self, text: bytes) -> None:
        if not self._state.failure.is_final:  # a lost store is final, even for this rank alone
            self._state = msgspec.json.decode(text, type=GroupState)

    def _decide(self, store: Any) -> None:
        while True:
            with self._changed:
                present, wanted = self._state, self._next_state()
            if wanted == present:
                return
            stored = store.compare_set(_STATE_KEY, _encode(present), _encode(wanted))
            with self._changed:
                self._set_state(stored)
                self._changed.notify_all()

    def _has_news(self) -> bool:
        return self._own != self._posted or self._next_state() != self._state

    def _next_state(self) -> GroupState:
        """Return the state that this rank wants, which is the present one if there is nothing to decide."""
        state, own = self._state, self._own
        if state.failure.is_final:
            return state
        if self._wants_cancel and not (state.cancelled_call == own.call and self.rank in state.cancelled_by):
            state = state.cancel(own.call, self.rank)
        failure = self._failure or (self._find_failure() if self._is_waiting else None)
        if failure is not None:
            return state.fail(own.call, failure)
        if self.rank == 0 and self._is_waiting and self._have_all_come():
            return state.permit(own.call, own.barrier)
        return state

    def _have_all_come(self) -> bool:
        own = self._own
        return len(self._others) == self.num_ranks - 1 and all(
            heartbeat.call == own.call and heartbeat.barrier >= own.barrier for heartbeat in self._others.values()
        )

    def _find_failure(self) -> Failure | None:
        """Return a failure if ranks that this one waits for do something else, have left, or are lost."""
        own, watched = self._own, self._others.items()
        apart = [rank for rank, heartbeat in watched if heartbeat.call == own.call and heartbeat.task != own.task]
        if apart and self.rank == 0:  # the others hear it from rank 0
            tasks = {0: own.doing, **{rank: self._others[rank].doing for rank in apart}}
            return Failure(tuple(apart), describe_tasks(tasks))
        gone = [
            rank
            for rank, heartbeat in watched
            if heartbeat.call > own.call or (heartbeat.call == own.call and heartbeat.has_ended)
        ]
        if gone:
            return Failure(tuple(gone), f"{name_ranks(gone)} left before the end")
        since_s = time.monotonic() - self.timeout_s
        silent = [rank for rank, heard_s in self._heard_s.items() if heard_s <= since_s]
        if silent:
            hint = "if ranks come that late, pass a larger Options(timeout_s=…)"
            if not all(rank in self._others and self._others[rank].call == own.call for rank in silent):
                hint = f"all ranks must make this call, and none under 'if rank == 0' alone; {hint}"
            why = f"gave no sign of life for {self.timeout_s:.3g} s ({hint})"
            return Failure(tuple(silent), f"{name_ranks(silent)} {why}", is_final=True)
        return None


def describe_tasks(tasks: dict[int, str]) -> str:
    """Say that ranks came to do something else than rank 0. `tasks` has the task of each of them, and of rank 0."""
    ranks_by_task: dict[str, list[int]] = {}
    for rank, task in tasks.items():
        ranks_by_task.setdefault(task, []).append(rank)
    shown = "; ".join(f"{name_ranks(ranks)}: {task}" for task, ranks in itertools.islice(ranks_by_task.items(), 5))
    why = "all ranks must make the same calls in the same order, and save to the same URI"
    return f"{name_ranks(tasks.keys() - {0})} came to do something else than rank 0 ({shown}): {why}"


def _encode(state: GroupState) -> str:
    return msgspec.json.encode(state).decode()
