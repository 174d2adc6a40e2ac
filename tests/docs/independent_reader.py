"""A reader of checkpoints in directories, written from ``docs/format.md`` alone, in plain Python.

It shares nothing with cloudckpt: an oracle for the format, and the proof that the document suffices.
"""

from __future__ import annotations

import base64
import collections
import datetime as dt
import decimal
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MANIFEST = re.compile(r"manifest(?:\.([1-9][0-9]{0,17}))?\.json")
TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n?\Z')
ELEMENT_BYTES = {
    **dict.fromkeys(["complex128"], 16),
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    **dict.fromkeys(["float32", "int32", "uint32", "complex32", "bcomplex32"], 4),
    **dict.fromkeys(["bfloat16", "float16", "int16", "uint16", "bits16"], 2),
    **dict.fromkeys(["bool", "int8", "uint8", "bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"], 1),
    **dict.fromkeys([f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")], 1),
    **dict.fromkeys([f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)], 1),
}
TAGS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
MAX = 2**63 - 1
REQUIRED = {
    "attempt": str, "created_at": str, "world_size": int, "software": dict, "tile_bytes": int, "objects": list,
    "tensors": dict, "values": dict,
}  # fmt: skip


class FormatError(Exception):
    """The checkpoint breaks the rule."""


def crc32c_table() -> list[int]:
    table = []
    for start in range(256):
        value = start
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = crc32c_table()


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


class Checkpoint:
    """One checkpoint, checked as the document demands."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        numbers = [int(m[1] or 0) for path in directory.glob("manifest*") if (m := MANIFEST.fullmatch(path.name))]
        if not numbers:
            raise FormatError("no manifest")
        document = (directory / entry_name(max(numbers))).read_bytes()
        if len(document) <= 128:
            keeps = kept(document, number=max(numbers))
            if keeps not in numbers:
                raise FormatError("no checkpoint")
            document = (directory / entry_name(keeps)).read_bytes()
        self.manifest = parsed(document)
        problems = list(problems_of(self.manifest))
        if problems:
            raise FormatError("; ".join(problems))

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        return self.manifest["tensors"]

    def object_bytes(self, index: int) -> bytes:
        """A data object, every tile checked."""
        stored = self.manifest["objects"][index]
        path = self.directory.parent / (stored.get("folder") or self.directory.name) / stored["key"]
        if not path.exists():
            raise FormatError(f"{stored['key']} is missing")
        data = path.read_bytes()
        if len(data) < stored["size"]:
            raise FormatError(f"{stored['key']} is short")
        step = self.manifest["tile_bytes"]
        values = struct.unpack(f"<{-(-stored['size'] // step)}I", base64.b64decode(stored["crc32c"], validate=True))
        for number, value in enumerate(values):
            if crc32c(data[number * step : min((number + 1) * step, stored["size"])]) != value:
                raise FormatError(f"tile {number} of {stored['key']} is damaged")
        return data

    def tensor(self, fqn: str) -> bytes:
        """The whole tensor's elements in row-major order."""
        entry = self.tensors[fqn]
        if entry.get("transforms"):
            raise FormatError(f"{fqn} has transforms that are not known here: {entry['transforms']}")
        size, shape = ELEMENT_BYTES[entry["dtype"]], entry["shape"]
        whole = bytearray(math.prod(shape) * size)
        written = bytearray(math.prod(shape))
        for offsets, lengths, object_index, begin, end, *_ in entry["chunks"]:
            stored = self.object_bytes(object_index)[begin:end]
            for number, position in enumerate(positions(shape, offsets, lengths)):
                if written[position]:
                    raise FormatError(f"the chunks of {fqn} overlap")
                written[position] = 1
                whole[position * size : (position + 1) * size] = stored[number * size : (number + 1) * size]
        return bytes(whole)

    def value(self, fqn: str) -> Any:
        """A Python object; the bytes of one that is stored as a pickle."""
        entry = self.manifest["values"][fqn]
        content = self.object_bytes(entry["object_index"])[entry["begin"] : entry["end"]]
        transforms = entry.get("transforms", [])
        if transforms not in ([], ["value.json/1"]):
            raise FormatError(f"{fqn} has transforms that are not known here: {transforms}")
        return plain(json.loads(content)) if transforms else content

    def nested(self) -> Any:
        """The state dict's form, with FQNs for its entries. Lists come as dictionaries of their indices, and keys that
        are no strings in tuples of one.
        """
        nesting, typed = self.manifest.get("nesting", {}), self.manifest.get("typed_nesting", {})
        root: dict[Any, Any] = {}
        places = [(typed.get(fqn, nesting.get(fqn, [fqn])), fqn) for fqn in [*self.tensors, *self.manifest["values"]]]
        for path, content in [*places, *((path, {}) for path in self.manifest.get("empty_mappings", []))]:
            *parents, last = [hashable(step) for step in path]
            node = root
            for step in parents:
                node = node.setdefault(step, {})
            node.setdefault(last, content)
        return root


def plain(part: Any) -> Any:
    """A value of tagged JSON. Tags of numpy and torch, and of types, come as tuples of the tag and its content."""
    if isinstance(part, list):
        return [plain(one) for one in part]
    if not isinstance(part, dict):
        return part
    if len(part) != 1:
        raise FormatError(f"{len(part)} tags in one place")
    ((tag, content),) = part.items()
    if tag in VALUES:
        return VALUES[tag](content)
    if tag in ("numpy.array", "torch.tensor", "numpy.scalar"):
        return (tag, *(hashable(one) for one in content[:-1]), base64.b64decode(content[-1], validate=True))
    if tag == "torch.Size":
        return tag, tuple(content)
    if tag in NAMED:
        return tag, content
    raise FormatError(f"the tag {tag} is not known here")


def double(text: str) -> float:
    (number,) = struct.unpack(">d", bytes.fromhex(text))
    return float(number)


def pairs(content: list[Any]) -> dict[Any, Any]:
    return {plain(key): plain(one) for key, one in content}


def moment(kind: Any, text: str, fold: int, zone: Any) -> Any:
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=plain(zone))


VALUES: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": double,
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "complex": lambda parts: complex(double(parts[0]), double(parts[1])),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "BytesIO": lambda parts: ("BytesIO", base64.b64decode(parts[0]), parts[1]),
    "ellipsis": lambda _: ...,
    "tuple": lambda parts: tuple(plain(one) for one in parts),
    "set": lambda parts: {plain(one) for one in parts},
    "frozenset": lambda parts: frozenset(plain(one) for one in parts),
    "deque": lambda parts: collections.deque([plain(one) for one in parts[0]], parts[1]),
    "range": lambda parts: range(*(plain(one) for one in parts)),
    "slice": lambda parts: slice(*(plain(one) for one in parts)),
    "dict": pairs,
    "OrderedDict": lambda content: collections.OrderedDict(pairs(content)),
    "Counter": lambda content: collections.Counter(pairs(content)),
    "defaultdict": lambda parts: ("defaultdict", parts[0], pairs(parts[1])),
    "date": dt.date.fromisoformat,
    "time": lambda parts: moment(dt.time, *parts),
    "datetime": lambda parts: moment(dt.datetime, *parts),
    "timedelta": lambda parts: dt.timedelta(days=parts[0], seconds=parts[1], microseconds=parts[2]),
    "timezone": lambda parts: dt.timezone(VALUES["timedelta"](parts[0]), *parts[1:]),
    "decimal": decimal.Decimal,
}
NAMED = frozenset({
    "pathlib.PurePosixPath", "pathlib.PosixPath", "pathlib.PureWindowsPath", "pathlib.WindowsPath", "type",
    "numpy.type", "numpy.dtype", "torch.dtype", "torch.device", "torch.layout",
})  # fmt: skip


def hashable(step: Any) -> Any:
    """A step of a path, or a key in it."""
    return tuple(hashable(one) for one in step) if isinstance(step, list) else step


def positions(shape: list[int], offsets: list[int], lengths: list[int]) -> Iterator[int]:
    """Yield the positions of a block's elements in the whole, both in row-major order."""
    if not shape:
        yield 0
        return
    inner = math.prod(shape[1:])
    for row in range(offsets[0], offsets[0] + lengths[0]):
        for position in positions(shape[1:], offsets[1:], lengths[1:]):
            yield row * inner + position


def entry_name(number: int) -> str:
    return f"manifest.{number}.json" if number else "manifest.json"


def kept(document: bytes, *, number: int) -> int:
    """The number that a fence keeps."""
    tail = TAIL.search(document)
    if tail is None or crc32c(document[: tail.start()]) != int(tail[1], 16):
        raise FormatError("wrong checksum of a fence")
    fence = json.loads(document)
    if fence["format"] != "cloudckpt-fence" or fence["version"][0] != 1:
        raise FormatError("no fence that is known here")
    keeps = fence["keeps"]
    if keeps is None:
        raise FormatError("deleted")
    if not 0 <= keeps < number:
        raise FormatError(f"a fence keeps {keeps}")
    return int(keeps)


def parsed(document: bytes) -> dict[str, Any]:
    """The manifest's members, once its checksum, format and version have been checked."""
    tail = TAIL.search(document)
    if tail is None:
        raise FormatError("no checksum")
    if crc32c(document[: tail.start()]) != int(tail[1], 16):
        raise FormatError("wrong checksum")
    manifest = json.loads(document)
    if manifest.get("format") != "cloudckpt":
        raise FormatError("another format")
    version = manifest.get("version")
    if not isinstance(version, list) or len(version) != 2 or version[0] not in (1, 2) or version[1] < 0:
        raise FormatError(f"version {version}")
    for name, kind in REQUIRED.items():
        if not isinstance(manifest.get(name), kind):
            raise FormatError(f"{name} is missing or has another type")
    return manifest


def problems_of(manifest: dict[str, Any]) -> Iterator[str]:
    """Rules 3 to 11."""
    step, objects, tensors, values = (manifest[name] for name in ("tile_bytes", "objects", "tensors", "values"))
    if step % 64 or not 4096 <= step <= 2**30:
        yield f"tile_bytes is {step}"
        return
    if manifest["world_size"] < 1 or not is_time(manifest.get("committed_at_ns", 0)):
        yield "world_size or committed_at_ns"
    if len({(stored.get("folder", ""), stored["key"]) for stored in objects}) != len(objects):
        yield "a key occurs twice"
    yield from itertools.chain.from_iterable(object_problems(stored, step) for stored in objects)
    if manifest["version"][0] == 1 and any(stored.get("folder") for stored in objects):
        yield "a folder in version 1"
    for fqn, tensor in tensors.items():
        yield from (f"{fqn}: {problem}" for problem in tensor_problems(tensor, objects))
    for fqn, value in values.items():
        if not range_is_good(value["object_index"], value["begin"], value["end"], objects):
            yield f"{fqn}: its range"
    if tensors.keys() & values.keys():
        yield "a tensor and a value have one name"
    yield from nesting_problems(manifest, {*tensors, *values})


def nesting_problems(manifest: dict[str, Any], fqns: set[str]) -> Iterator[str]:
    nesting, typed = manifest.get("nesting", {}), manifest.get("typed_nesting", {})
    if not fqns >= {*nesting, *typed}:
        yield "nesting of what is not stored"
    if not all(name is None or isinstance(name, str) for _, name in manifest.get("tuples", [])):
        yield "class of a tuple"
    tuples = [path for path, _ in manifest.get("tuples", [])]
    for path in [*nesting.values(), *typed.values(), *manifest.get("empty_mappings", []), *tuples]:
        if not path or not all(is_step(step) for step in path):
            yield f"path {path}"


def is_step(step: Any) -> bool:
    """A string, an index, or an array of one key: a scalar, or an array of scalars."""
    if not isinstance(step, list):
        return isinstance(step, str) or (type(step) is int and step >= 0)
    scalars = [one for key in step for one in (key if isinstance(key, list) else [key])]
    return len(step) == 1 and not any(isinstance(one, (list, dict)) for one in scalars)


def is_time(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX


def object_problems(stored: dict[str, Any], step: int) -> Iterator[str]:
    segments = stored["key"].split("/")
    if (
        len(stored["key"]) > 1024
        or len(segments) < 3
        or segments[0] != "data"
        or {"", ".", ".."} & set(segments)
        or any(character in "\\:" or not character.isprintable() for character in stored["key"])
    ):
        yield f"key {stored['key']!r}"
    folder = stored.get("folder", "")
    if folder in (".", "..") or any(character in "/\\:" or not character.isprintable() for character in folder):
        yield f"folder {folder!r}"
    if not 0 <= stored["size"] <= MAX:
        yield f"size {stored['size']}"
    elif len(base64_bytes(stored["crc32c"])) != -(-stored["size"] // step) * 4:
        yield f"tiles of {stored['key']}"


def base64_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise FormatError(f"{text!r} is no base64") from error


def tensor_problems(tensor: dict[str, Any], objects: list[dict[str, Any]]) -> Iterator[str]:
    size, shape = ELEMENT_BYTES.get(tensor["dtype"]), tensor["shape"]
    if size is None:
        yield "dtype"
        return
    if len(shape) > 64 or min(shape, default=0) < 0 or math.prod(shape) * size > MAX:
        yield "shape"
        return
    volume = 0
    for offsets, lengths, object_index, begin, end, *_ in tensor["chunks"]:
        volume += math.prod(lengths)
        if not len(offsets) == len(lengths) == len(shape):
            yield "dimensions of a chunk"
        elif any(o < 0 or n < 0 or o + n > extent for o, n, extent in zip(offsets, lengths, shape, strict=True)):
            yield "a chunk leaves its tensor"
        elif not range_is_good(object_index, begin, end, objects):
            yield "range of a chunk"
        elif not tensor.get("transforms") and (end - begin != math.prod(lengths) * size or begin % size):
            yield "size or alignment of a chunk"
    if volume != math.prod(shape):
        yield "volume"
    if any(overlap(one, other) for one, other in itertools.combinations(tensor["chunks"], 2)):
        yield "chunks overlap"


def overlap(one: list[Any], other: list[Any]) -> bool:
    sides = zip(one[0], one[1], other[0], other[1], strict=False)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides)


def range_is_good(object_index: int, begin: int, end: int, objects: list[dict[str, Any]]) -> bool:
    return 0 <= object_index < len(objects) and 0 <= begin <= end <= objects[object_index]["size"]


def entries_of(data: bytes) -> dict[str, dict[str, Any]]:
    """The header of a data object, with offsets from the object's beginning, and the form of the file checked."""
    (length,) = struct.unpack("<Q", data[:8])
    begin = 8 + length
    if begin % 64:
        raise FormatError("the data does not begin at a multiple of 64")
    header = json.loads(data[8:begin])
    if header.pop("__metadata__") != {"format": "pt"}:
        raise FormatError("__metadata__")
    reached = begin
    for name, entry in header.items():
        low, high = (begin + offset for offset in entry["data_offsets"])
        if low != reached:
            raise FormatError(f"{name} does not follow the entry before it")
        entry["range"], reached = (low, high), high
    if reached != len(data):
        raise FormatError("bytes after the last entry")
    return header
