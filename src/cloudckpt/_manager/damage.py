"""What was found damaged, until it is saved anew."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cloudckpt import _forks
from cloudckpt._manager.made import Made


class Damage:
    """Of one manager's steps. Threads of saves may tell of a commit at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: frozenset[int] = frozenset()
        self._mended: Made | None = None
        """The last save of a step that was found damaged."""
        _forks.watch(self)

    def after_fork(self) -> None:
        """A thread that is not in the child may have held its lock."""
        self._lock = threading.Lock()

    @property
    def steps(self) -> frozenset[int]:
        """Those that are, as far as it is known."""
        return self._steps

    def note(self, steps: Iterable[int]) -> None:
        """They were found damaged, whatever was saved there before."""
        with self._lock:
            self._steps = self._steps.union(steps)
            self._mended = None

    def saving(self, made: Made) -> None:
        """A save that may mend a step."""
        if made.step in self._steps:
            self._mended = made

    def committed(self, step: int) -> None:
        """What lies there is another one now."""
        with self._lock:
            self._steps -= {step}

    def is_to_mend(self, step: int) -> bool:
        """Whether what is there is damaged, also by the word of the last save there, whose callback may be late."""
        if step not in self._steps:
            return False
        return self._mended is None or self._mended.step != step or self._mended.has_failed
