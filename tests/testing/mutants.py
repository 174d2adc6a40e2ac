"""Stores that are right but for one thing each, and the clauses of the contract that have to notice.

They are `MemoryStore` with one defect that some real store, proxy or client has been seen to have.
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from urllib.parse import quote

from cloudckpt.errors import ObjectExistsError, ObjectNotFoundError, ShortObjectError, StoreError
from cloudckpt.stores._body import crc32c_of, in_order, num_bytes
from cloudckpt.stores.base import FoundPart, Part, UploadedPart
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore

_MEET_S = 2.0
"""How long a mutant waits for the other thread without which its defect does not show."""

MUTANTS: list[type[MemoryStore]] = []
CAUGHT_BY: dict[type, tuple[str, ...]] = {}


def caught_by(*clauses: str) -> Callable[[type], type]:
    """Each of `clauses` must fail on the store."""

    def register(mutant: type) -> type:
        MUTANTS.append(mutant)
        CAUGHT_BY[mutant] = clauses
        return mutant

    return register


class Mutant(MemoryStore):
    """What the mutants need to be short."""

    def raw(self, key):
        return self._bucket("raw").objects.get(self._prefix + key)

    def write(self, key, body):
        """Put without any check."""
        super().put(key, [memoryview(body)], crc32c=crc32c_of([memoryview(body)]))


def _meet(barrier):
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(_MEET_S)


# Putting


@caught_by("test_what_was_put_can_be_read_at_once")
class ReadsLate(Mutant):
    """Eventually consistent: an object can be read once another has been written."""

    def put(self, key, views, *, crc32c, if_absent=False):
        self.write("hidden", b"".join(views))

    def read(self, key, *, max_bytes):
        raise ObjectNotFoundError("not yet", key=self.url(key), operation="read")


@caught_by("test_a_put_replaces_the_object_whole")
class KeepsTheTail(Mutant):
    """Writes over the old bytes from the start on, without truncating."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(key, views, crc32c=crc32c, if_absent=if_absent)
        body = b"".join(views)
        old = self.__dict__.setdefault("_old", {})
        old[key] = body + old.get(key, b"")[len(body) :]
        self.write(key, old[key])


@caught_by("test_an_overwritten_object_is_one_object")
class ShowsVersions(Mutant):
    """A delete uncovers the version before."""

    def put(self, key, views, *, crc32c, if_absent=False):
        old = self.raw(key)
        super().put(key, views, crc32c=crc32c, if_absent=if_absent)
        self.__dict__.setdefault("_versions", {}).setdefault(key, []).append(old)

    def delete(self, keys):
        for key in keys:
            versions = self.__dict__.get("_versions", {}).get(key)
            if versions and versions[-1]:
                self.write(key, versions.pop().body)
            else:
                super().delete([key])


@caught_by("test_an_overwritten_object_is_one_object")
class ListsVersions(Mutant):
    """A listing has a line for every version."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(key, views, crc32c=crc32c, if_absent=if_absent)
        self.__dict__.setdefault("_lines", []).append(self.head(key))

    def list(self, prefix=""):
        return iter([line for line in self.__dict__.get("_lines", []) if line.key.startswith(prefix)])


@caught_by("test_a_version_changes_with_each_write")
class VersionsByKey(Mutant):
    """The version is the key's, not the write's."""

    def head(self, key):
        return replace(super().head(key), version=key)


@caught_by("test_a_body_of_many_views_is_put_in_their_order")
class SortsViews(Mutant):
    """Sends large views first."""

    def put(self, key, views, *, crc32c, if_absent=False):
        self.write(key, b"".join(sorted(views, key=lambda view: -view.nbytes)))


@caught_by("test_a_body_of_thousands_of_views_is_put")
class WritesOneVector(Mutant):
    """One ``writev`` takes 1,024 views, and what it did not write is forgotten."""

    def put(self, key, views, *, crc32c, if_absent=False):
        self.write(key, b"".join(views[:1024]))


@caught_by("test_an_empty_object_is_an_object")
class SkipsEmptyPuts(Mutant):
    """Nothing to write, so nothing is written."""

    def put(self, key, views, *, crc32c, if_absent=False):
        if num_bytes(views):
            super().put(key, views, crc32c=crc32c, if_absent=if_absent)


@caught_by("test_memory_may_be_reused_after_a_put")
class KeepsViews(Mutant):
    """Holds on to the caller's memory instead of copying it."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(key, views, crc32c=crc32c, if_absent=if_absent)
        self.__dict__.setdefault("_views", {})[key] = views

    def read(self, key, *, max_bytes):
        return b"".join(self._views[key])


@caught_by("test_memory_of_parts_may_be_reused")
class KeepsViewsOfParts(Mutant):
    """Holds on to the caller's memory until the upload is complete."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        uploaded = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        self.__dict__.setdefault("_views", {})[part.number] = views
        return uploaded

    def complete_multipart(self, key, upload_id, parts):
        super().complete_multipart(key, upload_id, parts)
        self.write(key, b"".join(b"".join(views) for _, views in sorted(self._views.items())))


@caught_by("test_odd_keys_work_everywhere")
class ListsQuotedKeys(Mutant):
    """A listing gives the keys as they stand in a URL."""

    def list(self, prefix=""):
        return (replace(info, key=quote(info.key)) for info in super().list(prefix))


@caught_by("test_odd_keys_work_everywhere")
class NormalizesKeys(Mutant):
    """Decomposed letters are stored composed, as some file systems do."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(key.replace("e\u0301", "é"), views, crc32c=crc32c, if_absent=if_absent)


@caught_by("test_keys_that_could_leave_the_root_are_refused")
class ResolvesDots(Mutant):
    """Takes a key for a path, and goes wherever it leads."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(posixpath.normpath(f"/{key}").strip("/") or "x", views, crc32c=crc32c, if_absent=if_absent)


@caught_by("test_keys_that_could_leave_the_root_are_refused")
class ReadsOutside(Mutant):
    """Checks keys when it writes, and not when it reads."""

    def read(self, key, *, max_bytes):
        return b"/etc/passwd"


@caught_by("test_the_wrong_checksum_is_refused")
class IgnoresChecksums(Mutant):
    """Takes any bytes with any checksum, and says otherwise."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(key, views, crc32c=crc32c_of(views), if_absent=if_absent)


# Creating


@caught_by("test_create_if_absent_refuses_what_exists", "test_a_lost_answer_can_be_found_out")
class IgnoresTheCondition(Mutant):
    """Overwrites whatever the condition says, as rclone's S3 server does."""

    def put(self, key, views, *, crc32c, if_absent=False):
        super().put(key, views, crc32c=crc32c)


@caught_by("test_create_if_absent_refuses_what_exists")
class OverwritesAndRefuses(Mutant):
    """Says that an object was there, and replaces it all the same."""

    def put(self, key, views, *, crc32c, if_absent=False):
        existed = self.raw(key) is not None
        super().put(key, views, crc32c=crc32c)
        if if_absent and existed:
            raise ObjectExistsError("exists", key=self.url(key), operation="put")


@caught_by("test_create_if_absent_after_a_delete_succeeds")
class RemembersTheDead(Mutant):
    """A key that was ever used counts as taken."""

    def put(self, key, views, *, crc32c, if_absent=False):
        used = self.__dict__.setdefault("_used", set())
        if if_absent and key in used:
            raise ObjectExistsError("exists", key=self.url(key), operation="put")
        used.add(key)
        super().put(key, views, crc32c=crc32c, if_absent=if_absent)


@caught_by("test_a_lost_answer_can_be_found_out")
class ForgivesTheSame(Mutant):
    """A create with the bytes that lie there already succeeds: of two equal writers both believe they won."""

    def put(self, key, views, *, crc32c, if_absent=False):
        found = self.raw(key)
        if found is None or found.body != b"".join(views):
            super().put(key, views, crc32c=crc32c, if_absent=if_absent)


@caught_by("test_of_many_threads_exactly_one_creates")
class ChecksThenWrites(Mutant):
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


@caught_by("test_a_create_never_replaces_what_was_just_completed")
class ChecksBeforeACompletion(Mutant):
    """Between the check of a create and its write, an upload to the same key is completed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._checked, self._completed = threading.Event(), threading.Event()

    def put(self, key, views, *, crc32c, if_absent=False):
        if if_absent and self.raw(key) is not None:
            raise ObjectExistsError("exists", key=self.url(key), operation="put")
        self._checked.set()
        self._completed.wait(_MEET_S)
        super().put(key, views, crc32c=crc32c)

    def complete_multipart(self, key, upload_id, parts):
        self._checked.wait(_MEET_S)
        super().complete_multipart(key, upload_id, parts)
        self._completed.set()


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


class ListsItsOwnParts(LocalStore):
    """Files, and a list of what this process has sent."""

    capabilities = replace(LocalStore.capabilities, listed_parts="same_upload")
    _sent: dict[tuple[str, int], FoundPart] = {}  # noqa: RUF012  # one of each process is the point

    def __reduce__(self):
        return ListsItsOwnParts, (self._root,)

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        done = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        self._sent[upload_id, part.number] = FoundPart(
            number=part.number, size_bytes=part.size_bytes, token=done.token, crc32c=crc32c, md5=None
        )
        return done

    def list_parts(self, key, upload_id):
        return iter([part for (of, _), part in self._sent.items() if of == upload_id])


@caught_by("test_a_pickled_store_sees_the_same_objects")
class LosesItsPrefix(Mutant):
    """Comes out of a pickle at another root."""

    def __reduce__(self):
        return MemoryStore, (self._name, "elsewhere")


# Deleting and copying


@caught_by("test_deleting_twice_is_no_error")
class MissesTheDead(Mutant):
    """A delete of nothing is an error."""

    def delete(self, keys):
        for key in keys:
            self.head(key)
            super().delete([key])


@caught_by("test_a_delete_removes_nothing_but_the_keys_given")
class DeletesByPrefix(Mutant):
    """Takes the key for a prefix."""

    def delete(self, keys):
        for key in keys:
            super().delete([info.key for info in self.list(key)])


@caught_by("test_deletes_keep_their_order")
class DeletesInAnyOrder(Mutant):
    """Batches, whose order no service promises. Others look in between."""

    _num_looks = 0

    def head(self, key):
        self._num_looks += 1
        return super().head(key)

    def delete(self, keys):
        until_s = time.monotonic() + _MEET_S / 4
        for key in reversed(list(keys)):
            super().delete([key])
            enough = self._num_looks + 4
            while self._num_looks < enough and time.monotonic() < until_s:
                time.sleep(0)  # the other thread's turn


@caught_by("test_a_copy_by_the_service_says_what_it_copied")
class Moves(Mutant):
    """A copy that is a rename."""

    def copy_from(self, source_url, target_key):
        said = super().copy_from(source_url, target_key)
        super().delete([source_url.removeprefix(f"{self.uri}/")])
        return said


@caught_by("test_a_copy_by_the_service_says_what_it_copied")
class CopiesUnseen(Mutant):
    """The service says of a copy what it has not looked at."""

    def copy_from(self, source_url, target_key):
        return (super().copy_from(source_url, target_key) or 0) ^ 1


# Uploads


@caught_by("test_an_upload_is_its_parts_joined")
class LosesTheLastPart(Mutant):
    """The part that is smaller than all others is left out."""

    def complete_multipart(self, key, upload_id, parts):
        super().complete_multipart(key, upload_id, parts[:-1])


@caught_by("test_an_upload_is_invisible_until_completed")
class ShowsParts(Mutant):
    """Each part is seen as soon as it is there."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        uploaded = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        self.write(key, b"".join(views))
        return uploaded


@caught_by("test_an_upload_is_invisible_until_completed", "test_more_than_a_page_of_uploads")
class ListsPartFiles(Mutant):
    """Parts are objects of their own, and nobody hides them."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        self.write(f"parts/{key}-{part.number}", b"".join(views))
        return super().upload_part(key, upload_id, part, views, crc32c=crc32c)


@caught_by("test_an_upload_replaces_an_object_only_when_completed")
class MakesRoom(Mutant):
    """The old object goes as soon as a new one is begun."""

    def create_multipart(self, key):
        super().delete([key])
        return super().create_multipart(key)


@caught_by("test_parts_are_ordered_by_number")
class JoinsAsTheyArrive(Mutant):
    """The first part that comes is the first of the object."""

    def complete_multipart(self, key, upload_id, parts):
        arrived = b"".join(self._bucket("complete").uploads[upload_id].parts.values())
        super().complete_multipart(key, upload_id, parts)
        self.write(key, arrived)


@caught_by("test_parts_go_up_in_parallel")
class ForgetsParallelParts(Mutant):
    """The list of parts is read, changed and written back without a lock."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._all_read = threading.Barrier(4)

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        upload = self._bucket("upload_part").uploads[upload_id]
        known = dict(upload.parts)
        _meet(self._all_read)
        uploaded = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        _meet(self._all_read)
        upload.parts = {**known, part.number: b"".join(views)}
        return uploaded


@caught_by("test_of_a_part_uploaded_twice_the_last_counts")
class KeepsTheFirst(Mutant):
    """A part that is there is not taken again."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        known = self.__dict__.setdefault("_known", {})
        if (upload_id, part.number) not in known:
            known[upload_id, part.number] = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        return known[upload_id, part.number]


@caught_by("test_two_uploads_to_one_key_do_not_mix")
class OneUploadForAKey(Mutant):
    """Whoever begins an upload gets the one that is under way."""

    def create_multipart(self, key):
        running = {info.key: info.upload_id for info in self.list_uploads()}
        return running.get(key) or super().create_multipart(key)


@caught_by("test_an_aborted_upload_leaves_nothing", "test_unfinished_uploads_are_listed")
class NeverAborts(Mutant):
    """Parts stay, and are paid for."""

    def abort_multipart(self, key, upload_id):
        pass


@caught_by("test_a_damaged_part_is_refused")
class IgnoresChecksumsOfParts(Mutant):
    """Takes any part with any checksum, and says otherwise."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        return super().upload_part(key, upload_id, part, views, crc32c=crc32c_of(views))


@caught_by("test_parts_with_a_gap_are_not_completed")
class ClosesGaps(Mutant):
    """Numbers are an order and no more."""

    def complete_multipart(self, key, upload_id, parts):
        offsets, end = [], 0
        for number, done in enumerate(sorted(parts, key=lambda done: done.part.number), start=1):
            part = Part(number=number, offset_bytes=end, size_bytes=done.part.size_bytes)
            offsets.append((part, self._bucket("complete").uploads[upload_id].parts[done.part.number]))
            end += part.size_bytes
        again = super().create_multipart(key)
        done = [
            super(ClosesGaps, self).upload_part(key, again, p, [memoryview(b)], crc32c=crc32c_of([memoryview(b)]))
            for p, b in offsets
        ]
        super().complete_multipart(key, again, done)


@caught_by("test_completing_twice_does_no_harm")
class CompletesNothing(Mutant):
    """A completion of an upload that is gone makes an empty object."""

    def complete_multipart(self, key, upload_id, parts):
        try:
            super().complete_multipart(key, upload_id, parts)
        except ObjectNotFoundError:
            self.write(key, b"")


@caught_by("test_a_part_that_comes_late_does_no_harm")
class TakesLateParts(Mutant):
    """A part of an upload that is gone goes into the object."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        try:
            return super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        except ObjectNotFoundError:
            self.write(key, b"".join(views))
            return UploadedPart(part=part, token=key, crc32c=crc32c)


@caught_by("test_a_token_that_nobody_gave_completes_nothing_else")
class SkipsUnknownTokens(Mutant):
    """A part whose token is not known is left out."""

    def complete_multipart(self, key, upload_id, parts):
        in_order(self, key, list(parts))
        known = self._bucket("complete").uploads.pop(upload_id).parts
        tokens = self.__dict__["_tokens"]
        self.write(key, b"".join(known[p.part.number] for p in parts if tokens[p.part.number] == p.token))

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        uploaded = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        self.__dict__.setdefault("_tokens", {})[part.number] = uploaded.token
        return uploaded


@caught_by("test_an_upload_of_nothing_is_empty_or_refused")
class StumblesOverNothing(Mutant):
    """The last part is looked at, whether there is one or not."""

    def complete_multipart(self, key, upload_id, parts):
        parts[-1]
        super().complete_multipart(key, upload_id, parts)


@caught_by("test_uploads_at_odd_keys_are_found")
class ListsQuotedUploads(Mutant):
    """A listing of uploads gives the keys as they stand in a URL."""

    def list_uploads(self, prefix=""):
        return (replace(info, key=quote(info.key)) for info in super().list_uploads(prefix))


@caught_by("test_unfinished_uploads_are_listed")
class ListsAllUploads(Mutant):
    """The prefix is not looked at: one checkpoint's clean-up aborts another's save."""

    def list_uploads(self, prefix=""):
        return super().list_uploads()


@caught_by("test_unfinished_uploads_are_listed")
class UploadsWithoutAge(Mutant):
    """Every upload began long ago, so a clean-up aborts what is under way."""

    def list_uploads(self, prefix=""):
        old = timedelta(days=5000)
        return (replace(info, started_at=info.started_at - old) for info in super().list_uploads(prefix))


# Parts of unfinished uploads


@caught_by("test_parts_are_listed_for_what_they_are")
class ListsPartsOfAll(Mutant):
    """All parts that were ever sent to the key."""

    def list_parts(self, key, upload_id):
        return (part for info in self.list_uploads(key) for part in super(Mutant, self).list_parts(key, info.upload_id))


@caught_by("test_parts_are_listed_for_what_they_are", "test_more_than_a_page_of_parts")
class ListsAnotherChecksum(Mutant):
    """That of the part before."""

    def list_parts(self, key, upload_id):
        found = list(super().list_parts(key, upload_id))
        return (replace(part, crc32c=found[index - 1].crc32c) for index, part in enumerate(found))


@caught_by("test_a_part_that_was_sent_again_is_listed_as_it_is_now")
class ListsTheFirstSending(Mutant):
    """A listing that is not told of a second sending."""

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        uploaded = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        listed = self.__dict__.setdefault("_listed", {})
        listed.setdefault((upload_id, part.number), list(super().list_parts(key, upload_id))[-1])
        return uploaded

    def list_parts(self, key, upload_id):
        return iter([part for (of, _), part in self.__dict__.get("_listed", {}).items() if of == upload_id])


@caught_by("test_listed_parts_complete_the_upload")
class ListsNoTokens(Mutant):
    """Tokens that complete nothing."""

    def list_parts(self, key, upload_id):
        return (replace(part, token=str(part.number)) for part in super().list_parts(key, upload_id))


@caught_by("test_listed_parts_complete_another_upload_where_that_is_declared")
class DeclaresTooMuch(Mutant):
    """Parts are good for their own upload, and said to be good for any."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.capabilities = replace(self.capabilities, listed_parts="any_upload")


@caught_by("test_a_part_that_was_replaced_is_not_completed_as_it_was")
class CompletesWhatIsThere(Mutant):
    """Looks at the numbers of the parts, not at the tokens."""

    def complete_multipart(self, key, upload_id, parts):
        held = {part.number: part.token for part in self.list_parts(key, upload_id)}
        known = [replace(done, token=held.get(done.part.number, done.token)) for done in parts]
        super().complete_multipart(key, upload_id, known)


@caught_by("test_an_upload_that_is_over_lists_nothing")
class ListsForEver(Mutant):
    """A listing that outlives the upload."""

    def list_parts(self, key, upload_id):
        return iter(self.__dict__.get("_sent", {}).get(upload_id, []))

    def upload_part(self, key, upload_id, part, views, *, crc32c):
        uploaded = super().upload_part(key, upload_id, part, views, crc32c=crc32c)
        self.__dict__.setdefault("_sent", {})[upload_id] = list(super().list_parts(key, upload_id))
        return uploaded


@caught_by("test_more_than_a_page_of_parts")
class OnePageOfParts(Mutant):
    """The first thousand, and no marker for the rest."""

    def list_parts(self, key, upload_id):
        return iter(list(super().list_parts(key, upload_id))[:1000])


# Reading


@caught_by("test_ranges_are_half_open", "test_many_threads_read_one_object")
class ClosedRanges(Mutant):
    """Off by one."""

    def read_into(self, key, offset_bytes, views):
        super().read_into(key, max(0, offset_bytes - 1), views)


@caught_by("test_a_range_past_the_end_is_a_short_object", "test_an_empty_object_has_no_first_byte")
class FillsWithZeros(Mutant):
    """What the object lacks is zero."""

    def read_into(self, key, offset_bytes, views):
        body = self._object("read_into", key).body + bytes(10_000)
        for view in views:
            view[:] = body[offset_bytes : offset_bytes + view.nbytes]
            offset_bytes += view.nbytes


@caught_by("test_a_range_past_the_end_is_a_short_object")
class ReadsWhatThereIs(Mutant):
    """A short object fills what it can, without a word."""

    def read_into(self, key, offset_bytes, views):
        with contextlib.suppress(ShortObjectError):
            super().read_into(key, offset_bytes, views)


@caught_by("test_one_read_fills_several_views_and_nothing_else")
class BeginsAgain(Mutant):
    """Each view gets the bytes that the first one got."""

    def read_into(self, key, offset_bytes, views):
        for view in views:
            super().read_into(key, offset_bytes, [view])


@caught_by("test_one_read_fills_thousands_of_views")
class ReadsOneVector(Mutant):
    """One ``readv`` fills 1,024 views, and the others are forgotten."""

    def read_into(self, key, offset_bytes, views):
        super().read_into(key, offset_bytes, views[:1024])


@caught_by("test_many_threads_read_one_object")
class SharesAPosition(Mutant):
    """Seeks, then reads; another thread seeks in between."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._all_sought = threading.Barrier(8)

    def read_into(self, key, offset_bytes, views):
        self._position_bytes = offset_bytes
        _meet(self._all_sought)
        super().read_into(key, self._position_bytes, views)


@caught_by("test_a_whole_read_is_bounded")
class ReadsAnySize(Mutant):
    """Reads whatever lies there."""

    def read(self, key, *, max_bytes):
        return super().read(key, max_bytes=1 << 40)


@caught_by("test_a_missing_object_is_a_typed_error", "test_an_overwritten_object_is_one_object")
class UntypedErrors(Mutant):
    """The key error of a dictionary."""

    def _object(self, operation, key):
        if self.raw(key) is None:
            raise KeyError(key)
        return super()._object(operation, key)


@caught_by("test_a_missing_object_is_a_typed_error")
class NamelessErrors(Mutant):
    """Something is missing, and nobody says what."""

    def _object(self, operation, key):
        if self.raw(key) is None:
            raise ObjectNotFoundError("404", key="", operation=operation)
        return super()._object(operation, key)


@caught_by("test_a_directory_is_no_object")
class HasFolders(Mutant):
    """A folder has a size, too."""

    def head(self, key):
        inside = list(self.list(f"{key}/"))
        return replace(inside[0], key=key, size_bytes=0) if inside else super().head(key)


@caught_by("test_the_address_names_the_store")
class TrailingSlash(Mutant):
    """The address ends in a slash."""

    @property
    def uri(self):
        return f"{super().uri}/"


@caught_by("test_a_fresh_store_is_empty")
class MarksItsRoot(Mutant):
    """An empty object stands for the folder, as S3 consoles make one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.write(".keep", b"")


@caught_by("test_listings_follow_writes_and_deletes_at_once")
class CachesListings(Mutant):
    """A listing is good for a while, as fsspec's are."""

    def list(self, prefix=""):
        cache = self.__dict__.setdefault("_listings", {})
        return iter(cache.setdefault(prefix, list(super().list(prefix))))


@caught_by("test_a_prefix_is_a_plain_string")
class ListsFolders(Mutant):
    """A prefix is a folder."""

    def list(self, prefix=""):
        return super().list(f"{prefix.rstrip('/')}/" if prefix else "")


@caught_by("test_times_are_aware_and_recent")
class NaiveTimes(Mutant):
    """Local time without a zone."""

    def list(self, prefix=""):
        return (replace(info, modified_at=info.modified_at.replace(tzinfo=None)) for info in super().list(prefix))


@caught_by("test_times_are_aware_and_recent")
class WrongClock(Mutant):
    """An hour ahead, as a time zone forgotten makes it."""

    def head(self, key):
        info = super().head(key)
        return replace(info, modified_at=info.modified_at + timedelta(hours=1))


@caught_by("test_directories_are_first_segments")
class FilesAreDirectories(Mutant):
    """What lies at the top counts as a directory."""

    def list_directories(self):
        yield from {info.key.split("/")[0] for info in self.list()}


# Keys


@caught_by("test_the_longest_key_works_everywhere")
class AddsToKeys(Mutant):
    """A suffix while it is written, and 1,024 bytes for both."""

    def put(self, key, views, *, crc32c, if_absent=False):
        if len(f"{self._prefix}{key}.partial".encode()) > 1024:
            raise StoreError("KeyTooLong", key=self.url(key), operation="put")
        super().put(key, views, crc32c=crc32c, if_absent=if_absent)


@caught_by("test_a_key_that_is_too_long_is_a_typed_error")
class UntypedNames(Mutant):
    """The operating system's error, as it came."""

    def put(self, key, views, *, crc32c, if_absent=False):
        if len(key) > 4096:
            raise OSError(36, "File name too long")
        super().put(key, views, crc32c=crc32c, if_absent=if_absent)


@caught_by("test_more_than_a_page_of_keys", "test_more_than_a_page_of_siblings")
class OnePageOfKeys(Mutant):
    """The first thousand, and no marker for the rest."""

    def list(self, prefix=""):
        return iter(sorted(super().list(prefix), key=lambda info: info.key)[:1000])


@caught_by("test_more_than_a_page_of_keys")
class OnePageOfDirectories(Mutant):
    """The first thousand, and no marker for the rest."""

    def list_directories(self):
        return iter(sorted(super().list_directories())[:1000])


@caught_by("test_more_than_a_page_of_siblings")
class OneBatchOfDeletes(Mutant):
    """The first thousand are deleted."""

    def delete(self, keys):
        super().delete(list(keys)[:1000])


@caught_by("test_more_than_a_page_of_uploads")
class OnePageOfUploads(Mutant):
    """The first thousand, and no marker for the rest."""

    def list_uploads(self, prefix=""):
        return iter(sorted(super().list_uploads(prefix), key=lambda info: info.key)[:1000])


# Memory


@caught_by("test_odd_memory_is_put_right_or_not_at_all")
class SendsRawMemory(Mutant):
    """Looks at where a view begins and how much it holds."""

    def put(self, key, views, *, crc32c, if_absent=False):
        self.write(key, b"".join(bytes(view.obj)[: view.nbytes] for view in views))


@caught_by("test_odd_memory_is_filled_right_or_not_at_all")
class FillsRawMemory(Mutant):
    """Looks at where a view begins and how much it holds."""

    def read_into(self, key, offset_bytes, views):
        for view in views:
            memoryview(view.obj)[: view.nbytes] = self.raw(key).body[: view.nbytes]


@caught_by("test_memory_that_cannot_be_written_stays_as_it_is")
class PassesOverReadOnlyMemory(Mutant):
    """Nothing can be written there, so nothing is, and nobody hears of it."""

    def read_into(self, key, offset_bytes, views):
        super().read_into(key, offset_bytes, [view for view in views if not view.readonly])
