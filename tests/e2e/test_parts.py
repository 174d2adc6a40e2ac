"""Plain tensors that hold parts of larger ones, by torch's ``CheckpointableTensor``."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.kit.places import LocalPlace
from tests.kit.ranks import run_ranks
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt

pytest.importorskip("torch.distributed.checkpoint.protocol", reason="torch before 2.14 knows of no such tensors")

ROWS, PADDING = 8, 1
Verb = Literal["save", "thread", "process"]


def parts(content: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Return the rows of `content` whose index modulo `num_ranks` is `rank`, between rows of padding."""
    rows = range(rank, len(content), num_ranks)
    held: Any = torch.full((len(rows) + 2 * PADDING, *content.shape[1:]), -1.0)
    held[PADDING:-PADDING] = content[rank::num_ranks]
    held.global_shape = tuple(content.shape)
    held.global_offsets = tuple((row, 0) for row in rows)
    held.local_offsets = tuple((PADDING + number, 0) for number in range(len(rows)))
    held.local_sizes = ((1, content.shape[1]),) * len(rows)
    return held  # type: ignore[no-any-return]


def content(*, seed: int) -> torch.Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(seed))


def save(uri: str, verb: Verb) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for seed in (1, 2):  # the second snapshot is laid into the memory of the first
        state = {"model": {"w": parts(content(seed=seed), rank, num_ranks)}, "plain": torch.ones(ROWS)}
        if verb == "save":
            cloudckpt.save(state, f"{uri}/{seed}")
        else:
            kind = AsyncCheckpointerType[verb.upper()]
            cloudckpt.async_save(state, f"{uri}/{seed}", async_checkpointer_type=kind).result()


def load(uri: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for seed in (1, 2):
        expected = parts(content(seed=seed), rank, num_ranks)
        loaded = parts(torch.zeros(ROWS, 3), rank, num_ranks)
        cloudckpt.load({"model": {"w": loaded}}, f"{uri}/{seed}")
        assert loaded.equal(expected)  # the padding, too


def check_whole(uri: str) -> None:
    for seed in (1, 2):
        whole = torch.zeros(ROWS, 3)
        cloudckpt.load({"model": {"w": whole}}, f"{uri}/{seed}", no_dist=True)
        assert whole.equal(content(seed=seed))


@pytest.mark.multirank
@pytest.mark.parametrize("verb", ["save", "thread", "process"])
def test_the_parts_of_all_ranks_are_saved(local: LocalPlace, verb: Verb) -> None:
    """If this fails, one rank's part of a tensor is saved as if it were the whole, and the rest is lost."""
    uri = local.uri()
    run_ranks(save, uri, verb, world_size=2)
    check_whole(uri)
    run_ranks(load, uri, world_size=4)
