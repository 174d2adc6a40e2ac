"""Threads of several ranks that run one at a time, in an order and a time that are drawn, and the same for one seed.

A thread goes on until it takes a lock, waits, or asks the store. There it says when it is to go on, by a clock that
only shows what was slept and waited for; and the one whose time comes first does. So what happens between two ranks
depends on how long each of those steps takes, which is drawn. A *delay* is one that takes long, as that of a thread
which the machine has put aside.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

_HANG_S = 60.0
"""By the real clock; nothing here takes long."""
_MOST_STEPS = 400_000
_STEP_S = 0.0002


class Killed(BaseException):
    """The process of a thread is gone, or the world is over: nothing of it runs any more."""


class Task:
    """A thread of one rank."""

    def __init__(self, scheduler: Scheduler, run: Callable[[], object], *, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self.has_ended = self.is_dead = False
        self.num_steps = 0
        self.interrupted_at = math.inf
        """After how many steps Ctrl-C comes."""
        self.epoch = 0
        """How often it was woken: of what says when it goes on, the last counts."""
        self.joining: list[Task] = []
        self.gate = threading.Semaphore(0)
        self._scheduler = scheduler
        self._body = run
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.gate.acquire()
        try:
            if not self._scheduler.is_over:
                self._body()
        except Killed:
            return
        except BaseException as error:  # noqa: BLE001  # it is for who runs the world
            self._scheduler.errors.append(error)
        if not self._scheduler.is_over:
            self._scheduler.ended(self)


class Scheduler:
    """`delays`: how much longer the steps of these numbers take."""

    def __init__(self, seed: int | str, *, delays: Mapping[int, float]) -> None:
        self.now_s = 1000.0
        self.num_steps = 0
        self.is_over = False
        self.errors: list[BaseException] = []
        self.current: Task | None = None
        self._random = random.Random(seed)
        self._delays = delays
        self._due: list[tuple[float, float, int, Task]] = []
        self._tasks: list[Task] = []
        self._num_running = 0
        self._is_done = threading.Semaphore(0)

    def spawn(self, run: Callable[[], object], *, rank: int, name: str) -> Task:
        task = Task(self, run, rank=rank, name=name)
        self._tasks.append(task)
        task.thread.start()
        self.wake(task)
        return task

    def run(self, mains: list[Task]) -> None:
        """Until all of these have ended, or died."""
        self._mains = mains
        self._pass_on(None)
        is_in_time = self._is_done.acquire(timeout=_HANG_S)
        self.is_over = True
        for task in self._tasks:
            task.gate.release()
        for task in self._tasks:
            task.thread.join(_HANG_S)
        assert is_in_time, "a thread waits for something that the scheduler does not know"
        if self.errors:
            raise self.errors[0]

    def step(self) -> None:
        """Another may go first. Ctrl-C comes here."""
        me = self.me()
        self.num_steps += 1
        me.num_steps += 1
        if self.num_steps > _MOST_STEPS:
            self._fail(me, "it goes on and on")
        self._sleep(me, _STEP_S * self._random.random() + self._delays.get(self.num_steps, 0.0))
        if me.num_steps >= me.interrupted_at:
            me.interrupted_at = math.inf
            raise KeyboardInterrupt

    def sleep(self, duration_s: float) -> None:
        self._sleep(self.me(), duration_s)

    def park(self, until_s: float = math.inf) -> None:
        """Until it is woken, or that time has come."""
        me = self.me()
        if until_s < math.inf:
            self._at(me, until_s)
        self._pass_on(me)

    def wake(self, task: Task) -> None:
        self._at(task, self.now_s + _STEP_S * self._random.random())

    def kill(self, rank: int) -> None:
        """Nothing of this rank runs from now on; what it has posted stays."""
        for task in self._tasks:
            task.is_dead |= task.rank == rank
        self._pass_on(self.me())

    def ended(self, task: Task) -> None:
        task.has_ended = True
        for other in task.joining:
            self.wake(other)
        self._pass_on(None)

    def me(self) -> Task:
        if self.is_over or self.current is None:
            raise Killed
        return self.current

    def _sleep(self, me: Task, duration_s: float) -> None:
        self._at(me, self.now_s + duration_s)
        self._pass_on(me)

    def _at(self, task: Task, time_s: float) -> None:
        task.epoch += 1
        heapq.heappush(self._due, (time_s, self._random.random(), task.epoch, task))

    def _pass_on(self, me: Task | None) -> None:
        if self.is_over:
            raise Killed
        if all(task.has_ended or task.is_dead for task in self._mains):
            self._end(me)
            return
        while self._due:
            time_s, _, epoch, task = heapq.heappop(self._due)
            if epoch == task.epoch and not task.is_dead and not task.has_ended:
                break
        else:
            self._fail(me, "all wait for one another")
            return
        self.now_s = max(self.now_s, time_s)
        if task is me:
            return
        self.current = task
        task.gate.release()
        if me is not None:
            me.gate.acquire()
            if self.is_over:
                raise Killed

    def _fail(self, me: Task | None, why: str) -> None:
        self.errors.append(AssertionError(f"{why}, at {self.now_s:.3f} s"))
        self._end(me)

    def _end(self, me: Task | None) -> None:
        self.current = None
        self._is_done.release()
        if me is not None:
            me.gate.acquire()
            raise Killed


class Lock:
    """As `threading.RLock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.owner: Task | None = None
        self.depth = 0
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        if self.owner is not self.scheduler.me():
            self.scheduler.step()
        self.take(self.depth + 1 if self.owner is self.scheduler.me() else 1)
        return True

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.give()

    def take(self, depth: int) -> None:
        me = self.scheduler.me()
        while self.owner not in (None, me):
            self._waiting.append(me)
            self.scheduler.park()
        self.owner, self.depth = me, depth

    def give(self) -> int:
        depth, self.owner, self.depth = self.depth, None, 0
        for task in self._waiting:
            self.scheduler.wake(task)
        self._waiting.clear()
        return depth


class Condition:
    """As `cloudckpt._threads.Condition`."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._lock.scheduler
        me = scheduler.me()
        self._waiting.append(me)
        depth = self._lock.give()
        try:
            scheduler.park(math.inf if timeout is None else scheduler.now_s + timeout)
            was_notified = me not in self._waiting
            scheduler.step()
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            self._lock.take(depth)
        return was_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = self._lock.scheduler
        until_s = math.inf if timeout is None else scheduler.now_s + timeout
        while not (result := predicate()) and scheduler.now_s < until_s:
            self.wait(None if timeout is None else until_s - scheduler.now_s)
        return result

    def notify_all(self) -> None:
        for task in self._waiting:
            self._lock.scheduler.wake(task)
        self._waiting.clear()


class Thread:
    """As `cloudckpt._threads.Thread`, of the rank that starts it."""

    def __init__(self, scheduler: Scheduler, run: Callable[[], object], *, name: str) -> None:
        self._scheduler, self._run, self._name = scheduler, run, name
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)

    def start(self) -> None:
        self._task = self._scheduler.spawn(self._run, rank=self._scheduler.me().rank, name=self._name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        until_s = math.inf if timeout is None else self._scheduler.now_s + timeout
        self._scheduler.step()
        while not self._task.has_ended and self._scheduler.now_s < until_s:
            self._task.joining.append(self._scheduler.me())
            self._scheduler.park(until_s)
