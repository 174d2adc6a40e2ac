"""Small checkpoints that ask for much memory, opened with little.

Run as ``python -m tests.integrity.bombs``: opens all `BOMBS` in a process that may take half a gibibyte more than it
has, and prints the classes of the errors, and how many bytes were taken at the most.
"""

from __future__ import annotations

import functools
import json
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from awscrt.checksums import crc32c
from tests.format.samples import as_json, tiles_text

import cloudckpt
from cloudckpt.stores.base import crc32c_of
from cloudckpt.stores.memory import MemoryStore

ROOM_BYTES = 2**29
HUGE = 2**40
KEY = "data/a/0-0.safetensors"

Bomb = tuple[dict[str, Any], dict[str, bytes], dict[str, Any]]
"""A manifest without its checksum, the objects that are really there, and a state dict to load."""


def manifest(*, size: int, tile_bytes: int = 2**30) -> dict[str, Any]:
    """Return the manifest of one object that claims `size` bytes."""
    found = as_json()
    num_tiles = -(-size // tile_bytes)
    return found | {
        "tile_bytes": tile_bytes,
        "objects": [{"key": KEY, "size": size, "crc32c": tiles_text([0] * num_tiles)}],
        "tensors": {},
        "values": {},
        "nesting": None,
    }


def huge_value() -> Bomb:
    found = manifest(size=HUGE)
    found["values"] = {"v": {"object_index": 0, "begin": 0, "end": HUGE}}
    return found, {KEY: b"small"}, {"v": None}


def huge_values_that_overlap() -> Bomb:
    content = bytes(20 * 2**20)
    found = manifest(size=len(content), tile_bytes=2**20)
    found["objects"][0]["crc32c"] = tiles_text([crc32c(bytes(2**20))] * 20)
    names = [f"v{index}" for index in range(2000)]
    found["values"] = {name: {"object_index": 0, "begin": 0, "end": len(content)} for name in names}
    return found, {KEY: content}, dict.fromkeys(names)


def huge_tile() -> Bomb:
    found = manifest(size=2**30)
    found["tensors"] = {"w": {"dtype": "uint8", "shape": [1], "chunks": [[[0], [1], 0, 7, 8]]}}
    return found, {KEY: b"small object"}, {"w": torch.zeros(1, dtype=torch.uint8)}


def huge_header() -> Bomb:
    content = (99_000_000).to_bytes(8, "little") + b"{}"
    found = manifest(size=HUGE)
    found["values"] = {"v": {"object_index": 0, "begin": 8, "end": 10}}
    return found, {KEY: content}, {"v": None}


def huge_shape() -> Bomb:
    found = manifest(size=4096)
    found["tensors"] = {"w": {"dtype": "uint8", "shape": [2**62], "chunks": [[[0], [2**62], 0, 0, 4096]]}}
    return found, {KEY: bytes(4096)}, {"w": torch.zeros(1, dtype=torch.uint8)}


def huge_size_without_tiles() -> Bomb:
    found = manifest(size=4096)
    found["objects"][0]["size"] = 2**62
    return found, {KEY: bytes(4096)}, {"w": torch.zeros(1, dtype=torch.uint8)}


BOMBS: dict[str, Callable[[], Bomb]] = {
    bomb.__name__: bomb
    for bomb in (huge_value, huge_values_that_overlap, huge_tile, huge_header, huge_shape, huge_size_without_tiles)
}


def _size_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def outcome(call: Callable[[], object]) -> str:
    """The class of what went wrong, on its rank."""
    try:
        call()
    except cloudckpt.CloudckptError as error:
        (cause, *_) = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        return type(cause).__name__
    return ""


def main() -> dict[str, Any]:
    bombs = {name: bomb() for name, bomb in BOMBS.items()}
    for name, (found, objects, _) in bombs.items():
        body = json.dumps(found).encode()[:-1]
        documents = {"manifest.json": body + b',"crc32c":"%08x"}' % crc32c(body)}
        for key, data in {**objects, **documents}.items():
            MemoryStore("bombs", name).put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))
    # What every load needs, such as the stacks of threads, comes first.
    cloudckpt.save({"x": torch.zeros(10**6)}, "memory://bombs/warm", no_dist=True)
    cloudckpt.load({"x": torch.zeros(10**6)}, "memory://bombs/warm", no_dist=True)
    limit_bytes = _size_bytes() + ROOM_BYTES + 8 * 2**27  # glibc reserves up to 128 MiB of addresses for a thread
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: dict[str, list[str]] = {}
    for name, (_, _, state) in bombs.items():
        uri = f"memory://bombs/{name}"
        calls = (functools.partial(cloudckpt.load, state, uri, no_dist=True), functools.partial(cloudckpt.verify, uri))
        outcomes[name] = [outcome(call) for call in calls]
    taken_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
    return {"outcomes": outcomes, "taken_bytes": taken_bytes}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main()))
