"""Copies that are killed and told to go on: what is there is used, if it is right and of the same source."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.convert.conftest import Root
from tests.convert.states import bits, contents, loaded, save, store_at

import cloudckpt
from cloudckpt.options import KIB, MIB, Options
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Faults, Rule, Tell, WrappedStore

NUM_OBJECTS = 4
OPTIONS: dict[str, Any] = {"resume": True, "connections": 1}


def state_of(fill: int) -> dict[str, Any]:
    return {f"w{number}": torch.full((20_000,), 10 * fill + number) for number in range(NUM_OBJECTS)}


def saved(uri: str, fill: int = 1, *, overwrite: bool = False) -> dict[str, Any]:
    state = state_of(fill)
    save(state, uri, tile_bytes=4 * KIB, object_bytes=KIB, overwrite=overwrite)
    return state


class _DiedError(BaseException):
    """The process is gone, and makes no call any more."""


class _Mortal(WrappedStore):
    """Dies at the `at`-th call that puts an object at a data key: before, or `after` it was carried out."""

    def __init__(self, inner: Any, at: int, *, after: bool) -> None:
        super().__init__(inner)
        self._at, self._after, self._num_writes = at, after, 0
        self._lock = threading.Lock()

    def around(self, call: Call, action: Callable[[], Any]) -> Any:
        with self._lock:
            is_write = call.operation in {"put", "complete_multipart", "copy_from"} and call.key.startswith("data/")
            self._num_writes += is_write
            is_due = is_write and self._num_writes == self._at
            is_dead = self._num_writes > self._at or (is_due and not self._after)
        if is_dead:
            raise _DiedError
        result = action()
        if is_due:
            self._num_writes += 1
            raise _DiedError
        return result


def noting(operation: str, note: Callable[[Call], None]) -> Faults:
    """Tells of each such call."""
    return Faults(Rule(fault=Tell(before=note), operations={operation}, times=None))


def died(source: str, target: str, at: int, *, after: bool) -> None:
    """A copy that dies there."""
    mortal = Options(**OPTIONS, wrap_store=lambda inner: _Mortal(inner, at, after=after))
    with pytest.raises(_DiedError):
        cloudckpt.copy(source, target, target_options=mortal)
    assert cloudckpt.list_checkpoints(target.rpartition("/")[0]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [("memory", "path"), ("path", "s3"), ("path", "gs"), ("memory", "memory"), ("s3", "s3"), ("gs", "gs")],
)
@pytest.mark.slow
def test_a_copy_that_is_killed_at_any_object_goes_on(
    root_of: Root, copies_by_service: Callable[[str], bool], one: str, other: str
) -> None:
    """If this fails, two terabytes are copied from the beginning again; or what was copied before is not looked at."""
    source = f"{root_of(one)}/step-1"
    state = saved(source)
    by_service = one == other and copies_by_service(one)
    for at, after in itertools.product((1, 2, NUM_OBJECTS), (False, True)):
        target = f"{root_of(other)}/step-1"
        died(source, target, at, after=after)
        read: list[str] = []
        seen = noting("read_into", lambda call, read=read: read.append(call.key))  # type: ignore[misc]
        told: list[tuple[int, int]] = []
        report = cloudckpt.copy(
            source,
            target,
            options=Options(wrap_store=seen) if one != other else Options(),
            target_options=Options(**OPTIONS),
            on_progress=lambda done, total, told=told: told.append((done, total)),
        )
        num_there = at - 1 + after
        if one != other:
            size = report.num_bytes // NUM_OBJECTS
            assert report.num_reused_bytes // size == num_there
            of_data = {key for key in read if key.startswith("data/")}
            assert len(of_data) == NUM_OBJECTS - num_there, "what is there already was read at the source again"
        elif by_service:
            # One is asked for anew in any case: what the service made is believed only if what it makes is good.
            assert report.num_reused_bytes // (report.num_bytes // NUM_OBJECTS) == min(num_there, NUM_OBJECTS - 1)
        assert told[-1] == (report.num_bytes, report.num_bytes)
        assert bits(loaded(state, target)) == bits(state)
        cloudckpt.verify(target)
        cloudckpt.gc(target.rpartition("/")[0], older_than=0, dry_run=False)
        assert len([key for key in contents(target) if key.startswith("data/")]) == NUM_OBJECTS
        cloudckpt.verify(target)


def test_what_the_first_of_many_tries_copied_is_used_by_the_last(root_of: Root) -> None:
    """If this fails, a copy that breaks off again and again copies anew, in the end, what it copied at first."""
    source, target = f"{root_of('memory')}/step-1", f"{root_of('path')}/step-1"
    save({f"w{number}": torch.full((2000,), number) for number in range(20)}, source, object_bytes=KIB)
    for _ in range(18):
        died(source, target, 1, after=True)
    report = cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert report.num_reused_bytes // (report.num_bytes // 20) == 18


def test_nothing_is_written_where_one_rank_is_of_something_else(root_of: Root) -> None:
    """If this fails, a copy that is refused has already put ranks of a new save beside those of an old one."""
    source, target = f"{root_of('memory')}/step-1", f"{root_of('memory')}/step-1"
    for rank in range(2):
        saved(f"{source}/rank-{rank}", rank + 1)
    cloudckpt.copy(source, target, target_options=Options(resume=True))
    for rank in (1, 2):  # and rank 0 has not come to it yet
        saved(f"{source}/rank-{rank}", 10 + rank, overwrite=rank == 1)
    before = contents(target)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=Options(resume=True))
    assert contents(target) == before


def test_a_rank_that_the_source_lacks_makes_it_no_copy(root_of: Root) -> None:
    """If this fails, a folder with a rank of another save in it is called the copy of this one."""
    source, target = f"{root_of('memory')}/step-1", f"{root_of('memory')}/step-1"
    for rank in range(2):
        saved(f"{source}/rank-{rank}", rank + 1)
    cloudckpt.copy(source, target, target_options=Options(resume=True))
    saved(f"{target}/rank-2", 9)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=Options(resume=True))
    cloudckpt.delete(f"{target}/rank-2")
    assert cloudckpt.copy(source, target, target_options=Options(resume=True)).was_there


@pytest.mark.parametrize("resume", [False, True])
def test_ranks_of_another_save_are_seen_before_the_first_is_written(root_of: Root, *, resume: bool) -> None:
    """If this fails, a copy that is refused has put its ranks beside those that another job is writing."""
    source, target = f"{root_of('memory')}/step-1", f"{root_of('memory')}/step-1"
    for rank in range(4):
        saved(f"{source}/rank-{rank}", rank + 1)
    saved(f"{target}/rank-1", 9)
    before = contents(target)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=Options(resume=resume))
    assert contents(target) == before


@pytest.mark.parametrize("how", ["overwritten", "deleted"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_replaced_while_it_is_compared_is_not_called_damaged(
    root_of: Root, how: str, *, overwrite: bool
) -> None:
    """If this fails, a copy tells to delete what another job has just saved, or replaces it unasked."""
    source, target = f"{root_of('memory')}/step-1", f"{root_of('memory')}/step-1"
    saved(source)
    cloudckpt.copy(source, target, target_options=Options(resume=True))

    done: list[Call] = []

    def act(call: Call) -> None:
        done.append(call)
        if how == "deleted":
            cloudckpt.delete(target)
        else:
            saved(target, 2, overwrite=True)

    seen = Faults(Rule(fault=Tell(before=act), operations={"head"}, key="data/", times=1))
    with pytest.raises(cloudckpt.errors.CheckpointChangedError, match="while it was being compared"):
        cloudckpt.copy(source, target, overwrite=overwrite, target_options=Options(resume=True, wrap_store=seen))
    assert len(done) == 1


@pytest.mark.parametrize(("one", "other"), [("memory", "path"), ("memory", "memory"), ("path", "s3"), ("path", "gs")])
@pytest.mark.parametrize("how", ["bit", "short", "gone"])
def test_what_is_there_and_is_not_right_is_copied_again(root_of: Root, one: str, other: str, how: str) -> None:
    """If this fails, what rotted between two tries is committed under checksums that it does not have."""
    source, target = f"{root_of(one)}/step-1", f"{root_of(other)}/step-1"
    state = saved(source)
    died(source, target, 3, after=True)
    key = min(key for key in contents(target) if key.startswith("data/"))
    if how == "bit":
        damage.flip_bit(store_at(target), key, bit=8 * 100_000)
    elif how == "short":
        damage.truncate(store_at(target), key, size_bytes=50_000)
    else:
        damage.remove(store_at(target), key)
    report = cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert report.num_reused_bytes // (report.num_bytes // NUM_OBJECTS) == 2
    cloudckpt.verify(target)
    assert bits(loaded(state, target)) == bits(state)


@pytest.mark.parametrize("same", [False, True], ids=["other content", "the same content"])
def test_nothing_of_another_save_is_used(root_of: Root, *, same: bool) -> None:
    """If this fails, a source that is overwritten between two tries, or another checkpoint that is copied to the same
    place, is mixed with what was copied before.
    """
    root = root_of("memory")
    source, target = f"{root}/a", f"{root_of('path')}/b"
    saved(source)
    died(source, target, 3, after=True)
    state = saved(source, 1 if same else 2, overwrite=True)
    report = cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert report.num_reused_bytes == 0
    assert bits(loaded(state, target)) == bits(state)


def test_a_source_that_changes_in_the_second_try_is_copied_whole(root_of: Root) -> None:
    """If this fails, the objects of the first try are committed with those of a save that came after it."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    saved(source)
    died(source, target, 3, after=True)
    states: list[dict[str, Any]] = []

    def overwrite(call: Call) -> None:
        if not states and call.key.startswith("data/"):
            states.append(state_of(2))
            saved(source, 2, overwrite=True)

    changing = Faults(Rule(fault=Tell(before=overwrite), operations={"read_into"}, times=None))
    cloudckpt.copy(source, target, options=Options(wrap_store=changing), target_options=Options(**OPTIONS))
    assert bits(loaded(states[0], target)) == bits(states[0])


@pytest.mark.parametrize("what", ["save", "overwritten", "gc", "delete"])
def test_a_target_that_changes_between_two_tries(root_of: Root, what: str) -> None:
    """If this fails, somebody else's checkpoint is replaced by a copy, or one is committed whose data gc removes."""
    root = root_of("path")
    source, target = f"{root_of('memory')}/a", f"{root}/b"
    state = saved(source)
    died(source, target, 3, after=True)
    if what in {"save", "overwritten"}:
        save({"w": torch.ones(3)}, target)
        if what == "save":
            with pytest.raises(cloudckpt.CheckpointExistsError):
                cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
            assert bits(loaded({"w": torch.zeros(3)}, target)) == bits({"w": torch.ones(3)})
            return
    elif what == "gc":
        cloudckpt.gc(root, older_than=0, dry_run=False)
    else:
        save({"w": torch.ones(3)}, target)
        cloudckpt.delete(target)
    report = cloudckpt.copy(source, target, overwrite=what == "overwritten", target_options=Options(**OPTIONS))
    assert report.num_reused_bytes == 0
    cloudckpt.gc(root, older_than=0, dry_run=False)
    assert bits(loaded(state, target)) == bits(state)


@pytest.mark.parametrize("after", ["0", "1"])
def test_two_that_go_on_at_once_commit_one(root_of: Root, after: str) -> None:
    """If this fails, one of two copies that take up the same objects removes them under the other's manifest."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    state = saved(source)
    died(source, target, 3, after=after == "1")

    def other(call: Call) -> None:
        if call.key == "manifest.json" and not cloudckpt.list_checkpoints(target.rpartition("/")[0]):
            cloudckpt.copy(source, target, target_options=Options(**OPTIONS))

    meanwhile = Options(**OPTIONS, wrap_store=Faults(Rule(fault=Tell(before=other), operations={"put"}, times=None)))
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=meanwhile)
    cloudckpt.verify(target)
    cloudckpt.gc(target.rpartition("/")[0], older_than=0, dry_run=False)
    assert bits(loaded(state, target)) == bits(state)


@pytest.mark.parametrize("kind", ["memory", "path", "gs"])
def test_what_ranks_saved_on_their_own_goes_on_at_the_rank_that_was_reached(root_of: Root, kind: str) -> None:
    """If this fails, such a copy cannot be finished: the ranks that it has committed are in its way; or it is said to
    be whole, though what was committed has rotted since.
    """
    source, target = root_of("memory"), root_of(kind)
    for rank in range(3):
        save({"w": torch.full((5000,), rank)}, f"{source}/rank-{rank}")

    def mortal(inner: Any) -> _Mortal:
        return _Mortal(inner, 1 if inner.uri.endswith("/rank-1") else 99, after=False)

    with pytest.raises(_DiedError):
        cloudckpt.copy(source, target, target_options=Options(**OPTIONS, wrap_store=mortal))
    (key,) = (key for key in contents(f"{target}/rank-2") if key.startswith("data/"))
    damage.flip_bit(store_at(f"{target}/rank-2"), key, bit=8 * 20_000)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match="rank-2, which an earlier copy has committed"):
        cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    damage.flip_bit(store_at(f"{target}/rank-2"), key, bit=8 * 20_000)
    report = cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert report.num_reused_bytes == report.num_bytes // 3
    for rank in range(3):
        like = {"w": torch.zeros(5000, dtype=torch.int64)}
        assert bits(loaded(like, f"{target}/rank-{rank}")) == bits({"w": torch.full((5000,), rank)})

    again = cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert (again.was_there, again.num_reused_bytes) == (True, again.num_bytes)
    assert (report.was_there, again.attempts) == (False, report.attempts)
    cloudckpt.delete(f"{target}/rank-1")
    mended = cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert (mended.was_there, mended.num_reused_bytes) == (False, mended.num_bytes // 3 * 2)
    save({"w": torch.ones(3)}, f"{source}/rank-0", overwrite=True)
    before = contents(target)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert contents(target) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("first", [{}, {"resume": True}], ids=["plain", "resumable"])
@pytest.mark.parametrize(("one", "other"), [("memory", "path"), ("path", "s3"), ("gs", "gs")])
def test_a_copy_that_was_done_is_done(
    root_of: Root, one: str, other: str, first: dict[str, Any], *, overwrite: bool
) -> None:
    """If this fails, a job that is begun again after its copy was committed fails at it, or copies all once more."""
    source, target = f"{root_of(one)}/a", f"{root_of(other)}/b"
    saved(source)
    done = cloudckpt.copy(source, target, target_options=Options(**first))
    before, calls = contents(target), list[Call]()
    watching = Faults(Rule(fault=Tell(before=calls.append), times=None))
    told: list[tuple[int, int]] = []
    again = cloudckpt.copy(
        source,
        target,
        overwrite=overwrite,
        options=Options(wrap_store=noting("read_into", calls.append)) if one != other else Options(),
        target_options=Options(resume=True, wrap_store=watching),
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert (done.was_there, again.was_there) == (False, True)
    assert again.attempts == done.attempts
    assert again.num_reused_bytes == again.num_bytes == done.num_bytes
    assert told[-1] == (done.num_bytes, done.num_bytes)
    assert {call.operation for call in calls} <= {"list", "read", "head", "read_into", "probe"}
    assert sum(call.num_bytes for call in calls if call.operation == "read_into") == done.num_bytes
    assert contents(target) == before


@pytest.mark.parametrize("what", ["other source", "same source again", "other save", "same save again", "unreadable"])
def test_what_is_there_and_is_no_copy_of_it_is_left_alone(root_of: Root, what: str) -> None:
    """If this fails, ``resume`` says of another checkpoint that it is the copy, or replaces it unasked."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    saved(source)
    if what.endswith("source") or what == "same source again":
        cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
        saved(source, 2 if what.startswith("other") else 1, overwrite=True)
    else:
        saved(target, 2 if what.startswith("other") else 1)
    if what == "unreadable":
        damage.flip_bit(store_at(target), "manifest.json", bit=800)
    before = contents(target)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert contents(target) == before
    report = cloudckpt.copy(source, target, overwrite=True, target_options=Options(**OPTIONS))
    assert (report.was_there, report.num_reused_bytes) == (False, 0)
    assert cloudckpt.compare(source, target).is_same


@pytest.mark.parametrize("how", ["bit", "short", "gone"])
def test_a_copy_that_was_done_and_is_damaged_is_told_or_replaced(root_of: Root, how: str) -> None:
    """If this fails, the repeated command says that all is well of a copy that cannot be loaded any more; or the bar of
    one that replaces it stands still in the middle.
    """
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    state = saved(source)
    cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    key = min(key for key in contents(target) if key.startswith("data/"))
    if how == "bit":
        damage.flip_bit(store_at(target), key, bit=8 * 20_000)
    elif how == "short":
        damage.truncate(store_at(target), key, size_bytes=50_000)
    else:
        damage.remove(store_at(target), key)
    before = contents(target)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=re.escape(key)):
        cloudckpt.copy(source, target, target_options=Options(**OPTIONS))
    assert contents(target) == before
    told: list[tuple[int, int]] = []
    report = cloudckpt.copy(
        source,
        target,
        overwrite=True,
        target_options=Options(**OPTIONS),
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert (report.was_there, report.num_reused_bytes) == (False, 0)
    assert told[-1][0] == told[-1][1]
    assert bits(loaded(state, target)) == bits(state)
    cloudckpt.verify(target)


_KILLED = """
import os, signal, sys
import cloudckpt
from cloudckpt.options import MIB, Options
from cloudckpt.testing.faults import Faults, Rule, Tell
kill = Tell(before=lambda call: os.kill(os.getpid(), signal.SIGKILL))
faults = Faults(Rule(fault=kill, operations={"upload_part"}, skip=3))
options = Options(wrap_store=faults, connections=1, resume=True, part_bytes=5 * MIB)
cloudckpt.copy(sys.argv[1], sys.argv[2], target_options=options)
"""


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_an_upload_that_was_killed_in_the_midst_goes_on(root_of: Root, tmp_path: Path, kind: str) -> None:
    """If this fails, an object of many gigabytes is sent from its beginning again, or finished with something else."""
    source, target = str(tmp_path / "a"), f"{root_of(kind)}/b"
    state = {"w": torch.arange(4 * MIB)}
    save(state, source)
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, source, target],
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -9
    sent: list[int] = []
    counting = noting("upload_part", lambda call: sent.append(call.num_bytes))
    options = Options(resume=True, connections=1, part_bytes=5 * MIB, wrap_store=counting)
    report = cloudckpt.copy(source, target, target_options=options)
    assert report.num_reused_bytes == 15 * MIB
    assert sum(sent) == report.num_bytes - 15 * MIB
    cloudckpt.verify(target)
    assert bits(loaded(state, target)) == bits(state)


def test_a_save_takes_up_nothing_of_a_copy_and_a_copy_nothing_of_a_save(root_of: Root) -> None:
    """If this fails, what was only compared by checksums, or for another purpose, is taken for the same bytes."""
    source, target = f"{root_of('memory')}/a", f"{root_of('memory')}/b"
    state = saved(source)
    died(source, target, 3, after=True)
    attempts = {key.split("/")[1] for key in contents(target)}
    assert all(re.fullmatch(r".*-r0-c[0-9a-f]{32}", attempt) for attempt in attempts)
    saved_report = cloudckpt.save(
        state, target, no_dist=True, options=Options(resume=True, tile_bytes=4 * KIB, object_bytes=KIB)
    ).report
    assert saved_report.num_reused_bytes == 0
