"""Threads that run calls to a store.

Not a ``ThreadPoolExecutor``: that refuses work as soon as the interpreter begins to exit, and a background save that
is still running when a script ends has to be completed, not lost.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from cloudckpt._this_process import is_forked

_T = TypeVar("_T")
_log = logging.getLogger("cloudckpt")


class WorkQueue(queue.Queue["Callable[[], None] | None"]):
    """A queue of tasks, which threads run in order. A thread is started when it is needed.

    At most as many tasks as `width` returns run at once; the number may change while they run. `put` waits while
    `max_waiting` tasks wait for a thread (0: no bound), and `join` waits until every task has run. A context: at its
    end, all tasks have run, and the threads have ended. It then raises the first exception of a task. A task's
    exception does not end its thread. The interpreter does not wait for threads that are `daemon`.
    """

    def __init__(self, width: Callable[[], int], *, name: str, max_waiting: int = 0, daemon: bool = False) -> None:
        super().__init__(max_waiting)
        self._daemon = daemon
        self._width = width
        self._name = name
        self._threads: list[threading.Thread] = []
        self._num_taking = 0
        self._has_room = threading.Condition()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_forked():  # a child has none of the threads
            return
        try:
            self.join()
        finally:  # if that is interrupted, the threads still leave after the last task
            with self.mutex:  # `put` would wait while the queue is full
                self._put(None)
                self.unfinished_tasks += 1
                self.not_empty.notify()
        for thread in self._threads:
            thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` as soon as a thread is free."""
        # First, so that no task is left without a thread if this is interrupted.
        if len(self._threads) < max(self._width(), 1):
            name, run = f"{self._name}-{len(self._threads)}", contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=self._daemon)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # the system's limit, or the interpreter ends: those that there are do the work
                if not self._threads:
                    raise
        self.put(task)

    def _run(self) -> None:
        while True:
            with self._has_room:
                self._has_room.wait_for(lambda: self._num_taking < max(self._width(), 1))
                self._num_taking += 1
            task = self.get()
            try:
                if task is None:
                    self.put(None)  # for the next thread
                    return
                task()
            except BaseException as error:  # noqa: BLE001  # the context raises it
                self._error = self._error or error
            finally:
                with self._has_room:
                    self._num_taking -= 1
                    self._has_room.notify_all()
                self.task_done()


class RepeatedTask:
    """Runs a function in a thread of its own, once more after each request that came during a run.

    The thread is not a daemon: the interpreter waits for it, and it ends when no run is requested.

    Args:
        run: Function to run. It must not raise.
        name: Name of the thread.

    """

    def __init__(self, run: Callable[[], None], *, name: str) -> None:
        self._run_once, self._name = run, name
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_requested = False
        self._num_waiting = 0

    @property
    def is_awaited(self) -> bool:
        """True while a thread waits for the end of the runs, as the interpreter does at its exit."""
        return self._num_waiting > 0 or not threading.main_thread().is_alive()

    def request(self) -> None:
        """Request a run. Does not wait.

        Raises:
            RuntimeError: No thread can be started: the interpreter is exiting, or the system has too many threads.

        """
        with self._changed:
            self._is_requested = True
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=False)
            thread.start()
            self._thread = thread

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no run is in progress or requested. Returns False after `timeout_s`."""
        with self._changed:
            thread = self._thread
            self._num_waiting += 1
            try:
                if not self._changed.wait_for(lambda: self._thread is None, timeout_s):
                    return False
            finally:
                self._num_waiting -= 1
        if thread is not None:
            thread.join()  # it has nothing left to do
        return True

    def _run(self) -> None:
        try:
            while self._is_requested_still():
                self._run_once()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # it ends by an error, and no thread waits for it
                    self._thread = None
                    self._changed.notify_all()

    def _is_requested_still(self) -> bool:
        with self._changed:
            is_requested, self._is_requested = self._is_requested, False
            if not is_requested:
                self._thread = None  # under the same lock as the check: a later `request` begins a new thread
                self._changed.notify_all()
            return is_requested


@contextlib.contextmanager
def logging_failures(text: str, *values: object) -> Iterator[None]:
    """Log the exceptions of a callback in this context. The thread must not end, since others wait for it.

    Raises an interrupt or an exit of the main thread, which ends the program.
    """
    try:
        yield
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        _log.exception(text, *values)


def each_done(
    items: Sequence[_T],
    work: Callable[[_T], None],
    *,
    num_threads: int | Callable[[], int],
    name: str,
    on_failure: Callable[[], None],
) -> Generator[_T, None, None]:
    """Run `work` on all `items` in threads, and yield each item in this thread once it is done.

    Raises the first failure. After a failure, or once the iterator is closed, no other item is begun, and `on_failure`
    is called. In every case, it ends only when no `work` runs any more.
    """
    ended: queue.SimpleQueue[tuple[_T, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()

    def run(item: _T) -> None:
        error: BaseException | None = None
        try:
            if not stopped.is_set():
                work(item)
        except BaseException as caught:  # noqa: BLE001  # it is raised again where it can be handled
            error = caught
        ended.put((item, error))

    with WorkQueue(num_threads if callable(num_threads) else lambda: num_threads, name=name) as tasks:
        try:
            for item in items:
                tasks.submit(functools.partial(run, item))
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
    """Return the number of ranks on this machine that torchrun gives, or 1."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1


def num_cores_of_rank() -> int:
    """Return the number of cores that each rank of this machine has to itself."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // max(ranks_of_host(), 1))
