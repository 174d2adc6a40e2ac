"""A rank plans its load from the chunks that it wants, and the plan is torch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.format.samples import URI
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from cloudckpt.dcp import torch_metadata
from cloudckpt.dcp.load_planner import ExplainingLoadPlanner, narrow_metadata
from cloudckpt.dcp.torch_metadata import make_metadata
from cloudckpt.format.model import Chunk, Manifest, StoredObject, StoredTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Shards:
    """Boxes of a tensor, as torch asks a sharded object of any kind for them."""

    def __init__(self, shape: tuple[int, ...], boxes: list[Box]) -> None:
        self._shape, self._boxes = torch.Size(shape), boxes

    def size(self) -> torch.Size:
        return self._shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # torch's protocol
        return [ChunkStorageMetadata(offsets=torch.Size(o), sizes=torch.Size(n)) for o, n in self._boxes]

    def __create_write_items__(self, *_: Any) -> list[Any]:
        return []

    def __get_tensor_shard__(self, _: Any) -> torch.Tensor:
        raise NotImplementedError


def manifest_of_shards(num_rows: int, num_columns: int = 1) -> Manifest:
    """One tensor, of 4 x 3 elements per chunk, on a mesh."""
    places = [(row, column) for row in range(num_rows) for column in range(num_columns)]
    chunks = [Chunk((4 * r, 3 * c), (4, 3), 0, 48 * number, 48 * number + 48) for number, (r, c) in enumerate(places)]
    shape = (4 * num_rows, 3 * num_columns)
    return Manifest(
        format="cloudckpt",
        version=(1, 0),
        attempt="a",
        created_at="",
        world_size=len(places),
        software={},
        tile_bytes=4096,
        objects=[StoredObject(key="data/a/0.safetensors", size=48 * len(places), crc32c="")],
        tensors={"w": StoredTensor(dtype="float32", shape=shape, chunks=chunks)},
        values={},
    )


def metadata_with(manifest: Manifest) -> Metadata:
    return make_metadata(manifest, checkpoint_id=URI, load_id="load")


def essence(items: list[ReadItem]) -> list[Any]:
    """All but the hints."""
    return [
        (i.type, i.dest_index, i.dest_offsets, i.storage_index, i.storage_offsets, i.lengths)
        for i in sorted(items, key=lambda item: (tuple(item.storage_index.offset or ()), tuple(item.dest_offsets)))
    ]


CASES: dict[str, list[Box]] = {
    "its own shard": [((400, 0), (4, 6))],
    "of another number of ranks": [((390, 1), (13, 4))],
    "two boxes that share a chunk": [((400, 0), (2, 6)), ((402, 0), (2, 6))],
    "everything": [((0, 0), (512, 6))],
    "the last row": [((511, 5), (1, 1))],
    "nothing": [((8, 0), (0, 6))],
    "no box": [],
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_from_narrowed_metadata_is_torchs(name: str) -> None:
    """If this fails, a load of a large job's checkpoint reads other bytes than torch would, or leaves some out."""
    metadata = metadata_with(manifest_of_shards(128, 2))
    state_dict = {"w": Shards((512, 6), CASES[name])}
    of_torch = create_default_local_load_plan(state_dict, metadata)
    ours = create_default_local_load_plan(state_dict, narrow_metadata(metadata, state_dict))
    assert essence(ours.items) == essence(of_torch.items)
    num_elements = sum(math.prod(item.lengths) for item in ours.items)
    assert num_elements == sum(math.prod(lengths) for _, lengths in CASES[name])
    for item in ours.items:
        index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
        assert metadata.storage_data[item.storage_index] == metadata.storage_data[index]


@pytest.fixture
def num_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the chunks of torch and our locations that were made."""
    counts = [0]
    for name in ("_torch_chunk", "locate_chunk"):
        made = getattr(torch_metadata, name)

        def counted(*arguments: Any, made: Any = made) -> Any:
            counts[0] += 1
            return made(*arguments)

        monkeypatch.setattr(torch_metadata, name, counted)
    return counts


@pytest.mark.parametrize("num_rows", [128, 1024, 8192])
def test_objects_of_a_rank_do_not_grow_with_the_number_of_ranks(num_rows: int, num_made: list[int]) -> None:
    """If this fails, each rank makes objects for the chunks of all others, minutes of them in the largest jobs."""
    metadata = metadata_with(manifest_of_shards(num_rows, 2))
    planner = ExplainingLoadPlanner(URI)
    planner.set_up_planner({}, metadata)
    planner.state_dict = {"w": Shards((4 * num_rows, 6), [((200, 0), (8, 6))])}
    items = planner.create_local_plan().items
    assert len(items) == 4
    assert all(metadata.storage_data[item.storage_index].lengths == (4, 3) for item in items)
    assert num_made[0] == 8
