"""Between the manifest and torch's `Metadata`."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

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
    nesting = manifest.nesting
    return Metadata(
        state_dict_metadata=entries if is_lazy else dict(entries),
        planner_data=None if nesting is None or is_lazy else {fqn: tuple(path) for fqn, path in nesting.items()},
        storage_data=ItemLocations(manifest),
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=manifest.save_id, load_id=load_id),
        version=DCP_VERSION,
    )
