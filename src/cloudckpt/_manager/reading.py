"""Keeping what this process reads from being removed by it, root by root."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from cloudckpt._forks import in_child
from cloudckpt._threads import Condition

_changed = Condition()
_readers: Counter[str] = Counter()
_removing: set[str] = set()


@in_child
def _forget_after_fork() -> None:
    global _changed  # noqa: PLW0603  # another thread may have held it
    _changed = Condition()
    _readers.clear()
    _removing.clear()


@contextlib.contextmanager
def reading(root: str) -> Iterator[None]:
    """Nothing under `root` is removed in this context; waits for the one removal that may be under way."""
    with _changed:
        _changed.wait_for(lambda: root not in _removing)
        _readers[root] += 1
    try:
        yield
    finally:
        with _changed:
            _readers[root] -= 1
            _changed.notify_all()


@contextlib.contextmanager
def removing(root: str) -> Iterator[None]:
    """Nothing under `root` is read in this context; waits for whoever reads there."""
    with _changed:
        _changed.wait_for(lambda: not _readers[root] and root not in _removing)
        _removing.add(root)
    try:
        yield
    finally:
        with _changed:
            _removing.discard(root)
            _changed.notify_all()
