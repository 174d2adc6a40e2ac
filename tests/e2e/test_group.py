"""The collectives of one call, as torch's steps make them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.kit.ranks import on_ranks
from torch.distributed.checkpoint.utils import _DistWrapper

from cloudckpt.dcp.ranks.collectives import begin_call

pytestmark = pytest.mark.multirank


@on_ranks(2)
def test_ranks_meet_before_each_collective_of_dcps() -> None:
    """If this fails, torch makes a collective in another way, in which a lost rank is waited for for half an hour."""
    call = begin_call(None, "foreground", doing="saving", uri="memory://c", timeout_s=60.0)
    assert call is not None
    met: list[str] = []
    barrier = call._rendezvous.barrier
    call._rendezvous.barrier = lambda: (met.append(name), barrier())[1]  # type: ignore[method-assign]
    rank, is_first = call.get_rank(), call.is_coordinator
    large = [b"of 0" * 300_000, b"of 1"]
    calls: dict[str, tuple[Callable[[], object], object]] = {
        "broadcast_object": (lambda: call.broadcast_object(large[0] if is_first else None), large[0]),
        "gather_object": (lambda: call.gather_object(large[rank]), large if is_first else None),
        "all_gather_object": (lambda: call.all_gather_object(large[1 - rank]), large[::-1]),
        "scatter_object": (lambda: call.scatter_object(large if is_first else None), large[rank]),
        "reduce_scatter": (lambda: call.reduce_scatter("step", lambda: rank, lambda ranks: [sum(ranks)] * 2), 1),
        "all_reduce": (lambda: call.all_reduce("step", lambda: rank, sum), 1),
        "all_gather": (lambda: call.all_gather("step", lambda: rank), [0, 1]),
        "broadcast": (lambda: call.broadcast("step", lambda: "of 0"), "of 0"),
        "barrier": (call.barrier, None),
    }
    assert {name for name in dir(_DistWrapper) if not name.startswith(("_", "get_"))} == calls.keys()
    for name, (collective, expected) in calls.items():
        assert collective() == expected, name
        assert name in met
    call.end(None)
