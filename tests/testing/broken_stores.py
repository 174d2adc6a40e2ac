"""Stores that are right but for one thing each, and the clause of the contract that has to notice.

They have one defect that some real store, proxy or client has been seen to have.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from cloudckpt.errors import (
    AccessDeniedError,
    ObjectExistsError,
    StoreError,
    TransientStoreError,
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


class BrokenClient(Store):
    """Base class of the broken clients: passes every call to `far`, behind the wire; `direct` is not behind it."""

    def __init__(self, far: Store, direct: Store) -> None:
        self.far, self.direct = far, direct
        self.capabilities, self.limits = far.capabilities, far.limits

    @property
    def uri(self):
        return self.far.uri

    def call(self, name, *args, **kwargs):
        result = getattr(self.far, name)(*args, **kwargs)
        return iter(list(result)) if isinstance(result, Iterator) else result


def _passed_on(name):
    return lambda self, *args, **kwargs: self.call(name, *args, **kwargs)


for _name in (Store.__abstractmethods__ - {"uri"}) | {"list_parts", "copy_from"}:
    setattr(BrokenClient, _name, _passed_on(_name))
BrokenClient.__abstractmethods__ = frozenset()


@fails("test_a_store_that_is_down_is_worth_another_try")
class GivesUp(BrokenClient):
    """A broken connection is final."""

    def call(self, name, *args, **kwargs):
        try:
            return super().call(name, *args, **kwargs)
        except TransientStoreError as error:
            raise StoreError(str(error), key=error.key, operation=name) from None


@fails("test_after_a_lost_answer_any_call_can_be_made_again")
class HopesForTheBest(BrokenClient):
    """Whatever breaks off is taken for done."""

    def call(self, name, *args, **kwargs):
        try:
            return super().call(name, *args, **kwargs)
        except TransientStoreError:
            return None


@fails("test_a_broken_upload_writes_nothing")
class WritesHalf(BrokenClient):
    """What has been sent when the connection breaks is the object."""

    def put(self, key, views, *, crc32c, if_absent=False):
        try:
            self.far.put(key, views, crc32c=crc32c, if_absent=if_absent)
        except TransientStoreError:
            half = [memoryview(b"".join(views)[: sum(view.nbytes for view in views) // 2])]
            self.direct.put(key, half, crc32c=crc32c_of(half))
            raise


@fails("test_a_denied_call_says_so")
class BlamesAnother(BrokenClient):
    """Refused, so somebody was faster."""

    def put(self, key, views, *, crc32c, if_absent=False):
        try:
            self.far.put(key, views, crc32c=crc32c, if_absent=if_absent)
        except AccessDeniedError as error:
            raise ObjectExistsError(str(error), key=error.key, operation="put") from None
