"""The one reader of a checkpoint's objects, as copies, exports and files use it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.kit.options import make_options

import cloudckpt
from cloudckpt import Event
from cloudckpt.commit.log import resolve
from cloudckpt.errors import CheckpointChangedError, CorruptCheckpointError
from cloudckpt.io.reads import RangeRead
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.stores.base import crc32c_of
from cloudckpt.uri import parse_location

OPTIONS = make_options(tile_bytes=4096, verify=True)
TENSOR = torch.arange(3000, dtype=torch.int32)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint of one tensor in one object of three tiles."""
    cloudckpt.save({"w": TENSOR}, tmp_path / "c", no_dist=True, options=OPTIONS)
    return tmp_path / "c"


def open_reader(place: Path) -> CheckpointReader:
    context = Context(parse_location(place), OPTIONS, rank=0)
    return CheckpointReader(context, resolve(context.client).manifest)


def read_bytes(reader: CheckpointReader) -> torch.Tensor:
    """Read all of the tensor, as an export does."""
    buffer = torch.zeros(TENSOR.nbytes, dtype=torch.uint8)
    reader.read_bytes([TensorBytes(name="w", begin=0, end=TENSOR.nbytes, buffer=buffer)])
    return buffer.view(torch.int32)


def fetch(reader: CheckpointReader) -> torch.Tensor:
    """Read the whole object, as a copy does."""
    content = bytearray(reader.manifest.objects[0].size)
    reader.read_tiles(
        RangeRead(object_index=0, begin=0, end=len(content)),
        open_views=lambda _: contextlib.nullcontext([memoryview(content)]),
        names_in=lambda *_: "'w'",
        is_verified=True,
    )
    (chunk,) = reader.manifest.tensors["w"].chunks
    return torch.frombuffer(content[chunk.begin : chunk.end], dtype=torch.int32)


def path_of(reader: CheckpointReader, place: Path) -> Path:
    return place / reader.manifest.objects[0].key


def test_a_user_of_the_reader_needs_ten_lines(place: Path) -> None:
    """If this fails, a tier, an export or a merge needs a reader of its own."""
    reader = open_reader(place)
    assert torch.equal(read_bytes(reader), TENSOR)
    assert torch.equal(fetch(reader), TENSOR)


@pytest.mark.parametrize("read", [read_bytes, fetch])
def test_a_damaged_tile_is_named_with_its_entries_and_checksums(
    place: Path, read: Callable[[CheckpointReader], torch.Tensor]
) -> None:
    """If this fails, damaged weights are copied or exported silently (G4), or the user does not learn which."""
    reader = open_reader(place)
    path = path_of(reader, place)
    content = bytearray(path.read_bytes())
    saved = crc32c_of([memoryview(content)[4096:8192]])
    content[5000] ^= 1
    path.write_bytes(content)
    found = crc32c_of([memoryview(content)[4096:8192]])
    with pytest.raises(CorruptCheckpointError) as caught:
        read(reader)
    message = str(caught.value)
    assert f"{path.name} is damaged: bytes [4096, 8192) have CRC32C {found:08x}, but {saved:08x} was saved" in message
    assert "They hold 'w'." in message


@pytest.mark.parametrize("read", [read_bytes, fetch])
def test_an_object_that_was_cut_is_damage_of_its_entries(
    place: Path, read: Callable[[CheckpointReader], torch.Tensor]
) -> None:
    """If this fails, a reader learns of a short object and not which weights are lost."""
    reader = open_reader(place)
    path = path_of(reader, place)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="is shorter than when it was saved, so 'w' cannot be loaded"):
        read(reader)


@pytest.mark.parametrize("read", [read_bytes, fetch])
@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "lost"])
def test_a_missing_object_is_damage_unless_the_checkpoint_was_replaced(
    place: Path, read: Callable[[CheckpointReader], torch.Tensor], *, is_replaced: bool
) -> None:
    """If this fails, an overwrite during a read is told as damage, or lost bytes as an overwrite."""
    reader = open_reader(place)
    if is_replaced:
        cloudckpt.save({"w": TENSOR}, place, no_dist=True, overwrite=True, options=OPTIONS)
    path_of(reader, place).unlink(missing_ok=True)
    with pytest.raises(CheckpointChangedError if is_replaced else CorruptCheckpointError) as caught:
        read(reader)
    text = "was overwritten or removed while it was being read" if is_replaced else "is missing, and with it 'w'"
    assert text in str(caught.value)


def test_a_read_emits_its_event_when_it_ends(place: Path) -> None:
    """If this fails, a handler that wants to see a load under way hears of its reads when all have ended."""
    threads: set[str] = set()

    def note(event: Event) -> None:
        if event.name == "load.range_read":
            threads.add(threading.current_thread().name.rpartition("-")[0])

    options = dataclasses.replace(OPTIONS, on_event=note)
    cloudckpt.load({"w": torch.zeros_like(TENSOR)}, place, no_dist=True, options=options)
    assert threads == {"cloudckpt-read"}


def test_a_missing_object_with_tiles_larger_than_all_buffers_is_damage_of_its_entries(tmp_path: Path) -> None:
    """If this fails, the error for such an object names nothing that is lost with it."""
    cloudckpt.save({"w": TENSOR}, tmp_path / "c", no_dist=True, options=make_options(tile_bytes=2**20))
    (path,) = (tmp_path / "c" / "data").glob("*/*")
    path.unlink()
    options = make_options(read_bytes=8192, request_bytes=8192, tile_bytes=4096)
    with pytest.raises(BaseException, match="is missing, and with it 'w'"):
        cloudckpt.load({"w": torch.zeros_like(TENSOR)}, tmp_path / "c", no_dist=True, options=options)
