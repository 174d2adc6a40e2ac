"""Bytes on their way between tensors and a store: what is done to them in memory, for reports and timelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from cloudckpt._trace.recorder import Recorder, now_ns
from cloudckpt._transfer.checksum import combined, tile_crc32cs
from cloudckpt._transfer.resume import Body
from cloudckpt.stores.base import Part, Views


@contextlib.contextmanager
def opened_part(
    body: Body, part: Part, *, key: str, tile_bytes: int, recorder: Recorder
) -> Iterator[tuple[Views, list[int], int]]:
    """The part's views, the CRC32C of each of its tiles, and that of all of it. `key` is for the timeline."""
    begun_ns = now_ns()
    with body.open(part.offset_bytes, part.offset_bytes + part.size_bytes) as views:
        recorder.span("stage", begun_ns, key=key, part=part.number, size=part.size_bytes)
        checksum_begun_ns = now_ns()
        values = tile_crc32cs(views, tile_bytes)
        whole = combined(values, tile_bytes=tile_bytes, size_bytes=part.size_bytes)
        recorder.span("checksum", checksum_begun_ns, key=key, part=part.number, size=part.size_bytes)
        recorder.spent("stage", begun_ns)
        yield views, values, whole


@contextlib.contextmanager
def placing(opened: AbstractContextManager[Views], *, key: str, recorder: Recorder) -> Iterator[Views]:
    """What `opened` gives. Its beginning counts as staging, and so does its end, which puts the bytes in their places.

    `key` is for the timeline.
    """
    begun_ns = now_ns()
    with opened as views:
        recorder.span("stage", begun_ns, key=key)
        recorder.spent("stage", begun_ns)
        yield views
        begun_ns = now_ns()
    recorder.span("place", begun_ns, key=key)
    recorder.spent("stage", begun_ns)
