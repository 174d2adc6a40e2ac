"""Manifests to test with."""

from __future__ import annotations

import base64
import struct
from typing import Any

from hypothesis import strategies as st

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
