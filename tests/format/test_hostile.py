"""Manifests made by somebody who wants to do harm: each is refused, by type, at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.format.samples import URI, as_json, tiles_text
from tests.kit.oracles import signed

from cloudckpt.errors import InvalidManifestError
from cloudckpt.format.codec import decode

Json = dict[str, Any]

TILES_OF_2 = tiles_text([1, 2])


def put(value: object, *path: str | int) -> Callable[[Json], None]:
    """Replace what lies at `path`."""

    def change(manifest: Json) -> None:
        inner: Any = manifest
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Json], None]:
    def change(manifest: Json) -> None:
        inner: Any = manifest
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]

    return change


CHUNK = ("tensors", "w", "chunks", 0)
LAST_CHUNK = ("tensors", "w", "chunks", 1)
EMPTY_VALUE = {"object_index": 0, "begin": 0, "end": 0}

HOSTILE: dict[str, tuple[Callable[[Json], None], str]] = {
    # keys
    **{
        f"key {key!r:.40}": (put(key, "objects", 0, "key"), r"objects\[0\]: key .* is not under data/")
        for key in (
            "", "/", "data", "data/", "data/x", "data/a/", "/data/a/b", "data//b", "../data/a/b", "data/../a/b",
            "data/a/..", "data/./a/b", "data\\a\\b", "data/a/b\\..\\c", "data/a/b\0", "data/a/b\n", "other/a/b",
            "manifest.json", "file:///etc/passwd", "C:/data/a/b", "data/c:/x", "data/a/\u202egnp.exe", "data/a/\u200b",
                        "DATA/a/b", "data/" + "a" * 1020 + "/b", "s3://other/data/a/b",
        )
    },
    "the same key twice": (put("data/a/1-0.safetensors", "objects", 0, "key"), "occurs twice"),
    # sizes and tiles
    "a negative size": (put(-1, "objects", 0, "size"), "size is -1"),
    "a huge size": (put(2**63, "objects", 0, "size"), "size is 9223372036854775808"),
    "a size for which tiles are missing": (put(10**15, "objects", 0, "size"), "one checksum for each"),
    "too few tiles": (put(tiles_text([1]), "objects", 0, "crc32c"), "one checksum for each of its 2 tiles"),
    "too many tiles": (put(tiles_text([1, 2, 3]), "objects", 0, "crc32c"), "one checksum for each"),
    "tiles that are no base64": (put(TILES_OF_2[:-2] + "*=", "objects", 0, "crc32c"), "one checksum for each"),
    "tiles of half a value": (put(TILES_OF_2[:-2] + "==", "objects", 0, "crc32c"), "one checksum for each"),
    "tiles with bytes to spare": (put(TILES_OF_2[:-1] + "A", "objects", 0, "crc32c"), "one checksum for each"),
    "tiles that are not ASCII": (put("ÄAAAAAAAAAA=", "objects", 0, "crc32c"), "one checksum for each"),
    **{
        f"tiles of {size_bytes} bytes": (put(size_bytes, "tile_bytes"), "tile_bytes is")
        for size_bytes in (0, -4096, 1, 64, 4095, 4097, 2**31, 2**64)
    },
    "a world of nobody": (put(0, "world_size"), "world_size is 0"),
    # tensors
    "an unknown dtype": (put("float7", "tensors", "w", "dtype"), "dtype 'float7' is unknown"),
    "a dtype that is code": (put("__class__", "tensors", "w", "dtype"), "is unknown"),
    "a negative extent": (put([-4, -2], "tensors", "w", "shape"), "is not a shape"),
    "too many dimensions": (put([1] * 65, "tensors", "w", "shape"), "is not a shape"),
    "a million dimensions": (put([1] * 10**6, "tensors", "w", "shape"), "is not a shape"),
    "an extent beyond 64 bits": (put([2**64, 0], "tensors", "w", "shape"), "is not a shape"),
    "a volume beyond 64 bits": (put([2**40, 2**40], "tensors", "w", "shape"), "too large"),
    "no chunks": (put([], "tensors", "w", "chunks"), "hold 0 elements of 8"),
    "a chunk that is missing": (drop(*CHUNK), "hold 4 elements of 8"),
    "a chunk twice": (put([[0, 0], [2, 2], 1, 64, 80], *LAST_CHUNK), "each element once"),
    "chunks that overlap by a row": (put([1, 0], "tensors", "w", "chunks", 1, 0), "each element once"),
    "a chunk of other dimensions": (put([0], *CHUNK, 0), "1 offsets and 2 lengths in 2 dimensions"),
    "a chunk outside": (put([3, 0], *CHUNK, 0), r"\[3, 5\) is not within \[0, 4\)"),
    "a chunk before": (put([-1, 0], *CHUNK, 0), r"\[-1, 1\) is not within"),
    "a chunk of negative length": (put([-2, 2], *CHUNK, 1), "is not within"),
    "a chunk in no object": (put(2, *CHUNK, 2), "object 2 does not exist"),
    "a chunk in the last object but one": (put(-1, *CHUNK, 2), "object -1 does not exist"),
    "a range past the object": (put([[2, 0], [2, 2], 1, 120, 136], *LAST_CHUNK), r"\[120, 136\) are not within"),
    "a range before the object": (put(-16, *CHUNK, 3), r"\[-16, 80\) are not within"),
    "a range backwards": (put([[0, 0], [2, 2], 0, 80, 64], *CHUNK), r"\[80, 64\) are not within"),
    "a range too short": (put(79, *CHUNK, 4), "15 bytes do not hold"),
    "a range too long": (put(84, *CHUNK, 4), "20 bytes do not hold"),
    "a range that is not aligned": (put([[0, 0], [2, 2], 0, 66, 82], *CHUNK), "byte 66 is not aligned to float32"),
    "a value past its object": (put(4161, "values", "step", "end"), r"value 'step': bytes \[4000, 4161\)"),
    "a value in no object": (put(7, "values", "step", "object_index"), "object 7 does not exist"),
    "a name that is both": (put(EMPTY_VALUE, "values", "w"), "a tensor and a value at once"),
    # nesting
    "nesting of what is not stored": (put(["x"], "nesting", "ghost"), "nesting names 'ghost'"),
    "nesting in a list without end": (put(["w", 10**9], "nesting", "w"), "lists with more than 100000"),
    "nesting before a list": (put(["w", -1], "nesting", "w"), "has an index outside"),
    **{
        f"{member} with the index {index}": (put(nesting, member), "has an index outside")
        for index in (-1, 2**63)
        for member, nesting in (("typed_nesting", {"w": ["w", index]}), ("empty_mappings", [["w", index]]))
    },
    "empty nesting": (put([], "nesting", "w"), "nesting of 'w' is empty"),
    # types
    **{
        f"{'.'.join(map(str, path))} = {value!r:.20}": (put(value, *path), "is not valid")
        for path, value in (
            (("objects",), None), (("objects",), {}), (("objects", 0), []), (("objects", 0, "size"), "1"),
            (("objects", 0, "size"), 1.5), (("objects", 0, "key"), 5), (("tensors",), []), (("tensors", "w"), None),
            (("tensors", "w", "shape"), "42"), (("tensors", "w", "shape", 0), 4.5), (CHUNK, {}), (CHUNK, [[0]]),
            ((*CHUNK, 3), None), ((*CHUNK, 4), True), (("values", "step", "begin"), "0"), (("nesting", "w"), "w"),
            (("nesting", "w"), [{}]), (("world_size",), "2"), (("metadata",), []), (("attempt",), 7),
        )
    },
    **{f"no {name}": (drop(name), "is not valid") for name in ("attempt", "objects", "tensors", "tile_bytes")},
    "a number with thousands of digits": (put(10**4000, "objects", 0, "size"), "size is 10000"),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(name: str) -> None:
    """If this fails, whoever can write to the bucket chooses what a load reads, allocates or leaves unfilled."""
    change, says = HOSTILE[name]
    manifest = as_json()
    change(manifest)
    document = json.dumps(manifest).encode()
    with pytest.raises(InvalidManifestError, match=says) as caught:
        decode(fast_signed(document), uri=URI)
    assert len(str(caught.value)) < 5000


def fast_signed(body: bytes) -> bytes:
    """`signed`, where the slow checksum would take minutes."""
    if len(body) < 50_000:
        return signed(body)
    from awscrt.checksums import crc32c  # noqa: PLC0415  # of the input; what is tested is another thing

    return body[:-1] + b',"crc32c":"%08x"}' % crc32c(body[:-1])


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "body",
    [
        b'{"format":"cloudckpt","version":[1,0],"metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"format":"cloudckpt","version":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"format":"cloudckpt","version":[1,0],"attempt":"\xff\xfe"}',
        b'{"format":"\xff","version":[1,0]}',
        b'{"format":"cloudckpt","version":[1,1' + b"0" * 10_000 + b"]}",
        b'{"format":"cloudckpt","version":[1,0],"tile_bytes":1e999}',
        b"{}",
    ],
    ids=["deep metadata", "deep version", "deep objects", "no UTF-8", "no UTF-8 name", "long version", "inf", "empty"],
)
@pytest.mark.parametrize("finished", [fast_signed, bytes])
def test_hostile_json_is_refused(body: bytes, finished: Callable[[bytes], bytes]) -> None:
    """If this fails, a few bytes in a bucket crash every process that looks there, or keep it busy."""
    with pytest.raises(InvalidManifestError):
        decode(finished(body), uri=URI)


def test_every_problem_is_named() -> None:
    """If this fails, whoever repairs a manifest finds its problems one by one."""
    manifest = as_json()
    put(64, "tensors", "w", "chunks", 0, 4)(manifest)
    put("float7", "tensors", "s", "dtype")(manifest)
    put(9, "values", "step", "object_index")(manifest)
    with pytest.raises(InvalidManifestError) as caught:
        decode(signed(json.dumps(manifest).encode()), uri=URI)
    assert all(text in str(caught.value) for text in ("tensor 'w': chunk 0", "tensor 's'", "value 'step'"))


def test_many_problems_are_counted() -> None:
    """If this fails, one bad manifest fills the log."""
    manifest = as_json()
    manifest["values"] = {f"v{index}": {"object_index": 9, "begin": 0, "end": 0} for index in range(1000)}
    manifest["nesting"] = None
    with pytest.raises(InvalidManifestError, match="and 990 more"):
        decode(fast_signed(json.dumps(manifest).encode()), uri=URI)


@pytest.mark.timeout(20)
def test_lists_within_lists_are_counted() -> None:
    """If this fails, a manifest of a megabyte makes a loader fill the memory with empty places."""
    num_entries = 3000
    manifest = as_json()
    manifest["tensors"] = {}
    manifest["values"] = {f"v{i}": {"object_index": 0, "begin": 0, "end": 0} for i in range(num_entries)}
    manifest["nesting"] = {f"v{i}": [i, num_entries - 1] for i in range(num_entries)}
    with pytest.raises(InvalidManifestError, match="places in all"):
        decode(fast_signed(json.dumps(manifest).encode()), uri=URI)
    manifest["nesting"] = {f"v{i}": ["all", i] for i in range(num_entries)}
    decode(fast_signed(json.dumps(manifest).encode()), uri=URI)
    manifest["typed_nesting"] = {f"v{i}": [["all"], i] for i in range(num_entries)}
    manifest["empty_mappings"] = [[[i], [None], num_entries] for i in range(300)]
    decode(fast_signed(json.dumps(manifest).encode()), uri=URI)
    manifest["empty_mappings"] += [[[i], num_entries] for i in range(100)]
    with pytest.raises(InvalidManifestError, match="places in all"):
        decode(fast_signed(json.dumps(manifest).encode()), uri=URI)
