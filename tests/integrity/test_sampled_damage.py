"""Damage to a checkpoint of 64 MiB: samples of it, and what a load alone cannot see."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.e2e.models import assert_same
from tests.options import make_options

import cloudckpt
from cloudckpt import CorruptCheckpointError

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")]

MIB = 2**20
SEED = 20261121
NUM_TENSORS = 8
OPTIONS = make_options(part_bytes=8 * MIB, object_bytes=32 * MIB, tile_bytes=MIB, request_bytes=4 * MIB)


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return {f"w{index}": torch.randn(2 * MIB, generator=generator) for index in range(NUM_TENSORS)}


def blank(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2 * MIB) for name in names}


class Saved:
    """The checkpoint as files, and which bytes of them each tensor has, as the safetensors library sees it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        cloudckpt.save(values(), str(directory), options=OPTIONS)
        self.paths = sorted(directory.glob("data/*/*.safetensors"))
        assert len(self.paths) > 1
        self.ranges: dict[Path, dict[str, tuple[int, int]]] = {}
        for path in self.paths:
            with safe_open(path, "pt") as opened:
                names = list(opened.keys())
            data = path.read_bytes()
            expected = values()
            self.ranges[path] = {}
            for name in names:
                begin = data.index(expected[name].numpy().tobytes())
                self.ranges[path][name] = (begin, begin + 8 * MIB)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("large") / "checkpoint")


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_flipped_bits_are_found_wherever_they_are(saved: Saved, record_property: Any) -> None:
    """If this fails, a bit that rots in a large checkpoint is found only by luck."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    num_cases = 24
    expected = values()
    for _ in range(num_cases):
        path = chance.choice(saved.paths)
        name, (begin, end) = chance.choice(sorted(saved.ranges[path].items()))
        position = chance.choice([begin, end - 1, *(chance.randrange(begin, end) for _ in range(4))])
        bit = chance.randrange(8)
        flip(path, position, bit)
        try:
            with pytest.raises(CorruptCheckpointError, match=f"{path.name}.*'{name}'"):
                cloudckpt.load(blank(name), str(saved.directory), options=OPTIONS)
            with pytest.raises(CorruptCheckpointError) as caught:
                cloudckpt.verify(str(saved.directory), options=OPTIONS)
            (problem,) = caught.value.problems
            assert path.name in problem
            assert f"'{name}'" in problem
            low = position // MIB * MIB
            assert f"bytes [{low}, " in problem
            other = chance.choice([other for other in values() if other != name])
            if other not in problem:  # two tensors can share a tile
                state = blank(other)
                cloudckpt.load(state, str(saved.directory), options=OPTIONS)
                assert_same(state[other], expected[other])
        finally:
            flip(path, position, bit)
    state = blank(*values())
    cloudckpt.load(state, str(saved.directory), options=OPTIONS)
    assert_same(state, values())
    report = cloudckpt.verify(str(saved.directory), options=OPTIONS)
    assert report.num_bytes == sum(path.stat().st_size for path in saved.paths) > 64 * MIB
    record_property("num_sampled_flips", num_cases)
    print(f"sampled flips: {num_cases}, each found")


def test_what_a_load_does_not_read_only_verify_sees(saved: Saved) -> None:
    """If this fails, either loads read what nobody asked for, or `verify` sees no more than a load does."""
    path = saved.paths[0]
    name, (begin, _) = max(saved.ranges[path].items(), key=lambda item: item[1])
    assert begin > MIB
    good = path.read_bytes()
    for damaged in (bytes([good[0] ^ 1]) + good[1:], good[:20] + bytes([good[20] ^ 8]) + good[21:], good + b"\0"):
        path.write_bytes(damaged)
        state = blank(name)
        cloudckpt.load(state, str(saved.directory), options=OPTIONS)
        assert_same(state[name], values()[name])
        with pytest.raises(CorruptCheckpointError, match=f"{path.name}.*(header|bytes were added)"):
            cloudckpt.verify(str(saved.directory), options=OPTIONS)
    path.write_bytes(good)
    cloudckpt.verify(str(saved.directory), options=OPTIONS)
