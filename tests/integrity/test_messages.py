"""Errors that quote what a stranger wrote into a manifest."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.errors import MAX_MESSAGE_CHARS, CloudckptError
from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.memory import MemoryStore

LONG = "x y\x1b[2J\u202e" * 10_000


def _rename(kind: str, old: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest[kind][LONG] = manifest[kind].pop(old)

    return change


def _put(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        inner: Any = manifest
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value

    return change


HOSTILE = {
    "a tensor's name": _rename("tensors", "w"),
    "a value's name": _rename("values", "t"),
    "a name in the nesting": _put([LONG], "nesting", LONG),
    "a step of the nesting": _put([LONG], "nesting", "w"),
    "an extension": _put([LONG], "tensors", "w", "transforms"),
    "an extension of a value": _put([LONG], "values", "t", "transforms"),
    "a dtype": _put(LONG, "tensors", "w", "dtype"),
    "a key": _put(f"data/a/{LONG}", "objects", 0, "key"),
    "a checksum": _put(LONG, "objects", 0, "crc32c"),
    "the attempt": _put(LONG, "attempt"),
    "the time": _put(LONG, "created_at"),
    "the format": _put(LONG, "format"),
    "the version": _put(LONG, "version"),
    "a newer version": lambda manifest: manifest.update(version=[9, 0], software={"cloudckpt": LONG}),
    "a member of another type": _put({LONG: LONG}, "tile_bytes"),
    "chunks": _put([LONG], "tensors", "w", "chunks"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_message_is_bounded_whatever_a_manifest_says(what: str) -> None:
    """If this fails, one manifest of a stranger floods the logs of all ranks, or drives a terminal."""
    uri = f"memory://messages/{what}"
    cloudckpt.save({"w": torch.ones(4), "t": 1}, uri, no_dist=True)
    store = MemoryStore("messages", what)
    manifest = json.loads(store.read("manifest.json", max_bytes=1 << 20))
    HOSTILE[what](manifest)
    manifest.pop("crc32c")
    body = json.dumps(manifest).encode()[:-1]
    document = body + b',"crc32c":"%08x"}' % crc32c_of([memoryview(body)])
    store.put("manifest.json", [memoryview(document)], crc32c=crc32c_of([memoryview(document)]))
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (
            lambda: cloudckpt.load({"w": torch.zeros(4), "t": 0}, uri, no_dist=True),
            lambda: cloudckpt.load_latest({"w": torch.zeros(4), "t": 0}, "memory://messages", no_dist=True),
            lambda: cloudckpt.verify(uri),
            lambda: cloudckpt.latest("memory://messages"),
            lambda: cloudckpt.describe(uri),
            lambda: cloudckpt.copy(uri, f"memory://messages-copied/{what}"),
            lambda: cloudckpt.export_checkpoint(uri, f"memory://messages-exported/{what}"),
        ):
            try:
                call()
            except (CheckpointException, CloudckptError) as error:  # noqa: PERF203  # each call has its own
                said += [str(error), *map(str, getattr(error, "problems", ()))]
    store.delete(["manifest.json"])
    said += [str(warning.message) for warning in caught]
    assert said or what in {"the time", "the attempt"}
    for text in said:
        assert len(text) < 2 * MAX_MESSAGE_CHARS
        assert all(one.isprintable() or one == "\n" for one in text)
