"""How large the requests of a save or load should be."""

from __future__ import annotations


def request_bytes_for(num_bytes: int, *, connections: int, for_each: int, least_bytes: int, most_bytes: int) -> int:
    """Such that `num_bytes` make `for_each` requests for each of `connections`, within bounds.

    `most_bytes` holds where it is below `least_bytes`.
    """
    return min(max(num_bytes // (for_each * connections), least_bytes), most_bytes)
