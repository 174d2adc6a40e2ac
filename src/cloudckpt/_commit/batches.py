"""Keys to remove, so many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_BATCH = 1000  # keys that one request of S3 can delete


def batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """`keys` in their order, in runs of what one request can remove."""
    for begin in range(0, len(keys), _BATCH):
        yield keys[begin : begin + _BATCH]
