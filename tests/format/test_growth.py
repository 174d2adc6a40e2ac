"""What a manifest costs grows with the number of chunks, counted in calls and not in seconds."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.format.samples import URI
from tests.format.test_narrow import manifest_of_shards
from tests.format.test_torch_metadata import made, receipts_of, tensor_entry
from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.format.codec import decode, encode, pack_tiles
from cloudckpt.format.model import Manifest
from cloudckpt.format.torch_metadata import make_metadata

NUMS_OF_CHUNKS = (512, 1024, 2048)
SLACK = 1.05


def num_calls(action: Callable[[], Any]) -> int:
    """How many functions are called, of Python or C."""
    num = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return num


def metadata_of_rows(num_chunks: int) -> Metadata:
    return Metadata(state_dict_metadata={"w": tensor_entry([2] * num_chunks)})


def test_a_build_is_linear() -> None:
    """If this fails, the commit of a large job takes hours on its coordinator, while all others wait."""
    calls = []
    for num_chunks in NUMS_OF_CHUNKS:
        metadata = metadata_of_rows(num_chunks)
        receipts = receipts_of(metadata, 4)
        calls.append(num_calls(lambda metadata=metadata, receipts=receipts: made(metadata, receipts)))
    assert_linear(calls)


@pytest.mark.parametrize("num_columns", [1, 2, 8])
def test_a_decode_costs_no_call_for_each_chunk(num_columns: int) -> None:
    """If this fails, each rank of a large job looks at the chunks of all others one by one, in Python."""
    calls = []
    for num_chunks in NUMS_OF_CHUNKS:
        manifest = manifest_of_shards(num_chunks // num_columns, num_columns)
        document = encode(manifest_with_checksums(manifest))
        calls.append(num_calls(lambda document=document: decode(document, uri=URI)))
    assert calls[-1] <= SLACK * calls[0]


def test_what_planners_get_costs_nothing_for_each_chunk() -> None:
    """If this fails, each rank makes torch's objects for the chunks of all others: gigabytes on each host."""
    calls = []
    for num_chunks in NUMS_OF_CHUNKS:
        manifest = manifest_of_shards(num_chunks)
        calls.append(num_calls(lambda manifest=manifest: make_metadata(manifest, checkpoint_id=URI, load_id="")))
    assert calls[0] == calls[-1]


def manifest_with_checksums(manifest: Manifest) -> Manifest:
    (stored,) = manifest.objects
    checksums = pack_tiles([7] * -(-stored.size // manifest.tile_bytes))
    return msgspec.structs.replace(manifest, objects=[msgspec.structs.replace(stored, crc32c=checksums)])


def assert_linear(calls: list[int]) -> None:
    for fewer, more in itertools.pairwise(calls):
        assert more <= 2 * SLACK * fewer
