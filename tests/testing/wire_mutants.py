"""Clients of a store that are right but for what they make of a broken network, or of a refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cloudckpt.errors import (
    AccessDeniedError,
    InterruptedReadError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.base import Store, UploadedPart

WIRE_MUTANTS: list[type[Wrapped]] = []
DENIED_MUTANTS: list[type[Wrapped]] = []
CAUGHT_BY: dict[type, tuple[str, ...]] = {}


def caught_by(*clauses: str, mutants: list[type[Wrapped]] = WIRE_MUTANTS) -> Callable[[type], type]:
    """Each of `clauses` must fail where the store is reached through the class."""

    def register(mutant: type) -> type:
        mutants.append(mutant)
        CAUGHT_BY[mutant] = clauses
        return mutant

    return register


class Wrapped(Store):
    """Passes every call to `far`, the store behind the wire; `direct` is the same without a wire."""

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
    setattr(Wrapped, _name, _passed_on(_name))
Wrapped.__abstractmethods__ = frozenset()


@caught_by("test_a_throttled_call_says_so")
class HidesThrottling(Wrapped):
    """A failure like any other, tried again at once."""

    def call(self, name, *args, **kwargs):
        try:
            return super().call(name, *args, **kwargs)
        except ThrottledError as error:
            raise TransientStoreError(str(error), key=error.key, operation=name) from None


@caught_by("test_a_throttled_call_says_so")
class NamesNoKey(Wrapped):
    """Something was throttled."""

    def call(self, name, *args, **kwargs):
        try:
            return super().call(name, *args, **kwargs)
        except ThrottledError as error:
            raise ThrottledError(str(error), key=self.uri, operation=name) from None


@caught_by(
    "test_a_store_that_is_down_is_worth_another_try",
    "test_after_a_lost_answer_any_call_can_be_made_again",
    "test_a_lost_answer_to_a_create_is_found_out_by_a_second_one",
    "test_whichever_answer_to_a_completion_is_lost_the_object_is_whole",
    "test_a_broken_upload_writes_nothing",
    "test_a_broken_part_is_no_part",
    "test_a_broken_answer_says_how_far_it_came",
)
class GivesUp(Wrapped):
    """A broken connection is final."""

    def call(self, name, *args, **kwargs):
        try:
            return super().call(name, *args, **kwargs)
        except TransientStoreError as error:
            raise StoreError(str(error), key=error.key, operation=name) from None


@caught_by("test_a_store_that_is_down_is_worth_another_try", "test_after_a_lost_answer_any_call_can_be_made_again")
class StaysBroken(Wrapped):
    """A connection that broke is kept, and used again."""

    broken: TransientStoreError | None = None

    def call(self, name, *args, **kwargs):
        if self.broken:
            raise self.broken
        try:
            return super().call(name, *args, **kwargs)
        except TransientStoreError as error:
            self.broken = error
            raise


@caught_by(
    "test_after_a_lost_answer_any_call_can_be_made_again",
    "test_a_lost_answer_to_a_create_is_found_out_by_a_second_one",
    "test_a_broken_upload_writes_nothing",
)
class HopesForTheBest(Wrapped):
    """Whatever breaks off is taken for done."""

    def call(self, name, *args, **kwargs):
        try:
            return super().call(name, *args, **kwargs)
        except TransientStoreError:
            return None


@caught_by("test_a_lost_answer_to_a_create_is_found_out_by_a_second_one")
class TriesWithoutTheCondition(Wrapped):
    """After a failure it overwrites: what lies there must be its own."""

    failed = False

    def put(self, *args, if_absent=False, **kwargs):
        try:
            self.far.put(*args, if_absent=if_absent and not self.failed, **kwargs)
        except TransientStoreError:
            self.failed = True
            raise


@caught_by("test_a_lost_answer_to_a_create_is_found_out_by_a_second_one")
class TriesAgainByItself(Wrapped):
    """As SDKs do: the second try meets what the first wrote, and takes it for another's."""

    def put(self, *args, **kwargs):
        try:
            self.far.put(*args, **kwargs)
        except TransientStoreError:
            self.far.put(*args, **kwargs)


@caught_by("test_whichever_answer_to_a_completion_is_lost_the_object_is_whole")
class CleansUpTooMuch(Wrapped):
    """A completion that failed left nothing but rubbish."""

    def complete_multipart(self, key, upload_id, parts):
        try:
            self.far.complete_multipart(key, upload_id, parts)
        except TransientStoreError:
            self.direct.delete([key])
            raise


@caught_by("test_whichever_answer_to_a_completion_is_lost_the_object_is_whole")
class CannotTellGone(Wrapped):
    """The second completion fails, and nobody knows that the first did not."""

    failed = False

    def complete_multipart(self, key, upload_id, parts):
        if self.failed:
            raise StoreError("InvalidRequest", key=self.url(key), operation="complete_multipart")
        try:
            self.far.complete_multipart(key, upload_id, parts)
        except TransientStoreError:
            self.failed = True
            raise


@caught_by("test_a_broken_upload_writes_nothing")
class WritesHalf(Wrapped):
    """What has been sent when the connection breaks is the object."""

    def put(self, key, views, *, crc32c, if_absent=False):
        try:
            self.far.put(key, views, crc32c=crc32c, if_absent=if_absent)
        except TransientStoreError:
            half = [memoryview(b"".join(views)[: sum(view.nbytes for view in views) // 2])]
            self.direct.put(key, half, crc32c=crc32c_of(half))
            raise


@caught_by("test_a_broken_part_is_no_part")
class TakesHalfAPart(Wrapped):
    """The part arrived, as far as it came."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        try:
            return self.far.upload_part(key, upload_id, part, views, crc32c=crc32c)
        except TransientStoreError:
            return UploadedPart(part=part, token=key, crc32c=crc32c)


@caught_by("test_a_broken_answer_says_how_far_it_came")
class CountsWhatItAskedFor(Wrapped):
    """The piece under way when the answer broke off counts as received."""

    def read_into(self, key, offset_bytes, views):
        try:
            self.far.read_into(key, offset_bytes, views)
        except InterruptedReadError as error:
            received = min(error.received_bytes + 100, sum(view.nbytes for view in views))
            raise InterruptedReadError(
                str(error), key=error.key, operation=error.operation, received_bytes=received
            ) from None


@caught_by("test_a_broken_answer_says_how_far_it_came")
class TakesAShortAnswer(Wrapped):
    """What came is what there is."""

    def read(self, key, *, max_bytes):
        try:
            return self.far.read(key, max_bytes=max_bytes)
        except TransientStoreError:
            return b""


@caught_by("test_a_denied_call_says_so", mutants=DENIED_MUTANTS)
class FindsNothing(Wrapped):
    """What may not be seen is not there."""

    def call(self, name, *args, **kwargs):
        try:
            return super().call(name, *args, **kwargs)
        except AccessDeniedError as error:
            raise ObjectNotFoundError(str(error), key=error.key, operation=name) from None


@caught_by("test_a_denied_call_says_so", mutants=DENIED_MUTANTS)
class WritesAllTheSame(Wrapped):
    """The refusal comes once it is done."""

    def delete(self, keys):
        keys = list(keys)
        self.direct.delete(keys)
        self.far.delete(keys)


@caught_by("test_a_denied_call_says_so", mutants=DENIED_MUTANTS)
class KeepsQuiet(Wrapped):
    """A delete that is denied is logged, and dropped."""

    def delete(self, keys):
        with contextlib.suppress(AccessDeniedError):
            self.far.delete(keys)


@caught_by("test_a_denied_create_is_no_lost_race", mutants=DENIED_MUTANTS)
class BlamesAnother(Wrapped):
    """Refused, so somebody was faster."""

    def put(self, key, views, *, crc32c, if_absent=False):
        try:
            self.far.put(key, views, crc32c=crc32c, if_absent=if_absent)
        except AccessDeniedError as error:
            raise ObjectExistsError(str(error), key=error.key, operation="put") from None
