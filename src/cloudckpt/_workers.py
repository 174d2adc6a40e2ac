"""Threads that run calls to a store.

Not a ``ThreadPoolExecutor``: that refuses work as soon as the interpreter begins to exit, and a background save that
is still running when a script ends has to be completed, not lost.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

_T = TypeVar("_T")


class Workers:
    """A fixed number of threads, started as they are needed, that run tasks in the order of their submission.

    Tasks must not raise: whoever submits them takes care of their results. Used as a context, which ends when all
    tasks have.
    """

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.join()

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` as soon as a thread is free."""
        self._tasks.put(task)
        if len(self._threads) < self._num_threads:
            # Not a daemon: the interpreter waits for it.
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=False)
            try:
                thread.start()
            except RuntimeError:  # the system's limit; those that there are do the work
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def join(self) -> None:
        """Wait until all tasks have run. Nothing can be submitted afterwards."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def each_done(
    items: Sequence[_T],
    work: Callable[[_T], None],
    *,
    num_threads: int,
    name: str,
    on_failure: Callable[[], None],
) -> Generator[_T, None, None]:
    """Run `work` on all `items` in threads, and give each item in this thread once it is done.

    Raises the first failure; what has not begun by then, or when the iterator is closed, is not begun any more. Ends,
    in every case, only when nothing is running; `on_failure` is called before that is waited for.
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

    with Workers(num_threads, name=name) as workers:
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
