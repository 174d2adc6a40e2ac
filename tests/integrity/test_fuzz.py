"""Any bytes, where a manifest or a data object should be: a typed error, soon, and nothing outside the prefix."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from awscrt.checksums import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.format.samples import as_json, json_values, tiles_text
from tests.kit.options import make_options
from tests.kit.wrapped import Call, watching

import cloudckpt
from cloudckpt import CorruptCheckpointError, Options
from cloudckpt.errors import CheckpointError
from cloudckpt.format.safetensors import LENGTH_BYTES
from cloudckpt.format.validation import is_safe_key
from cloudckpt.stores.base import crc32c_of
from cloudckpt.stores.memory import MemoryStore

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:.*(TypedStorage|is not a)"),
    pytest.mark.timeout(240),
]

_numbers = itertools.count()
SECRET = b"what lies beside the checkpoint"


def check_is_confined(call: Call) -> None:
    """Fail the test where a call leaves the checkpoint, or asks for what a checkpoint does not have."""
    if call.operation in ("read", "read_into", "head"):
        assert is_safe_key(call.key) or call.key.startswith("manifest"), call
    assert call.operation not in ("put", "delete", "copy", "create_multipart"), call


def opened(objects: dict[str, bytes]) -> tuple[str, Options]:
    """A checkpoint of these objects, and how to open it."""
    name = f"fuzz-{next(_numbers)}"
    for key, data in {"checkpoint/" + key: data for key, data in objects.items()}.items():
        MemoryStore(name).put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))
    MemoryStore(name).put("secret", [memoryview(SECRET)], crc32c=crc32c(SECRET))

    options = make_options(wrap_store=watching(before=check_is_confined), connections=1, retries=0)
    return f"memory://{name}/checkpoint", options


def finished(manifest: Any) -> bytes:
    """The manifest with a checksum that is right."""
    body = json.dumps(manifest).encode()[:-1]
    return body + b',"crc32c":"%08x"}' % crc32c(body)


def assert_loads_or_says_why(uri: str, options: Options, state: dict[str, Any]) -> None:
    for call in (
        lambda: cloudckpt.load(state, uri, no_dist=True, options=options),
        lambda: cloudckpt.verify(uri, options=options),
        lambda: cloudckpt.list_checkpoints(uri.rpartition("/")[0]),
    ):
        message = ""
        try:
            call()
        except cloudckpt.CloudckptError as error:
            message = str(error)
        assert len(message) < 50_000


# --- manifests


@given(document=st.binary(max_size=300))
@example(document=b'{"format":"cloudckpt-fence","version":[1,0],"id":"0123456789ab","keeps":0,"crc32c":"00000000"}')
@example(document=b"[" * 100_000)
@example(document=b'{"format":"cloudckpt-fence","keeps":' + b"[" * 80)
@settings(max_examples=600)
def test_any_bytes_as_a_manifest_are_refused(document: bytes) -> None:
    """If this fails, a file that happens to be called manifest.json crashes, or is loaded."""
    uri, options = opened({"manifest.json": document})
    with pytest.raises(CheckpointError):
        cloudckpt.load({"w": torch.zeros(4, 2)}, uri, no_dist=True, options=options)
    with pytest.raises(CheckpointError):
        cloudckpt.verify(uri, options=options)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON document."""
    if path:
        yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in members:
        yield from _places(inner, (*path, step))


GOOD_OBJECTS = {"data/a/0-0.safetensors": bytes(4096 + 64), "data/a/1-0.safetensors": bytes(128)}
"""The objects of `as_json`; its checksums are made to fit them."""


def good_manifest() -> dict[str, Any]:
    manifest = as_json()
    for entry, data in zip(manifest["objects"], GOOD_OBJECTS.values(), strict=True):
        assert entry["size"] == len(data)
        entry["crc32c"] = tiles_text([crc32c(data[begin : begin + 4096]) for begin in range(0, len(data), 4096)])
    return manifest


PLACES = sorted(_places(good_manifest()), key=repr)
NASTY = st.sampled_from(
    [
        -1, 0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, 1e308, "", "..", "data/../../secret",
        "/etc/passwd",
        "data/a/0-0.safetensors", "memory://x/y", "\x00", "\ud7ff", "float64", "uint8", [], {}, [[]], [0] * 65,
        None, True,
    ]
)  # fmt: skip


@given(
    changes=st.lists(
        st.tuples(st.sampled_from(PLACES), st.one_of(NASTY, st.integers(0, 5000), json_values), st.booleans()),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=600)
def test_any_forged_manifest_is_refused_or_reads_its_own_bytes(
    changes: list[tuple[tuple[Any, ...], Any, bool]],
) -> None:
    """If this fails, whoever can write to the bucket can make a load crash, hang, or read what is not its own."""
    manifest = good_manifest()
    for path, value, drop in changes:
        inner: Any = manifest
        try:
            for step in path[:-1]:
                inner = inner[step]
            if drop:
                del inner[path[-1]]
            else:
                inner[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has replaced what lay there
    uri, options = opened({"manifest.json": finished(manifest), **GOOD_OBJECTS})
    state = {"w": torch.zeros(4, 2), "s": torch.zeros((), dtype=torch.bfloat16), "step": 0}
    assert_loads_or_says_why(uri, options, state)
    assert_loads_or_says_why(uri, options, {"w": torch.zeros(4, 2)})


# --- headers of data objects

TENSORS = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.arange(5, dtype=torch.int16)}


def saved() -> tuple[dict[str, Any], str, bytes]:
    """A manifest, its one object's key, and the object."""
    name = f"fuzz-saved-{next(_numbers)}"
    cloudckpt.save(dict(TENSORS), f"memory://{name}/checkpoint", no_dist=True)
    store = MemoryStore(name, "checkpoint")
    manifest = json.loads(store.read("manifest.json", max_bytes=10**6))
    del manifest["crc32c"]
    (entry,) = manifest["objects"]
    return manifest, entry["key"], store.read(entry["key"], max_bytes=10**6)


MANIFEST, KEY, OBJECT = saved()
HEADER_END = LENGTH_BYTES + int.from_bytes(OBJECT[:LENGTH_BYTES], "little")
HEADER = json.loads(OBJECT[LENGTH_BYTES:HEADER_END])


def verified_with(data: bytes) -> str:
    """Return what `verify` says of an object whose checksums were made to fit; empty where it is content."""
    manifest = copy.deepcopy(MANIFEST)
    assert len(data) == manifest["objects"][0]["size"]
    manifest["objects"][0]["crc32c"] = tiles_text([crc32c(data)])
    uri, options = opened({"manifest.json": finished(manifest), KEY: data})
    try:
        cloudckpt.verify(uri, options=options)
    except CorruptCheckpointError as error:
        return str(error) if all(KEY in problem for problem in error.problems) else ""
    return ""


@given(place=st.sampled_from(sorted(_places(HEADER), key=repr)), value=st.one_of(NASTY, json_values))
@settings(max_examples=600)
def test_any_header_that_contradicts_the_manifest_is_found(place: tuple[Any, ...], value: Any) -> None:
    """If this fails, a shard opened with the safetensors library has other tensors than the checkpoint it is from."""
    header = copy.deepcopy(HEADER)
    inner: Any = header
    for step in place[:-1]:
        inner = inner[step]
    before, inner[place[-1]] = inner[place[-1]], value
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > HEADER_END - LENGTH_BYTES:
        return  # it would not fit
    data = OBJECT[:LENGTH_BYTES] + text.ljust(HEADER_END - LENGTH_BYTES) + OBJECT[HEADER_END:]
    is_same = type(value) is type(before) and value == before
    assert bool(verified_with(data)) != (is_same or (place[0] == "__metadata__" and is_free(header["__metadata__"])))


def is_free(metadata: Any) -> bool:
    """Return True if a header's own metadata may be this."""
    return isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
