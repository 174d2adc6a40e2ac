"""The contract itself: a clause fails on a store that breaks it, or it would be no clause."""

from __future__ import annotations

import inspect
import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.testing.broken_stores import BROKEN

from cloudckpt.stores.base import Store
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing import StoreContract

BUCKET = "strict"


def clauses() -> dict[str, Any]:
    """Return every clause by name."""
    return {name: member for name, member in inspect.getmembers(StoreContract, callable) if name.startswith("test_")}


def parameters_of(clause: Any) -> list[dict[str, Any]]:
    """Return every set of arguments that pytest would call the clause with, besides the store."""
    choices = []
    for mark in getattr(clause, "pytestmark", []):
        names, values = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        rows = [getattr(value, "values", value if len(names) > 1 else (value,)) for value in values]
        choices.append([dict(zip(names, row, strict=True)) for row in rows])
    return [
        dict(itertools.chain.from_iterable(chosen))
        for chosen in itertools.product(*(map(dict.items, c) for c in choices))
    ]


def failures(suite: StoreContract, name: str, new_store: Callable[[], Store]) -> list[BaseException]:
    """Call a clause with all its parameters, on a fresh store each time, and return its errors."""
    found: list[BaseException] = []
    for parameters in parameters_of(clauses()[name]):
        try:
            getattr(suite, name)(store=new_store(), **parameters)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001, PERF203  # the result
            found.append(error)
    return [error for error in found if not isinstance(error, pytest.skip.Exception)]


class _Memory(StoreContract):
    pass


class _Files(StoreContract):
    shared_between_processes = True


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_store_with_a_defect_fails_the_clause_about_it(kind, tmp_path: Path):
    """If this fails, the clause passes a store with the defect that it is about."""
    if issubclass(kind, LocalStore):
        found = failures(_Files(), BROKEN[kind], lambda: kind(tmp_path))
    else:
        found = failures(_Memory(), BROKEN[kind], lambda: kind(uuid.uuid4().hex, "run"))
    assert found
    mistakes = [error for error in found if isinstance(error, (AttributeError, NameError, TypeError))]
    assert not mistakes, "the broken store cannot be run"


def test_without_a_defect_no_clause_fails():
    """If this fails, the broken stores might fail for what they all have in common."""
    for name in set(BROKEN.values()):
        assert not failures(_Memory(), name, lambda: MemoryStore(uuid.uuid4().hex, "run")), name
