"""Collectives of Python objects that begin only once all ranks have come to them.

A collective of gloo cannot be taken back: if a rank is missing, it waits for gloo's timeout, and names no rank. So a
barrier (`Rendezvous.barrier`) precedes each collective. If a rank is lost, the barrier names it within
`Options.timeout_s`. See ``docs/design/009-waiting-for-ranks.md``.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime as dt
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt._this_process import refuse_in_fork
from cloudckpt._torch_compat import DistWrapper
from cloudckpt.dcp.ranks.rendezvous import TRANSFER_FRACTION, Rendezvous, c10d, describe_tasks
from cloudckpt.errors import RankLostError
from cloudckpt.telemetry.timeline import records_waits

if TYPE_CHECKING:
    from cloudckpt.pipeline.shared_reads import MemoryTransfer

Purpose: TypeAlias = Literal["foreground", "background", "asking"]
"""The purposes of calls. Calls with different purposes may run at once, so each purpose has its own connections."""
_T = TypeVar("_T")

# With another backend, a rank may be no process of its own, or the ranks may share no store.
_GUARDED_BACKENDS = {"gloo", "nccl", "nccl2", "nccl-lazy", "nccl-legacy", "xccl", "hccl", "ucc"}
_MAX_COLLECTIVE_S = 1800.0
_SIGNAL_CHECK_S = 0.5


class _GroupLink:
    """The rendezvous and the gloo connections of the ranks of one process group, for calls of one purpose.

    torch does not know these connections, so they outlive a process group that is destroyed while a call runs.
    """

    def __init__(self, source: dist.ProcessGroup, purpose: Purpose) -> None:
        store = source.get_group_store()
        self.rendezvous = Rendezvous(
            c10d.PrefixStore(f"cloudckpt/{purpose}", store),
            rank=dist.get_rank(source),
            num_ranks=dist.get_world_size(source),
            store_keeper=_find_store_keeper(store, source),
        )
        self.num_calls = 0
        self.gloo: Any = None

    def begin(self, call: int, *, doing: str, uri: str, timeout_s: float) -> None:
        """Begin a call. The first call connects the ranks."""
        self.rendezvous.begin(call, doing=doing, uri=uri, timeout_s=timeout_s)
        timeout = _transfer_timeout(timeout_s)
        if self.gloo is None:
            self.rendezvous.barrier()
            store = c10d.PrefixStore("gloo", self.rendezvous.store)
            try:
                self.gloo = c10d.ProcessGroupGloo(store, self.rendezvous.rank, self.rendezvous.num_ranks, timeout)
            except RuntimeError as error:
                raise self.rendezvous.explain(error) from None
        self.gloo._set_default_timeout(timeout)  # noqa: SLF001  # torch's own way to change it


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Purpose, _GroupLink]] = weakref.WeakKeyDictionary()
"""The links of each process group that this process has used, by purpose."""
_links_lock = threading.RLock()  # a signal handler may need the lock while its own thread holds it


class CollectiveCall(DistWrapper):
    """The collectives of one save or load, in which no rank waits for a lost one longer than `timeout_s`.

    Replaces the ``_DistWrapper`` on which torch runs the steps of DCP. The constructor begins the call; `ending` or
    `end` ends it. A Ctrl-C never interrupts a collective, since the other ranks would wait in gloo: it is raised before
    or after the collective.

    Args:
        source: The process group, whose store the ranks share.
        purpose: Calls of different purposes may run at a time.
        doing: Participle for errors about the ranks, such as "saving".
        uri: Place that is saved to or loaded from. Saves to different URIs fail.
        timeout_s: Seconds without a sign of life after which a rank is lost.

    Raises:
        RankLostError: The group has lost a rank, or, in the first call of a purpose, not all ranks come.

    """

    def __init__(self, source: dist.ProcessGroup, purpose: Purpose, *, doing: str, uri: str, timeout_s: float) -> None:
        super().__init__(source, use_dist=True, coordinator_rank=0)
        self.group = None  # or a call in a background thread could be the last to free the user's group
        with _links_lock:
            by_purpose = _links.setdefault(source, {})
            if purpose not in by_purpose:
                by_purpose[purpose] = _GroupLink(source, purpose)
            self._link = link = by_purpose[purpose]
            link.num_calls += 1  # even if the call fails: the other ranks count it, too
            self._number = link.num_calls
        self._rendezvous = link.rendezvous
        try:
            _run_to_end(
                lambda: link.begin(self._number, doing=doing, uri=uri, timeout_s=timeout_s),
                self._rendezvous.fail,
            )
        except BaseException as error:
            self.end(error)
            raise

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self._rendezvous.num_ranks

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the value of the rank `source`, by default the coordinator."""
        is_source = self.rank == source
        data = pickle.dumps(value) if is_source else b""

        def broadcast() -> torch.Tensor:
            received = _to_tensor(data, self._broadcast_size(len(data), source))
            self._gloo.broadcast(received, source).wait()
            return received

        received = self._run_collective(broadcast)
        return value if is_source else _unpickle(received)

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on the coordinator, and None on the others."""
        gathered = self._gather(value, to_all=False)
        return gathered if self.is_coordinator else None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return self._gather(value, to_all=True)

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        """Return this rank's object of the coordinator's list."""
        data = [pickle.dumps(value) for value in object_list or ()] if self.is_coordinator else []

        def scatter() -> torch.Tensor:
            size = self._broadcast_size(max(map(len, data), default=0))
            received = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._gloo.scatter(received, [_to_tensor(pickled, size) for pickled in data], 0).wait()
            return received

        return _unpickle(self._run_collective(scatter))

    def exchange(self, sends: Sequence[MemoryTransfer], receives: Sequence[MemoryTransfer]) -> None:
        """Send and receive memory. All ranks call this directly after another collective, so that none is missing."""
        limit = _transfer_timeout(self._rendezvous.timeout_s)

        def exchange() -> None:
            works = [self._gloo.recv([memory], rank, tag) for rank, tag, memory in receives]
            works += [self._gloo.send([memory], rank, tag) for rank, tag, memory in sends]
            for work in works:
                work.wait(limit)

        self._run_collective(exchange, have_met=True)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._run_collective(lambda: None)

    def set_on_cancel(self, on_cancel: Callable[[tuple[int, ...]], object] | None) -> None:
        """Have `on_cancel` called with the ranks that cancel this call, in any thread, and perhaps repeatedly."""
        self._rendezvous.set_on_cancel(self._number, on_cancel)

    def cancel(self) -> None:
        """Tell all ranks that this one cancels this call. Later calls are not cancelled."""
        self._rendezvous.cancel(self._number)

    def note_uri(self, uri: str) -> None:
        """Name another place in the errors of this call, once the save is tried there."""
        self._rendezvous.uri = uri

    def end(self, error: BaseException | None) -> None:
        """End the call. With an `error` that only this rank has, the call fails on the other ranks at once."""
        self._rendezvous.end(self._number, error)

    @contextlib.contextmanager
    def ending(self) -> Iterator[CollectiveCall]:
        """End the call at the end of the context. Raise a `RankLostError` of the body as ``CheckpointException``."""
        error: BaseException | None = None
        try:
            yield self
        except CheckpointException:
            raise  # all ranks know of it
        except BaseException as caught:
            error = caught
            if isinstance(caught, RankLostError):
                raise as_checkpoint_exception(caught) from None
            raise
        finally:
            self.end(error)
            del error

    @property
    def _gloo(self) -> Any:
        return self._link.gloo

    def _gather(self, value: Any, *, to_all: bool) -> list[Any]:
        data = pickle.dumps(value)

        def gather() -> list[torch.Tensor]:
            sizes = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self.get_world_size())]
            self._gloo.allgather(sizes, torch.tensor([len(data)], device="cpu")).wait()
            padded = _to_tensor(data, max(int(size) for size in sizes))
            received = [torch.empty_like(padded) for _ in sizes] if to_all or self.is_coordinator else []
            (self._gloo.allgather(received, padded) if to_all else self._gloo.gather(received, padded, 0)).wait()
            return received

        return [_unpickle(pickled) for pickled in self._run_collective(gather)]

    def _broadcast_size(self, num_bytes: int, source: int = 0) -> int:
        size = torch.tensor([num_bytes], device="cpu")
        self._gloo.broadcast(size, source).wait()
        return int(size)

    @records_waits
    def _run_collective(self, collective: Callable[[], _T], *, have_met: bool = False) -> _T:
        """Wait for all ranks, unless they `have_met`, and then run `collective`."""

        def meet() -> _T:
            if not have_met:
                self._rendezvous.barrier()
            try:
                return collective()
            except RuntimeError as error:
                raise self._rendezvous.explain(error) from None

        return _run_to_end(meet, self._rendezvous.fail)


def begin_call(
    process_group: dist.ProcessGroup | None, purpose: Purpose, *, doing: str, uri: str, timeout_s: float
) -> CollectiveCall | None:
    """Begin a `CollectiveCall` of all ranks of `process_group`.

    Returns None if there is no other rank, or if the backend of the group is none of `_GUARDED_BACKENDS`. Raises a
    `RankLostError` as torch's ``CheckpointException``.
    """
    source = find_guarded_group(process_group)
    if source is None:
        return None
    try:
        return CollectiveCall(source, purpose, doing=doing, uri=uri, timeout_s=timeout_s)
    except RankLostError as error:
        raise as_checkpoint_exception(error) from None


@contextlib.contextmanager
def guarded_collectives(
    process_group: dist.ProcessGroup | None, *, doing: str, uri: str, timeout_s: float, no_dist: bool = False
) -> Iterator[DistWrapper]:
    """Yield the collectives of one save or load: a `CollectiveCall`, or torch's own if `begin_call` returns None.

    A lost rank fails the call with torch's ``CheckpointException``.
    """
    call = None if no_dist else begin_call(process_group, "foreground", doing=doing, uri=uri, timeout_s=timeout_s)
    if call is None:
        yield unguarded_collectives(process_group, no_dist=no_dist)
    else:
        with call.ending():
            yield call


def unguarded_collectives(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> DistWrapper:
    """Return torch's collectives of `process_group`.

    A process that saves or loads alone makes none: with `no_dist`, without a process group, and in a group of one rank.
    """
    is_joined = not no_dist and dist.is_available() and dist.is_initialized()
    return DistWrapper(process_group, is_joined and dist.get_world_size(process_group) != 1, 0)


def refuse_other_calls(plans: Sequence[object], *, uri: str) -> None:
    """Raise `RankLostError` if some ranks save while others load, as their plans show.

    torch's own calls have no `Rendezvous` that would find this.
    """
    tasks = {rank: f"{'saving' if isinstance(plan, SavePlan) else 'loading'} {uri}" for rank, plan in enumerate(plans)}
    apart = {rank: task for rank, task in tasks.items() if task != tasks[0]}
    if apart:
        raise RankLostError(describe_tasks({0: tasks[0], **apart}), uri=uri, ranks=tuple(apart))


def as_checkpoint_exception(error: RankLostError) -> CheckpointException:
    """Wrap `error` as DCP reports the failures of ranks."""
    return CheckpointException("rendezvous", dict.fromkeys(error.ranks or (0,), (error, None)))  # type: ignore[arg-type]  # torch takes None


def _run_to_end(work: Callable[[], _T], on_interrupt: Callable[[BaseException], object]) -> _T:
    """Run `work` to its end, and return its result. The main thread, where signals raise, runs it in another thread.

    `on_interrupt` gets an interrupt (Ctrl-C) at once. Once `work` has ended, the interrupt is raised in place of its
    outcome.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[_T] = []
    errors: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # the main thread raises it
            errors.append(error)
        finally:
            is_done.set()

    _thread.start_new_thread(run, ())  # `Thread.start` waits for the thread, and an interrupt would end that wait
    interrupts: list[BaseException] = []

    def wait() -> None:
        try:
            is_done.wait(_SIGNAL_CHECK_S)  # a signal just before the wait does not end it
        except BaseException as interrupt:  # raised after `work`, which `on_interrupt` brings to its end
            interrupts.append(interrupt)
            on_interrupt(interrupt)

    while not is_done.is_set():
        wait()
    if interrupts or errors:
        raise [*interrupts, *errors][0]
    return results[0]


def _transfer_timeout(timeout_s: float) -> dt.timedelta:
    """Return gloo's time-out. All ranks have come to a collective, so it bounds the transfer alone."""
    return dt.timedelta(seconds=min(TRANSFER_FRACTION * timeout_s, _MAX_COLLECTIVE_S))


def _to_tensor(data: bytes, num_bytes: int) -> torch.Tensor:
    """Copy `data` to the beginning of a tensor of `num_bytes`."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    tensor.numpy().data[: len(data)] = data
    return tensor


def _unpickle(tensor: torch.Tensor) -> Any:
    return pickle.loads(tensor.numpy().data)  # noqa: S301  # from the job's other ranks, as torch does; loads ignores padding


def find_guarded_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of a `CollectiveCall`; None if there is no other rank, or none of `_GUARDED_BACKENDS`."""
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return None
    refuse_in_fork()
    source = process_group if process_group is not None else dist.group.WORLD
    if source is None or dist.get_rank(source) < 0 or dist.get_world_size(source) == 1:
        return None
    backends = {pair.rpartition(":")[2] for pair in str(dist.get_backend_config(source)).lower().split(",")}
    return source if backends <= _GUARDED_BACKENDS else None


def _find_store_keeper(store: Any, source: dist.ProcessGroup) -> int | None:
    """Return the rank whose process holds the store; None if no rank does."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    # Under torchrun its agent keeps the store, else the first rank of all does.
    is_in_rank = isinstance(store, c10d.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.get_group_rank(source, 0) if is_in_rank and 0 in dist.get_process_group_ranks(source) else None
