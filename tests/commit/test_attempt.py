"""The ids of attempts: what draws them and what recognises them."""

from __future__ import annotations

import pytest

from cloudckpt._commit.attempt import ATTEMPT, is_resumable, new_attempt_id


@pytest.mark.parametrize("resumable", [False, True])
def test_what_is_drawn_is_recognised(resumable):
    """Garbage collection would take a running save's data for somebody else's, or leave its own for ever."""
    drawn = [new_attempt_id(resumable=resumable) for _ in range(200)]
    assert len(set(drawn)) == len(drawn)
    assert all(ATTEMPT.fullmatch(attempt) for attempt in drawn)
    assert all(is_resumable(attempt) is resumable for attempt in drawn)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-r",
        "my-folder-r",
        "20260131T235959123Z-1f2e3d4c5b6",
        "20260131T235959123Z-1f2e3d4c5b6a-R",
        "20260131T235959123Z-1f2e3d4c5b6a-r-r",
        "20260131T235959123Z-1f2e3d4c5b6a-r/",
        "20260131T235959123Z-1f2e3d4c5b6a\n",
    ],
)
def test_what_nobody_draws_is_no_attempt(name):
    """A folder of the user's under data/ would be swept, or taken up."""
    assert ATTEMPT.fullmatch(name) is None
    assert not is_resumable(name)
