"""The ids of attempts: what draws them and what recognises them."""

from __future__ import annotations

import pytest

from cloudckpt.commit.attempts import ATTEMPT, data_key, data_prefix, new_attempt_id, parse_number


@pytest.mark.parametrize("number", [None, 0, 7, 10**18 - 1])
def test_what_is_drawn_is_recognised(number):
    """Garbage collection would take a running save's data for somebody else's, or leave its own for ever."""
    drawn = [new_attempt_id(resumable_as=number) for _ in range(200)]
    assert len(set(drawn)) == len(drawn)
    assert all(ATTEMPT.fullmatch(attempt) for attempt in drawn)
    assert {parse_number(attempt) for attempt in drawn} == {number}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-r0",
        "my-folder-r0",
        "20260131T235959123Z-1f2e3d4c5b6",
        "20260131T235959123Z-1f2e3d4c5b6a-r",
        "20260131T235959123Z-1f2e3d4c5b6a-R0",
        "20260131T235959123Z-1f2e3d4c5b6a-r0-r0",
        "20260131T235959123Z-1f2e3d4c5b6a-r0/",
        "20260131T235959123Z-1f2e3d4c5b6a\n",
    ],
)
def test_what_nobody_draws_is_no_attempt(name):
    """A folder of the user's under data/ would be swept, or taken up."""
    assert ATTEMPT.fullmatch(name) is None
    assert parse_number(name) is None


def test_the_keys_of_one_rank_begin_like_no_others():
    """Rank 1 would look at what rank 10 wrote."""
    assert data_key("a", 1, 2) == "data/a/1-2.safetensors"
    assert data_key("a", 1, 2).startswith(data_prefix("a", 1))
    assert not data_key("a", 10, 2).startswith(data_prefix("a", 1))
