"""Blocks are hashed by other threads, and staged by the caller's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
import xxhash

from cloudckpt.format.safetensors import HeaderEntry
from cloudckpt.options import MIB
from cloudckpt.pipeline.unchanged import hash_chunks
from cloudckpt.tensors.data_objects import SaveItems, StagedItem
from cloudckpt.tensors.host_memory import new_arena

TENSORS = [torch.arange(3 * MIB, dtype=torch.float32), torch.ones(5).expand(4, 5).t(), torch.empty(0)]


def stage(positions: Sequence[int], threads: set[threading.Thread]) -> Iterator[StagedItem]:
    """Give `TENSORS`, and note the thread that asks."""
    for position in positions:
        threads.add(threading.current_thread())
        tensor = TENSORS[position]
        shape = tuple(tensor.shape)
        entry = HeaderEntry(fqn=f"t{position}", dtype="float32", shape=shape, offsets=None, num_bytes=tensor.nbytes)
        yield StagedItem(entry=entry, index_offsets=(0,), content=tensor, dtype="float32", lengths=shape, transforms=())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_blocks_are_staged_by_the_caller(num_threads: int) -> None:
    """If this fails, a hash can be that of old bytes: a GPU's copy waits for the stream of the wrong thread."""
    threads: set[threading.Thread] = set()
    planned = SaveItems(
        sizes_bytes=[tensor.nbytes for tensor in TENSORS],
        aliases={},
        are_transformed=False,
        are_repeatable=[True] * len(TENSORS),
        stage=lambda positions: stage(positions, threads),
    )
    with contextlib.closing(new_arena(budget_bytes=64 * MIB)) as arena:
        blocks = hash_chunks(planned, arena, None, num_threads=num_threads, check=lambda: None)
    assert threads == {threading.current_thread()}
    for position, tensor in enumerate(TENSORS):
        assert blocks[position].xxh3_128 == xxhash.xxh3_128(tensor.contiguous().numpy().tobytes()).digest()
