"""An exhaustive check of the commit protocol: every order in which the actors' store calls can happen.

An actor is an ordinary function that calls the real `publish`, `resolve`, `remove_garbage` and so on, on a `Replayed`
store.
To find out what it does next, it is run again from its start with the answers that it has got so far; its first call
without an answer is its next step. So the state of the whole is the objects in the store and each actor's answers,
which are plain values, and states that were reached on several ways are looked at only once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from cloudckpt.errors import AccessDeniedError, ObjectExistsError, ObjectNotFoundError, TransientStoreError
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.base import ForwardingStore, ObjectInfo, Store, Views
from cloudckpt.stores.memory import MemoryStore

World = tuple[tuple[str, bytes], ...]
"""The objects in the store, sorted by key."""
_EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)
LATER = _EPOCH.replace(month=2)
"""Nothing that was written by `_EPOCH` shows a sign of life any more."""
_MAX_FENCE_BYTES = 128
_ERRORS = {
    "exists": ObjectExistsError,
    "missing": ObjectNotFoundError,
    "transient": TransientStoreError,
    "denied": AccessDeniedError,
}


class Call(NamedTuple):
    """One step of an actor."""

    operation: str
    key: str
    body: bytes = b""
    if_absent: bool = False


class Answer(NamedTuple):
    """The store's answer: a value, or the kind of error that it raised."""

    value: Any = None
    error: str | None = None


class _NextCall(BaseException):  # not an error
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


class Replayed(MemoryStore):
    """Answers as it did before; the first new call ends the run."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__("model")
        self._answers: Iterator[Answer] = iter(answers)
        self.milestones: list[str] = []
        """The milestones that the actor has reported."""

    def _ask(self, call: Call) -> Any:
        try:
            answer = next(self._answers)
        except StopIteration:
            raise _NextCall(call) from None
        if answer.error is not None:
            raise _ERRORS[answer.error](answer.error, key=call.key, operation=call.operation)
        return answer.value

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        self._ask(Call("put", key, b"".join(views), if_absent))

    def read(self, key: str, *, max_bytes: int) -> bytes:
        found: bytes = self._ask(Call("read", key))
        return found

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size_bytes=self._ask(Call("head", key)), modified_at=_EPOCH)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key, size_bytes, is_top in self._ask(Call("list", prefix)):
            # Time has a part in one thing only: a fence that is all there is goes when it is old. Here it never is.
            moment = LATER if is_top and size_bytes <= _MAX_FENCE_BYTES else _EPOCH
            yield ObjectInfo(key=key, size_bytes=size_bytes, modified_at=moment)

    def list_directories(self) -> Iterator[str]:
        yield from self._ask(Call("list_directories", ""))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:  # each deletion is a step of its own, as on a store without batches
            if ".cloudckpt-probe-" not in key:  # it asks for the permission, and changes nothing
                self._ask(Call("delete", key))


class _Ids:
    """The ids that the actor that is run draws: the same ones each time, and never another actor's."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, index: int) -> None:
        self._ids = (f"{index:06x}{number:06x}" for number in itertools.count())

    def draw(self) -> str:
        return next(self._ids)


IDS = _Ids()

Actor = Callable[[Replayed, StoreClient], str]
"""An actor's program. It returns its outcome."""


class Progress(NamedTuple):
    """The progress of an actor: its next call, or its outcome."""

    call: Call | None
    outcome: str | None
    milestones: tuple[str, ...]


class State(NamedTuple):
    """One state of the whole."""

    world: World
    histories: tuple[tuple[Answer, ...] | Progress, ...]
    """The answers that each actor got; of one that has ended or died, its outcome alone, since no call follows."""
    num_faults_left: int
    num_kills_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The extent of an exhaustive check."""

    num_states: int
    num_schedules: int
    outcomes: frozenset[tuple[str, ...]]
    """The outcomes of all actors, one tuple for each final state."""


def applied(call: Call, world: World) -> tuple[Answer, World]:
    """Return what a correct store does."""
    objects = dict(world)
    if call.operation == "put":
        if call.if_absent and call.key in objects:
            return Answer(error="exists"), world
        objects[call.key] = call.body
    elif call.operation == "delete":
        objects.pop(call.key, None)
    elif call.operation == "list":
        tops = set(_tops(tuple(objects)))
        found = tuple((key, len(body), key in tops) for key, body in objects.items() if key.startswith(call.key))
        return Answer(found), world
    elif call.operation == "list_directories":
        return Answer(tuple(sorted({key.partition("/")[0] for key in objects if "/" in key}))), world
    elif call.key not in objects:
        return Answer(error="missing"), world
    else:
        body = objects[call.key]
        return Answer(body if call.operation == "read" else len(body)), world
    return Answer(), tuple(sorted(objects.items()))


@functools.lru_cache(maxsize=1 << 16)
def _tops(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The entry of each folder that decides."""
    tops: dict[str, str] = {}
    for key in sorted((key for key in keys if "manifest" in key), key=lambda key: _number_in(key.rpartition("/")[2])):
        tops[key.rpartition("/")[0]] = key
    return tuple(tops.values())


def _number_in(name: str) -> int:
    return int("0" + "".join(character for character in name if character.isdigit()))


class Inside(ForwardingStore):
    """A folder of a store, as a store of its own."""

    def __init__(self, inner: Store, folder: str) -> None:
        super().__init__(inner)
        self._prefix = f"{folder}/"

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        self.inner.put(self._prefix + key, views, crc32c=crc32c, if_absent=if_absent)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        return self.inner.read(self._prefix + key, max_bytes=max_bytes)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(self._prefix + key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in self.inner.list(self._prefix + prefix):
            yield dataclasses.replace(info, key=info.key.removeprefix(self._prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete([self._prefix + key for key in keys])


def run_alone(actor: Actor, world: World) -> World:
    """Return what is in the store after `actor`, beside whom nobody does anything."""
    history: list[Answer] = []
    while True:
        IDS.begin(9)
        try:
            store = Replayed(history)
            actor(store, StoreClient(store, retries=2, timeout_s=math.inf))
        except _NextCall as paused:
            answer, world = applied(paused.call, world)
            history.append(answer)
        else:
            return world


class Check:
    """All schedules of `actors`, from the store's state `world`.

    Up to `num_faults` puts are answered wrongly: lost on their way, carried out with the answer lost, or refused for
    lack of permission. Up to `num_kills` actors die, at any moment. `inspect` is called on each state that can be
    reached, with every actor's progress before and after the step that led there, and raises where something is wrong.
    """

    def __init__(
        self,
        actors: Sequence[Actor],
        inspect: Callable[[World, Sequence[Progress], Sequence[Progress]], None],
        *,
        world: World = (),
        num_faults: int = 0,
        num_kills: int = 0,
    ) -> None:
        self._actors = actors
        self._inspect = inspect
        self._start = State(world, ((),) * len(actors), num_faults, num_kills)
        self._progress_of = functools.cache(self._run)
        self._trace: list[str] = []

    def run(self) -> Result:
        """Look at all of it. An `AssertionError` of `inspect` gets the schedule that led to it."""
        num_schedules: dict[State, int] = {}
        outcomes: set[tuple[str, ...]] = set()

        def explore(state: State) -> int:
            if state in num_schedules:
                return num_schedules[state]
            before = self._progress(state)
            successors = list(self._successors(state, before))
            if not successors:
                outcomes.add(tuple(progress.outcome or "dead" for progress in before))
            total = 0
            for step, successor in successors:
                self._trace.append(step)
                try:
                    self._inspect(successor.world, before, self._progress(successor))
                except AssertionError as error:
                    raise AssertionError("\n".join([str(error), "schedule:", *self._trace])) from error
                total += explore(successor)
                self._trace.pop()
            num_schedules[state] = max(total, 1)
            return num_schedules[state]

        total = explore(self._start)
        return Result(num_states=len(num_schedules), num_schedules=total, outcomes=frozenset(outcomes))

    def sample(self, num_schedules: int, *, seed: int) -> None:
        """Look at some schedules, drawn by chance."""
        chance = random.Random(seed)  # a test that can be repeated
        for _ in range(num_schedules):
            state, trace = self._start, list[str]()
            while successors := list(self._successors(state, before := self._progress(state))):
                step, state = chance.choice(successors)
                trace.append(step)
                try:
                    self._inspect(state.world, before, self._progress(state))
                except AssertionError as error:
                    raise AssertionError("\n".join([str(error), "schedule:", *trace])) from error

    def _progress(self, state: State) -> list[Progress]:
        return [
            history if isinstance(history, Progress) else self._progress_of(index, history)
            for index, history in enumerate(state.histories)
        ]

    def _run(self, index: int, history: tuple[Answer, ...]) -> Progress:
        store = Replayed(history)
        IDS.begin(index)
        try:
            outcome = self._actors[index](store, StoreClient(store, retries=2, timeout_s=math.inf))
        except _NextCall as paused:
            return Progress(paused.call, None, tuple(store.milestones))
        return Progress(None, outcome, tuple(store.milestones))

    def _successors(self, state: State, progress: Sequence[Progress]) -> Iterator[tuple[str, State]]:
        for index, at in enumerate(progress):
            if at.call is None:
                continue
            name = f"{index}: {at.call.operation} {at.call.key}"
            answer, world = applied(at.call, state.world)
            yield f"{name} -> {answer.error or answer.value!r:.80}", self._after(state, index, answer, world)
            if at.call.operation == "put" and state.num_faults_left:
                for how, kind, result in (
                    ("its answer was lost", "transient", world),
                    ("it was lost", "transient", state.world),
                    ("it was denied", "denied", state.world),
                ):
                    after = self._after(state, index, Answer(error=kind), result)
                    yield f"{name}: {how}", after._replace(num_faults_left=state.num_faults_left - 1)
            if state.num_kills_left:
                dead = _with(state, index, Progress(None, None, at.milestones))
                yield f"{index} dies", dead._replace(num_kills_left=state.num_kills_left - 1)

    def _after(self, state: State, index: int, answer: Answer, world: World) -> State:
        history = state.histories[index]
        assert not isinstance(history, Progress)
        reached = self._progress_of(index, (*history, answer))
        history_after = (*history, answer) if reached.call is not None else reached
        return _with(state, index, history_after)._replace(world=world)


def _with(state: State, index: int, history: tuple[Answer, ...] | Progress) -> State:
    histories = list(state.histories)
    histories[index] = history
    return state._replace(histories=tuple(histories))
