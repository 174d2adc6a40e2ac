"""The manifest as a document: what comes back, and that nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.format.samples import URI, as_json, tiles_text
from tests.kit.oracles import signed

from cloudckpt.errors import InvalidManifestError, UnsupportedFormatError
from cloudckpt.format.codec import decode, pack_tiles, unpack_tiles


def document() -> bytes:
    return signed(json.dumps(as_json(), separators=(",", ":")).encode())


def test_a_document_of_another_writer_is_read() -> None:
    """If this fails, the document's spacing or field order matters, which the format does not say."""
    spaced = signed(json.dumps(dict(reversed(as_json().items())), indent=1).encode())
    assert decode(spaced, uri=URI) == decode(document(), uri=URI)
    assert decode(document() + b"\n", uri=URI) == decode(document(), uri=URI)


def test_no_flipped_bit_is_accepted() -> None:
    """If this fails, a manifest that was damaged in storage loads wrong tensors."""
    good = document()
    decode(good, uri=URI)
    for position in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[position] ^= 1 << bit
            with pytest.raises(InvalidManifestError):
                decode(bytes(damaged), uri=URI)


def test_no_truncation_or_addition_is_accepted() -> None:
    """If this fails, a manifest that was cut, or that has bytes which no checksum covers, is taken for a whole one."""
    good = document()
    cut = [good[:length] for length in range(len(good))]
    longer = [good + more for more in (b"x", b"}", b" ", b"\n\n", b"\0", b'{"format":"cloudckpt"}')]
    for damaged in [*cut, *longer]:
        with pytest.raises(InvalidManifestError):
            decode(damaged, uri=URI)


@pytest.mark.parametrize(
    ("foreign", "says"),
    [
        (b"", "not JSON"),
        (b"PK\x03\x04zip", "not JSON"),
        (b"[1, 2]", "not JSON"),
        (b"null", "not JSON"),
        (b'{"name": "a web app", "icons": []}', "another program"),
        (b'{"format": "other", "version": [1, 0]}', "another program"),
        (b'{"format": ["cloudckpt"]}', "another program"),
        (b'{"format": "cloudckpt", "version": [1, 0]}', "do not end in a checksum"),
        (b'{"format": "caf\xe9"}', "truncated"),
    ],
)
def test_foreign_manifest_is_recognized(foreign: bytes, says: str) -> None:
    """If this fails, somebody who points at the wrong place reads that a checkpoint is damaged."""
    with pytest.raises(InvalidManifestError, match=says) as caught:
        decode(foreign, uri=URI)
    assert URI in str(caught.value)
    assert caught.value.uri == URI


@pytest.mark.parametrize("finished", [signed, bytes])
@pytest.mark.parametrize("version", [[3, 0], [99, 7], [10**15, 0]])
def test_a_newer_major_version_asks_for_an_upgrade(version: list[int], finished: Callable[[bytes], bytes]) -> None:
    """If this fails, users of an old release read that a new checkpoint is damaged, and delete it."""
    body = json.dumps({"format": "cloudckpt", "version": version, "all": "else is new"}).encode()
    with pytest.raises(UnsupportedFormatError, match=rf"version {version[0]}\.{version[1]}.*Upgrade"):
        decode(finished(body), uri=URI)


def test_a_newer_minor_version_is_read() -> None:
    """If this fails, no field can ever be added to the format."""
    newer = {**as_json(), "version": [1, 42], "a_new_field": {"deep": [1, 2]}}
    newer["tensors"]["w"]["colour"] = "blue"
    assert decode(signed(json.dumps(newer).encode()), uri=URI).tensors.keys() == {"w", "s"}


@pytest.mark.parametrize(
    "version", [None, 1, "1.0", [], [1], [1, 0, 0], [1.0, 0.0], [True, False], ["1", "0"], [-1, 0], [0, 9], [1, -1]]
)
def test_an_invalid_version_is_refused(version: object) -> None:
    """If this fails, a version that never existed is read as if it were this one."""
    with pytest.raises(InvalidManifestError, match="version"):
        decode(signed(json.dumps({**as_json(), "version": version}).encode()), uri=URI)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_tiles_are_little_endian_words_in_base64(values: list[int]) -> None:
    """If this fails, the checksums that another reader finds are not those of the data."""
    assert pack_tiles(values) == tiles_text(values)
    assert list(unpack_tiles(pack_tiles(values))) == values


@pytest.mark.parametrize("text", ["AAA", "AAAA", "AAAAAA=", "AAAAAA==AAAA", "AAAA*A==", "ÄAAAAA=="])
def test_malformed_tile_checksums_are_refused(text: str) -> None:
    """If this fails, damaged checksums are taken for others instead of being refused."""
    with pytest.raises(ValueError, match=r"."):
        unpack_tiles(text)
