"""Two processes that do something to one store at the same instant, round after round."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import TypeVar

from cloudckpt.errors import StoreError
from cloudckpt.stores.base import Store
from cloudckpt.testing._contract_tools import WAIT_S

Round = TypeVar("Round")

_barrier: Barrier | None = None


def race_in_processes(
    store: Store,
    first: Callable[[Store, Round], None],
    second: Callable[[Store, Round], None],
    rounds: Sequence[Round],
) -> list[tuple[StoreError | None, StoreError | None]]:
    """Run `first` in one process and `second` in another, together for each of `rounds`; what came of it, in order.

    Functions and rounds have to survive pickling.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    with ProcessPoolExecutor(2, mp_context=context, initializer=_keep_barrier, initargs=(barrier,)) as pool:
        futures = [pool.submit(_run, pickle.dumps(store), function, rounds) for function in (first, second)]
        outcomes = [future.result(WAIT_S) for future in futures]
    return list(zip(*outcomes, strict=True))


def _keep_barrier(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  # a barrier reaches a pool's processes only so
    _barrier = barrier


def _run(
    pickled_store: bytes, function: Callable[[Store, Round], None], rounds: Sequence[Round]
) -> list[StoreError | None]:
    if _barrier is None:
        raise RuntimeError("the pool's initializer did not run")
    store: Store = pickle.loads(pickled_store)  # noqa: S301  # our own bytes
    outcomes: list[StoreError | None] = []
    try:
        for round_ in rounds:
            _barrier.wait(WAIT_S)
            try:
                function(store, round_)
            except StoreError as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
    except BaseException:
        _barrier.abort()  # the other need not wait
        raise
    return outcomes
