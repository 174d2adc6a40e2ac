"""What may lie at a place after saves that died, and that gc removes exactly the rest.

It is listed by `Place`, and manifests are read as JSON: no code of cloudckpt's judges it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.e2e.places import LocalPlace, Place

import cloudckpt
from cloudckpt.types import GarbageReport

MAX_FENCE_BYTES = 128


def check_gc(place: Place, *, has_checkpoint: bool, must_find: bool = False) -> GarbageReport:
    """It finds exactly the rest, says so, removes it, and then finds no more; what the dry run reported."""
    left, left_uploads = frozenset(place.keys()), place.num_unfinished_uploads()
    assert left or left_uploads or not must_find
    found = cloudckpt.gc(place.root, older_than=0)
    assert (frozenset(place.keys()), place.num_unfinished_uploads()) == (left, left_uploads)
    removed = cloudckpt.gc(place.root, older_than=0, dry_run=False)
    assert (removed.keys, removed.uploads, removed.num_bytes) == (found.keys, found.uploads, found.num_bytes)
    now = assert_nothing_needless(place, num_manifests=int(has_checkpoint))
    gone = left - now
    assert set(removed.keys) == {key for key in gone if not _is_part(key)}
    had_parts = bool(left_uploads or any(map(_is_part, gone)))
    # Who dies before the first file of an upload to a path leaves an empty hidden folder.
    assert bool(removed.num_uploads) == had_parts or (isinstance(place, LocalPlace) and not had_parts)
    if left_uploads:
        assert removed.num_uploads == left_uploads
    cloudckpt.gc(place.root, older_than=0, dry_run=False)
    again = assert_nothing_needless(place, num_manifests=int(has_checkpoint))
    assert {key for key in again if "/data/" in key} == {key for key in now if "/data/" in key}
    return found


def assert_nothing_needless(place: Place, *, num_manifests: int) -> frozenset[str]:
    """What lies there: manifests, whatever they name, and at most one fence."""
    keys = frozenset(place.keys())
    contents = {key: place.read(key) for key in place.manifest_keys()}
    manifests = {key: content for key, content in contents.items() if len(content) > MAX_FENCE_BYTES}
    assert len(manifests) == num_manifests
    assert len(contents) - len(manifests) <= 1
    named = {
        f"{key.rpartition('/')[0]}/{name}"
        for key, content in manifests.items()
        for name in _data_keys_in(json.loads(content))
    }
    assert keys == contents.keys() | named
    assert place.num_unfinished_uploads() == 0
    if isinstance(place, LocalPlace):
        assert list(place.directory.rglob(".cloudckpt-*")) == []  # folders, too
    return keys


def _is_part(key: str) -> bool:
    """Of an unfinished upload: a file of a path's, or an object of GCS's."""
    return "/.cloudckpt-tmp." in key or key.endswith(".~part")


def _data_keys_in(document: Any) -> set[str]:
    """Every string of the manifest that is a data object's key, wherever it stands."""
    if isinstance(document, Mapping):
        document = [*document.keys(), *document.values()]
    if isinstance(document, list):
        return {key for value in document for key in _data_keys_in(value)}
    return {document} if isinstance(document, str) and document.startswith("data/") else set()
