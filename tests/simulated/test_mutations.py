"""Errors that are planted in the protocol: the simulation must find each, within a bounded search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.simulated.test_schedules import no_waiting, search

from cloudckpt.commit import publish
from cloudckpt.inspect import removal

pytestmark = pytest.mark.faults

__all__ = ["no_waiting"]

_MOST_SCHEDULES = 500
Plant = Callable[[pytest.MonkeyPatch], None]


def gc_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """gc removes what a running save wrote, and does not keep it from committing."""
    collect: Any = removal.collect
    monkeypatch.setattr(
        removal, "collect", lambda *args, **settings: collect(*args, **settings | {"conditional": False})
    )
    # The look before the commit would hide most of it.
    monkeypatch.setattr("cloudckpt.pipeline.save.check_objects_present", lambda *args: None)


def put_without_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that commit under one number are both told that they have."""
    put_entry: Any = publish.put_entry
    monkeypatch.setattr(
        publish, "put_entry", lambda *args, **settings: put_entry(*args, **settings | {"conditional": False})
    )


def lost_answers_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies at the key after a lost answer is taken for another's, and the data is removed."""

    def check(store: Any, manifest: Any, error: Any, *others: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(publish, "_check_arrived", check)


# What it takes to meet the error, so that the search is short.
PLANTS: dict[Plant, dict[str, Any]] = {
    gc_without_a_fence: {"kinds": ("save", "gc"), "fates": ("done",), "num_steps": (6, 99)},
    put_without_the_condition: {"kinds": ("save",), "fates": ("done",)},
    lost_answers_are_failures: {},
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the simulation is blind for a whole class of errors, and its silence says nothing."""
    counts: Counter[str] = Counter()
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="schedule:") as caught:
        search(counts, num_schedules=_MOST_SCHEDULES, **PLANTS[plant])
    print(f"found in schedule {counts['schedules']}: {str(caught.value).splitlines()[0]}")
