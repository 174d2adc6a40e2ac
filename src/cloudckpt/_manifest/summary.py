"""What a manifest says of its checkpoint as a whole, without a look at each tensor and chunk."""

from __future__ import annotations

from typing import Any

import msgspec

from cloudckpt._manifest.codec import check_document, refuse
from cloudckpt._manifest.model import CommitTime, StoredObject
from cloudckpt._manifest.validate import problems_of_names, problems_of_objects
from cloudckpt.errors import InvalidManifestError


class _Unseen(msgspec.Struct, frozen=True, gc=False):
    """What is skipped."""


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
    metadata: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Of all data objects."""
        return sum(stored.size for stored in self.objects)


_DECODER = msgspec.json.Decoder(Summary)  # made on import: see `codec`


def summary_of(document: bytes, *, uri: str) -> Summary:
    """Of a document whose checksum is right. Of what it says, only the tensors and their chunks are not checked, which
    would take many times as long: nothing is read by it.

    Raises what `decode` raises.
    """
    check_document(document, uri=uri)
    try:
        summary = _DECODER.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidManifestError(f"the manifest of {uri} is not valid: {error}", uri=uri) from error
    of_objects = problems_of_objects(summary.objects, tile_bytes=summary.tile_bytes, world_size=summary.world_size)
    refuse(of_objects or problems_of_names(summary.tensors, summary.values), uri=uri)
    return summary
