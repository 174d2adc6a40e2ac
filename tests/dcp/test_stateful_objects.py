"""What a load adds to the state of an object that asks for less than was saved of it, without any store."""

from __future__ import annotations

import logging
import re
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

from cloudckpt.dcp.stateful_objects import hand_over
from cloudckpt.errors import StateDictMismatchError

Sizes = Sequence[tuple[tuple[Any, ...], int]]
"""The path and the number of float32 elements of each entry that was saved and that nothing asks for."""


def handed(
    state: Any,
    left: Sizes,
    *,
    max_bytes: int = 1 << 20,
    num_ranks: int = 1,
    num_chunks: int = 1,
    is_strict: bool = True,
) -> Any:
    """Return the state of an object under ``t`` after it was given what is `left`."""
    paths = {".".join(map(str, ("t", *path))): ("t", *path) for path, _ in left}
    saved = {}
    for name, (_, length) in zip(paths, left, strict=True):
        size = torch.Size([length])
        chunk = ChunkStorageMetadata(torch.Size([0]), size)
        saved[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk] * num_chunks)
    entries = {"t": state, "other": 1}
    hand_over(
        entries,
        {"t": object()},
        list(paths),
        Metadata(saved, planner_data=paths),
        is_strict=is_strict,
        max_bytes=max_bytes,
        num_ranks=num_ranks,
        rank=0,
        uri="memory://here",
    )
    assert entries["other"] == 1
    return entries["t"]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the names that the only warning says stay behind."""
    (message,) = caplog.messages or ["nothing"]
    return re.findall(r"'(t[^']*)'", message)


def test_rest_is_added_up_to_the_bytes_in_all(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, each rank reads the whole optimizer beside a model that was asked for on purpose."""
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        state = handed({"a": 1}, [(("b",), 2), (("c",), 3), (("d",), 2), (("e",), 1)], max_bytes=20)
    assert state.keys() == {"a", "b", "c"}, "exactly 20 bytes"
    assert told(caplog) == ["t.d", "t.e"]


def test_rest_is_not_added_without_strictness(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, strict=False gives an object more than it asks for, which its load_state_dict may refuse."""
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        assert handed({"a": 1}, [(("b",), 2)], is_strict=False) == {"a": 1}
        assert told(caplog) == ["t.b"]
    assert handed({}, [(("b",), 2)], is_strict=False).keys() == {"b"}, "a fresh object gets all"


def test_members_of_a_list_keep_their_places(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, members of a list are lost, or one comes back in the place of another."""
    state = handed({"l": [{"a": 1}, "second", "third"]}, [(("l", 0, "b"), 2)])
    assert (state["l"][0].keys(), state["l"][1:]) == ({"a", "b"}, ["second", "third"])
    state = handed({"l": ["first"]}, [(("l", 1), 3), (("l", 2), 4)])
    assert [getattr(one, "shape", one) for one in state["l"]] == ["first", (3,), (4,)]
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        state = handed({"l": ["first"]}, [(("l", 1), 300), (("l", 2), 4)], max_bytes=20)
    assert state["l"] == ["first"], "the third is not given as the second"
    assert told(caplog) == ["t.l.1"]


def test_shards_are_added_on_one_rank_alone(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, each rank gets a whole tensor where it had a shard; or one rank cannot read what several saved."""
    left = [(("b",), 2)]
    assert handed({}, left, num_chunks=2)["b"].shape == (2,)
    assert handed({"a": 1}, left, num_chunks=2).keys() == {"a", "b"}
    with pytest.raises(StateDictMismatchError, match=r"'t' of memory://here: .* sharded"):
        handed({}, left, num_chunks=2, num_ranks=2)
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        assert handed({"a": 1}, left, num_chunks=2, num_ranks=2) == {"a": 1}
    assert told(caplog) == ["t.b"]
