"""Between the manifest and torch's `Metadata`."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from cloudckpt._flat import Nesting, from_json
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.torch_views import ItemLocations, StoredEntries

DCP_VERSION = "1.0.0"
"""The version of torch's own `Metadata`, which its planners look at."""


def metadata_of(manifest: Manifest, *, checkpoint_id: Any, load_id: str, is_lazy: bool = False) -> Metadata:
    """Torch's `Metadata` of the checkpoint; its ``storage_data`` maps each index to an `ItemLocation`.

    Takes time and memory by the number of tensors, not of chunks: both they and the locations are made when asked for.
    Where it `is_lazy`, so are the tensors' entries, and the nesting is left out: it is not for code that is not ours.
    """
    entries: Any = StoredEntries(manifest)
    return Metadata(
        state_dict_metadata=entries if is_lazy else dict(entries),
        planner_data=None if is_lazy else _nesting_of(manifest),
        storage_data=ItemLocations(manifest),
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=manifest.save_id, load_id=load_id),
        version=DCP_VERSION,
    )


def _nesting_of(manifest: Manifest) -> Nesting | None:
    if manifest.nesting is None:
        return None
    return Nesting(
        {fqn: tuple(path) for fqn, path in manifest.nesting.items()},
        typed={fqn: from_json(path) for fqn, path in (manifest.typed_nesting or {}).items()},
        empty=map(from_json, manifest.empty_mappings),
    )
