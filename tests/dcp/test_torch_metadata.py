"""From torch's metadata and the ranks' receipts to a manifest, and back."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from typing import Any

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

from cloudckpt.dcp.content import content_of
from cloudckpt.dcp.torch_metadata import make_metadata
from cloudckpt.errors import IncompleteSaveError, UnsupportedValueError
from cloudckpt.format.build import build_manifest
from cloudckpt.format.codec import decode, encode
from cloudckpt.format.model import ItemReceipts, Manifest, ObjectRef

TILE_BYTES = 4096


def tensor_entry(rows: list[int], *, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Any:
    """A tensor of shape [sum(rows), 3] whose chunks have that many rows."""
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size((sum(rows[:index]), 0)), sizes=torch.Size((length, 3)))
        for index, length in enumerate(rows)
    ]
    properties = TensorProperties(dtype=dtype, requires_grad=requires_grad)
    return TensorStorageMetadata(properties=properties, size=torch.Size((sum(rows), 3)), chunks=chunks)


def receipts_of(metadata: Metadata, num_ranks: int, *, lost: MetadataIndex | None = None) -> list[ItemReceipts]:
    """Return what ranks report that wrote all that was planned, in turn, but for what was `lost`."""
    items: list[tuple[MetadataIndex, str | None, tuple[int, ...], int]] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            items.append((MetadataIndex(fqn), None, (), 7))
            continue
        dtype = entry.properties.dtype
        for chunk in entry.chunks:
            size_bytes = chunk.sizes.numel() * dtype.itemsize
            items.append((MetadataIndex(fqn, chunk.offsets), str(dtype)[6:], tuple(chunk.sizes), size_bytes))
    receipts = []
    for rank in range(num_ranks):
        rows = [item for item in items[rank::num_ranks] if item[0] != lost]
        room = [-(-size_bytes // 64) * 64 for *_, size_bytes in rows]
        *begins, size = itertools.accumulate(room, initial=64)
        receipts.append(
            ItemReceipts(
                stored_in=ObjectRef(
                    key=f"data/attempt/{rank}-0.safetensors",
                    size_bytes=size,
                    tile_bytes=TILE_BYTES,
                    tile_crc32cs=tuple(range(rank, rank - (-size // TILE_BYTES))),
                ),
                fqns=[index.fqn for index, *_ in rows],
                offsets=[None if index.offset is None else tuple(index.offset) for index, *_ in rows],
                begins=array("q", begins),
                ends=array("q", [begin + row[3] for begin, row in zip(begins, rows, strict=True)]),
                dtypes=[dtype for _, dtype, _, _ in rows],
                lengths=[lengths for _, _, lengths, _ in rows],
                transforms=[()] * len(rows),
            )
        )
    return receipts


def made(metadata: Metadata, receipts: list[ItemReceipts], **user_metadata: Any) -> Manifest:
    results = [
        [WriteResult(index=MetadataIndex("an object"), size_in_bytes=0, storage_data=of_rank)] if of_rank.fqns else []
        for of_rank in receipts
    ]
    return build_manifest(
        content_of(metadata, results, uri=URI),
        uri=URI,
        attempt="attempt",
        save_id="save",
        tile_bytes=TILE_BYTES,
        user_metadata=user_metadata,
    )


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
    written = {
        MetadataIndex(fqn, offsets): (of_rank.stored_in.key, *place)
        for of_rank in receipts
        for fqn, offsets, *place in zip(
            of_rank.fqns, of_rank.offsets, of_rank.begins, of_rank.ends, of_rank.dtypes, of_rank.lengths, strict=True
        )
    }
    assert written == {
        index: (manifest.objects[place.object_index].key, place.begin, place.end, place.dtype, place.lengths)
        for index, place in rebuilt.storage_data.items()
    }
    assert manifest.world_size == num_ranks


def test_the_manifest_has_the_dtype_that_was_written() -> None:
    """If this fails, a cached plan makes bfloat16 weights load as float32 garbage."""
    metadata = sample()
    receipts = receipts_of(metadata, 1)
    (written,) = receipts
    for row, fqn in enumerate(written.fqns):
        if fqn == "w":
            written.dtypes[row] = "bfloat16"
            written.ends[row] -= (written.ends[row] - written.begins[row]) // 2
    rebuilt = make_metadata(made(metadata, receipts), checkpoint_id=URI, load_id="")
    entry = rebuilt.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.dtype is torch.bfloat16


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_missing_item_is_named(num_ranks: int) -> None:
    """If this fails, a save in which a rank wrote less than planned is committed (G3)."""
    metadata = sample()
    for fqn, offsets in [("w", (0, 0)), ("w", (2, 0)), ("w", (3, 0)), ("b", (0, 0)), ("step", None)]:
        lost = MetadataIndex(fqn, offsets)
        with pytest.raises(IncompleteSaveError, match="Nothing was committed") as caught:
            made(metadata, receipts_of(metadata, num_ranks, lost=lost))
        named = fqn if offsets is None else f"{fqn}{list(offsets)}"
        assert f"1 planned items of {URI} were not written, or not in their planned shape: {named}." in str(
            caught.value
        )


def test_another_shape_than_planned_is_refused() -> None:
    """If this fails, a cached plan that no longer fits makes a checkpoint with holes."""
    metadata = sample()
    receipts = receipts_of(metadata, 1)
    receipts[0].lengths[receipts[0].fqns.index("w")] = (1, 3)
    with pytest.raises(IncompleteSaveError, match=r"w\[0, 0\]"):
        made(metadata, receipts)


@pytest.mark.parametrize(("column", "other"), [("dtypes", "float16"), ("transforms", ("zstd",))])
def test_ranks_that_wrote_different_types_are_refused(column: str, other: Any) -> None:
    """If this fails, some shards of a tensor are read as another type than they were written in."""
    metadata = sample()
    receipts = receipts_of(metadata, 3)
    getattr(receipts[1], column)[receipts[1].fqns.index("w")] = other
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
        made(sample(), receipts_of(sample(), 1), **notes)
