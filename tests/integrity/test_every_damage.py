"""Every damage there can be to a small checkpoint: each is found, and named, by a load and by `verify`.

Each test counts its cases, and fails if their number is not what the checkpoint's size calls for.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.integrity.tiny import MANIFEST, OPTIONS, Tiny, blank, saved_on_two_ranks, values
from tests.kit.models import assert_same

import cloudckpt
from cloudckpt.errors import CloudckptError, CorruptCheckpointError, InvalidManifestError, UnsupportedFormatError
from cloudckpt.format.codec import decode

pytestmark = [pytest.mark.faults, pytest.mark.multirank, pytest.mark.usefixtures("without_threads")]

SAMPLE = 401  # of the cases that go the long way, through the public calls: one in so many


def assert_found(tiny: Tiny, keys: list[str], *, publicly: bool) -> None:
    """A load and a verification fail, each naming one of the damaged objects and all that lies in it."""
    with pytest.raises(CorruptCheckpointError) as caught:
        tiny.read()
    assert any(key in str(caught.value) for key in keys), str(caught.value)
    assert any(all(f"'{name}'" in str(caught.value) for name in tiny.names_in(key)) for key in keys), str(caught.value)
    problems = tiny.problems()
    for key in keys:
        named = [text for text in problems if key in text]
        assert named, f"{key} is not among {problems}"
        assert any(all(f"'{name}'" in text for name in tiny.names_in(key)) for text in named), named
    if publicly:
        with pytest.raises(CorruptCheckpointError):
            cloudckpt.load(blank(), tiny.uri, no_dist=True, options=OPTIONS)
        with pytest.raises(CorruptCheckpointError) as of_verify:
            cloudckpt.verify(tiny.uri, options=OPTIONS)
        assert list(of_verify.value.problems) == problems


def assert_whole(tiny: Tiny) -> None:
    assert_same(tiny.read(), values(0) | values(1))
    assert tiny.problems() == []
    cloudckpt.verify(tiny.uri, options=OPTIONS)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_flipped_bit_of_the_data_is_found(tiny: Tiny, rank: int) -> None:
    """If this fails, there is a bit of a data object that can rot without anyone noticing."""
    assert_whole(tiny)
    num_cases = 0
    key = tiny.data_keys[rank]
    data = bytearray(tiny.good[key])
    for position, bit in itertools.product(range(len(data)), range(8)):
        data[position] ^= 1 << bit
        tiny.put(key, bytes(data))
        assert_found(tiny, [key], publicly=num_cases % SAMPLE == 0)
        data[position] ^= 1 << bit
        num_cases += 1
    tiny.restore(key)
    assert_whole(tiny)
    assert num_cases == 8 * len(tiny.good[key]) > 8 * 300


def test_every_flipped_bit_of_the_manifest_is_found(tiny: Tiny) -> None:
    """If this fails, there is a bit of a manifest that can rot and move a tensor to other bytes."""
    good = tiny.good[MANIFEST]
    assert decode(good, uri=tiny.uri)
    num_cases = 0
    for position, bit in itertools.product(range(len(good)), range(8)):
        data = bytearray(good)
        data[position] ^= 1 << bit
        with pytest.raises((InvalidManifestError, UnsupportedFormatError), match=tiny.uri):
            decode(bytes(data), uri=tiny.uri)
        if num_cases % SAMPLE == 0:
            tiny.put(MANIFEST, bytes(data))
            assert_refused(tiny)
        num_cases += 1
    tiny.restore(MANIFEST)
    assert_whole(tiny)
    assert num_cases == 8 * len(good)


def assert_refused(tiny: Tiny) -> None:
    """By both public calls; because of the manifest."""
    with pytest.raises((InvalidManifestError, UnsupportedFormatError), match=MANIFEST):
        cloudckpt.load(blank(), tiny.uri, no_dist=True, options=OPTIONS)
    with pytest.raises((InvalidManifestError, UnsupportedFormatError), match=MANIFEST):
        cloudckpt.verify(tiny.uri, options=OPTIONS)


def test_every_cut_of_the_data_is_found(tiny: Tiny) -> None:
    """If this fails, an object can lose its end, and tensors keep what was in memory before."""
    num_cases = 0
    for key in tiny.data_keys:
        for size in range(len(tiny.good[key])):
            tiny.put(key, tiny.good[key][:size])
            assert_found(tiny, [key], publicly=num_cases % SAMPLE == 0)
            num_cases += 1
        tiny.restore(key)
    assert num_cases == sum(len(tiny.good[key]) for key in tiny.data_keys)


def test_every_cut_of_the_manifest_is_found(tiny: Tiny) -> None:
    """If this fails, half a manifest passes for a whole one, or for none at all."""
    good = tiny.good[MANIFEST]
    for size in range(len(good)):
        with pytest.raises(InvalidManifestError, match=tiny.uri):
            decode(good[:size], uri=tiny.uri)
        # Below the size of a fence it could be taken for one: the public calls have to see every such length.
        if size <= 256 or size % SAMPLE == 0:
            tiny.put(MANIFEST, good[:size])
            with pytest.raises(CloudckptError):
                cloudckpt.load(blank(), tiny.uri, no_dist=True, options=OPTIONS)
            with pytest.raises(CloudckptError):
                cloudckpt.verify(tiny.uri, options=OPTIONS)


def test_every_missing_object_is_found(tiny: Tiny) -> None:
    """If this fails, what somebody removed is loaded as whatever was in memory before."""
    subsets = [tiny.data_keys, *([key] for key in tiny.data_keys)]
    for keys in subsets:
        tiny.store.delete(keys)
        assert_found(tiny, keys, publicly=True)
        for key in keys:
            tiny.restore(key)
    tiny.store.delete([MANIFEST])
    for call in (lambda: cloudckpt.load(blank(), tiny.uri, no_dist=True), lambda: cloudckpt.verify(tiny.uri)):
        with pytest.raises(cloudckpt.CheckpointNotFoundError):
            call()


def test_every_swap_is_found(tiny: Tiny, saved: dict[str, bytes], tmp_path: Path) -> None:
    """If this fails, objects that a careless copy mixed up, or that are another save's, are loaded as this one's."""
    for first, second in itertools.combinations(tiny.data_keys, 2):
        tiny.put(first, tiny.good[second])
        tiny.put(second, tiny.good[first])
        assert_found(tiny, [first, second], publicly=True)
        for key in (first, second):
            tiny.restore(key)
    other = saved_on_two_ranks(tmp_path / "other", fill=1)
    for key in tiny.data_keys:
        name = key.rpartition("/")[2]
        (replacement,) = (data for other_key, data in other.items() if other_key.endswith(name))
        assert len(replacement) == len(saved[key])
        tiny.put(key, replacement)
        assert_found(tiny, [key], publicly=True)
        tiny.restore(key)
    # Another save's manifest over this one's data: its objects are not there.
    tiny.put(MANIFEST, other[MANIFEST])
    with pytest.raises(CorruptCheckpointError, match="missing"):
        cloudckpt.load(blank(), tiny.uri, no_dist=True, options=OPTIONS)
    with pytest.raises(CorruptCheckpointError) as caught:
        cloudckpt.verify(tiny.uri, options=OPTIONS)
    assert len(caught.value.problems) == len(tiny.data_keys)


def test_every_appended_byte_is_found(tiny: Tiny) -> None:
    """If this fails, `verify` overlooks an object that grew, or a load of one returns other values."""
    for key in tiny.data_keys:
        for byte in range(256):
            tiny.put(key, tiny.good[key] + bytes([byte]))
            # A load has no reason to look past the last tile: what it returns is what was saved.
            assert_same(tiny.read(), values(0) | values(1))
            (problem,) = tiny.problems()
            assert key in problem
            assert "bytes were added" in problem
        tiny.restore(key)
    for byte in range(256):
        document = tiny.good[MANIFEST] + bytes([byte])
        if byte == ord("\n"):  # which a text editor adds, and the format admits
            assert decode(document, uri=tiny.uri)
            continue
        with pytest.raises(InvalidManifestError, match=tiny.uri):
            decode(document, uri=tiny.uri)
