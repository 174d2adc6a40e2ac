"""Manifests to test with."""

from __future__ import annotations

import base64
import itertools
import math
import struct
from typing import Any

from hypothesis import strategies as st

from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, Manifest, StoredObject, StoredTensor, StoredValue

URI = "memory://tests/checkpoint"

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


def tiles_text(values: list[int]) -> str:
    """The tiles' checksums as the format document describes them."""
    return base64.b64encode(struct.pack(f"<{len(values)}I", *values)).decode()


def as_json() -> dict[str, Any]:
    """A small manifest: one sharded tensor, one scalar and one value in two objects, as plain JSON."""
    return {
        "format": "cloudckpt",
        "version": [1, 0],
        "attempt": "20260131T235959123Z-1f2e3d4c5b6a",
        "created_at": "2026-01-31T23:59:59.123+00:00",
        "world_size": 2,
        "software": {"cloudckpt": "0.1.0"},
        "tile_bytes": 4096,
        "objects": [
            {"key": "data/a/0-0.safetensors", "size": 4096 + 64, "crc32c": tiles_text([1, 2])},
            {"key": "data/a/1-0.safetensors", "size": 128, "crc32c": tiles_text([3])},
        ],
        "tensors": {
            "w": {
                "dtype": "float32",
                "shape": [4, 2],
                "chunks": [[[0, 0], [2, 2], 0, 64, 80], [[2, 0], [2, 2], 1, 64, 80]],
            },
            "s": {"dtype": "bfloat16", "shape": [], "chunks": [[[], [], 0, 80, 82]]},
        },
        "values": {"step": {"object_index": 0, "begin": 4000, "end": 4160}},
        "nesting": {"w": ["model", "w"], "s": ["model", 0], "step": ["step"]},
    }


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest that is sound."""
    tile_bytes = draw(st.sampled_from([4096, 4096 + 64, 8192]))
    sizes_bytes = [0] * draw(st.integers(1, 3))

    def placed(num_bytes: int) -> tuple[int, int, int]:
        index = draw(st.integers(0, len(sizes_bytes) - 1))
        begin = -(-sizes_bytes[index] // 16) * 16 + draw(st.sampled_from([0, 16, 5008]))
        sizes_bytes[index] = begin + num_bytes
        return index, begin, begin + num_bytes

    tensors: dict[str, StoredTensor] = {}
    for fqn in draw(st.lists(names, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(ITEMSIZE_BYTES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
        cuts = sorted(draw(st.lists(st.integers(0, shape[0]), max_size=3))) if shape else []
        bounds = [0, *cuts, *shape[:1]]
        blocks = (
            [((low, *(0 for _ in shape[1:])), (high - low, *shape[1:])) for low, high in itertools.pairwise(bounds)]
            if shape
            else [((), ())]
        )
        chunks = [Chunk(o, n, *placed(math.prod(n) * ITEMSIZE_BYTES[dtype])) for o, n in blocks]
        tensors[fqn] = StoredTensor(dtype=dtype, shape=shape, chunks=chunks, requires_grad=draw(st.booleans()))
    values: dict[str, StoredValue] = {}
    for fqn in draw(st.lists(names, max_size=3, unique=True)):
        if fqn not in tensors:
            index, begin, end = placed(draw(st.integers(0, 50)))
            values[fqn] = StoredValue(
                object_index=index, begin=begin, end=end, transforms=draw(st.lists(names, max_size=2))
            )
    fqns = [*tensors, *values]
    step = names | st.integers(0, max(len(tensors) + len(values) - 1, 0))
    path = st.lists(step, min_size=1, max_size=3)
    scalar = names | st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e9, 1e9)
    key = (scalar | st.lists(scalar, max_size=2)).map(lambda key: [key])
    typed_path = st.lists(step | key, min_size=1, max_size=3)
    return Manifest(
        format="cloudckpt",
        version=(1, draw(st.integers(0, 3))),
        attempt=draw(names),
        created_at=draw(names),
        world_size=draw(st.integers(1, 9)),
        software=draw(st.dictionaries(names, names, max_size=2)),
        tile_bytes=tile_bytes,
        objects=[
            StoredObject(
                key=f"data/{draw(st.sampled_from(['a', 'b']))}/{index}.safetensors",
                size=size_bytes,
                crc32c=tiles_text([draw(st.integers(0, 2**32 - 1)) for _ in range(-(-size_bytes // tile_bytes))]),
            )
            for index, size_bytes in enumerate(sizes_bytes)
        ],
        tensors=tensors,
        values=values,
        nesting=draw(st.none() | st.fixed_dictionaries(dict.fromkeys(fqns, path))),
        typed_nesting=draw(st.none() | st.fixed_dictionaries({}, optional=dict.fromkeys(fqns, typed_path))),
        empty_mappings=draw(st.lists(typed_path, max_size=2)),
        save_id=draw(st.none() | names),
        metadata=draw(st.dictionaries(names, json_values, max_size=2)),
    )
