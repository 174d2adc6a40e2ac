"""Copies of checkpoints, between all kinds of places and through all kinds of trouble."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awscrt.checksums import crc32c
from tests.convert.conftest import Root
from tests.convert.states import DiedError, Mortal, bits, contents, loaded, save, small, store_at
from tests.kit.options import make_options

import cloudckpt
from cloudckpt.convert.transfer import check_apart, is_one_service
from cloudckpt.options import KIB, MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.stores.base import RequestRunner, run_once
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Call, Faults, FlippedBits, Rule, Tell, WrappedStore
from cloudckpt.uri import parse_location

_PAIRS = [
    ("path", "path"),
    ("path", "s3"),
    ("s3", "s3"),
    ("s3", "gs"),
    ("gs", "gs"),
    ("gs", "memory"),
    ("memory", "memory"),
]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize(
    ("mine", "its", "is_one"),
    [
        ({"endpoint_url": "http://127.0.0.1:1"}, {"endpoint_url": "http://127.0.0.1:1"}, True),
        ({"endpoint_url": "http://127.0.0.1:1"}, {"endpoint_url": "http://127.0.0.1:2"}, False),
        ({"endpoint_url": "http://127.0.0.1:1"}, {}, False),
        ({}, {"endpoint_url": "http://127.0.0.1:1"}, False),
        ({}, {}, True),
    ],
)
def test_two_endpoints_of_one_scheme_are_two_services(
    scheme: str, mine: dict[str, str], its: dict[str, str], *, is_one: bool
) -> None:
    """If this fails, a server is asked to copy an object that another one has: it copies its own of that name, or none;
    or a copy to the same place on another server is refused.
    """
    sides = [
        Context(parse_location(f"{scheme}://bucket/run"), Options(storage_options=options), rank=0)
        for options in (mine, its)
    ]
    assert is_one_service(*sides) == is_one
    if is_one:
        with pytest.raises(cloudckpt.errors.InvalidURIError, match="both the source and the target"):
            check_apart(*sides)
    else:
        check_apart(*sides)


@pytest.mark.parametrize(("one", "other"), _PAIRS)
def test_a_copy_is_the_same_checkpoint(
    root_of: Root, copies_by_service: Callable[[str], bool], one: str, other: str
) -> None:
    """If this fails, what is copied to another store is not what was saved, or cannot be loaded there."""
    source, target = f"{root_of(one)}/step-1", f"{root_of(other)}/step-1"
    state = {**small(), "keyed": {0: {"n": 1}}}
    save(state, source, tile_bytes=4 * KIB, part_bytes=64 * KIB, object_bytes=16 * KIB, metadata={"run": "a"})
    before = contents(source)
    calls: list[tuple[int, int]] = []
    report = cloudckpt.copy(source, target, on_progress=lambda done, total: calls.append((done, total)))
    assert bits(loaded(state, target)) == bits(state)
    verified = cloudckpt.verify(target)
    assert verified.attempt == report.attempt
    assert verified.num_bytes == report.num_bytes
    assert report.num_objects > 1
    assert contents(source) == before
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (report.num_bytes, report.num_bytes)
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


def test_a_copy_keeps_the_target_without_overwrite(root_of: Root) -> None:
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


@pytest.mark.parametrize("how", ["damaged", "missing"])
@pytest.mark.parametrize(("one", "other"), [("memory", "memory"), ("path", "memory"), ("s3", "s3")])
def test_a_damaged_source_is_found_and_named(root_of: Root, one: str, other: str, how: str) -> None:
    """If this fails, bits that rot are copied with a fresh and good name, or nobody learns which object is gone."""
    source, target = f"{root_of(one)}/step-1", f"{root_of(other)}/step-1"
    save({"w": torch.arange(50_000), "b": torch.ones(3)}, source, tile_bytes=4 * KIB)
    key = next(key for key in contents(source) if key.startswith("data/"))
    if how == "damaged":
        damage.flip_bit(store_at(source), key, bit=8 * 100_000)
    else:
        damage.remove(store_at(source), key)
    with pytest.raises(cloudckpt.CorruptCheckpointError) as caught:
        cloudckpt.copy(source, target)
    for part in (source, key, "'w'", *(["is missing"] if how == "missing" else [])):
        assert part in str(caught.value)
    assert contents(target) == {}


@pytest.mark.parametrize("how", ["overwritten", "deleted"])
def test_a_source_removed_during_a_copy_is_not_called_damaged(root_of: Root, how: str) -> None:
    """If this fails, an overwrite in the middle makes a copy of two saves, or an error that speaks of damage."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    save({"w": torch.zeros(3000)}, source)

    def act(_call: Call) -> None:
        if how == "deleted":
            cloudckpt.delete(source)
        else:
            save({"w": torch.ones(3000)}, source, overwrite=True)

    options = make_options(wrap_store=Faults(Rule(fault=Tell(before=act), operations={"read_into"}, key="data/")))
    with pytest.raises(cloudckpt.errors.CheckpointChangedError, match="while it was being copied"):
        cloudckpt.copy(source, target, options=options)
    assert contents(target) == {}


@pytest.mark.parametrize("times", [1, None])
def test_bits_that_flip_on_the_way_are_not_copied(root_of: Root, times: int | None) -> None:
    """If this fails, a bit that flips on the network is copied; or flips once, and costs all that was sent before."""
    source, target = f"{root_of('memory')}/a", f"{root_of('path')}/b"
    state = {"w": torch.arange(30_000)}
    save(state, source, tile_bytes=4 * KIB)
    options = make_options(
        wrap_store=Faults(Rule(fault=FlippedBits(), operations={"read_into"}, key="data/", times=times))
    )
    if times is None:
        for convert in (cloudckpt.copy, cloudckpt.export_checkpoint):
            with pytest.raises(cloudckpt.CorruptCheckpointError, match="'w'"):
                convert(source, target, options=options)
            assert not contents(target)
    else:
        cloudckpt.copy(source, target, options=options)
        assert bits(loaded(state, target)) == bits(state)


class _Service(WrappedStore):
    """A service that copies as a test wants it."""

    def __init__(self, inner: Any, copy: Callable[..., int | None]) -> None:
        super().__init__(inner)
        self._copy = copy

    def copy_from(self, source_url: str, target_key: str, *, run: RequestRunner = run_once) -> int | None:
        return run(lambda: self._copy(self.inner, source_url, target_key))


def _silent(inner: Any, source_url: str, target_key: str) -> None:
    inner.copy_from(source_url, target_key)


def _damaging(inner: Any, source_url: str, target_key: str) -> int:
    crc32c: int = inner.copy_from(source_url, target_key)
    damage.flip_bit(inner, target_key, bit=9999)
    return crc32c ^ 1


def _cutting(inner: Any, source_url: str, target_key: str) -> None:
    inner.copy_from(source_url, target_key)
    damage.truncate(inner, target_key, size_bytes=5000)


@pytest.mark.parametrize(("copy", "is_kept"), [(_silent, True), (_damaging, False), (_cutting, False)])
def test_copy_by_the_service_is_verified(root_of: Root, copy: Callable[..., Any], *, is_kept: bool) -> None:
    """If this fails, a store that copies badly and says nothing makes a checkpoint that cannot be loaded."""
    root = root_of("memory")
    state = {"w": torch.arange(5000)}
    save(state, f"{root}/a", tile_bytes=4 * KIB)
    options = make_options(wrap_store=lambda inner: _Service(inner, copy))
    report = cloudckpt.copy(f"{root}/a", f"{root}/b", target_options=options)
    assert report.num_service_bytes == 0
    assert report.num_read_back_bytes == (report.num_bytes if is_kept else 0)
    assert bits(loaded(state, f"{root}/b")) == bits(state)
    assert len(contents(f"{root}/b")) == 2, "the bad copy is still there"


@pytest.mark.parametrize(
    ("source", "target"), [("a", "a"), ("a", "a/b"), ("a/data/x", "a"), ("a", "../{name}/a"), ("a", "link")]
)
def test_places_inside_of_each_other_are_refused(tmp_path: Path, source: str, target: str) -> None:
    """If this fails, a copy lies where gc takes it for a part of its source."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(cloudckpt.errors.InvalidURIError):
        cloudckpt.copy(tmp_path / source, tmp_path / target.format(name=tmp_path.name))


def test_a_copy_has_no_newer_format_version_than_its_fields(root_of: Root) -> None:
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
    assert (copied["version"], "later" in copied) == ([1, 4], False)
    assert bits(loaded(state, target)) == bits(state)


@pytest.mark.parametrize(("kind", "after"), [("memory", False), ("path", True)])
def test_a_copy_that_dies_leaves_a_whole_checkpoint_or_none(root_of: Root, kind: str, *, after: bool) -> None:
    """If this fails, a copy that is killed leaves what a reader takes for a checkpoint, or what nobody removes."""
    source = f"{root_of('memory')}/step-1"
    state = small()
    save(state, source, tile_bytes=4 * KIB, part_bytes=64 * KIB, object_bytes=16 * KIB)
    num_died = 0
    for at in itertools.count(1):
        root = root_of(kind)
        target = f"{root}/step-1"
        options = make_options(
            wrap_store=lambda inner, at=at: Mortal(inner, at, after=after), connections=1, part_bytes=MIB
        )
        try:
            cloudckpt.copy(source, target, target_options=options)
        except (DiedError, cloudckpt.CommitUnknownError):
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


def _manifest(objects: dict[str, bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(objects["manifest.json"])
    return found
