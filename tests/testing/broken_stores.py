"""Stores that are right but for one thing each, and the clause of the contract that has to notice.

They have one defect that some real store, proxy or client has been seen to have.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from cloudckpt.errors import (
    ObjectExistsError,
)
from cloudckpt.stores.base import Store, crc32c_of
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore

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


@fails("test_a_lost_answer_can_be_found_out")
class ForgivesTheSame(Broken):
    """A create with the bytes that lie there already succeeds: of two equal writers both believe they won."""

    def put(self, key, views, *, crc32c, if_absent=False):
        found = self.raw(key)
        if found is None or found.body != b"".join(views):
            super().put(key, views, crc32c=crc32c, if_absent=if_absent)


@fails("test_of_many_threads_exactly_one_creates")
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


@fails("test_of_two_processes_exactly_one_creates")
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
