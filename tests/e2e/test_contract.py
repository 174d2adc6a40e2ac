"""What torch's DCP and its own tests expect of a storage backend."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import LocalPlace, Place
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

import cloudckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def values(fill: float = 1.0) -> dict[str, Any]:
    return {
        "x": torch.full((50,), float(fill)),
        "nested": {"y": torch.full((3, 4), float(fill))},
        "n": int(fill),
    }


def load_zeros(uri: str, **keywords: Any) -> dict[str, Any]:
    state = values(0.0)
    cloudckpt.load(state, uri, **keywords)
    return state


def as_stored(entries: dict[str, Any]) -> dict[str, Any]:
    """Without how the tensors lay in memory: what a save returns has that as torch's own, with strides since 2.15."""

    def stored(entry: Any) -> Any:
        if not isinstance(entry, TensorStorageMetadata):
            return entry
        kept = TensorProperties(dtype=entry.properties.dtype, requires_grad=entry.properties.requires_grad)
        return dataclasses.replace(entry, properties=kept)

    return {fqn: stored(entry) for fqn, entry in entries.items()}


def test_metadata_says_who_saved_what(place: Place) -> None:
    """If this fails, tools that read a checkpoint's metadata through torch's classes find less than elsewhere."""
    returned = cloudckpt.save(values(), place.uri())
    assert isinstance(returned, Metadata)
    reader = cloudckpt.ObjectStoreReader(place.uri())
    metadata = reader.read_metadata()
    for one in (returned, metadata):
        assert one.version == "1.0.0"
        assert one.storage_meta is not None
        assert str(one.storage_meta.checkpoint_id) == place.uri()
        assert one.storage_meta.save_id
    assert metadata.storage_meta.load_id
    assert metadata.storage_meta.save_id == returned.storage_meta.save_id
    assert metadata.state_dict_metadata == as_stored(returned.state_dict_metadata)
    assert metadata.planner_data == returned.planner_data

    reader.reset()
    assert reader.read_metadata().storage_meta.load_id != metadata.storage_meta.load_id


def test_each_save_has_an_id_of_its_own(place: Place) -> None:
    """If this fails, two saves cannot be told apart in logs."""
    writer = cloudckpt.ObjectStoreWriter(place.uri())
    first = writer.storage_meta()
    writer.reset(place.uri("second"))
    second = writer.storage_meta()
    assert first.save_id != second.save_id
    assert (first.checkpoint_id, second.checkpoint_id) == (place.uri(), place.uri("second"))


@pytest.mark.parametrize("kind", [cloudckpt.ObjectStoreWriter, cloudckpt.ObjectStoreReader])
def test_ids_are_judged_by_their_form(kind: Any, tmp_path: Path) -> None:
    """If this fails, torch picks our backend for what it cannot reach, or another's for what it can."""
    for good in ("s3://bucket/run", "gs://bucket/run", str(tmp_path), tmp_path, f"file://{tmp_path}", "memory://a/b"):
        assert kind.validate_checkpoint_id(good), good
    for bad in ("abc://bucket/run", "s3://", "s3:/bucket/run", Path("s3://bucket/run"), ""):
        assert not kind.validate_checkpoint_id(bad), bad


def test_the_location_comes_first(place: Place) -> None:
    """If this fails, code that creates backends as torch does, by position, breaks."""
    dcp.save(values(), storage_writer=cloudckpt.ObjectStoreWriter(place.uri()))
    state = values(0.0)
    dcp.load(state, storage_reader=cloudckpt.ObjectStoreReader(place.uri()))
    assert_same(state, values())


def test_checkpoint_id_redirects_writer_and_reader(place: Place) -> None:
    """If this fails, torch's checkpoint_id next to a writer or reader is ignored."""
    writer = cloudckpt.ObjectStoreWriter(place.uri("elsewhere"))
    dcp.save(values(), checkpoint_id=place.uri("here"), storage_writer=writer)
    assert writer.checkpoint_id == place.uri("here")
    reader = cloudckpt.ObjectStoreReader(place.uri("elsewhere"))
    state = values(0.0)
    dcp.load(state, checkpoint_id=place.uri("here"), storage_reader=reader)
    assert_same(state, values())
    cloudckpt.save(values(2.0), checkpoint_id=place.uri("third"))
    state = values(0.0)
    cloudckpt.load(state, checkpoint_id=place.uri("third"))
    assert_same(state, values(2.0))


def save_many_times_with_one_writer(root: str) -> None:
    writer = cloudckpt.ObjectStoreWriter(f"{root}/0")
    dcp.save(values(0.0), storage_writer=writer)
    for number in (1, 2):
        dcp.save(values(number), storage_writer=writer, checkpoint_id=f"{root}/{number}")
    for number in (0, 1, 2):
        assert_same(load_zeros(f"{root}/{number}"), values(number))
    # the same writer again, with nothing reset
    with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists"):
        dcp.save(values(3.0), storage_writer=writer)
    assert_same(load_zeros(f"{root}/2"), values(2.0))
    overwriting = cloudckpt.ObjectStoreWriter(f"{root}/2", overwrite=True)
    for number in (4, 5):
        dcp.save(values(number), storage_writer=overwriting)
        assert_same(load_zeros(f"{root}/2"), values(number))
        dist.barrier()
    reader = cloudckpt.ObjectStoreReader(f"{root}/0")
    for number, name in ((0, None), (1, f"{root}/1"), (5, f"{root}/2"), (5, None)):
        state = values(-1.0)
        dcp.load(state, storage_reader=reader, checkpoint_id=name)
        assert_same(state, values(number))


@pytest.mark.multirank
def test_one_writer_serves_several_saves(place: Place) -> None:
    """If this fails, a save inherits keys, counters or failures from the one before it."""
    run_ranks(save_many_times_with_one_writer, place.root, world_size=2)


@contextlib.contextmanager
def empty_plan_caches() -> Iterator[None]:
    """torch keeps cached plans on the class, for the life of the process."""
    caches = [
        getattr(SavePlanner, name)
        for name in (
            "_cached_save_plan",
            "_cached_final_save_plan",
            "_cached_all_plans",
            "_cached_global_plan",
            "_cached_metadata",
        )
    ]
    for cache in caches:
        cache.clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.clear()


def save_with_cached_plans(root: str) -> None:
    rank = dist.get_rank()
    with empty_plan_caches():
        for number, dtype in enumerate([torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]):
            state = {
                "shared": torch.full((8,), number + 0.5, dtype=dtype),
                f"own-{rank}": torch.full((3,), number + 0.25, dtype=dtype),
            }
            uri = f"{root}/{number}"
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            cloudckpt.save(state, uri, planner=planner)
            for target_dtype in (torch.float32, torch.bfloat16):
                loaded = {name: torch.zeros_like(tensor, dtype=target_dtype) for name, tensor in state.items()}
                cloudckpt.load(loaded, uri)
                assert_same(loaded, {name: tensor.to(target_dtype) for name, tensor in state.items()})
    names = [found.name for found in cloudckpt.list_checkpoints(root)]
    assert names == ["0", "1", "2", "3", "4"]


@pytest.mark.multirank
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_cached_plans_do_not_carry_one_save_into_the_next(place: Place, num_ranks: int) -> None:
    """If this fails, a cached plan sends bytes to an old save's keys, or reads bfloat16 as float32."""
    run_ranks(save_with_cached_plans, place.root, world_size=num_ranks)
    objects = [key.partition("/data/")[2] for key in place.data_keys()]
    assert len(objects) == 5 * num_ranks
    assert len(set(objects)) == len(objects)  # no two saves ever share a key, or an overwrite could touch the old


class Rot13(StreamTransformExtension):
    """Letters of the stream rotate by 13: visible in the store, gone after a load."""

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    @staticmethod
    def from_descriptor(version: str) -> Rot13:
        assert version == "1"
        return Rot13()

    def get_descriptor(self) -> str:
        return "stream.rot13/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(rot13(bytes(data)))
                return len(data)

            def flush(self) -> None:
                output.flush()

        return Writer()  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  torch's name
        class Reader(io.RawIOBase):
            def readable(self) -> bool:
                return True

            def readinto(self, buffer: Any) -> int:
                data = rot13(input.read(len(buffer)))
                buffer[: len(data)] = data
                return len(data)

        return Reader()  # type: ignore[return-value]


def rot13(data: bytes) -> bytes:
    upper = bytes(range(65, 91))
    letters = upper + upper.lower()
    turned = upper[13:] + upper[:13]
    return data.translate(bytes.maketrans(letters, turned + turned.lower()))


def save_through_an_extension(uri: str) -> None:
    text = torch.frombuffer(bytearray(b"Hello World! " * 20), dtype=torch.uint8)
    state = {"text": text, "blob": io.BytesIO(b"Hello Blob"), f"own-{dist.get_rank()}": torch.rand(300)}
    cloudckpt.save(dict(state), storage_writer=cloudckpt.ObjectStoreWriter(uri, _extensions=[Rot13()]))
    registry = ExtensionRegistry()
    registry.register(Rot13)
    loaded: dict[str, Any] = {
        name: io.BytesIO() if isinstance(value, io.BytesIO) else torch.zeros_like(value)
        for name, value in state.items()
    }
    cloudckpt.load(loaded, storage_reader=cloudckpt.ObjectStoreReader(uri, _extension_registry=registry))
    assert loaded.pop("blob").getvalue() == state.pop("blob").getvalue()
    assert_same(loaded, state)
    with pytest.raises(dcp.api.CheckpointException, match="rot13"):
        cloudckpt.load({"text": torch.zeros_like(text)}, uri)


@pytest.mark.multirank
def test_stream_extensions_transform_and_back(place: Place) -> None:
    """If this fails, users' compression or encryption is skipped, or what it wrote cannot be read."""
    run_ranks(save_through_an_extension, place.uri(), world_size=2)
    data = b"".join(place.read(key) for key in place.data_keys())
    assert b"Uryyb Jbeyq!" in data
    assert b"Hello World!" not in data


def test_plain_paths_stay_torchs_when_enabled(local: LocalPlace) -> None:
    """If this fails, enable() changes the format of checkpoints that were never meant for cloudckpt."""
    torchs, ours = local.uri("torchs"), local.uri("ours")
    cloudckpt.save(values(2.0), ours)
    cloudckpt.enable()
    try:
        dcp.save(values(1.0), checkpoint_id=torchs)
        assert local.read("torchs/.metadata")
        for uri, fill in ((torchs, 1.0), (ours, 2.0)):
            state = values(0.0)
            dcp.load(state, checkpoint_id=uri)
            assert_same(state, values(fill))
    finally:
        cloudckpt.disable()


def test_enable_is_undone_by_disable(local: LocalPlace) -> None:
    """If this fails, the one patch that we make to torch outlives its user, or is made twice."""
    uri = f"file://{local.uri()}"
    before = dcp.state_dict_saver._storage_setup
    cloudckpt.enable()
    cloudckpt.enable()
    dcp.save(values(), checkpoint_id=uri)
    cloudckpt.disable()
    cloudckpt.disable()
    assert dcp.state_dict_saver._storage_setup is before
    assert local.manifest_keys() == ["checkpoint/manifest.json"]


def test_paths_of_every_spelling_name_one_place(local: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a relative path or a file URI saves somewhere else than it loads from."""
    monkeypatch.chdir(local.directory)
    cloudckpt.save(values(), "checkpoint")
    for spelling in ("./checkpoint/", f"file://{local.uri()}", Path("checkpoint"), os.fspath(local.uri())):
        assert_same(load_zeros(spelling), values())  # type: ignore[arg-type]
