"""What a load adds to the state of an object that asks for less than was saved of it, without any store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.dcp.completeness import hand_over, refuse_left
from cloudckpt.errors import StateDictMismatchError

Left = Sequence[tuple[tuple[Any, ...], int, int]]
"""The path, the number of elements and that of the chunks of each tensor that was saved and that nothing asks for."""


def handed(state: Any, left: Left, *, num_ranks: int = 1, is_strict: bool = True) -> Any:
    """Return the state of an object under ``t`` after it was given what is `left`."""
    paths: dict[str, Any] = {".".join(map(str, ("t", *path))): ("t", *path) for path, *_ in left}
    saved: dict[str, Any] = {}
    for name, (_, length, num_chunks) in zip(paths, left, strict=True):
        size = torch.Size([length])
        chunk = ChunkStorageMetadata(torch.Size([0]), size)
        saved[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk] * num_chunks)
    entries = {"t": state, "other": 1}
    metadata = Metadata(saved, planner_data=paths)
    hand_over(entries, {"t": object()}, list(paths), metadata, is_strict=is_strict, num_ranks=num_ranks)
    assert entries["other"] == 1
    return entries["t"]


def shapes(values: Sequence[Any]) -> list[Any]:
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]


def test_rest_is_added_only_with_strictness() -> None:
    """If this fails, strict=False gives an object more than it asks for, or a load leaves state behind silently."""
    left = [(("b",), 2, 1), (("d", "x"), 3, 1)]
    assert handed({"a": 1, "d": {"y": 2}}, left).keys() == {"a", "b", "d"}
    assert handed({"a": 1, "d": {"y": 2}}, left)["d"].keys() == {"x", "y"}
    assert handed({"a": 1, "d": {"y": 2}}, left, is_strict=False) == {"a": 1, "d": {"y": 2}}
    assert handed({}, left, is_strict=False).keys() == {"b", "d"}, "a fresh object gets all"


def test_members_of_a_list_keep_their_places() -> None:
    """If this fails, members of a list are lost, or one comes back in the place of another."""
    state = handed({"l": [{"a": 1}, "second", "third"]}, [(("l", 0, "b"), 2, 1)])
    assert (state["l"][0].keys(), state["l"][1:]) == ({"a", "b"}, ["second", "third"])
    left = [(("l", 1), 3, 1), (("l", 2), 4, 1)]
    assert shapes(handed({"l": ["first"]}, left)["l"]) == ["first", (3,), (4,)]
    assert handed({"l": ["first"]}, left, is_strict=False)["l"] == ["first"]
    left = [(("l", 1), 3, 2), (("l", 2), 4, 1)]  # nobody knows the layout of the second
    assert handed({"l": ["first"]}, left, num_ranks=2)["l"] == ["first"]


def test_parts_of_several_ranks_are_added_on_one_rank_alone() -> None:
    """If this fails, each rank gets a whole tensor where it had a shard; or one rank cannot read what several saved."""
    left = [(("b",), 2, 2)]
    assert shapes([*handed({}, left).values()]) == [(2,)]
    assert handed({"a": 1}, left).keys() == {"a", "b"}
    assert handed({"a": 1}, left, num_ranks=2) == {"a": 1}
    assert handed({}, left, num_ranks=2) == {}


def test_left_entries_of_objects_are_refused_or_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, state stays behind without a word, or each rank says it, or another object is blamed for it."""
    names, objects = ["t.a", "tt.b", "other.c"], {"t": object(), "u": torch.nn.Linear(1, 1)}
    with pytest.raises(StateDictMismatchError, match=r"leaves behind 't\.a' of memory://here: .* of object does"):
        refuse_left(names, objects, is_strict=True, rank=1, uri="memory://here")
    refuse_left(names[1:], objects, is_strict=True, rank=0, uri="memory://here")
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        for rank in (0, 1):
            refuse_left(names, objects, is_strict=False, rank=rank, uri="memory://here")
    (message,) = caplog.messages
    assert message.startswith("memory://here holds 't.a', for which")
