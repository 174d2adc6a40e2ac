"""The body of an upload: the right bytes, in large pieces, and the memory itself."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.stores.http_body import ViewsBody

MIB = 1 << 20


def pieces_of(body: ViewsBody) -> list[memoryview | bytes]:
    return list(iter(lambda: body.read(16384), b""))


@settings(deadline=None)  # the machine may be busy
@given(
    sizes=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 700_000)), max_size=12),
    stops=st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 4)), max_size=4),
)
def test_reads_what_a_file_of_the_same_bytes_reads(sizes: list[int], stops: list[tuple[int, int]]) -> None:
    """Bytes would be lost, doubled or out of place on their way out, or after a rewind for a second try."""
    content = (bytes(range(251)) * (sum(sizes) // 251 + 1))[: sum(sizes)]
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(content)[start : start + size])
        start += size
    body, oracle = ViewsBody(views), io.BytesIO(content)
    assert len(body) == len(content)
    for target, num_reads in stops:
        assert body.seek(target) == min(target, len(content))
        oracle.seek(min(target, len(content)))
        for _ in range(num_reads):
            assert body.tell() == oracle.tell()
            piece = body.read(8192)
            assert bytes(piece) == oracle.read(len(piece))
    body.seek(0)
    assert b"".join(pieces_of(body)) == content
    assert body.tell() == len(content)
    assert body.read() == b""


def test_large_views_are_handed_out_themselves() -> None:
    """A copy of every byte would double the CPU cost of a save, and add to its memory."""
    source = bytearray(9 * MIB)
    pieces = pieces_of(ViewsBody([memoryview(source)]))
    assert [(len(piece), getattr(piece, "obj", None) is source) for piece in pieces] == [(9 * MIB, True)]


def test_no_view_is_joined_to_another() -> None:
    """Joining a large view would copy it."""
    large = bytearray(MIB)
    views = [memoryview(large), memoryview(b"small"), memoryview(large)]
    copied = [piece for piece in pieces_of(ViewsBody(views)) if getattr(piece, "obj", None) is not large]
    assert [bytes(piece) for piece in copied] == [b"small"]


def test_seeks_as_files_do() -> None:
    """boto3 and urllib3 measure and rewind bodies by seeking."""
    body = ViewsBody([memoryview(b"abc"), memoryview(b"def")])
    assert body.seek(0, io.SEEK_END) == 6
    assert body.seek(-2, io.SEEK_CUR) == 4
    assert bytes(body.read()) == b"ef"
    assert body.seek(-99) == 0
    with pytest.raises(ValueError, match="whence"):
        body.seek(0, 7)
