"""Copies of checkpoints, between all kinds of places and through all kinds of trouble."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from awscrt.checksums import crc32c
from tests.convert.conftest import Root
from tests.convert.states import bits, contents, loaded, save, small, store_at

import cloudckpt
from cloudckpt.options import GIB, KIB, MIB, Options
from cloudckpt.stores.base import Tried, once
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Denied, Faults, Rule, SlowDown, Tell, WrappedStore

KINDS = ["path", "s3", "gs", "memory"]


@pytest.mark.parametrize(("one", "other"), list(itertools.product(KINDS, KINDS)))
def test_a_copy_is_the_same_checkpoint(
    root_of: Root, copies_by_service: Callable[[str], bool], one: str, other: str
) -> None:
    """If this fails, what is copied to another store is not what was saved, or cannot be loaded there."""
    source, target = f"{root_of(one)}/step-1", f"{root_of(other)}/step-1"
    state = {**small(), "keyed": {0: {"n": 1}}}
    save(state, source, tile_bytes=4 * KIB, part_bytes=64 * KIB, object_bytes=16 * KIB, metadata={"run": "a"})
    before = contents(source)
    told: list[tuple[int, int]] = []
    report = cloudckpt.copy(source, target, on_progress=lambda done, total: told.append((done, total)))
    assert bits(loaded(state, target)) == bits(state)
    verified = cloudckpt.verify(target)
    assert verified.attempts == report.attempts
    assert verified.num_bytes == report.num_bytes
    assert report.num_objects > 1
    assert contents(source) == before
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (report.num_bytes, report.num_bytes)
    if one == other and copies_by_service(one):
        assert report.num_service_bytes + report.num_read_back_bytes == report.num_bytes
    else:
        assert report.num_service_bytes == report.num_read_back_bytes == 0
    old, new = _manifest(before), _manifest(contents(target))
    for name in ("tensors", "values", "nesting", "typed_nesting", "tile_bytes", "world_size", "metadata", "save_id"):
        assert new.get(name) == old.get(name), name
    assert new["attempt"] != old["attempt"]
    assert [(each["size"], each["crc32c"]) for each in new["objects"]] == [
        (each["size"], each["crc32c"]) for each in old["objects"]
    ]


def test_a_copy_leaves_alone_what_is_there_unless_told(root_of: Root) -> None:
    """If this fails, a mistyped target costs a checkpoint; or one that was to be replaced is not, or not at once."""
    source, target = f"{root_of('path')}/a", f"{root_of('memory')}/b"
    save({"w": torch.arange(4)}, source)
    save({"w": torch.arange(5)}, target)
    before = contents(target)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target)
    assert contents(target) == before
    cloudckpt.copy(source, target, overwrite=True)
    assert bits(loaded({"w": torch.zeros(4)}, target)) == bits({"w": torch.arange(4).float()})
    assert set(contents(target)).isdisjoint(before), "what was replaced is still there"


@pytest.mark.parametrize(("one", "other"), [("memory", "memory"), ("path", "memory"), ("path", "path"), ("s3", "s3")])
def test_a_damaged_source_is_found_and_named(root_of: Root, one: str, other: str) -> None:
    """If this fails, bits that rot are copied with a fresh and good name."""
    source, target = f"{root_of(one)}/step-1", f"{root_of(other)}/step-1"
    save({"w": torch.arange(50_000), "b": torch.ones(3)}, source, tile_bytes=4 * KIB)
    key = next(key for key in contents(source) if key.startswith("data/"))
    damage.flip_bit(store_at(source), key, bit=8 * 100_000)
    with pytest.raises(cloudckpt.CorruptCheckpointError) as caught:
        cloudckpt.copy(source, target)
    assert key in str(caught.value)
    assert "'w'" in str(caught.value)
    assert source in str(caught.value)
    assert contents(target) == {}


@pytest.mark.parametrize(("one", "other"), [("memory", "memory"), ("path", "memory")])
def test_a_missing_object_is_named(root_of: Root, one: str, other: str) -> None:
    """If this fails, the user reads of a save and a gc, and not of the object that the source lacks."""
    source, target = f"{root_of(one)}/step-1", f"{root_of(other)}/step-1"
    save({"w": torch.arange(500)}, source)
    key = next(key for key in contents(source) if key.startswith("data/"))
    damage.remove(store_at(source), key)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=re.escape(key) + " is missing, and with it .*'w'"):
        cloudckpt.copy(source, target)
    assert contents(target) == {}


class _Service(WrappedStore):
    """A service that copies as a test wants it."""

    def __init__(self, inner: Any, copy: Callable[..., int | None]) -> None:
        super().__init__(inner)
        self._copy = copy

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        return tried(lambda: self._copy(self.inner, source_url, target_key))


def _silent(inner: Any, source_url: str, target_key: str) -> None:
    inner.copy_from(source_url, target_key)


def _damaging(inner: Any, source_url: str, target_key: str) -> int:
    said: int = inner.copy_from(source_url, target_key)
    damage.flip_bit(inner, target_key, bit=9999)
    return said ^ 1


def _cutting(inner: Any, source_url: str, target_key: str) -> None:
    inner.copy_from(source_url, target_key)
    damage.truncate(inner, target_key, size_bytes=5000)


@pytest.mark.parametrize(("copy", "is_kept"), [(_silent, True), (_damaging, False), (_cutting, False)])
def test_what_the_service_copies_is_not_believed(root_of: Root, copy: Callable[..., Any], *, is_kept: bool) -> None:
    """If this fails, a store that copies badly and says nothing makes a checkpoint that cannot be loaded."""
    root = root_of("memory")
    state = {"w": torch.arange(5000)}
    save(state, f"{root}/a", tile_bytes=4 * KIB)
    options = Options(wrap_store=lambda inner: _Service(inner, copy))
    report = cloudckpt.copy(f"{root}/a", f"{root}/b", target_options=options)
    assert report.num_service_bytes == 0
    assert report.num_read_back_bytes == (report.num_bytes if is_kept else 0)
    assert bits(loaded(state, f"{root}/b")) == bits(state)
    assert len(contents(f"{root}/b")) == 2, "the bad copy is still there"


def test_a_service_that_may_not_copy_is_done_without(root_of: Root) -> None:
    """If this fails, credentials that may read one bucket and write the other are of no use."""
    root = root_of("memory")
    state = small()
    save(state, f"{root}/a")
    faults = Faults(Rule(fault=Denied(), operations={"copy_from"}, times=None))
    report = cloudckpt.copy(f"{root}/a", f"{root}/b", target_options=Options(wrap_store=faults))
    assert report.num_service_bytes == report.num_read_back_bytes == 0
    assert bits(loaded(state, f"{root}/b")) == bits(state)


class _Choosy(WrappedStore):
    """Copies by its service, but for the `refused`-th object, of which it says `error`."""

    def __init__(self, inner: Any, refused: int, error: type[cloudckpt.errors.StoreError]) -> None:
        super().__init__(inner)
        self.refused, self.error, self.num_asked = refused, error, 0

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        self.num_asked += 1
        if self.num_asked == self.refused:
            raise self.error("not this one", key=self.inner.url(target_key), operation="copy_from")
        return self.inner.copy_from(source_url, target_key, tried=tried)


@pytest.mark.parametrize("error", [cloudckpt.errors.AccessDeniedError, cloudckpt.errors.ObjectNotFoundError])
def test_one_object_that_the_service_does_not_copy_ends_nothing_else(
    root_of: Root, error: type[cloudckpt.errors.StoreError]
) -> None:
    """If this fails, one object under a key of its own makes all others go through this machine; or an upload that
    somebody has aborted is told as damage of the source.
    """
    source, target = f"{root_of('memory')}/step-1", f"{root_of('memory')}/step-1"
    state = {f"w{number}": torch.full((500,), float(number)) for number in range(20)}
    save(state, source, object_bytes=KIB)
    stores: list[_Choosy] = []

    def choosy(inner: Any) -> _Choosy:
        stores.append(_Choosy(inner, 3, error))
        return stores[-1]

    report = cloudckpt.copy(source, target, target_options=Options(wrap_store=choosy, connections=1))
    assert [store.num_asked for store in stores] == [20]
    assert report.num_service_bytes == report.num_bytes // 20 * 19
    assert bits(loaded(state, target)) == bits(state)


class _Endless(WrappedStore):
    """Of the first two objects after the trial, one takes requests without an end, and the other fails meanwhile."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._numbers = itertools.count()
        self._is_under_way = threading.Event()

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        number = next(self._numbers)
        while number == 1:
            tried(self._is_under_way.set)
        if number == 2:
            self._is_under_way.wait()
            raise cloudckpt.errors.CredentialsError("expired", key=self.inner.url(target_key), operation="copy_from")
        return self.inner.copy_from(source_url, target_key, tried=tried)


@pytest.mark.timeout(60)
def test_a_failure_does_not_wait_for_all_requests_of_another_object(root_of: Root) -> None:
    """If this fails, a copy that has failed, or was interrupted, goes on for the 2,000 parts of a large object."""
    source, target = f"{root_of('memory')}/step-1", f"{root_of('memory')}/step-1"
    save({f"w{number}": torch.full((500,), float(number)) for number in range(4)}, source, object_bytes=KIB)
    with pytest.raises(cloudckpt.errors.CredentialsError, match="expired"):
        cloudckpt.copy(source, target, target_options=Options(wrap_store=_Endless, connections=2))
    assert contents(target) == {}


class _TwoKinds(_Service):
    """A service that copies objects of up to 8 KiB by one request, and others by many."""

    def __init__(self, inner: Any, copy: Callable[..., int | None]) -> None:
        super().__init__(inner, copy)
        self.limits = dataclasses.replace(inner.limits, max_single_copy_bytes=8 * KIB)


@pytest.mark.parametrize("leftovers", [False, True])
@pytest.mark.parametrize("how", ["refused", "damaged"])
@pytest.mark.parametrize("kinds", [{"one"}, {"many"}, {"one", "many"}])
def test_what_the_service_does_not_copy_is_tried_once(
    root_of: Root, kinds: set[str], how: str, *, leftovers: bool
) -> None:
    """If this fails, each of thousands of objects is first copied in vain; or what the service does copy is read and
    written, because of objects of another size.
    """
    root = root_of("memory")
    state = {f"w{i}": torch.full((500 if i % 2 else 5000,), i) for i in range(24)}
    save(state, f"{root}/a", object_bytes=KIB, tile_bytes=4 * KIB)
    if leftovers:
        failing = Faults(Rule(fault=Denied(), operations={"put"}, key="manifest", times=None))
        with pytest.raises(cloudckpt.errors.AccessDeniedError):
            cloudckpt.copy(f"{root}/a", f"{root}/b", target_options=Options(resume=True, wrap_store=failing))
        for key in sorted(contents(f"{root}/b"))[::2]:
            damage.remove(store_at(f"{root}/b"), key)
    asked: list[str] = []

    def copy(inner: Any, source_url: str, target_key: str) -> int | None:
        size_bytes = store_at(f"{root}/a").head(source_url.removeprefix(f"{root}/a/")).size_bytes
        kind = "many" if size_bytes > 8 * KIB else "one"
        asked.append(kind)
        if kind not in kinds:
            said: int | None = inner.copy_from(source_url, target_key)
            return said
        if how == "damaged":
            return _damaging(inner, source_url, target_key)
        raise cloudckpt.errors.AccessDeniedError("not from there", key=target_key, operation="copy_from")

    options = Options(wrap_store=lambda inner: _TwoKinds(inner, copy), resume=leftovers)
    report = cloudckpt.copy(f"{root}/a", f"{root}/b", target_options=options)
    assert {kind: asked.count(kind) for kind in kinds} == dict.fromkeys(kinds, 1)
    assert report.num_service_bytes > 0 or kinds == {"one", "many"}
    cloudckpt.verify(f"{root}/b")
    assert bits(loaded(state, f"{root}/b")) == bits(state)


def test_a_copy_by_the_service_that_is_throttled_is_tried_again(root_of: Root) -> None:
    """If this fails, one answer to slow down ends a copy, or has its bytes read and written after all."""
    root = root_of("memory")
    save(small(), f"{root}/a")
    faults = Faults(Rule(fault=SlowDown(), operations={"copy_from"}, times=1))
    report = cloudckpt.copy(f"{root}/a", f"{root}/b", target_options=Options(wrap_store=faults))
    assert (report.num_service_bytes, report.num_retries) == (report.num_bytes, 1)


@pytest.mark.parametrize("side", ["source", "target"])
def test_the_side_that_denies_is_named(root_of: Root, side: str) -> None:
    """If this fails, a user with two sets of credentials does not know which of them is wrong."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    save(small(), source)
    denied = Options(
        wrap_store=Faults(Rule(fault=Denied(), operations={"read_into", "put", "upload_part"}, times=None))
    )
    which = {"options": denied} if side == "source" else {"target_options": denied}
    with pytest.raises(cloudckpt.errors.AccessDeniedError) as caught:
        cloudckpt.copy(source, target, **which)
    assert caught.value.key.startswith(source if side == "source" else target)
    assert contents(target) == {}


@pytest.mark.parametrize("times", [1, 2])
def test_a_source_that_changes_meanwhile_is_copied_anew(root_of: Root, times: int) -> None:
    """If this fails, an overwrite in the middle makes a copy of two saves, or an error that speaks of damage."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    save({"w": torch.full((3000,), 0)}, source)
    left = list(range(1, times + 1))
    seen: set[str] = set()

    def overwrite(call: Call) -> None:
        if left and call.key not in seen:  # what has vanished is looked for more than once
            seen.add(call.key)
            save({"w": torch.full((3000,), left.pop(0))}, source, overwrite=True)

    options = Options(wrap_store=Faults(Rule(fault=Tell(before=overwrite), operations={"read_into"}, times=None)))
    if times > 1:
        with pytest.raises(cloudckpt.errors.CheckpointChangedError):
            cloudckpt.copy(source, target, options=options)
        assert contents(target) == {}
    else:
        cloudckpt.copy(source, target, options=options)
        assert bits(loaded({"w": torch.zeros(3000, dtype=torch.int64)}, target)) == bits({"w": torch.full((3000,), 1)})


@pytest.mark.parametrize(
    ("source", "target"), [("a", "a"), ("a", "a/b"), ("a/data/x", "a"), ("a", "../{name}/a"), ("a", "link")]
)
def test_places_inside_of_each_other_are_refused(tmp_path: Path, source: str, target: str) -> None:
    """If this fails, a copy lies where gc takes it for a part of its source."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(cloudckpt.errors.InvalidURIError):
        cloudckpt.copy(tmp_path / source, tmp_path / target.format(name=tmp_path.name))


def test_a_checkpoint_of_torchs_own_is_not_copied_but_explained(tmp_path: Path) -> None:
    """If this fails, "not found" is all that is said of a checkpoint that is there."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="import"):
        cloudckpt.copy(tmp_path / "a", tmp_path / "b")
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="nothing lies there"):
        cloudckpt.copy(tmp_path / "c", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_ranks_saved_on_their_own_is_copied_rank_by_rank(root_of: Root) -> None:
    """If this fails, such a save cannot be moved; or a half of it is taken for all."""
    source, target = root_of("path"), root_of("memory")
    for rank in (0, 1):
        save({"w": torch.full((10,), rank)}, f"{source}/rank-{rank}")
    report = cloudckpt.copy(source, target)
    assert len(report.attempts) == 2
    for rank in (0, 1):
        assert bits(loaded({"w": torch.zeros(10, dtype=torch.int64)}, f"{target}/rank-{rank}")) == bits(
            {"w": torch.full((10,), rank)}
        )
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.copy(source, target)


def test_a_copy_says_no_newer_version_than_it_has(root_of: Root) -> None:
    """If this fails, a copy that an older cloudckpt made says that it has what a newer one added, and lacks it."""
    source, target = f"{root_of('memory')}/a", f"{root_of('memory')}/b"
    state = {"w": torch.arange(5)}
    save(state, source)
    newer = _manifest(contents(source)) | {"version": [1, 7], "later": {"a": 1}}
    del newer["crc32c"]
    body = json.dumps(newer).encode()[:-1]
    document = body + b',"crc32c":"%08x"}' % crc32c(body)
    store_at(source).put("manifest.json", [memoryview(document)], crc32c=crc32c(document))
    for was_there in (False, True):
        report = cloudckpt.copy(source, target, target_options=Options(resume=True))
        assert report.was_there == was_there
    copied = _manifest(contents(target))
    assert (copied["version"], "later" in copied) == ([1, 1], False)
    assert bits(loaded(state, target)) == bits(state)


class _DiedError(BaseException):
    """The process is gone, and makes no call any more."""


class _Mortal(WrappedStore):
    """Dies at the call with a number, or, `after`, when the store has carried it out."""

    def __init__(self, inner: Any, at: int, *, after: bool) -> None:
        super().__init__(inner)
        self.num_calls, self._at, self._after = 0, at, after

    def around(self, call: Call, action: Callable[[], Any]) -> Any:
        self.num_calls += 1
        if self.num_calls > self._at or (self.num_calls == self._at and not self._after):
            raise _DiedError
        result = action()
        if self.num_calls == self._at:
            raise _DiedError
        return result


@pytest.mark.parametrize("kind", ["memory", "path"])
@pytest.mark.parametrize("after", [False, True])
def test_whenever_it_dies_nothing_or_all_is_there(root_of: Root, kind: str, *, after: bool) -> None:
    """If this fails, a copy that is killed leaves what a reader takes for a checkpoint, or what nobody removes."""
    source = f"{root_of('memory')}/step-1"
    state = small()
    save(state, source, tile_bytes=4 * KIB, part_bytes=64 * KIB, object_bytes=16 * KIB)
    num_died = 0
    for at in itertools.count(1):
        root = root_of(kind)
        target = f"{root}/step-1"
        options = Options(
            wrap_store=lambda inner, at=at: _Mortal(inner, at, after=after), connections=1, part_bytes=MIB
        )
        try:
            cloudckpt.copy(source, target, target_options=options)
        except (_DiedError, cloudckpt.CommitUnknownError):
            num_died += 1
        else:
            break
        is_there = bool(cloudckpt.list_checkpoints(root))
        if is_there:
            cloudckpt.verify(target)
        cloudckpt.gc(root, older_than=0, dry_run=False)
        if is_there:
            assert bits(loaded(state, target)) == bits(state)
            continue
        assert not any(key.startswith("data/") for key in contents(target)), at
        cloudckpt.copy(source, target)
        assert bits(loaded(state, target)) == bits(state)
    assert num_died > 5


_KILLED = """
import os, signal, sys
import cloudckpt
from cloudckpt.options import Options
from cloudckpt.testing.faults import Faults, Rule, Tell
kill = Tell(before=lambda call: os.kill(os.getpid(), signal.SIGKILL))
faults = Faults(Rule(fault=kill, operations={sys.argv[3]}, skip=1))
cloudckpt.copy(sys.argv[1], sys.argv[2], target_options=Options(wrap_store=faults, connections=1))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_what_gc_removes(tmp_path: Path) -> None:
    """If this fails, temporary files of a copy stay for ever, or a half of it is loaded."""
    source, target = tmp_path / "a", tmp_path / "b"
    save({f"w{i}": torch.full((5000,), i) for i in range(6)}, str(source), object_bytes=MIB // 32)
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    done = subprocess.run([sys.executable, script, source, target, "put"], check=False, timeout=120)
    assert done.returncode == -9
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.verify(target)
    assert [path for path in target.rglob("*") if path.is_file()]
    cloudckpt.gc(target, older_than=0, dry_run=False)
    assert not [path for path in target.rglob("*") if path.is_file() and path.name != "manifest.json"]
    cloudckpt.copy(source, target)
    cloudckpt.verify(target)


def test_a_copy_that_was_interrupted_goes_on(root_of: Root) -> None:
    """If this fails, ``Options(resume=True)`` sends all bytes of a large checkpoint again."""
    source, target = f"{root_of('path')}/a", f"{root_of('memory')}/b"
    state = {f"w{i}": torch.full((20_000,), i) for i in range(8)}
    save(state, source, object_bytes=KIB)
    failing = Faults(Rule(fault=Denied(), operations={"put"}, skip=5, times=None))
    with pytest.raises(cloudckpt.errors.AccessDeniedError):
        cloudckpt.copy(source, target, target_options=Options(resume=True, wrap_store=failing, connections=1))
    sent: list[int] = []
    counting = Faults(Rule(fault=Tell(before=lambda call: sent.append(call.num_bytes)), operations={"put"}, times=None))
    cloudckpt.copy(source, target, target_options=Options(resume=True, wrap_store=counting, connections=1))
    assert len([size for size in sent if size > 100_000]) == 3
    assert bits(loaded(state, target)) == bits(state)


_MEASURED = """
import resource, sys
import cloudckpt
from cloudckpt.options import MIB, Options
cloudckpt.copy(sys.argv[1] + "/small", sys.argv[2] + "/small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = Options(read_bytes=64 * MIB, request_bytes=16 * MIB)
cloudckpt.copy(sys.argv[1] + "/large", sys.argv[2] + "/large", options=options)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_it_holds_no_more_than_it_may(tmp_path: Path) -> None:
    """If this fails, a copy of a checkpoint larger than the machine's memory is killed."""
    save({"w": torch.zeros(1000)}, f"{tmp_path}/a/small")
    save({"w": torch.zeros(GIB // 2, dtype=torch.uint8)}, f"{tmp_path}/a/large")
    script = tmp_path / "measured.py"
    script.write_text(_MEASURED)
    answer = subprocess.run(
        [sys.executable, script, tmp_path / "a", tmp_path / "b"],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert int(answer.stdout) < 64 * MIB + 24 * MIB, "the buffers, and what the allocator and threads take"


def _manifest(objects: dict[str, bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(objects["manifest.json"])
    return found
