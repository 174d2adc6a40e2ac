"""Worker threads, and the number of cores that a rank has for them.

Threads that are no daemons go on while the interpreter exits: a background save that still runs when a script ends must
be completed. A ``ThreadPoolExecutor`` refuses work then.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from cloudckpt._this_process import is_forked

_T = TypeVar("_T")
_log = logging.getLogger("cloudckpt")
_MAX_REQUESTS_PER_CONNECTION = 4


class WorkQueue(queue.Queue["Callable[[], None] | None"]):
    """A queue of tasks, which threads run in order. A thread is started when it is needed.

    At most as many tasks as `num_threads` returns run at once; the number may change while they run. `submit` waits
    while `max_waiting` tasks wait for a thread (0: no bound). `join` waits until every task has run.

    The queue is a context manager: at the end of the context, all tasks have run, the threads have ended, and the first
    exception of a task is raised. An exception does not end its thread. The interpreter does not wait for `daemon`
    threads.
    """

    def __init__(
        self, num_threads: Callable[[], int], *, name: str, max_waiting: int = 0, daemon: bool = False
    ) -> None:
        super().__init__(max_waiting)
        self._daemon = daemon
        self._num_threads = num_threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._num_running = 0
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
        finally:  # if `join` is interrupted, the threads still end after the last task
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
        # Start the thread before the task is queued: after an interrupt, no task is left without a thread.
        if len(self._threads) < max(self._num_threads(), 1):
            name, run = f"{self._name}-{len(self._threads)}", contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=self._daemon)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # the system's limit, or the interpreter exits: the other threads do the work
                if not self._threads:
                    raise
        self.put(task)

    def _run(self) -> None:
        while True:
            with self._has_room:
                self._has_room.wait_for(lambda: self._num_running < max(self._num_threads(), 1))
                self._num_running += 1
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
                    self._num_running -= 1
                    self._has_room.notify_all()
                self.task_done()


class RepeatedTask:
    """Runs a function in a thread of its own on each request. Requests during a run cause one more run.

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
                self._changed.notify_all()
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=False)
            thread.start()
            self._thread = thread

    def pause(self, timeout_s: float) -> bool:
        """Let the run in progress wait. Returns False at once if another run is requested."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._is_requested, timeout_s)

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
            while self._take_request():
                self._run_once()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # an error ended the runs: waiters must not wait on
                    self._thread = None
                    self._changed.notify_all()

    def _take_request(self) -> bool:
        with self._changed:
            is_requested, self._is_requested = self._is_requested, False
            if not is_requested:
                self._thread = None  # under the same lock as the check: a later `request` begins a new thread
                self._changed.notify_all()
            return is_requested


@contextlib.contextmanager
def logging_failures(text: str, *values: object) -> Iterator[None]:
    """Log an exception that leaves this context, so that it does not end the thread, for which others wait.

    In the main thread, ``KeyboardInterrupt`` and ``SystemExit`` are raised, since they end the program.
    """
    try:
        yield
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        _log.exception(text, *values)


def run_as_completed(
    items: Sequence[_T],
    work: Callable[[_T], None],
    *,
    num_threads: int | Callable[[], int],
    name: str,
    on_failure: Callable[[], None],
) -> Generator[_T, None, None]:
    """Run `work` on all `items` in threads, and yield each item in this thread once it is done.

    Raises the first failure. After a failure, or once the iterator is closed, it begins no other item, and calls
    `on_failure`. It always waits until no `work` runs any more.
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
                    raise error  # noqa: TRY301  # the clause below stops the other items
                yield item
        except BaseException:
            stopped.set()
            on_failure()
            raise


def run_all(
    items: Sequence[_T],
    work: Callable[[_T], None],
    *,
    num_threads: int | Callable[[], int],
    name: str,
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """Run `work` on all `items` in threads, as `run_as_completed` does, and return when all are done."""
    for _ in run_as_completed(items, work, num_threads=num_threads, name=name, on_failure=on_failure):
        pass


def start_in_thread(call: Callable[[], _T], *, name: str) -> concurrent.futures.Future[_T]:
    """Return a future of `call`, which runs in a thread. The end of the interpreter does not wait for it.

    So Ctrl-C ends the wait for the result at once, even if a store does not answer.
    """
    future = concurrent.futures.Future[_T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # the future raises it
            future.set_exception(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has too many threads
        run()
    return future


def call_together(
    *calls: Callable[[], Any], num_threads: int, on_interrupt: Callable[[], None] = lambda: None
) -> list[Any]:
    """Return the results of `calls`, in order. Raises the first failure, or an interrupt, once no call runs any more.

    `on_interrupt` is called at an interrupt of this thread (Ctrl-C), to make the calls end soon.
    """
    if num_threads == 1:
        return [call() for call in calls]
    results: dict[int, Any] = {}

    def make(number: int) -> None:
        results[number] = calls[number]()

    def stop() -> None:
        if not isinstance(sys.exc_info()[1], Exception):
            on_interrupt()

    run_all(range(len(calls)), make, num_threads=num_threads, name="cloudckpt-look", on_failure=stop)
    return [results[number] for number in range(len(calls))]


def ranks_of_host() -> int:
    """Return the number of ranks on this machine that torchrun gives, or 1."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1


def _cores_per_rank() -> float:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_cores / max(ranks_of_host(), 1)


def num_cores_of_rank() -> int:
    """Return the number of cores for each rank of this machine, at least 1."""
    return max(1, int(_cores_per_rank()))


def requests_per_connection() -> int:
    """Return how many requests of a save or load each connection gets: 4, or down to 1 if ranks have less than 2 cores.

    Several requests keep all connections busy to the end. But each costs as much CPU as some MB of its bytes, and ranks
    that share cores have none to spare.
    """
    return min(max(int(2 * _cores_per_rank()), 1), _MAX_REQUESTS_PER_CONNECTION)
