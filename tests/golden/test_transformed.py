"""Checkpoints that went through stream extensions, of every version of the format that was ever released."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.docs.independent_reader import ELEMENT_BYTES, Checkpoint, positions
from tests.golden.make_transformed import Cipher, flipped
from tests.golden.test_golden import blank, expected_of, hex_of

import cloudckpt

HERE = Path(__file__).resolve().parent / "transformed"
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "SHA256SUMS").exists())
UNDO = {
    "stream.zstd/1": lambda stored: zstandard.ZstdDecompressor().decompressobj().decompress(stored),
    "golden.cipher/1": flipped,
}
"""By code that is not cloudckpt's."""
CHAINS = {"compressed": ["stream.zstd/1"], "encrypted": ["golden.cipher/1", "stream.zstd/1"]}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of one version."""
    return HERE / request.param


def assert_loads(expected: dict[str, Any], uri: Path | str, options: cloudckpt.Options | None) -> None:
    state: dict[str, Any] = {name: blank(entry) for name, entry in expected["tensors"].items()}
    state |= dict.fromkeys(expected["values"])
    cloudckpt.load(state, uri, options=options)
    for name, entry in expected["tensors"].items():
        assert str(state[name].dtype) == f"torch.{entry['dtype']}", name
        assert list(state[name].shape) == entry["shape"], name
        assert hex_of(state[name]) == entry["hex"], name
    assert {name: state[name] for name in expected["values"]} == expected["values"]


def test_compressed_ones_load_to_the_bit_without_options(golden: Path) -> None:
    """If this fails, compressed checkpoints of this version load wrongly, or no longer at all."""
    assert_loads(expected_of(golden), golden / "compressed", None)


def test_encrypted_ones_load_to_the_bit(golden: Path) -> None:
    """If this fails, what users' own extensions wrote in this version is lost with it: descriptors or their order."""
    assert_loads(expected_of(golden), golden / "encrypted", cloudckpt.Options(extensions=[Cipher()]))


@pytest.mark.parametrize("name", CHAINS)
def test_the_document_suffices_to_read_them(golden: Path, name: str) -> None:
    """If this fails, the format's document does not say how to undo transforms, or what is stored is something else."""
    checkpoint = Checkpoint(golden / name)
    for fqn, expected in expected_of(golden)["tensors"].items():
        entry = checkpoint.tensors[fqn]
        assert entry["transforms"] == CHAINS[name]
        size_bytes = ELEMENT_BYTES[entry["dtype"]]
        whole = bytearray(math.prod(entry["shape"]) * size_bytes)
        for offsets, lengths, object_index, begin, end, *_ in entry["chunks"]:
            content = checkpoint.object_bytes(object_index)[begin:end]
            for descriptor in entry["transforms"]:
                content = UNDO[descriptor](content)
            assert len(content) == math.prod(lengths) * size_bytes
            for number, position in enumerate(positions(entry["shape"], offsets, lengths)):
                element = content[number * size_bytes : (number + 1) * size_bytes]
                whole[position * size_bytes : (position + 1) * size_bytes] = element
        assert whole.hex() == expected["hex"], fqn


def test_they_are_verified_without_the_extension(golden: Path) -> None:
    """If this fails, nobody without the key can tell whether an encrypted checkpoint is damaged."""
    report = cloudckpt.verify(golden / "encrypted")
    assert report.num_tensors == len(expected_of(golden)["tensors"])
