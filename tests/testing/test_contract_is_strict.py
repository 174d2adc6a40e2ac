"""The contract itself: a clause fails on a store that breaks it, or it would be no clause."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cloudckpt.errors import ObjectExistsError
from cloudckpt.stores.base import Store, crc32c_of
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.testing import StoreContract

_MEET_S = 2.0
"""A broken store waits so long for the other thread without which its defect does not show."""
_Kind = TypeVar("_Kind", bound=type[Store])

BROKEN: dict[type[Store], str] = {}
"""The clause that fails on each store."""


def fails(clause: str) -> Callable[[_Kind], _Kind]:
    """Register a store on which `clause` must fail."""

    def register(kind: _Kind) -> _Kind:
        BROKEN[kind] = clause
        return kind

    return register


class Broken(MemoryStore):
    """Base class of the broken stores."""

    def raw(self, key):
        return self._bucket("raw").objects.get(self._prefix + key)

    def write(self, key, body):
        """Put without any check."""
        super().put(key, [memoryview(body)], crc32c=crc32c_of([memoryview(body)]))


def _meet(barrier):
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(_MEET_S)


@fails("test_the_wrong_checksum_is_refused")
class IgnoresChecksums(Broken):
    """Takes any bytes with any checksum, and says otherwise."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(key, views, crc32c=crc32c_of(views), if_absent=if_absent)


@fails("test_a_read_after_a_lost_answer_shows_whose_object_it_is")
class ForgivesTheSame(Broken):
    """A create with the bytes that lie there already succeeds: of two equal writers both believe they won."""

    def put(self, key, views, *, crc32c, if_absent=False):
        found = self.raw(key)
        if found is None or found.body != b"".join(views):
            super().put(key, views, crc32c=crc32c, if_absent=if_absent)


@fails("test_one_of_many_threads_creates")
class ChecksThenWrites(Broken):
    """No lock between the check and the write, as moto has none."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._both_checked = threading.Barrier(2)

    def put(self, key, views, *, crc32c, if_absent=False):
        if if_absent:
            if self.raw(key) is not None:
                raise ObjectExistsError("exists", key=self.url(key), operation="put")
            _meet(self._both_checked)
        super().put(key, views, crc32c=crc32c)


@fails("test_an_upload_is_invisible_until_completed")
class ShowsParts(Broken):
    """Each part is seen as soon as it is there."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        uploaded = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        self.write(key, b"".join(views))
        return uploaded


@fails("test_an_aborted_upload_leaves_nothing")
class NeverAborts(Broken):
    """Parts stay, and are paid for."""

    def abort_multipart(self, key, upload_id):
        pass


@fails("test_listings_follow_writes_and_deletes_at_once")
class CachesListings(Broken):
    """A listing is good for a while, as fsspec's are."""

    def list(self, prefix=""):
        cache = self.__dict__.setdefault("_listings", {})
        return iter(cache.setdefault(prefix, list(super().list(prefix))))


@fails("test_one_of_two_processes_creates")
class LocksInTheProcess(LocalStore):
    """Files, with a condition that other processes do not hear of."""

    _created: dict[str, bool] = {}  # noqa: RUF012  # one of each process is the point

    def __reduce__(self):
        return LocksInTheProcess, (self._root,)

    def put(self, key, views, *, crc32c, if_absent=False):
        if if_absent and self._created.setdefault(self.url(key), False):
            raise ObjectExistsError("exists", key=self.url(key), operation="put")
        self._created[self.url(key)] = True
        super().put(key, views, crc32c=crc32c)


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
