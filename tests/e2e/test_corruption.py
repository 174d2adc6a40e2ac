"""Damaged, cut and missing objects: an error that names the object and the tensor, never wrong values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kit.places import Place

import cloudckpt

PATTERN = b"\x5a\xc3\x3c\xa5"
NUM_PATTERNS = 1000


def values() -> dict[str, Any]:
    """One tensor whose bytes can be found in an object without knowing the format, among others."""
    patterned = torch.frombuffer(bytearray(PATTERN * NUM_PATTERNS), dtype=torch.float32)
    return {"before": torch.ones(500), "block": {"victim": patterned}, "end": torch.zeros(500), "n": 3}


def blank() -> dict[str, Any]:
    return {"before": torch.zeros(500), "block": {"victim": torch.zeros(NUM_PATTERNS)}, "end": torch.ones(500), "n": 0}


def victim_at(place: Place) -> tuple[str, int]:
    """The object that holds the tensor, and where in it the tensor begins."""
    for key in place.data_keys():
        position = place.read(key).find(PATTERN * NUM_PATTERNS)
        if position >= 0:
            return key, position
    raise AssertionError("the tensor's bytes lie nowhere")


def assert_names_object_and_tensor(error: BaseException, key: str) -> None:
    name = key.rpartition("/")[2]
    assert name in str(error), f"{name} is not named: {error}"
    assert "block.victim" in str(error), str(error)


@pytest.mark.every_store
def test_a_missing_object_is_found(place: Place) -> None:
    """If this fails, a data object that somebody removed gives an error that explains nothing."""
    cloudckpt.save(values(), place.uri())
    key, _ = victim_at(place)
    place.remove(key)
    with pytest.raises(cloudckpt.CloudckptError) as caught:
        cloudckpt.load(blank(), place.uri())
    assert isinstance(caught.value, cloudckpt.CorruptCheckpointError | cloudckpt.errors.CheckpointChangedError)
    assert_names_object_and_tensor(caught.value, key)
