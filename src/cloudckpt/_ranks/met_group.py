"""The group that DCP is given: gloo's collectives, each of them once all ranks have come to it."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt._ranks.meetings import Meetings
from cloudckpt._ranks.waiting import GivenUpError

BACKEND = "cloudckpt"

_founding = threading.local()


class MetGroup(dist.ProcessGroup):
    """A gloo group whose ranks meet before each collective of DCP's. Made by `dist.new_group` alone."""

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]  # its form for subclasses
        self._at_end: Callable[[], None] | None = None
        self._is_scattered = False
        self.begin_anew: Callable[[], Callable[[], None] | None] = lambda: None
        """Gives, while a call is made, what to do where the ranks turn out to have given one another up before it."""
        self.meet_by(_founding.meetings)
        for device in _founding.devices:
            self._register_backend(device, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # torch 2.15 looks for it in each new group

    def wait_at_most(self, timeout_s: float) -> None:
        """In a collective that all ranks have come to."""
        self._gloo._set_default_timeout(dt.timedelta(seconds=timeout_s))  # noqa: SLF001

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def meet_by(self, meetings: Meetings) -> None:
        """Be the group of these ranks, who have met, and are connected anew."""
        # Not the store that torch offers: by its name it may be that of a group of the same ranks that is gone.
        store = c10d().PrefixStore("gloo", meetings.store)
        timeout = dt.timedelta(seconds=meetings.timeout_s)
        self._gloo: Any = c10d().ProcessGroupGloo(store, meetings.rank, meetings.num_ranks, timeout)
        self.meetings = meetings

    def call_at_end(self, call: Callable[[], None] | None) -> None:
        """Have `call` made when this rank comes to the end of its load, whatever its own part in it came to."""
        # DCP ends a load with the first all-gather after its plans were scattered.
        self._at_end, self._is_scattered = call, False

    # torch's collectives of objects are two or three of tensors: the sizes first, and what follows in one go.

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._gathering()
        return self._together(inputs[0], lambda: self._gloo.allgather(outputs, inputs, opts))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002  # torch's name
        # By which torch 2.15 gathers objects.
        self._gathering()
        return self._together(input, lambda: self._gloo._allgather_base(output, input, opts))  # noqa: SLF001

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # of its two forms, the one that dist uses
        return self._together(tensors[0], lambda: self._gloo.broadcast(tensors, opts))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]  # of its two forms, the one that dist uses
        return self._together(inputs[0], lambda: self._gloo.gather(outputs, inputs, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]  # of its two forms, the one that dist uses
        self._is_scattered = True
        return self._together(None, lambda: self._gloo.scatter(outputs, inputs, opts))

    def barrier(self, opts: Any = None) -> Any:
        self._meet()
        return self._done(lambda: self._gloo.barrier(opts))

    def _gathering(self) -> None:
        if self._at_end is not None and self._is_scattered:
            self._at_end()

    def _together(self, tensor: torch.Tensor | None, collective: Callable[[], Any]) -> Any:
        if tensor is not None and tensor.dtype is not torch.uint8:
            self._meet()
        return self._done(collective)

    def _meet(self) -> None:
        while True:
            try:
                self.meetings.meet()
            except GivenUpError:
                begin_anew = self.begin_anew()
                if begin_anew is None:
                    raise
                begin_anew()
                continue
            return

    def _done(self, collective: Callable[[], Any]) -> Any:
        try:
            work = collective()
            work.wait()
        except RuntimeError as error:
            raise self.meetings.explain(error) from None
        return work


def c10d() -> Any:
    """torch.distributed, with the names that its stubs leave out."""
    return dist


def new_group(ranks: list[int], meetings: Meetings) -> MetGroup:
    """Of these ranks of the default group, who have met. Raises `RuntimeError` where not all of them connect."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, MetGroup, extended_api=True, devices=["cpu"])
    bound = c10d().distributed_c10d._get_default_group().bound_device_id  # noqa: SLF001  # torch asks each new group for it
    _founding.meetings = meetings
    _founding.devices = [torch.device("cpu"), *([torch.device(bound.type)] if bound is not None else [])]
    try:
        group: MetGroup = dist.new_group(
            ranks,
            backend=BACKEND,
            timeout=dt.timedelta(seconds=meetings.timeout_s),
            use_local_synchronization=True,  # or a rank that is lost here would put later groups out of step
        )
    finally:
        del _founding.meetings, _founding.devices
    return group
