"""Threads that run calls to a store.

Not a ``ThreadPoolExecutor``: that refuses work as soon as the interpreter begins to exit, and a background save that
is still running when a script ends has to be completed, not lost.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from cloudckpt import _forks
from cloudckpt._threads import Condition, Event, Thread

_T = TypeVar("_T")

_WATCH_EVERY_S = 0.1
_START_S = 5.0


class Workers:
    """Threads, started as they are needed, that run tasks in the order of their submission.

    No more run at once than `width` says, which may change with every task that ends: then further ones are started,
    or some wait. Tasks must not raise: whoever submits them takes care of their results. Used as a context, which ends
    when all tasks have. While there is something to do, `watch` is called ten times a second, in a thread of its own.
    """

    def __init__(self, width: int | Callable[[], int], *, name: str, watch: Callable[[], None] | None = None) -> None:
        self._width = width if callable(width) else lambda: width
        self._name = name
        self._watch = watch
        self._lock = lock = threading.RLock()
        self._changed, self._has_room, self._has_left = Condition(lock), Condition(lock), Condition(lock)
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads: list[Thread] = []
        self._num_running = 0
        self._num_idle = 0
        self._num_left = 0
        self._is_joining = False
        self._has_ended = Event()
        self._watcher: Thread | None = None
        _forks.watch(self)

    def after_fork(self) -> None:
        """In a child, which has none of the threads: there is nothing to do, and nobody to wait for."""
        self._lock = lock = threading.RLock()
        self._changed, self._has_room, self._has_left = Condition(lock), Condition(lock), Condition(lock)
        self._tasks.clear()
        self._threads, self._watcher, self._num_left = [], None, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.join()

    def submit(self, task: Callable[[], None], *, most_for_each: int | None = None) -> None:
        """Run `task` as soon as a thread is free; but wait first until there is less to do than `most_for_each` tasks
        for each request of the width, those that run included.
        """
        with self._lock:
            if most_for_each is not None:
                self._has_room.wait_for(
                    lambda: len(self._tasks) + self._num_running < most_for_each * self._current_width()
                )
            self._tasks.append(task)
            self._make_way()

    def join(self) -> None:
        """Wait until all tasks have run. Nothing can be submitted afterwards."""
        try:
            with self._lock:
                self._is_joining = True
                self._changed.notify_all()
                while not self._has_left.wait_for(lambda: self._num_left == len(self._threads), timeout=_START_S):
                    # An interrupt in the midst of a start can keep a thread from ever running.
                    self._threads = [thread for thread in self._threads if thread.ident is not None]
            for thread in self._threads:
                thread.join()
        finally:  # also where this is interrupted: nobody would end the watcher then
            self._has_ended.set()
        if self._watcher is not None:
            self._watcher.join()

    def _current_width(self) -> int:
        return max(self._width(), 1)

    def _make_way(self) -> None:
        """With the lock held: have as many threads at work as there is room and work for."""
        num_wanted = min(self._current_width() - self._num_running, len(self._tasks))
        if num_wanted > 0:
            self._changed.notify(num_wanted)
        for _ in range(self._num_idle, num_wanted):
            if len(self._threads) >= self._current_width():
                break
            # Not a daemon: the interpreter waits for it.
            name, run = f"{self._name}-{len(self._threads)}", contextvars.copy_context().run
            thread = Thread(run, self._run, name=name, daemon=False)
            self._threads.append(thread)  # first: one whose start is interrupted runs all the same
            try:
                thread.start()
            except RuntimeError:  # the system's limit, or the interpreter ends: those that there are do the work
                self._threads.remove(thread)
                if not self._threads:
                    raise
                break
        if self._watch is not None and self._watcher is None and len(self._threads) > 1:
            watcher = Thread(self._keep_watch, name=f"{self._name}-watch", daemon=False)
            # There may be no more threads: then nobody watches.
            with contextlib.suppress(RuntimeError):
                watcher.start()
                self._watcher = watcher

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                try:
                    task()
                finally:
                    with self._lock:
                        self._num_running -= 1
                        self._make_way()
                        self._has_room.notify_all()
        finally:
            with self._lock:
                self._num_left += 1
                self._has_left.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            while not self._tasks or self._num_running >= self._current_width():
                if self._is_joining and not self._tasks:
                    return None
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            self._num_running += 1
            task = self._tasks.popleft()
            if self._is_joining and not self._tasks:
                self._changed.notify_all()  # there is nothing left to wait for
            return task

    def _keep_watch(self) -> None:
        assert self._watch is not None  # noqa: S101  # there is no watcher without
        while not self._has_ended.wait(_WATCH_EVERY_S):
            self._watch()


def each_done(
    items: Sequence[_T],
    work: Callable[[_T], None],
    *,
    num_threads: int | Callable[[], int],
    name: str,
    on_failure: Callable[[], None],
    watch: Callable[[], None] | None = None,
) -> Generator[_T, None, None]:
    """Run `work` on all `items` in threads, and give each item in this thread once it is done.

    `num_threads` and `watch` are as the width and `watch` of `Workers`.

    Raises the first failure; what has not begun by then, or when the iterator is closed, is not begun any more. Ends,
    in every case, only when nothing is running; `on_failure` is called before that is waited for.
    """
    ended: queue.SimpleQueue[tuple[_T, BaseException | None]] = queue.SimpleQueue()
    stopped = Event()

    def run(item: _T) -> None:
        error: BaseException | None = None
        try:
            if not stopped.is_set():
                work(item)
        except BaseException as caught:  # noqa: BLE001  # it is raised again where it can be handled
            error = caught
        ended.put((item, error))

    with Workers(num_threads, name=name, watch=watch) as workers:
        try:
            for item in items:
                workers.submit(functools.partial(run, item))
            for _ in items:
                item, error = ended.get()
                if error is not None:
                    raise error  # noqa: TRY301  # the clause below is for it, too
                yield item
        except BaseException:
            stopped.set()
            on_failure()
            raise


def ranks_of_host() -> int:
    """As torchrun says it; 1 where it does not."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1


def num_cores_of_rank() -> int:
    """As many as this process has to itself, beside the other ranks of its machine."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // max(ranks_of_host(), 1))
