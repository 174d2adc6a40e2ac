"""Python's cyclic garbage collector, while many objects are made that are no garbage."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from cloudckpt._forks import in_child

# Planning makes some twenty containers for each tensor. At Python's own threshold of 700, a collection, with now and
# then one of all that the process has, took 40 % of the time of planning a save of 20,000 tensors.
_THRESHOLD = 100_000

_lock = threading.Lock()
_num_inside = 0
_before: tuple[int, int, int] | None = None


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collections only after every 100,000 new containers. Garbage, of whichever thread, is still bounded so."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _num_inside, _before  # noqa: PLW0603  # the threshold is the process's, too
    with _lock:
        _num_inside += 1
        threshold = gc.get_threshold()
        if _num_inside == 1 and 0 < threshold[0] < _THRESHOLD:
            _before = threshold
            gc.set_threshold(_THRESHOLD, *threshold[1:])


def _leave() -> None:
    global _num_inside, _before  # noqa: PLW0603
    with _lock:
        _num_inside -= 1
        if _num_inside == 0 and _before is not None:
            if gc.get_threshold()[0] == _THRESHOLD:  # else somebody else has set it meanwhile
                gc.set_threshold(*_before)
            _before = None


@in_child
def _begin_anew() -> None:
    """In a child, in which the threads that were inside do not go on."""
    global _lock, _num_inside, _before  # noqa: PLW0603
    _lock = threading.Lock()
    if _before is not None and gc.get_threshold()[0] == _THRESHOLD:
        gc.set_threshold(*_before)
    _num_inside, _before = 0, None
