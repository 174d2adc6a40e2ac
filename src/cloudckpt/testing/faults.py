"""Fault injection by rule into the calls of a store during a save or a load.

Rules choose calls by counting them or by random numbers with a seed; nothing depends on time. The same seed gives the
same faults in any order of threads, and every injected error names it::

    faults = Faults(
        Rule(fault=BrokenConnection(carried_out=True), operations={"put"}, key=r"manifest"),
        Rule(fault=SlowDown(), probability=0.05, times=None),
        seed=7,
    )
    cloudckpt.save(state_dict, "s3://bucket/run", options=Options(wrap_store=faults))
    print(faults.num_injected)

`cloudckpt.testing.wire` breaks the network, and `cloudckpt.testing.damage` breaks stored objects.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from cloudckpt.stores.base import Store
from cloudckpt.testing.faulty_store import (
    EVERYTHING,
    Absent,
    BrokenConnection,
    Denied,
    Draw,
    Due,
    Fault,
    FaultyStore,
    FlippedBits,
    History,
    LaggingList,
    ServerError,
    Short,
    SlowDown,
    StalledBody,
    Tell,
    TimedOut,
    TruncatedBody,
    is_count,
    is_number,
    operations_of,
    without_attempts,
)
from cloudckpt.testing.wrapping import Call, WrappedStore

__all__ = [
    "Absent",
    "BrokenConnection",
    "Call",
    "Denied",
    "Fault",
    "Faults",
    "FlippedBits",
    "Injected",
    "LaggingList",
    "Rule",
    "ServerError",
    "Short",
    "SlowDown",
    "StalledBody",
    "Tell",
    "TimedOut",
    "TruncatedBody",
    "WrappedStore",
]

_LONGEST_LOG = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fault, and the calls that it happens to.

    A rule counts every call that it matches. It skips the first `skip` of them, acts on the next `times` (``None``: all
    of them), and ignores the rest. Calls are counted in the order in which they are made, which threads can change.
    With `each_key`, each operation on each key is counted separately, and they cannot.

    With a `probability` below 1, the rule acts only on that fraction of the calls. The choice depends on the seed, the
    rule, the operation, the key, and the number of earlier calls of this operation on this key, but not on the random
    ids of attempts.
    """

    fault: Fault
    operations: Collection[str] | None = None
    """Names of methods of `Store`; ``None``: all methods that the fault can happen to."""
    key: str = ""
    """A regular expression, searched for in the key."""
    skip: int = 0
    times: int | None = 1
    each_key: bool = False
    probability: float = 1.0

    def __post_init__(self) -> None:
        problems = [*_problems_of_names(self), *_problems_of_numbers(self)]
        if problems:
            raise ValueError("; ".join(problems))

    def matches(self, call: Call) -> bool:
        """Return True if the rule counts the call."""
        can_happen = call.operation in operations_of(self.fault)
        is_meant = self.operations is None or call.operation in self.operations
        return can_happen and is_meant and re.search(self.key, call.key) is not None

    def acts_on(self, num_before: int) -> bool:
        """Return True if the rule acts on a match that follows `num_before` others."""
        return self.skip <= num_before and (self.times is None or num_before < self.skip + self.times)


def _problems_of_names(rule: Rule) -> Iterator[str]:
    if not isinstance(rule.fault, Fault):
        raise TypeError(f"fault is one of this module's faults, such as SlowDown(), not {rule.fault!r}")
    if isinstance(rule.operations, str):
        raise TypeError(f"operations are a collection of names: {{{rule.operations!r}}}, not {rule.operations!r}")
    unknown = sorted(set(rule.operations or ()) - EVERYTHING)
    impossible = sorted(set(rule.operations or ()) - operations_of(rule.fault) - set(unknown))
    if unknown:
        yield f"a store has no operations {unknown}"
    if impossible:
        yield f"{type(rule.fault).__name__} cannot happen to {impossible}"
    if rule.operations is not None and not rule.operations:
        yield "operations are none, so that nothing would ever happen; None means all"
    try:
        re.compile(rule.key)
    except re.error as error:
        yield f"key is no regular expression: {rule.key!r}: {error}"


def _problems_of_numbers(rule: Rule) -> Iterator[str]:
    if not is_count(rule.skip, least=0):
        yield f"skip must be a whole number from 0 on, not {rule.skip!r}"
    if rule.times is not None and not is_count(rule.times, least=1):
        yield f"times must be a whole number from 1 on, or None for all, not {rule.times!r}"
    if not is_number(rule.probability) or not 0 <= rule.probability <= 1:
        yield f"probability must be a number from 0 to 1, not {rule.probability!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A record of an injected fault."""

    call: Call
    fault: Fault
    rule: int
    """Index of the rule, from 0."""
    nth: int
    """Number of the call, from 1, among those of this operation on this key."""


class Faults:
    """Wraps stores for `Options.wrap_store`: every opened store gets these rules, and they count calls together.

    The first rule that is due for a call acts; all rules that match count it. A pickled copy in another process, such
    as a spawned rank, has the same rules and seed and counts from the beginning. Safe for use by several threads.
    """

    def __init__(self, *rules: Rule, seed: int = 0) -> None:
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"Faults takes rules: Rule(fault={rule!r}), not {rule!r}")
        self.rules = rules
        self.seed = seed
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._num_alike: Counter[tuple[str, str]] = Counter()
        self._num_matched: Counter[tuple[Any, ...]] = Counter()
        self._num_injected: Counter[str] = Counter()
        self._num_calls: Counter[str] = Counter()
        self._log: deque[Injected] = deque(maxlen=_LONGEST_LOG)
        self._lags = any(isinstance(rule.fault, LaggingList) for rule in rules)
        self._histories: dict[str, History] = {}

    def __call__(self, store: Store) -> FaultyStore:
        """Wrap `store` with these faults."""
        with self._lock:
            history = self._histories.setdefault(store.uri, History()) if self._lags else None
        return FaultyStore(store, decide=self._decide, released=self._released, history=history)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (self.rules, self.seed)

    def __repr__(self) -> str:
        return f"Faults({', '.join(map(repr, self.rules))}, seed={self.seed})"

    @property
    def injected(self) -> tuple[Injected, ...]:
        """The latest ten thousand injected faults, in order."""
        with self._lock:
            return tuple(self._log)

    @property
    def num_injected(self) -> dict[str, int]:
        """Number of injected faults by the name of their class."""
        with self._lock:
            return dict(self._num_injected)

    @property
    def num_calls(self) -> dict[str, int]:
        """Number of calls by operation."""
        with self._lock:
            return dict(self._num_calls)

    def release(self) -> None:
        """End every current and future stall: the stalled calls fail at once."""
        self._released.set()

    def _decide(self, call: Call) -> Due | None:
        alike = (call.operation, without_attempts(call.key))
        due: Due | None = None
        with self._lock:
            self._num_calls[call.operation] += 1
            self._num_alike[alike] += 1
            nth = self._num_alike[alike]
            for index, rule in enumerate(self.rules):
                if not rule.matches(call):
                    continue
                counted = (index, *alike) if rule.each_key else (index,)
                self._num_matched[counted] += 1
                if due is not None or not rule.acts_on(self._num_matched[counted] - 1):
                    continue
                draw = Draw(self.seed, index, *alike, nth)
                if draw.fraction("acts") >= rule.probability:
                    continue
                why = f"by rule {index} with seed {self.seed}, at call {nth} of {call.operation} on this key"
                due = Due(fault=rule.fault, draw=draw, why=why)
                self._log.append(Injected(call=call, fault=rule.fault, rule=index, nth=nth))
                self._num_injected[type(rule.fault).__name__] += 1
        return due


def _made_again(rules: tuple[Rule, ...], seed: int) -> Faults:
    return Faults(*rules, seed=seed)
