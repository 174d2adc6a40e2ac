"""Fences: entries of a checkpoint's log that are no commits, and that keep their number from ever becoming one."""

from __future__ import annotations

import re
import secrets

import msgspec
from awscrt.checksums import crc32c

from cloudckpt._version import __version__
from cloudckpt.errors import InvalidManifestError, UnsupportedFormatError

MAX_FENCE_BYTES = 128
"""Any manifest is longer, so that a listing tells the two apart."""
_FORMAT = "cloudckpt-fence"
_MAJOR = 1
_BEGINNING = b'{"format":"%s"' % _FORMAT.encode()
_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"}\n?\Z')
_ID = re.compile(r"[0-9a-f]{12}")


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """Says which manifest counts, without being one."""

    format: str
    version: tuple[int, int]
    id: str
    keeps: int | None
    """The number of the manifest that counts; None where the checkpoint was deleted, or never was."""


class _FenceHead(msgspec.Struct):
    version: tuple[int, int]


# Made on import, by one thread: two that have msgspec look into one type for the first time can crash the process.
_FENCE_DECODER = msgspec.json.Decoder(Fence)
_HEAD_DECODER = msgspec.json.Decoder(_FenceHead)


def new_fence(*, keeps: int | None) -> Fence:
    """Return a fence with an id of its own, by which its writer recognises it."""
    return Fence(format=_FORMAT, version=(_MAJOR, 0), id=_new_id(), keeps=keeps)


def encode_fence(fence: Fence) -> bytes:
    """The document: compact JSON whose last member is the CRC32C of all that stands before it."""
    body = msgspec.json.encode(fence)[:-1]
    return body + b',"crc32c":"%08x"}' % crc32c(body)


def is_fence(document: bytes) -> bool:
    """Return whether the document begins as a fence does. `decode_fence` checks that it is whole."""
    return document.startswith(_BEGINNING)


def decode_fence(document: bytes, *, number: int, uri: str) -> Fence:
    """The fence in `document`, which is the entry with that number.

    Raises `InvalidManifestError` where it is damaged, and `UnsupportedFormatError` for a newer major version.
    """
    tail = _TAIL.search(document)
    if tail is None or len(document) > MAX_FENCE_BYTES:
        raise _invalid(uri, f"its {len(document)} bytes do not end in a checksum, or are too many")
    if int(tail.group(1), 16) != (actual := crc32c(document[: tail.start()])):
        raise _invalid(uri, f"its checksum is {actual:08x}, but it was written as {tail.group(1).decode()}")
    try:
        major = _HEAD_DECODER.decode(document).version[0]
        if major > _MAJOR:
            raise UnsupportedFormatError(
                f"{uri} was written in version {major} of the format of fences; this cloudckpt, {__version__}, reads "
                f"up to {_MAJOR}.x. Upgrade cloudckpt to load the checkpoint",
                uri=uri,
            )
        fence = _FENCE_DECODER.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(uri, str(error)) from error
    if fence.version < (1, 0) or fence.version[1] < 0 or not _ID.fullmatch(fence.id):
        raise _invalid(uri, f"it has the version {fence.version} and the id {fence.id!r}")
    if fence.keeps is not None and not 0 <= fence.keeps < number:
        raise _invalid(uri, f"it keeps the number {fence.keeps}, which does not come before its own")
    return fence


def _new_id() -> str:
    return secrets.token_hex(6)


def _invalid(uri: str, why: str) -> InvalidManifestError:
    return InvalidManifestError(
        f"{uri} is a damaged fence: {why}. The current checkpoint is unknown: load another one, or restore "
        "the object from a backup",
        uri=uri,
    )
