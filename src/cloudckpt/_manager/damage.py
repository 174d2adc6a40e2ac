"""The steps that were found damaged, until they are replaced, and where those are saved that are not replaced."""

from __future__ import annotations

import threading

from cloudckpt import _forks
from cloudckpt._manager.made import Made
from cloudckpt._manager.rule import OnDamaged
from cloudckpt._manager.steps import Steps


class Damage:
    """The damaged steps of one manager, the same on all ranks. Threads of saves may tell of a commit at any time."""

    def __init__(self, steps: Steps, policy: OnDamaged) -> None:
        self._lock = threading.Lock()
        self._steps = steps
        self._policy = policy
        self._uris: frozenset[str] = frozenset()
        self._replaced: Made | None = None
        """The last save of a step that was found damaged and is replaced."""
        _forks.watch(self)

    def after_fork(self) -> None:
        """A thread that is not in the child may have held its lock."""
        self._lock = threading.Lock()

    @property
    def uris(self) -> frozenset[str]:
        """The checkpoints that are damaged, as far as it is known."""
        return self._uris

    def note(self, uri: str) -> None:
        """It was found damaged, whatever was saved there before."""
        with self._lock:
            self._uris |= {uri}
            self._replaced = None

    def uri_for(self, step: int) -> str:
        """Where to save a step: with the policy ``"skip"`` never where one lies that was found damaged."""
        again = 0
        while self._policy == "skip" and self._steps.uri_of(step, again) in self._uris:
            again += 1
        return self._steps.uri_of(step, again)

    def saving(self, made: Made, uri: str) -> None:
        """A save that may replace a damaged step."""
        if uri in self._uris:
            self._replaced = made

    def committed(self, uri: str) -> None:
        """Another checkpoint lies there now."""
        with self._lock:
            self._uris -= {uri}

    def is_to_replace(self, step: int) -> bool:
        """Whether what is there is damaged, also by the word of the last save there, whose callback may be late."""
        if self._policy != "replace" or self._steps.uri_of(step) not in self._uris:
            return False
        return self._replaced is None or self._replaced.step != step or self._replaced.has_failed
