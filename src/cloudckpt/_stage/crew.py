"""Threads that fill one snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from cloudckpt._stage.staging import Staging
from cloudckpt._threads import Thread


class Crew:
    """Does some jobs for a staging, each in a thread of its own. When the last has ended, it says how all of them did.

    Once one has failed, or `run` was interrupted, the others should end early: those that have not begun never do.
    """

    def __init__(self, staging: Staging, jobs: Sequence[Callable[[Crew], None]], *, in_threads: bool = True) -> None:
        self._staging = staging
        self._jobs: list[Callable[[Crew], None] | None] = list(jobs)
        self._in_threads = in_threads
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._running: list[threading.Thread] = []
        self._is_run = False
        self._num_left = len(jobs)
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether there is no use in going on."""
        return self._error is not None

    @property
    def sources(self) -> Sequence[Any]:
        """What is copied."""
        return self._staging.sources

    def done(self, task: int, num_bytes: int) -> None:
        """A task of the staging has been."""
        self._staging.task_done(task, num_bytes)

    def run(self) -> None:
        """Start all jobs; those that get no thread are done here, after the others have begun."""
        here = list(range(len(self._jobs)))
        try:
            while self._in_threads and here:
                # Not a daemon: the interpreter waits for it.
                thread = Thread(self._do_in_thread, here[0], name=f"cloudckpt-stage-{here[0]}", daemon=False)
                try:
                    thread.start()
                except RuntimeError:  # the system's limit, or the interpreter ends
                    break
                here.pop(0)
            for number in here:
                self._do(number)
            self._is_run = True
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            for number in here:
                self._do(number)
            raise

    def wait(self) -> None:
        """Until no memory is read or written any more."""
        if self._is_run:
            self._staging.completed.exception()  # it is whoever asked for that copy who is told
            return
        # `run` was interrupted, wherever it was: nobody has the staging, and it may never end.
        with self._lock:
            self._begun.update(range(len(self._jobs)))
            running = list(self._running)
        for thread in running:
            thread.join()

    def _do_in_thread(self, number: int) -> None:
        with self._lock:
            if number in self._begun:
                return
            self._running.append(threading.current_thread())
        self._do(number)

    def _do(self, number: int) -> None:
        with self._lock:
            if number in self._begun:
                return
            self._begun.add(number)
            job, self._jobs[number] = self._jobs[number], None  # it may hold what it copies
        try:
            if job is not None and not self.has_failed:
                job(self)
        except BaseException as error:  # noqa: BLE001  # it is raised where it is waited for
            with self._lock:
                self._error = self._error or error
        del job  # before anybody learns that it has been done
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._staging.end(self._error)
