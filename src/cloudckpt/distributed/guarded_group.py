"""Process groups whose collectives begin only once all ranks have come to them.

A collective of gloo cannot be taken back: where a rank is missing, it waits for the group's own timeout, mostly half
an hour. So a barrier whose wait ends (`Rendezvous`) precedes it. See ``docs/design/009-waiting-for-ranks.md``.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime as dt
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._forks import refuse_in_fork
from cloudckpt.distributed.rendezvous import Rendezvous
from cloudckpt.errors import RankLostError
from cloudckpt.telemetry.timeline import meeting

Purpose: TypeAlias = Literal["foreground", "background", "asking"]
"""Calls that may run beside one another use process groups of their own."""
_T = TypeVar("_T")

BACKEND = "cloudckpt"
# Of other backends it is not known that each rank is a process, and that all ranks have a store in common.
_GUARDED_BACKENDS = {"gloo", "nccl", "nccl2", "nccl-lazy", "nccl-legacy", "xccl", "hccl", "ucc"}
_MAX_COLLECTIVE_S = 1800.0
_SIGNAL_CHECK_S = 0.5
_GROUP_DESTROYED = (
    "the process group was destroyed meanwhile. Nothing was removed, and rank 0 may have committed: see "
    "cloudckpt.latest. Before destroy_process_group(), wait for the handle's result(), or call cloudckpt.close()"
)
c10d: Any = dist  # with names that torch's stubs leave out
_new_group = threading.local()


class GuardedProcessGroup(dist.ProcessGroup):
    """A gloo group for DCP. In the main thread, an interrupt comes before a collective or after it, and never within.

    torch makes an object's collective of two or three: first the sizes, and then the bytes, of ``uint8``. The barrier
    is before the first, and an interrupt waits until after the last, so that no rank leaves the others in gloo.
    """

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]  # its form for subclasses
        self.rendezvous: Rendezvous = _new_group.rendezvous
        self._interrupt: BaseException | None = None
        # Not the store that torch offers: by its name it may be that of a group of the same ranks that is gone.
        store = c10d.PrefixStore("gloo", self.rendezvous.store)
        timeout = dt.timedelta(seconds=self.rendezvous.timeout_s)
        self._gloo: Any = c10d.ProcessGroupGloo(store, self.rendezvous.rank, self.rendezvous.num_ranks, timeout)
        for device in _new_group.devices:
            self._register_backend(device, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # torch 2.15 looks for it in each new group

    def bound_collectives(self, timeout_s: float) -> None:
        """Bound each collective. All ranks have come to it, so this bounds the transfer alone."""
        timeout = dt.timedelta(seconds=min(timeout_s, _MAX_COLLECTIVE_S))
        self._gloo._set_default_timeout(timeout)  # noqa: SLF001  # torch's own way to change it

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._guard(inputs[0], lambda: self._gloo.allgather(outputs, inputs, opts))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # torch's name
        # torch 2.15 gathers objects by this.
        return self._guard(input, lambda: self._gloo._allgather_base(output, input, opts))  # noqa: SLF001  # torch's own

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # of its two forms, the one that dist uses
        return self._guard(tensors[0], lambda: self._gloo.broadcast(tensors, opts))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]  # of its two forms, the one that dist uses
        return self._guard(inputs[0], lambda: self._gloo.gather(outputs, inputs, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]  # of its two forms, the one that dist uses
        # torch broadcasts the largest size before, and scatters the sizes last.
        is_last = outputs[0].dtype is not torch.uint8
        return self._complete(lambda: self._gloo.scatter(outputs, inputs, opts), is_last=is_last)

    def _guard(self, tensor: torch.Tensor, collective: Callable[[], Any]) -> Any:
        if tensor.dtype is torch.uint8:
            return self._complete(collective, is_last=True)
        return self._meet_and_complete(collective, is_last=False)

    @meeting
    def _meet_and_complete(self, collective: Callable[[], Any], *, is_last: bool) -> Any:
        def meet_and_run() -> Any:
            self.rendezvous.barrier()
            return self._run(collective)

        return self._end_interrupted(*run_in_thread(meet_and_run, self.rendezvous.fail), is_last=is_last)

    def _complete(self, collective: Callable[[], Any], *, is_last: bool) -> Any:
        outcome = run_in_thread(lambda: self._run(collective), self.rendezvous.fail)
        return self._end_interrupted(*outcome, is_last=is_last)

    def _run(self, collective: Callable[[], Any]) -> Any:
        try:
            work = collective()
            work.wait()
        except RuntimeError as error:
            raise self.rendezvous.explain(error) from None
        return work

    def _end_interrupted(self, work: Any, interrupt: BaseException | None, *, is_last: bool) -> Any:
        self._interrupt = self._interrupt or interrupt
        if is_last and self._interrupt is not None:
            pending, self._interrupt = self._interrupt, None
            raise pending
        return work


def run_in_thread(
    work: Callable[[], _T], on_interrupt: Callable[[BaseException], object]
) -> tuple[_T, BaseException | None]:
    """Run `work` in another thread if this is the main thread, where signals raise; it always runs to its end.

    Returns its result, and the interrupt that came meanwhile, which `on_interrupt` was told of. Raises that interrupt
    instead if `work` fails.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(), None
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

    def note_interrupt(_kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is not None:
            interrupts.append(error)
            on_interrupt(error)
        return True  # `work` has to end first, which `on_interrupt` sees to

    while not is_done.is_set():
        with contextlib.ExitStack() as stack:
            stack.push(note_interrupt)
            is_done.wait(_SIGNAL_CHECK_S)  # a signal just before the wait does not end it
    if errors:
        raise [*interrupts, *errors][0]
    return results[0], next(iter(interrupts), None)


class _Guard:
    """The calls of the ranks of one process group, for one purpose."""

    def __init__(self, source: dist.ProcessGroup, purpose: Purpose) -> None:
        self.source = weakref.ref(source)  # torch alone keeps groups alive: a fork must not be the last to free one
        self.purpose = purpose
        self.num_calls = 0
        self._ranks = sorted(dist.get_process_group_ranks(source))
        self._group: Callable[[], GuardedProcessGroup | None] = lambda: None
        store = source.get_group_store()
        self.rendezvous = Rendezvous(
            c10d.PrefixStore(f"cloudckpt/{purpose}", store),
            rank=self._ranks.index(dist.get_rank()),
            num_ranks=len(self._ranks),
            store_keeper=self._keeper_of(store),
        )

    def begin(self, call: int, *, doing: str, uri: str, timeout_s: float) -> GuardedProcessGroup:
        """Begin a call, and return the group for its collectives. The first call makes it."""
        self.rendezvous.begin(call, doing=doing, uri=uri, timeout_s=timeout_s)
        group = self._group()
        if group is None:
            self.rendezvous.barrier()
            try:
                group = self._new_group()
            except RuntimeError as error:
                raise self.rendezvous.explain(error) from None
            self._group = weakref.ref(group)
        group.bound_collectives(timeout_s)
        return group

    def destroy(self) -> None:
        """Free the group for the collectives, after that of the user was destroyed."""
        group = self._group()
        if group is not None and exists(group):
            dist.destroy_process_group(group)

    def _new_group(self) -> GuardedProcessGroup:
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, GuardedProcessGroup, extended_api=True, devices=["cpu"])
        bound = c10d.distributed_c10d._get_default_group().bound_device_id  # noqa: SLF001  # torch asks each new group for it
        _new_group.rendezvous = self.rendezvous
        _new_group.devices = [torch.device("cpu"), *([torch.device(bound.type)] if bound is not None else [])]
        group: GuardedProcessGroup = dist.new_group(
            self._ranks,
            backend=BACKEND,
            timeout=dt.timedelta(seconds=self.rendezvous.timeout_s),
            use_local_synchronization=True,  # or a rank that is lost here would put later groups out of step
        )
        return group

    def _keeper_of(self, store: Any) -> tuple[int, ...]:
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        # Under torchrun its agent keeps the store, else the first rank of all does.
        is_a_ranks = isinstance(store, c10d.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return (self._ranks.index(0),) if is_a_ranks and 0 in self._ranks else ()


_guards: list[_Guard] = []
"""The guards of the process groups that this process has used."""
_guards_lock = threading.RLock()  # a signal's handler may come while its own thread holds it


def _next_call(source: dist.ProcessGroup, purpose: Purpose) -> tuple[_Guard, int]:
    """Return the guard for this purpose, and the number of its next call, which counts even if it fails."""
    with _guards_lock:
        for guard in list(_guards):
            known = guard.source()
            if known is None or not exists(known):
                guard.destroy()
                _guards.remove(guard)
        for guard in _guards:
            if guard.source() is source and guard.purpose == purpose:
                break
        else:
            guard = _Guard(source, purpose)
            _guards.append(guard)
        guard.num_calls += 1
        return guard, guard.num_calls


class CollectiveCall:
    """One save or load of all ranks: `group` is for its collectives, and `end` must be called."""

    def __init__(self, source: dist.ProcessGroup, purpose: Purpose, *, doing: str, uri: str, timeout_s: float) -> None:
        self._what, self._uri = f"{doing} {uri}", uri
        guard, self._number = _next_call(source, purpose)
        self._rendezvous = guard.rendezvous
        try:
            self.group, interrupt = run_in_thread(
                lambda: guard.begin(self._number, doing=doing, uri=uri, timeout_s=timeout_s), self._rendezvous.fail
            )
            if interrupt is not None:
                raise interrupt  # noqa: TRY301  # the clause below is for it, too
        except BaseException as error:
            self.end(error)
            raise

    def set_on_cancel(self, on_cancel: Callable[[tuple[int, ...]], object] | None) -> None:
        """Have `on_cancel` called, in any thread, with the ranks that cancel this call; perhaps repeatedly."""
        self._rendezvous.set_on_cancel(self._number, on_cancel)

    def cancel(self) -> None:
        """Tell all ranks that this one wants this call, and no later one, to come to nothing."""
        self._rendezvous.cancel(self._number)

    def end(self, error: BaseException | None) -> None:
        """End the call. With `error`, which the other ranks do not know of, it fails there at once."""
        self._rendezvous.end(self._number, error)

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """End the call with this context, and raise the loss of a rank or of the group as DCP's own exception."""
        error: BaseException | None = None
        try:
            yield
        except CheckpointException:
            raise  # all ranks know of it
        except BaseException as caught:
            error = caught
            if isinstance(caught, RankLostError):
                raise as_checkpoint_exception(caught) from None
            if isinstance(caught, Exception) and not exists(self.group):
                ranks = (self._rendezvous.rank,)
                text = f"{self._what} failed: {_GROUP_DESTROYED}"
                raise as_checkpoint_exception(RankLostError(text, uri=self._uri, ranks=ranks)) from caught
            raise
        finally:
            self.end(error)
            del error


def begin_call(
    process_group: dist.ProcessGroup | None, purpose: Purpose, *, doing: str, uri: str, timeout_s: float
) -> CollectiveCall | None:
    """Begin a call of all ranks of `process_group`; None if there is no other rank, or no way to guard the group.

    Raises `RankLostError` if the group has lost a rank, or, on the first call, if not all ranks come.
    """
    source = _guardable(process_group)
    return None if source is None else CollectiveCall(source, purpose, doing=doing, uri=uri, timeout_s=timeout_s)


@contextlib.contextmanager
def guarded_collectives(
    process_group: dist.ProcessGroup | None,
    purpose: Purpose = "foreground",
    *,
    doing: str,
    uri: str,
    timeout_s: float,
) -> Iterator[dist.ProcessGroup | None]:
    """Yield the group for the collectives of one call of DCP: `process_group` itself if it cannot be guarded.

    A lost rank fails the call with torch's own exception.
    """
    try:
        call = begin_call(process_group, purpose, doing=doing, uri=uri, timeout_s=timeout_s)
    except RankLostError as error:
        raise as_checkpoint_exception(error) from None
    if call is None:
        yield process_group
    else:
        with call.ended():
            yield call.group


def as_checkpoint_exception(error: RankLostError) -> CheckpointException:
    """Wrap `error` as DCP reports the failures of ranks."""
    return CheckpointException("rendezvous", dict.fromkeys(error.ranks or (0,), (error, None)))  # type: ignore[arg-type]  # torch takes None


def exists(group: dist.ProcessGroup) -> bool:
    """True if the group has not been destroyed, as all are with the default one."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def _guardable(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return None
    refuse_in_fork()
    source = process_group if process_group is not None else dist.group.WORLD
    if source is None or dist.get_rank(source) < 0 or dist.get_world_size(source) == 1:
        return None
    return source if _backends_of(source) <= _GUARDED_BACKENDS else None


def _backends_of(group: dist.ProcessGroup) -> set[str]:
    config = dist.get_backend_config(group)
    return {pair.rpartition(":")[2] for pair in str(config).lower().split(",")}
