"""Publishers, retention and readers under interleavings of their calls to the store, and killed at each of them.

A reader ends with exactly the bits of a version, or with an error that says what to do.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.clock import skip_waits
from tests.publication.turns import TO_THE_END, Mortal, Turns
from tests.publication.weights import Bits, Policy, bits_of, train

import cloudckpt
from cloudckpt.errors import CheckpointChangedError, CheckpointExistsError
from cloudckpt.options import Options

IS_EXHAUSTIVE = "CLOUDCKPT_EXHAUSTIVE" in os.environ
SAMPLES = pytest.mark.parametrize("num_samples", [8, pytest.param(150, marks=pytest.mark.faults)])
ANCHOR_EVERY = 2


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waits(monkeypatch)


class Run:
    """Publishers and readers of one root, and the bits of each version that was or may be committed."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.bits: dict[int, set[Bits]] = {}
        self.last: dict[str, tuple[cloudckpt.Publisher, Policy]] = {}

    def publisher(self, options: Options | None = None) -> cloudckpt.Publisher:
        return cloudckpt.Publisher(self.root, anchor_every=ANCHOR_EVERY, keep_chains=1, options=options)

    def publish(self, publisher: cloudckpt.Publisher, model: Policy, *versions: int) -> None:
        for version in versions:
            train(model, version)
            self.bits.setdefault(version, set()).add(bits_of(model))
            publisher.publish(model=model, version=version)

    def pull(self, model: Policy, options: Options | None = None) -> int:
        """Pull the latest version. The model then has its bits, to the bit."""
        report = cloudckpt.pull(self.root, model=model, options=options)
        assert bits_of(model) in self.bits[report.version]
        return report.version

    def check_end(self, model: Policy, *, at_least: int) -> None:
        """A reader, whatever it held, and a new one find the same version."""
        version = self.pull(model)
        assert version >= at_least
        assert self.pull(Policy(9)) == version


def overtaken(error: object) -> bool:
    """An error that is not damage, and says what to do."""
    return isinstance(error, CheckpointChangedError) and "start at the anchor" in str(error)


def schedules(first: str, second: str, calls: dict[str, int], *, num_samples: int) -> list[list[tuple[str, int]]]:
    """All schedules with two switches: one actor up to a call, the other one up to one, and the first to its end."""
    pairs = [
        [(one, i), (other, j), (one, TO_THE_END)]
        for one, other in ((first, second), (second, first))
        for i, j in itertools.product(range(calls[one] + 1), range(1, calls[other] + 1))
    ]
    return pairs if IS_EXHAUSTIVE else random.Random(num_samples).sample(pairs, min(num_samples, len(pairs)))


def each_schedule(
    scene: Callable[[Run, Turns], dict[str, Callable[[], Any]]],
    check: Callable[[Run, Turns], None],
    *,
    num_samples: int,
) -> None:
    """Run a scene of two actors in each schedule, and check the end of each."""
    run, turns = new_run(), Turns()
    actors = scene(run, turns)
    turns.run(actors, [])
    check(run, turns)
    first, second = actors
    for schedule in schedules(first, second, turns.num_calls, num_samples=num_samples):
        run, turns = new_run(), Turns()
        turns.run(scene(run, turns), schedule)
        try:
            check(run, turns)
        except BaseException as error:
            raise AssertionError(f"in the schedule {schedule}: {turns.ended}") from error


def new_run() -> Run:
    return Run(f"memory://{uuid.uuid4().hex}/policy")


@SAMPLES
@pytest.mark.parametrize("held", ["nothing", "the version before", "a version of the last chain"])
def test_a_reader_beside_a_publisher_and_its_retention(held: str, num_samples: int) -> None:
    """If this fails, a reader gets half of a version, or damage, while versions come and go."""

    def scene(run: Run, turns: Turns) -> dict[str, Callable[[], Any]]:
        model, reading = Policy(), Policy(5)
        publisher = run.publisher(turns.options_of("publisher"))

        def begin() -> None:
            run.publish(publisher, model, 0, 1)
            if held == "a version of the last chain":
                run.pull(reading)
            run.publish(publisher, model, 2)
            if held == "the version before":
                run.pull(reading)
            run.publish(publisher, model, 3)

        act_alone(turns, "publisher", begin)
        return {
            "reader": lambda: run.pull(reading, turns.options_of("reader")),
            "publisher": lambda: run.publish(publisher, model, 4, 5),
        }

    def check(run: Run, turns: Turns) -> None:
        assert turns.ended["publisher"] is None
        outcome = turns.ended["reader"]
        assert outcome in (3, 4, 5) or overtaken(outcome)
        run.check_end(Policy(7), at_least=5)

    each_schedule(scene, check, num_samples=num_samples)


@SAMPLES
@pytest.mark.parametrize("of_rival", [(3,), (4,), (4, 5)], ids=str)
def test_two_publishers_race(of_rival: tuple[int, ...], num_samples: int) -> None:
    """If this fails, two publishers go on beside each other unnoticed, both end, or a version is a mixture."""

    def scene(run: Run, turns: Turns) -> dict[str, Callable[[], Any]]:
        model, other_model = Policy(), Policy(3)
        publisher = run.publisher(turns.options_of("publisher"))
        rival = run.publisher(turns.options_of("rival"))
        act_alone(turns, "publisher", lambda: run.publish(publisher, model, 0, 1, 2))
        run.last = {"publisher": (publisher, model), "rival": (rival, other_model)}
        return {
            "publisher": lambda: run.publish(publisher, model, 3),
            "rival": lambda: run.publish(rival, other_model, *of_rival),
        }

    def check(run: Run, turns: Turns) -> None:
        assert all(error is None or isinstance(error, CheckpointExistsError) for error in turns.ended.values())
        newest = run.pull(Policy(7))
        turns.open_to("publisher", "rival")
        lost = {name for name, error in turns.ended.items() if error is not None}
        lost |= {name for name, last in run.last.items() if not goes_on(run, *last, newest + 10 + len(name))}
        assert len(lost) == 1
        run.check_end(Policy(8), at_least=newest + 1)

    each_schedule(scene, check, num_samples=num_samples)


def goes_on(run: Run, publisher: cloudckpt.Publisher, model: Policy, version: int) -> bool:
    """Return False if a publisher is told that another one has taken over."""
    try:
        run.publish(publisher, model, version)
    except CheckpointExistsError:
        return False
    return True


def act_alone(turns: Turns, name: str, act: Callable[[], Any]) -> None:
    """Let an actor act before the others begin."""
    turns.run({name: act}, [])
    outcome = turns.ended.pop(name)
    assert outcome is None, outcome
    turns.num_calls.clear()


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize(
    "version",
    [pytest.param(3, id="without the whole"), pytest.param(4, id="an anchor, and retention", marks=pytest.mark.slow)],
)
def test_a_publisher_is_killed_at_each_call(version: int, *, carried_out: bool) -> None:
    """If this fails, a publisher's death leaves half of a version, or a root where nobody can publish."""
    for num_calls in itertools.count():
        run, model, reading = new_run(), Policy(), Policy(5)
        mortal = Mortal(carried_out=carried_out)
        publisher = run.publisher(mortal.options)
        run.publish(publisher, model, *range(version))
        run.pull(reading)
        was_killed = mortal.dies_in(functools.partial(run.publish, publisher, model, version), after_calls=num_calls)
        assert run.pull(reading) in (version - 1, version)
        run.check_end(Policy(6), at_least=version - 1)
        restarted = run.publisher()
        run.publish(restarted, model, version + 1, version + 2, version + 3)
        run.check_end(reading, at_least=version + 3)
        if not was_killed:
            assert num_calls > 5
            return


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("held", [None, 1, 3], ids=["nothing", "two versions ago", "the version before"])
def test_a_reader_is_killed_at_each_call(held: int | None, *, carried_out: bool) -> None:
    """If this fails, a pull takes what a killed one has left in the model for a version."""
    run, model, reading = new_run(), Policy(), Policy(5)
    publisher = cloudckpt.Publisher(run.root, anchor_every=3, keep_chains=1)
    states: list[dict[str, Any]] = []
    for version in range(5):
        run.publish(publisher, model, version)
        states.append(copy.deepcopy(model.state_dict()))
    for num_calls in itertools.count():
        reading.load_state_dict(Policy(5).state_dict() if held is None else states[held])
        mortal = Mortal(carried_out=carried_out)
        if mortal.dies_in(functools.partial(run.pull, reading, mortal.options), after_calls=num_calls):
            run.check_end(reading, at_least=4)
            continue
        assert num_calls > 2
        return
