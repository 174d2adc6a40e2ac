"""What a manifest says of its checkpoint as a whole, without a look at each tensor and chunk."""

from __future__ import annotations

from typing import Any

import msgspec

from cloudckpt._manifest.codec import check_document
from cloudckpt.errors import InvalidManifestError


class SummarizedObject(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One data object."""

    key: str
    size: int


class _Unseen(msgspec.Struct, frozen=True, gc=False):
    """What is skipped."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a `Manifest`."""

    attempt: str
    created_at: str
    world_size: int
    software: dict[str, str]
    objects: list[SummarizedObject]
    tensors: dict[str, _Unseen]
    values: dict[str, _Unseen]
    metadata: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Of all data objects."""
        return sum(stored.size for stored in self.objects)


_DECODER = msgspec.json.Decoder(Summary)  # made on import: see `codec`


def summary_of(document: bytes, *, uri: str) -> Summary:
    """Of a document whose checksum is right. What it says is not checked against itself: nothing is read by it.

    Raises what `decode` raises.
    """
    check_document(document, uri=uri)
    try:
        return _DECODER.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidManifestError(f"the manifest of {uri} is not valid: {error}", uri=uri) from error
