"""Manifest to bytes and back, with a checksum of the document in its own tail."""

from __future__ import annotations

import base64
import re
import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from awscrt.checksums import crc32c

from cloudckpt._messages import join_first
from cloudckpt._version import __version__
from cloudckpt.errors import InvalidManifestError, UnsupportedFormatError
from cloudckpt.format.model import FORMAT_NAME, REFERENCES_VERSION, CommitTime, Manifest, StoredObject
from cloudckpt.format.validation import find_name_problems, find_object_problems, find_problems

_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"}\n?\Z')
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are not of the type."""
_T = TypeVar("_T")
_TAIL_BYTES = len(b',"crc32c":"00000000"}\n')
# Made on import, by one thread: two that have msgspec look into one type for the first time can crash the process.
_MANIFEST_DECODER = msgspec.json.Decoder(Manifest)


def pack_tiles(values: Sequence[int]) -> str:
    """Return CRC32C values as the manifest holds them."""
    words = array("I", values)
    if sys.byteorder == "big":
        words.byteswap()
    return base64.b64encode(words.tobytes()).decode("ascii")


def unpack_tiles(text: str) -> array[int]:
    """Reverse `pack_tiles`. Raise `ValueError` if `text` is not such a list."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) % 4:
        raise ValueError("not a whole number of CRC32C values")
    words = array("I", raw)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def encode(manifest: Manifest) -> bytes:
    """Return the document: compact JSON whose last member is the CRC32C of all before it."""
    return add_checksum(msgspec.json.encode(manifest))


def add_checksum(document: bytes) -> bytes:
    """Add one member at the end of compact JSON: the CRC32C of all before it."""
    document = document[:-1]  # frees the memory of the whole document
    return document + b',"crc32c":"%08x"}' % crc32c(document)


def find_checksums(document: bytes) -> tuple[int, int] | None:
    """Return the CRC32C that `add_checksum` has added, and the CRC32C of the content; None if no checksum was added."""
    tail = _TAIL.search(document, max(0, len(document) - _TAIL_BYTES))
    return (int(tail[1], 16), crc32c(document[: tail.start()])) if tail else None


def decode(document: bytes, *, uri: str) -> Manifest:
    """Return the manifest in `document`, checked in every respect that the rest of cloudckpt relies on.

    Raises `InvalidManifestError` for anything that is damaged, inconsistent or not a manifest, and
    `UnsupportedFormatError` for a newer major version of the format.
    """
    manifest = _decode_with(_MANIFEST_DECODER, document, uri=uri)
    raise_problems(find_problems(manifest), uri=uri)
    return manifest


def raise_problems(problems: Sequence[str], *, uri: str) -> None:
    """Raise `InvalidManifestError` if there are `problems`."""
    if problems:
        shown = join_first(problems)
        raise InvalidManifestError(f"the manifest of {uri} contradicts itself: {shown}", uri=uri, problems=problems)


def _decode_with(decoder: msgspec.json.Decoder[_T], document: bytes, *, uri: str) -> _T:
    """Decode a document that is whole, a manifest, and of a known version. Raises what `decode` raises."""
    checksums = find_checksums(document)
    if checksums is None:
        raise _foreign_error(document, uri)
    recorded, actual = checksums
    if recorded != actual:
        raise InvalidManifestError(
            f"the manifest of {uri} is damaged: its checksum is {actual:08x}, but it was written as {recorded:08x}. "
            "Load an older checkpoint, or restore the manifest from a backup",
            uri=uri,
        )
    _check_version(_probe(document), uri)
    try:
        return decoder.decode(document)
    except UNDECODABLE as error:
        raise InvalidManifestError(f"the manifest of {uri} is not valid: {error}", uri=uri) from error


class _ManifestHead(msgspec.Struct):
    format: Any = None
    version: Any = None
    software: Any = None

    @property
    def writer(self) -> str:
        """Words about the version of cloudckpt that wrote it, if it has one."""
        version = self.software.get("cloudckpt") if isinstance(self.software, dict) else None
        return f" by cloudckpt {version:.40}" if isinstance(version, str) else ""


_HEAD_DECODER = msgspec.json.Decoder(_ManifestHead)  # made on import, too


def _probe(document: bytes) -> _ManifestHead | None:
    try:
        return _HEAD_DECODER.decode(document)
    except UNDECODABLE:
        return None


def _check_version(head: _ManifestHead | None, uri: str) -> None:
    if head is None or head.format != FORMAT_NAME:
        raise InvalidManifestError(
            f"{uri} holds a manifest.json that another program wrote, not a cloudckpt checkpoint", uri=uri
        )
    version = head.version
    is_version = isinstance(version, list) and [type(number) for number in version] == [int, int]
    if not is_version or not (version[0] >= 1 and version[1] >= 0):
        raise InvalidManifestError(f"the manifest of {uri} has no usable version: {version!r:.80}", uri=uri)
    if version[0] > REFERENCES_VERSION[0]:
        raise UnsupportedFormatError(
            f"{uri} was written{head.writer} in version {version[0]}.{version[1]} of the format; this cloudckpt, "
            f"{__version__}, reads up to {REFERENCES_VERSION[0]}.x. Upgrade cloudckpt to load it",
            uri=uri,
        )


def _foreign_error(document: bytes, uri: str) -> InvalidManifestError:
    """Return why a document without cloudckpt's checksum at its end is not a manifest that can be read."""
    head = _probe(document)
    if head is not None:
        _check_version(head, uri)
    if head is None and document.lstrip()[:1] != b"{":
        return InvalidManifestError(
            f"{uri} is not a cloudckpt manifest: its {len(document)} bytes are not JSON. Another program wrote it, "
            "or it was damaged",
            uri=uri,
        )
    return InvalidManifestError(
        f"the manifest of {uri} is truncated: its {len(document)} bytes do not end in a checksum. "
        "Load an older checkpoint, or restore the manifest from a backup",
        uri=uri,
    )


class _Unseen(msgspec.Struct, frozen=True, gc=False):
    """A value that the decoder skips."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a `Manifest`."""

    attempt: str
    created_at: str
    committed_at_ns: CommitTime | None = None
    world_size: int
    software: dict[str, str]
    tile_bytes: int
    objects: list[StoredObject]
    tensors: dict[str, _Unseen]
    values: dict[str, _Unseen]
    save_id: str | None = None
    metadata: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """The size of all data objects."""
        return sum(stored.size for stored in self.objects)


_SUMMARY_DECODER = msgspec.json.Decoder(Summary)  # made on import


def decode_summary(document: bytes, *, uri: str) -> Summary:
    """Decode a summary of a manifest. Its tensors and chunks are not checked, which would take many times as long.

    Raises what `decode` raises.
    """
    summary = _decode_with(_SUMMARY_DECODER, document, uri=uri)
    of_objects = find_object_problems(summary.objects, tile_bytes=summary.tile_bytes, world_size=summary.world_size)
    raise_problems(of_objects or find_name_problems(summary.tensors, summary.values), uri=uri)
    return summary
