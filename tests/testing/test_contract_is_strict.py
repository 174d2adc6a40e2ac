"""The contract itself: a clause fails on a store that breaks it, or it would be no clause."""

from __future__ import annotations

import inspect
import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.stores.wire_contract import WireContract
from tests.testing.broken_stores import BROKEN, BrokenClient
from tests.wire import S3_ACCESS_DENIED, Wire, WireRule

from cloudckpt.stores.base import Store
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing import StoreContract
from cloudckpt.testing.servers import moto_server

BUCKET = "strict"


def clauses() -> dict[str, Any]:
    """Return every clause by name."""
    return {name: member for name, member in inspect.getmembers(_S3, callable) if name.startswith("test_")}


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


class _S3(WireContract):
    """moto behind a wire, and the client before it wrapped in `far_kind`."""

    short_timeout_s = 0.3

    def __init__(
        self, storage_options: Mapping[str, Any], far_kind: Callable[[Store, Store], Store], refusing: Wire
    ) -> None:
        self.storage_options = storage_options
        self.far_kind = far_kind
        self.refusing = refusing

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
        return self.at(store, self.refusing.url, timeout_s=30.0)


@pytest.fixture(scope="module")
def storage_options() -> Iterator[Mapping[str, Any]]:
    with moto_server() as server:
        server.create_bucket(BUCKET)
        yield server.storage_options


@pytest.fixture(scope="module")
def refusing(storage_options: Mapping[str, Any]) -> Iterator[Wire]:
    """Deny every request."""
    with Wire(storage_options["endpoint_url"], WireRule(action=S3_ACCESS_DENIED, times=None)) as wire:
        yield wire


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_store_with_a_defect_fails_the_clause_about_it(kind, storage_options, refusing, tmp_path: Path):
    """If this fails, the clause passes a store with the defect that it is about."""
    if issubclass(kind, BrokenClient):
        suite = _S3(storage_options, kind, refusing)
        found = failures(suite, BROKEN[kind], suite.new_store)
    elif issubclass(kind, LocalStore):
        found = failures(_Files(), BROKEN[kind], lambda: kind(tmp_path))
    else:
        found = failures(_Memory(), BROKEN[kind], lambda: kind(uuid.uuid4().hex, "run"))
    assert found
    mistakes = [error for error in found if isinstance(error, (AttributeError, NameError, TypeError))]
    assert not mistakes, "the broken store cannot be run"


def test_without_a_defect_no_clause_fails(storage_options, refusing):
    """If this fails, the broken stores might fail for what they all have in common."""
    of_clients = {clause for kind, clause in BROKEN.items() if issubclass(kind, BrokenClient)}
    for name in set(BROKEN.values()) - of_clients:
        assert not failures(_Memory(), name, lambda: MemoryStore(uuid.uuid4().hex, "run")), name
    suite = _S3(storage_options, BrokenClient, refusing)
    for name in of_clients:
        assert not failures(suite, name, suite.new_store), name
