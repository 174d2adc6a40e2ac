"""The contract itself: every clause fails on a store that breaks it, or it would be no clause."""

from __future__ import annotations

import inspect
import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.testing import mutants, wire_mutants

from cloudckpt.stores.base import Store
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing import StoreContract, contract_wire
from cloudckpt.testing.servers import moto_server
from cloudckpt.testing.wire import S3_ACCESS_DENIED, Rule, Wire

SILENCE = "test_silence_ends_in_time"
PROCESSES = "test_of_two_processes_exactly_one_creates"
PARTS_OF_OTHERS = "test_parts_of_another_process_are_listed"
BUCKET = "strict"


def clauses() -> dict[str, Any]:
    """Every clause by name."""
    return {name: member for name, member in inspect.getmembers(StoreContract, callable) if name.startswith("test_")}


def parameters_of(clause: Any) -> list[dict[str, Any]]:
    """Every set of arguments that pytest would call the clause with, besides the store."""
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
    """What comes of a clause that is called with all its parameters, on a fresh store each time."""
    found: list[BaseException] = []
    for parameters in parameters_of(clauses()[name]):
        try:
            getattr(suite, name)(store=new_store(), **parameters)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001, PERF203  # it is the result
            found.append(error)
    return found


def assert_caught(found: list[BaseException]) -> None:
    """The clause failed, and not because the mutant cannot be run."""
    assert found
    mistakes = [error for error in found if isinstance(error, (AttributeError, NameError, TypeError))]
    assert not mistakes


class _Memory(StoreContract):
    pass


class _Files(StoreContract):
    shared_between_processes = True


class _S3(StoreContract):
    """moto behind a wire, and the client before it wrapped in `far_kind`."""

    short_timeout_s = 0.3

    def __init__(
        self, storage_options: Mapping[str, Any], far_kind: Callable[[Store, Store], Store], door: Wire
    ) -> None:
        self.storage_options = storage_options
        self.far_kind = far_kind
        self.door = door

    def opened(self, prefix: str, **changes: Any) -> S3Store:
        options = {**self.storage_options, **{name: v for name, v in changes.items() if name == "endpoint_url"}}
        timeout_s = changes.get("timeout_s", 30.0)
        return S3Store(BUCKET, prefix, storage_options=options, timeout_s=timeout_s, connections=4)

    def new_store(self) -> S3Store:
        return self.opened(uuid.uuid4().hex)

    def endpoint_url(self, store: Store) -> str:
        return self.storage_options["endpoint_url"]

    def at(self, store: Store, endpoint_url: str, *, timeout_s: float) -> Store:
        prefix = urlsplit(store.uri).path
        return self.far_kind(self.opened(prefix, endpoint_url=endpoint_url, timeout_s=timeout_s), store)

    def denied(self, store: Store) -> Store:
        return self.at(store, self.door.url, timeout_s=30.0)


@pytest.fixture(scope="module")
def storage_options() -> Iterator[Mapping[str, Any]]:
    with moto_server() as server:
        server.create_bucket(BUCKET)
        yield server.storage_options


@pytest.fixture(scope="module")
def door(storage_options: Mapping[str, Any]) -> Iterator[Wire]:
    """Nobody is let in."""
    with Wire(storage_options["endpoint_url"], Rule(action=S3_ACCESS_DENIED, times=None)) as wire:
        yield wire


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_store_with_a_defect_fails_the_clause_about_it(mutant):
    """A clause that such a store passes does not say what it seems to say."""
    for name in mutants.CAUGHT_BY[mutant]:
        assert_caught(failures(_Memory(), name, lambda: mutant(uuid.uuid4().hex, "run")))


def test_a_condition_within_one_process_is_none(tmp_path):
    """Of two processes both would commit."""
    stores = (mutants.LocksInTheProcess(tmp_path / str(number)) for number in itertools.count())
    assert_caught(failures(_Files(), PROCESSES, lambda: next(stores)))


def test_a_listing_within_one_process_is_none(tmp_path):
    """Whoever goes on after a crash would find nothing, and send all of it again."""
    assert_caught(failures(_Files(), PARTS_OF_OTHERS, lambda: mutants.ListsItsOwnParts(tmp_path)))


@pytest.mark.parametrize(
    "mutant", [*wire_mutants.WIRE_MUTANTS, *wire_mutants.DENIED_MUTANTS], ids=lambda mutant: mutant.__name__
)
def test_a_client_with_a_defect_fails_the_clause_about_it(mutant, storage_options, door):
    """What a client makes of a broken network is half of what a store is."""
    suite = _S3(storage_options, mutant, door)
    for name in wire_mutants.CAUGHT_BY[mutant]:
        assert_caught(failures(suite, name, suite.new_store))


def test_a_client_without_patience_of_its_own_fails_the_clause_about_silence(storage_options, door, monkeypatch):
    """It would hang, and the job with it, at every one of the moments at which a server can fall silent."""
    monkeypatch.setattr(contract_wire, "_SLACK_S", 0.5)

    def patient(far: Store, direct: Store) -> Store:
        endpoint_url = far._session.client_key.config.endpoint_url
        return suite.opened(urlsplit(far.uri).path, endpoint_url=endpoint_url, timeout_s=600.0)

    suite = _S3(storage_options, patient, door)
    found = failures(suite, SILENCE, suite.new_store)
    assert len(found) == len(parameters_of(clauses()[SILENCE]))
    assert all("not finished" in str(error) for error in found)


def test_without_a_defect_no_clause_fails(storage_options, door):
    """Else the mutants might have failed for what they all have in common."""
    passing = {name: failures(_Memory(), name, lambda: MemoryStore(uuid.uuid4().hex, "run")) for name in clauses()}
    assert not [(name, found) for name, found in passing.items() if found]
    suite = _S3(storage_options, wire_mutants.Wrapped, door)
    for name in {name for caught in wire_mutants.CAUGHT_BY.values() for name in caught}:
        assert not failures(suite, name, suite.new_store), name


def test_every_clause_has_a_store_that_fails_it():
    """A clause that nothing can break says nothing."""
    known = {SILENCE, PROCESSES, PARTS_OF_OTHERS}
    for caught in (*mutants.CAUGHT_BY.values(), *wire_mutants.CAUGHT_BY.values()):
        known.update(caught)
    assert set(clauses()) == known


def test_every_clause_says_what_it_is_for():
    """Whoever sees it fail on a store of their own reads the docstring, and nothing else."""
    assert not [name for name, clause in clauses().items() if not (clause.__doc__ or "").strip()]
