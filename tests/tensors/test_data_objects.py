"""Tensors as the bytes of an object, part by part, against numpy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.samples import views

from cloudckpt.tensors.data_objects import PieceBody, new_piece
from cloudckpt.tensors.host_memory import Arena

TILE_BYTES = 64


class Filling:
    """Memory that is filled only while somebody waits for it, and only what is waited for; notes each wait."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.waits: list[tuple[int, int]] = []
        self._fills = []
        for tensor in tensors:
            begin = tensor.data_ptr()
            self._fills.append((begin, begin + tensor.untyped_storage().nbytes(), tensor, tensor.clone()))
            tensor.zero_()

    def wait(self, address: int, num_bytes: int) -> None:
        self.waits.append((address, num_bytes))
        for begin, end, tensor, values in self._fills:
            if begin < address + num_bytes and address < end:
                tensor.copy_(values)


class NoArena(Arena):
    """Lends nothing."""

    def __init__(self) -> None:
        super().__init__(budget_bytes=0)

    def lend(self, num_bytes: int) -> object:  # type: ignore[override]
        raise AssertionError(f"{num_bytes} bytes were copied")


class Noting(Arena):
    """Notes the size of each loan."""

    def __init__(self) -> None:
        super().__init__(budget_bytes=1 << 20)
        self.sizes_bytes: list[int] = []

    def lend(self, num_bytes: int) -> AbstractContextManager[torch.Tensor]:  # type: ignore[override]
        self.sizes_bytes.append(num_bytes)
        return super().lend(num_bytes)


def opened(body: PieceBody, begin: int, end: int) -> bytes:
    with body.open(begin, end) as parts:
        return b"".join(parts)


def test_a_part_of_two_tensors_is_copied_to_a_buffer_of_its_own_size() -> None:
    """If this fails, such parts need larger buffers than others, and memory is pinned anew for each of them."""
    tensors = [torch.arange(length * 2, dtype=torch.uint8)[::2] for length in (61, 70, 61)]
    begins = [0, 61, 131]
    pieces = [new_piece(tensor, begin=begin) for tensor, begin in zip(tensors, begins, strict=True)]
    arena = Noting()
    assert opened(PieceBody(pieces, arena), 0, 192) == b"".join(bytes(tensor.tolist()) for tensor in tensors)
    assert arena.sizes_bytes == [192]


@settings(max_examples=300)
@given(st.data(), st.lists(views(), max_size=4))
def test_any_part_of_any_tensors_has_their_bytes(
    data: st.DataObject, tensors: list[tuple[torch.Tensor, bytes]]
) -> None:
    """If this fails, what is uploaded of some type or memory layout is not what the tensor holds."""
    tensors.sort(key=lambda pair: -pair[0].element_size())  # as objects are laid out
    header = bytes(range(TILE_BYTES))
    pieces, expected = [new_piece(memoryview(header), begin=0)], bytearray(header)
    for tensor, content in tensors:
        pieces.append(new_piece(tensor, begin=len(expected)))
        expected += content
    body = PieceBody(pieces, Arena(budget_bytes=1 << 20))
    assert body.size_bytes == len(expected)
    assert opened(body, 0, len(expected)) == expected
    tiles = st.integers(0, -(-len(expected) // TILE_BYTES))
    for _ in range(3):
        low, high = sorted((data.draw(tiles) * TILE_BYTES, data.draw(tiles) * TILE_BYTES))
        high = min(high, len(expected))
        assert opened(body, low, high) == expected[low:high]


def test_contiguous_memory_is_not_copied() -> None:
    """If this fails, a save of CPU tensors needs their memory twice (G7)."""
    tensor = torch.arange(1000, dtype=torch.float32)
    part = tensor[100:900]
    body = PieceBody([new_piece(part, begin=0)], NoArena())
    with body.open(0, part.numel() * 4) as parts:
        tensor[100] = 7.5
        assert bytes(parts[0][:4]) == tensor[100:101].numpy().tobytes()


def test_only_the_open_part_of_a_strided_tensor_is_copied() -> None:
    """If this fails, one large transposed tensor takes its whole size in staging memory."""
    tensor = torch.arange(100_000, dtype=torch.int64).view(100, 1000).t()
    arena = Arena(budget_bytes=4096)
    body = PieceBody([new_piece(tensor, begin=0)], arena)
    joined = b"".join(opened(body, begin, begin + 4096) for begin in range(0, 798_720, 4096))
    assert joined == tensor.contiguous().numpy().tobytes()[:798_720]
    assert arena._buffer_bytes <= 4096


def test_a_part_is_opened_once_its_memory_is_there() -> None:
    """If this fails, a background save uploads memory that its snapshot has not been copied to yet."""
    first, strided, last = torch.arange(16.0), torch.arange(1.0, 33.0).view(4, 8), torch.arange(2.0, 18.0)
    expected = b"".join(t.contiguous().numpy().tobytes() for t in (first, strided.t(), last))
    filling = Filling(first, strided, last)
    pieces = [new_piece(first, begin=0), new_piece(strided.t(), begin=64), new_piece(last, begin=192)]
    body = PieceBody(pieces, Arena(budget_bytes=1 << 20), filling)
    assert filling.waits == []
    assert opened(body, 192, 256) == expected[192:]
    assert filling.waits == [(last.data_ptr(), 64)]
    assert opened(body, 0, 64) == expected[:64]
    assert filling.waits[1:] == [(first.data_ptr(), 64)]
    assert opened(body, 64, 192) == expected[64:192]
    assert filling.waits[2:] == [(strided.data_ptr(), 128)]


@pytest.mark.parametrize("is_told", [False, True])
def test_a_part_waits_only_for_its_own_bytes(is_told: bool) -> None:  # noqa: FBT001  # pytest's
    """If this fails, the first part of a large tensor waits for all of it to be copied."""
    tensor = torch.arange(64.0)
    filling = Filling(tensor)
    piece = new_piece(tensor, begin=64, address=tensor.data_ptr() if is_told else 0)
    body = PieceBody([new_piece(memoryview(bytes(64)), begin=0), piece], NoArena(), filling)
    opened(body, 64, 128)
    assert filling.waits == [(tensor.data_ptr(), 64)]
    opened(body, 192, 320)
    assert filling.waits[1:] == [(tensor.data_ptr() + 128, 128)]


class Queue:
    """A stream in whose copies nothing is done before somebody waits for a mark; notes what happens in order."""

    def __init__(self, *, error: BaseException | None = None) -> None:
        self.events: list[str] = []
        self.error = error

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self.events.append("use")
        yield
        self.events.append("used")

    def record_event(self) -> Queue:
        self.events.append("event")
        return self

    def synchronize(self) -> None:
        self.events.append("wait")
        if self.error is not None:
            raise self.error

    def drain(self) -> None:
        self.events.append("drain")


def test_a_part_is_sent_when_its_own_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a part of a GPU's tensors is sent before its copy is there, or waits for that of others."""
    blocking: list[bool] = []
    copy_ = torch.Tensor.copy_

    def noted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002  # torch's
        blocking.append(not non_blocking)
        return copy_(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    queue = Queue()
    first, second = torch.arange(64.0).view(8, 8).t(), torch.arange(1.0, 65.0).view(8, 8).t()
    pieces = [new_piece(memoryview(bytes(64)), begin=0), new_piece(first, begin=64), new_piece(second, begin=320)]
    body = PieceBody(pieces, Arena(budget_bytes=1 << 20), streams={torch.device("cpu"): queue})
    with body.open(0, 576) as parts:
        assert queue.events == ["use", "event", "wait", "used"]
        assert b"".join(parts)[64:] == b"".join(t.contiguous().numpy().tobytes() for t in (first, second))
    assert not any(blocking)
    queue.events.clear()
    assert opened(body, 0, 64) == bytes(64)
    assert queue.events == []


def test_a_buffer_is_lent_again_only_when_nothing_writes_to_it() -> None:
    """If this fails, a copy that goes on after a failed save writes into what another save sends."""
    queue = Queue(error=RuntimeError("of the GPU"))
    arena = Arena(budget_bytes=1 << 20)
    body = PieceBody([new_piece(torch.zeros(8, 8).t(), begin=0)], arena, streams={torch.device("cpu"): queue})
    with pytest.raises(RuntimeError, match="of the GPU"):
        opened(body, 0, 256)
    assert queue.events[-1] == "drain"
    with arena.lend(256):
        pass
