"""Exports whose files the service assembles: what is planned, what is proven, and what happens when the service lies.

The oracles are bytes that are put together by hand, and the safetensors library.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from tests.convert.conftest import Root
from tests.convert.states import DiedError, Mortal, bits, contents, save, store_at
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cloudckpt
from cloudckpt.convert import assembly
from cloudckpt.convert.assembly import SourceRange, find_ranges, plan_assembly
from cloudckpt.convert.bodies import plan_files
from cloudckpt.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.format.model import Chunk, StoredTensor
from cloudckpt.options import KIB, MIB
from cloudckpt.stores.base import FoundPart, Limits, Part, Store
from cloudckpt.testing import damage
from cloudckpt.testing.faults import Fails, Faults, Rule, WrappedStore

TILE_BYTES = 128


@st.composite
def files(draw: st.DrawFn) -> tuple[int, list[SourceRange], list[int]]:
    """The size of a file, its ranges that objects have, and the sizes of the objects."""
    sizes = draw(st.lists(st.integers(1, 6000), min_size=1, max_size=3))
    at = draw(st.integers(1, 50)) * 8
    ranges = []
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.sampled_from([0, 0, 0, 8, 200, 1500])) * draw(st.integers(0, 2))
        index = draw(st.integers(0, len(sizes) - 1))
        begin = draw(st.integers(0, sizes[index] - 1))
        length = draw(st.integers(1, sizes[index] - begin))
        ranges.append(SourceRange(at, at + length, index, begin))
        at += length
    return at + draw(st.sampled_from([0, 0, 1, 900])), ranges, sizes


@settings(deadline=None, max_examples=400)
@given(
    drawn=files(),
    min_part_bytes=st.sampled_from([1, 300, 700]),
    part_bytes=st.sampled_from([512, 4096]),
    max_parts=st.sampled_from([3, 10_000]),
)
def test_a_planned_file_has_every_byte_once_from_its_place(
    drawn: tuple[int, list[SourceRange], list[int]], min_part_bytes: int, part_bytes: int, max_parts: int
) -> None:
    """If this fails, a part is copied from another place or is smaller than S3 takes it; or a service copies less than
    it could, and the rest crosses the client.
    """
    size_bytes, ranges, object_sizes_bytes = drawn
    objects = [np.random.default_rng(n).bytes(size) for n, size in enumerate(object_sizes_bytes)]
    file = bytearray(np.random.default_rng(9).bytes(size_bytes))
    for own in ranges:
        file[own.begin : own.end] = objects[own.object_index][own.source_begin :][: own.end - own.begin]
    limits = Limits(min_part_bytes=min_part_bytes, max_part_bytes=10**6, max_parts=max_parts, max_put_bytes=10**6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "COPIED_PART_BYTES", 2048)
        planned = plan_assembly(
            size_bytes,
            ranges,
            object_sizes_bytes=object_sizes_bytes,
            tile_bytes=TILE_BYTES,
            part_bytes=part_bytes,
            limits=limits,
        )
    least_bytes = max(min_part_bytes, 2 * TILE_BYTES)
    if not planned:
        enough = min_part_bytes + least_bytes + 2 * TILE_BYTES
        assert max_parts == 3 or all(own.end - own.begin < enough for own in ranges)
        return
    assert len(planned) <= max_parts
    made = bytearray()
    copied = [0] * len(ranges)
    for number, (part, source) in enumerate(planned, start=1):
        assert (part.number, part.offset_bytes) == (number, len(made))
        assert part.size_bytes >= (min_part_bytes if number < len(planned) else 1)
        assert part.size_bytes <= max(part_bytes, 2 * min_part_bytes + 128, 2048) + 2 * TILE_BYTES
        begin, end = part.offset_bytes, part.offset_bytes + part.size_bytes
        if source is None:
            made += file[begin:end]
            continue
        assert (source.begin, source.end) == (begin, end)
        made += objects[source.object_index][source.source_begin :][: end - begin]
        copied[next(i for i, own in enumerate(ranges) if own.begin <= begin < own.end)] += end - begin
    assert made == file
    assert planned[0].source is None, "no part is left to be sent, and to complete the upload"
    for own, num_bytes in zip(ranges, copied, strict=True):  # what is read of each range is bounded
        read_bytes, most_bytes = own.end - own.begin - num_bytes, min_part_bytes + 2 * TILE_BYTES
        assert read_bytes <= most_bytes or (not num_bytes and read_bytes < most_bytes + least_bytes)


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[dict[str, StoredTensor], dict[str, np.ndarray], list[bytes]]:
    """Tensors in chunks, their content, and the objects that hold the chunks."""
    objects = [bytearray(draw(st.sampled_from([64, 65]))) for _ in range(2)]
    stored, arrays = {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
        array = np.random.default_rng(number).integers(0, 1 << 62, size=shape, dtype=np.int64)
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        chunks = []
        for bounds in itertools.product(*(list(itertools.pairwise(own)) for own in cuts)):
            body = array[tuple(slice(*own) for own in bounds)].tobytes()
            index = draw(st.integers(0, 1))
            begin = len(objects[index])
            objects[index] += body
            offsets, lengths = tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)
            chunks.append(Chunk(offsets, lengths, index, begin, begin + len(body)))
        transforms = draw(st.sampled_from([[], [], [], ["zstd/1"]]))
        stored[f"w{number}"] = StoredTensor(dtype="int64", shape=shape, chunks=chunks, transforms=transforms)
        arrays[f"w{number}"] = array
    return stored, arrays, [bytes(body) for body in objects]


@settings(deadline=None, max_examples=300)
@given(drawn=stored_tensors())
def test_ranges_are_those_that_objects_have_as_they_are(
    drawn: tuple[dict[str, StoredTensor], dict[str, np.ndarray], list[bytes]],
) -> None:
    """If this fails, the service copies rows of a shard into the wrong place, or compressed bytes as they are; or a
    shard that could be copied is read.
    """
    stored, arrays, objects = drawn
    (file,) = plan_files({name: (own.dtype, own.shape) for name, own in stored.items()}, file_bytes=1 << 40)
    body = file.layout.header + b"".join(arrays[entry.fqn].tobytes() for entry in file.entries)
    found = find_ranges(file, stored, {name: name for name in stored})
    assert found == sorted(found)
    for own in found:
        assert body[own.begin : own.end] == objects[own.object_index][own.source_begin :][: own.end - own.begin]
    expected = 0
    for name, tensor in stored.items():
        positions = np.arange(arrays[name].size).reshape(arrays[name].shape)
        for chunk in tensor.chunks:
            box = positions[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.lengths, strict=True))].ravel()
            if not tensor.transforms and chunk.begin % 8 == 0 and (np.diff(box) == 1).all():
                expected += box.size * 8
    assert sum(own.end - own.begin for own in found) == expected
    (cast,) = plan_files({name: ("float64", own.shape) for name, own in stored.items()}, file_bytes=1 << 40)
    assert not find_ranges(cast, stored, {name: name for name in stored})


def state_of(*, num_tensors: int = 5, num_floats: int = 20_000) -> dict[str, torch.Tensor]:
    """Tensors that are no multiple of a tile, and differ in each byte range."""
    generator = torch.Generator().manual_seed(3)
    return {f"w{n}": torch.randn(num_floats + 100 * n, generator=generator) for n in range(num_tensors)}


APART = ["w0", "w2", "w4"]
"""Tensors that are neighbours in a file, and not in their object. So copies begin and end inside of tiles."""


def opened(uri: str) -> dict[str, torch.Tensor]:
    """The tensors of all files at `uri`, by the safetensors library."""
    return {
        name: tensor
        for key, body in contents(uri).items()
        if key.endswith(".safetensors")
        for name, tensor in load(body).items()
    }


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_service_assembles_the_files_of_an_export(root_of: Root, kind: str) -> None:
    """If this fails, an export within a service crosses the client, or differs from one that does."""
    root, other, state = root_of(kind), root_of("memory"), state_of(num_floats=1_600_000, num_tensors=4)
    for place in (root, other):
        save(state, f"{place}/a", tile_bytes=256 * KIB)
    report = cloudckpt.export_checkpoint(f"{root}/a", f"{root}/hub", max_shard_bytes=15_000_000)
    assert len(report.files) == 3
    assert bits(opened(f"{root}/hub")) == bits(state)
    copied_bytes = report.num_service_bytes + report.num_read_back_bytes
    assert report.num_bytes - copied_bytes < 2 * (6 * MIB)
    assert report.num_requests > 10
    assert not list(store_at(f"{root}/hub").list_uploads())
    elsewhere = root_of("path")
    streamed = cloudckpt.export_checkpoint(f"{other}/a", elsewhere, max_shard_bytes=15_000_000)
    assert streamed.num_service_bytes == streamed.num_read_back_bytes == 0
    assert contents(elsewhere) == contents(f"{root}/hub")
    cast = cloudckpt.export_checkpoint(f"{root}/a", f"{root}/cast", dtype="bfloat16")
    assert cast.num_service_bytes == cast.num_read_back_bytes == 0
    assert bits(opened(f"{root}/cast")) == bits({name: tensor.bfloat16() for name, tensor in state.items()})


def rows_of(rank: int, number: int) -> torch.Tensor:
    """The rows that a rank has of a tensor: 9 MiB, whose begins are at no bound of a tile."""
    return torch.randn(9 * KIB, 256 + number, generator=torch.Generator().manual_seed(10 * rank + number))


def save_and_export(root: str) -> None:
    """Save the rows of this rank, and write its files of the export."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    state = {f"w{n}": DTensor.from_local(rows_of(rank, n), mesh, [Shard(0)], run_check=False) for n in range(4)}
    cloudckpt.save(state, f"{root}/a")
    report = cloudckpt.export_checkpoint(
        f"{root}/a", f"{root}/hub", part=(rank, world_size), max_shard_bytes=20_000_000
    )
    copied_bytes = report.num_service_bytes + report.num_read_back_bytes
    assert copied_bytes >= report.num_bytes / 3
    reports: list[Any] = [None] * world_size
    dist.all_gather_object(reports, report)
    assert any(each.is_whole for each in reports)
    written = [name for each in reports for name in each.files if name.endswith(".safetensors")]
    assert len(written) == len(set(written)) == 4


@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["s3"])
def test_ranks_share_an_export_of_their_shards(root_of: Root, kind: str) -> None:
    """If this fails, ranks of a job that share an export leave it without an index, write a file twice, or have the
    service put rows of one shard in the place of another's.
    """
    root = root_of(kind)
    run_ranks(save_and_export, root, world_size=2)
    expected = {f"w{n}": torch.cat([rows_of(rank, n) for rank in range(2)]) for n in range(4)}
    assert bits(opened(f"{root}/hub")) == bits(expected)
    assert "model.safetensors.index.json" in contents(f"{root}/hub")


class Service(WrappedStore):
    """A service that copies parts as a test wants it."""

    def __init__(self, inner: Store, copy: Callable[..., FoundPart]) -> None:
        super().__init__(inner)
        self._copy = copy

    def copy_part(self, key: str, upload_id: str, part: Part, *, source_url: str, source_begin: int) -> FoundPart:
        return self._copy(self.inner, key, upload_id, part, source_url=source_url, source_begin=source_begin)


def _shifted(inner: Store, *args: Any, source_url: str, source_begin: int) -> FoundPart:
    return inner.copy_part(*args, source_url=source_url, source_begin=source_begin - 64)


def _whole(inner: Store, key: str, upload_id: str, part: Part, *, source_url: str, source_begin: int) -> FoundPart:
    """It ignores the range."""
    larger = dataclasses.replace(part, size_bytes=part.size_bytes + source_begin)
    return inner.copy_part(key, upload_id, larger, source_url=source_url, source_begin=0)


def _silent(inner: Store, *args: Any, **kwargs: Any) -> FoundPart:
    return dataclasses.replace(inner.copy_part(*args, **kwargs), crc32c=None)


def _silent_and_wrong(inner: Store, *args: Any, source_url: str, source_begin: int) -> FoundPart:
    return _with_md5(inner, *args, source_url=source_url, source_begin=source_begin - 64)


def _with_md5(inner: Store, key: str, upload_id: str, part: Part, *, source_url: str, source_begin: int) -> FoundPart:
    found = inner.copy_part(key, upload_id, part, source_url=source_url, source_begin=source_begin)
    folder, _, name = source_url.rpartition("/")
    body = store_at(folder).read(name, max_bytes=1 << 40)
    piece = body[source_begin : source_begin + part.size_bytes]
    return dataclasses.replace(found, crc32c=None, md5=hashlib.md5(piece, usedforsecurity=False).hexdigest())


def _refusing(error: type[StoreError]) -> Callable[..., FoundPart]:
    def copy(inner: Store, key: str, upload_id: str, part: Part, **source: Any) -> FoundPart:
        if part.number == 2:
            raise error("no copies", key=key, operation="copy_part")
        return inner.copy_part(key, upload_id, part, **source)

    return copy


@pytest.mark.parametrize(
    "copy",
    [
        _shifted,
        _whole,
        _silent,
        _silent_and_wrong,
        *map(_refusing, (UnsupportedOperationError, AccessDeniedError, ObjectNotFoundError, TransientStoreError)),
    ],
)
@pytest.mark.parametrize("max_shard_bytes", [90_000, 1 << 40])
def test_no_byte_that_is_not_proven_is_kept(
    root_of: Root, caplog: pytest.LogCaptureFixture, copy: Callable[..., FoundPart], max_shard_bytes: int
) -> None:
    """If this fails, a service that copies other bytes, or says nothing of them, makes a wrong export; or a service
    that refuses makes it fail; or a service that has refused is asked again for each file.
    """
    root, state = root_of("memory"), state_of()
    save(state, f"{root}/a", tile_bytes=4 * KIB)
    options = make_options(wrap_store=lambda inner: Service(inner, copy), retries=1)
    caplog.set_level(logging.INFO)
    report = cloudckpt.export_checkpoint(
        f"{root}/a", f"{root}/hub", include=APART, max_shard_bytes=max_shard_bytes, target_options=options
    )
    assert bits(opened(f"{root}/hub")) == bits({name: state[name] for name in APART})
    assert report.num_service_bytes == report.num_read_back_bytes == 0
    assert not list(store_at(f"{root}/hub").list_uploads())
    assert caplog.text.count("the service does not copy") == 1


def test_a_service_without_crc32c_is_proven_by_md5(root_of: Root) -> None:
    """If this fails, the bytes that Ceph copies are believed unread, or are sent through the client all the same."""
    root, state = root_of("memory"), state_of()
    save(state, f"{root}/a", tile_bytes=4 * KIB)
    options = make_options(wrap_store=lambda inner: Service(inner, _with_md5))
    report = cloudckpt.export_checkpoint(f"{root}/a", f"{root}/hub", include=APART, target_options=options)
    assert bits(opened(f"{root}/hub")) == bits({name: state[name] for name in APART})
    assert report.num_service_bytes == 0
    assert report.num_read_back_bytes > 0.9 * report.num_bytes


def test_a_file_that_the_service_does_not_join_is_sent(root_of: Root) -> None:
    """If this fails, a service that copies parts and then refuses to join them makes every export fail."""
    root, state = root_of("memory"), state_of()
    save(state, f"{root}/a", tile_bytes=4 * KIB)
    faults = Faults(Rule(fault=Fails(StoreError), operations={"complete_multipart"}, times=1))
    options = make_options(wrap_store=faults)
    report = cloudckpt.export_checkpoint(f"{root}/a", f"{root}/hub", include=APART, target_options=options)
    assert faults.num_injected
    assert bits(opened(f"{root}/hub")) == bits({name: state[name] for name in APART})
    assert report.num_service_bytes == 0
    assert not list(store_at(f"{root}/hub").list_uploads())


@pytest.mark.parametrize(("name", "position"), [("w0", 0.5), ("w2", 0.0), ("w2", 0.5), ("w4", 0.99)])
def test_damage_in_the_source_is_not_copied(root_of: Root, name: str, position: float) -> None:
    """If this fails, the service copies a flipped bit into an export, whose readers have no checksums."""
    root, state = root_of("memory"), state_of()
    save(state, f"{root}/a", tile_bytes=4 * KIB)
    source = store_at(f"{root}/a")
    (key,) = (info.key for info in source.list("data/"))
    begin = source.head(key).size_bytes - sum(tensor.nbytes for other, tensor in state.items() if other >= name)
    damage.flip_bit(source, key, bit=8 * (begin + int(state[name].nbytes * position)))
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=f"'{name}'"):
        cloudckpt.export_checkpoint(f"{root}/a", f"{root}/hub", include=APART)
    assert not contents(f"{root}/hub")
    assert not list(store_at(f"{root}/hub").list_uploads())


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("part", [None, (0, 1)])
def test_an_assembly_that_is_killed_is_whole_or_has_no_index(
    root_of: Root, part: tuple[int, int] | None, *, after: bool
) -> None:
    """If this fails, a reader finds files of which parts are missing, or an export that died cannot be run again."""
    root, state = root_of("memory"), state_of()
    save(state, f"{root}/a", tile_bytes=4 * KIB)
    arguments: dict[str, Any] = {"include": APART, "max_shard_bytes": 170_000, "part": part}
    arguments["options"] = make_options(connections=1)
    index = "model.safetensors.index.json"
    for at in itertools.count(1):
        hub, has_died = f"{root}/hub-{at}", False
        mortal = make_options(wrap_store=lambda store, at=at: Mortal(store, at, after=after), connections=1)
        try:
            report = cloudckpt.export_checkpoint(f"{root}/a", hub, target_options=mortal, **arguments)
        except DiedError:
            has_died = True
        if index in contents(hub):
            assert bits(opened(hub)) == bits({name: state[name] for name in APART})
        if not has_died:
            assert report.num_service_bytes > 0.9 * report.num_bytes
            assert at > 12
            return
        again = cloudckpt.export_checkpoint(f"{root}/a", hub, overwrite=part is None, **arguments)
        assert again.is_whole
        assert bits(opened(hub)) == bits({name: state[name] for name in APART})
