"""Write the remains of saves that died, failed or stand still, to any store."""

from __future__ import annotations

from typing import Any

import torch
from awscrt.checksums import crc32c

import cloudckpt
from cloudckpt import Options
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Part, Store

LONG_AGO = "20200101T000000000Z-0123456789ab"


def state_of(fill: float) -> dict[str, Any]:
    return {"w": torch.full((300,), fill), "step": int(fill)}


def save(uri: str, fill: float, *, overwrite: bool = False) -> None:
    cloudckpt.save(state_of(fill), uri, overwrite=overwrite, no_dist=True)


def holds(uri: str, fill: float) -> bool:
    """Return True if all of that save is loaded from there."""
    state = state_of(-1.0)
    cloudckpt.load(state, uri, no_dist=True)
    return state["step"] == int(fill) and bool((state["w"] == fill).all())


def at(root: str) -> Store:
    return open_store(root, Options())


def put(store: Store, key: str, body: bytes = b"left over") -> None:
    store.put(key, [memoryview(body)], crc32c=crc32c(body))


def begin_upload(store: Store, key: str) -> None:
    """One part of it; before its first, GCS has no trace of an upload."""
    body, part = b"a part", Part(number=1, offset_bytes=0, size_bytes=6)
    store.upload_part(key, store.create_multipart(key), part, [memoryview(body)], crc32c=crc32c(body))


def keys_in(root: str) -> set[str]:
    return {info.key for info in at(root).list()}


def uploads_in(root: str) -> set[str]:
    return {info.key for info in at(root).list_uploads()}


FOREIGN = (
    "notes.txt",
    "manifest.json.bak",
    "step-1/data/readme.md",
    "step-1/data/0-0.safetensors",
    f"step-1/data/{LONG_AGO}/model.safetensors",
    f"step-1/data/{LONG_AGO}x/0-0.safetensors",
    f"step-1/data/{LONG_AGO}/0-0.safetensors.bak",
    f"step-1/data/{LONG_AGO}/00-0.safetensors",
    "step-1/data/20209901T000000000Z-0123456789ab/0-0.safetensors",
    ".cloudckpt-probe-mine",
)
"""Nearly what cloudckpt writes."""
