"""From torch's metadata and the ranks' receipts to a manifest, and back."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.format.samples import URI
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.errors import IncompleteSaveError, UnsupportedValueError
from cloudckpt.format.build import build_manifest
from cloudckpt.format.codec import decode, encode
from cloudckpt.format.model import ItemReceipts, Manifest, ObjectReceipt
from cloudckpt.format.torch_metadata import make_metadata


class ItemReceipt(msgspec.Struct):
    """Of one item: a row of what `ItemReceipts` has in columns."""

    stored_in: ObjectReceipt
    begin: int
    end: int
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]


Receipts = list[dict[MetadataIndex, ItemReceipt]]


def tensor_entry(rows: list[int], *, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Any:
    """A tensor of shape [sum(rows), 3] whose chunks have that many rows."""
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size((sum(rows[:index]), 0)), sizes=torch.Size((length, 3)))
        for index, length in enumerate(rows)
    ]
    properties = TensorProperties(dtype=dtype, requires_grad=requires_grad)
    return TensorStorageMetadata(properties=properties, size=torch.Size((sum(rows), 3)), chunks=chunks)


def receipts_of(metadata: Metadata, num_ranks: int) -> Receipts:
    """What ranks that wrote all that was planned, in turn, would report."""
    items: list[tuple[MetadataIndex, str | None, tuple[int, ...], int]] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            items.append((MetadataIndex(fqn), None, (), 7))
            continue
        dtype = entry.properties.dtype
        for chunk in entry.chunks:
            size_bytes = chunk.sizes.numel() * dtype.itemsize
            items.append((MetadataIndex(fqn, chunk.offsets), str(dtype)[6:], tuple(chunk.sizes), size_bytes))
    receipts: Receipts = []
    for rank in range(num_ranks):
        placed, position = [], 64
        for index, dtype, lengths, size_bytes in items[rank::num_ranks]:
            placed.append((index, position, position + size_bytes, dtype, lengths))
            position += -(-size_bytes // 64) * 64
        stored_in = ObjectReceipt(
            key=f"data/attempt/{rank}-0.safetensors",
            size_bytes=position,
            tile_crc32cs=tuple(range(rank, rank - (-position // 4096))),
        )
        receipts.append(
            {
                index: ItemReceipt(
                    stored_in=stored_in, begin=begin, end=end, dtype=dtype, lengths=lengths, transforms=()
                )
                for index, begin, end, dtype, lengths in placed
            }
        )
    return receipts


def made(metadata: Metadata, receipts: Receipts, **changes: Any) -> Manifest:
    settings: dict[str, Any] = {
        "uri": URI,
        "attempt": "attempt",
        "save_id": "save",
        "committed_at_ns": 1_795_403_713_245_015_000,
        "tile_bytes": 4096,
        "user_metadata": {},
        **changes,
    }
    results = [
        [
            WriteResult(index=MetadataIndex(columns.stored_in.key), size_in_bytes=0, storage_data=columns)
            for columns in columns_of(of_rank, settings["tile_bytes"])
        ]
        for of_rank in receipts
    ]
    return build_manifest(metadata, results, **settings)


def columns_of(of_rank: dict[MetadataIndex, ItemReceipt], tile_bytes: int = 4096) -> list[ItemReceipts]:
    """Of each object, what that rank would send."""
    objects = {receipt.stored_in.key: receipt.stored_in for receipt in of_rank.values()}
    made = []
    for key, stored_in in objects.items():
        rows = [(index, receipt) for index, receipt in of_rank.items() if receipt.stored_in.key == key]
        made.append(
            ItemReceipts(
                stored_in=stored_in,
                tile_bytes=tile_bytes,
                fqns=[index.fqn for index, _ in rows],
                offsets=[None if index.offset is None else tuple(index.offset) for index, _ in rows],
                begins=array("q", [receipt.begin for _, receipt in rows]),
                ends=array("q", [receipt.end for _, receipt in rows]),
                dtypes=[receipt.dtype for _, receipt in rows],
                lengths=[receipt.lengths for _, receipt in rows],
                transforms=[receipt.transforms for _, receipt in rows],
            )
        )
    return made


def sample() -> Metadata:
    return Metadata(
        state_dict_metadata={
            "w": tensor_entry([2, 1, 4]),
            "b": tensor_entry([5], dtype=torch.bfloat16, requires_grad=True),
            "step": BytesStorageMetadata(),
        },
        planner_data={"w": ("model", "w"), "b": ("model", 0), "step": ("step",)},
    )


@given(
    rows_of=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 5)), max_size=4),
    num_values=st.integers(0, 3),
    num_ranks=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.bool]),
)
def test_torchs_metadata_is_rebuilt(
    rows_of: dict[str, list[int]], num_values: int, num_ranks: int, dtype: torch.dtype
) -> None:
    """If this fails, torch's planners see another checkpoint than the one that was saved."""
    entries: dict[str, Any] = {fqn: tensor_entry(rows or [0], dtype=dtype) for fqn, rows in rows_of.items()}
    # Empty chunks lie where others begin, and an index cannot tell the two apart; torch's planner makes none.
    for entry in entries.values():
        entry.chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()] or entry.chunks[:1]
    entries |= {f"value {number} of many": BytesStorageMetadata() for number in range(num_values)}
    metadata = Metadata(state_dict_metadata=entries, planner_data={fqn: ("state", fqn) for fqn in entries})
    receipts = receipts_of(metadata, num_ranks)
    manifest = decode(encode(made(metadata, receipts)), uri=URI)
    rebuilt = make_metadata(manifest, checkpoint_id=URI, load_id="load")
    assert rebuilt.state_dict_metadata == metadata.state_dict_metadata
    assert rebuilt.planner_data == metadata.planner_data
    assert rebuilt.version == "1.0.0"
    assert rebuilt.storage_meta is not None
    meta = rebuilt.storage_meta
    assert (meta.checkpoint_id, meta.save_id, meta.load_id) == (URI, "save", "load")
    written = {index: receipt for of_rank in receipts for index, receipt in of_rank.items()}
    assert rebuilt.storage_data.keys() == written.keys()
    for index, location in rebuilt.storage_data.items():
        receipt = written[index]
        assert manifest.objects[location.object_index].key == receipt.stored_in.key
        assert (location.begin, location.end) == (receipt.begin, receipt.end)
        assert (location.dtype, location.lengths) == (receipt.dtype, receipt.lengths)
    assert manifest.world_size == num_ranks


def test_the_dtype_that_was_written_counts() -> None:
    """If this fails, a cached plan makes bfloat16 weights load as float32 garbage."""
    metadata = sample()
    receipts = receipts_of(metadata, 1)
    for index, receipt in receipts[0].items():
        if index.fqn == "w":
            halved = receipt.begin + (receipt.end - receipt.begin) // 2
            receipts[0][index] = msgspec.structs.replace(receipt, dtype="bfloat16", end=halved)
    rebuilt = make_metadata(made(metadata, receipts), checkpoint_id=URI, load_id="")
    entry = rebuilt.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.dtype is torch.bfloat16


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_missing_item_is_named(num_ranks: int) -> None:
    """If this fails, a save in which a rank wrote less than planned is committed (G3)."""
    metadata = sample()
    for lost in [index for of_rank in receipts_of(metadata, num_ranks) for index in of_rank]:
        receipts = receipts_of(metadata, num_ranks)
        for of_rank in receipts:
            of_rank.pop(lost, None)
        with pytest.raises(IncompleteSaveError, match="Nothing was committed") as caught:
            made(metadata, receipts)
        named = lost.fqn if lost.offset is None else f"{lost.fqn}{list(lost.offset)}"
        assert f"1 planned items of {URI} were not written, or not in their planned shape: {named}." in str(
            caught.value
        )


def test_another_shape_than_planned_is_refused() -> None:
    """If this fails, a cached plan that no longer fits makes a checkpoint with holes."""
    metadata = sample()
    receipts = receipts_of(metadata, 1)
    index = next(index for index in receipts[0] if index.fqn == "w")
    receipts[0][index] = msgspec.structs.replace(receipts[0][index], lengths=(1, 3))
    with pytest.raises(IncompleteSaveError, match=r"w\[0, 0\]"):
        made(metadata, receipts)


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"transforms": ("zstd",)}])
def test_ranks_that_wrote_different_types_are_refused(change: dict[str, Any]) -> None:
    """If this fails, some shards of a tensor are read as another type than they were written in."""
    metadata = sample()
    receipts = receipts_of(metadata, 3)
    index, receipt = next((index, r) for index, r in receipts[1].items() if index.fqn == "w")
    receipts[1][index] = msgspec.structs.replace(receipt, **change)
    with pytest.raises(UnsupportedValueError, match=r"'w' .* different types"):
        made(metadata, receipts)


def test_a_part_of_a_tensor_is_no_checkpoint() -> None:
    """If this fails, one rank's shards are committed as if they were the whole, and cannot be loaded."""
    metadata = sample()
    entry: Any = metadata.state_dict_metadata["w"]
    del entry.chunks[1]
    with pytest.raises(IncompleteSaveError, match=r"tensor 'w': .* hold 18 elements of 21.*saved by all"):
        made(metadata, receipts_of(metadata, 1))


@pytest.mark.parametrize("planner_data", [object(), 5, ["w"], {"w": "w"}, {"w": ()}, {"w": (1.5,)}, {3: ("w",)}])
def test_planner_data_that_json_cannot_hold_is_refused(planner_data: Any) -> None:
    """If this fails, a custom planner's data is lost without a word, or pickled into the format."""
    metadata = dataclasses.replace(sample(), planner_data=planner_data)
    with pytest.raises(UnsupportedValueError, match="planner's own data"):
        made(metadata, receipts_of(metadata, 1))


@pytest.mark.parametrize("notes", [{"x": object()}, {"x": torch.ones(2)}, {"x": "\ud800"}, {"x": 1j}])
def test_metadata_that_is_no_json_is_refused_before_the_commit(notes: dict[str, Any]) -> None:
    """If this fails, the coordinator fails in the middle of the commit, and nobody knows whether it was made."""
    with pytest.raises(UnsupportedValueError, match=r"Options\(metadata=…\)"):
        made(sample(), receipts_of(sample(), 1), user_metadata=notes)
