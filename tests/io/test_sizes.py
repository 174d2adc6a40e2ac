"""How large requests are."""

from __future__ import annotations

import pytest

from cloudckpt.io.reads import choose_request_bytes


@pytest.mark.parametrize(
    ("num_bytes", "expected_bytes"),
    [(0, 16), (31 * 16, 16), (32 * 20, 20), (32 * 64, 64), (32 * 65, 64), (10**9, 64)],
)
def test_requests_are_as_large_as_leaves_some_for_every_connection(num_bytes: int, expected_bytes: int) -> None:
    """If this fails, a small save or load leaves connections idle, or a large one makes too many requests."""
    assert choose_request_bytes(num_bytes, connections=8, for_each=4, least_bytes=16, most_bytes=64) == expected_bytes


def test_the_largest_size_that_the_user_allows_goes_before_the_smallest_that_pays() -> None:
    """If this fails, a part can be larger than `part_bytes`, or need more memory than there is."""
    assert choose_request_bytes(0, connections=8, for_each=4, least_bytes=16, most_bytes=5) == 5
