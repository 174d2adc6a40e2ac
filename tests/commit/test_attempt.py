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


def test_the_keys_of_one_rank_begin_like_no_others():
    """Rank 1 would look at what rank 10 wrote."""
    assert data_key("a", 1, 2) == "data/a/1-2.safetensors"
    assert data_key("a", 1, 2).startswith(data_prefix("a", 1))
    assert not data_key("a", 10, 2).startswith(data_prefix("a", 1))
