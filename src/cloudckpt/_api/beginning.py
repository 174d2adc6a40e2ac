"""What saves and loads have in common before they begin."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from cloudckpt._ranks.company import in_company
from cloudckpt._uri import redacted
from cloudckpt.errors import InvalidURIError
from cloudckpt.reader import ObjectStoreReader
from cloudckpt.writer import ObjectStoreWriter


def in_company_of(
    storage: StorageWriter | StorageReader, process_group: dist.ProcessGroup | None, *, doing: str, alone: bool
) -> AbstractContextManager[dist.ProcessGroup | None]:
    """The process group for DCP's call; where the storage is ours, none of its ranks waits for one that is lost."""
    if alone or not isinstance(storage, (ObjectStoreWriter, ObjectStoreReader)):
        return nullcontext(process_group)
    return in_company(process_group, doing=doing, uri=storage.checkpoint_id, timeout_s=storage.timeout_s)


def require_state_dict(state_dict: object, *, doing: str) -> None:
    """Raise ``TypeError`` for what is no state dict, such as a module."""
    kind = MutableMapping if doing == "loading" else Mapping
    if not isinstance(state_dict, kind):
        hint = " Pass {'model': model}, or model.state_dict()" if hasattr(state_dict, "state_dict") else ""
        raise TypeError(f"{doing} takes a state dict, which is a dict, and not a {type(state_dict).__name__}.{hint}")


def location_of(
    uri: str | os.PathLike[str] | None, checkpoint_id: str | os.PathLike[str] | None
) -> str | os.PathLike[str]:
    if uri is not None and checkpoint_id is not None and uri != checkpoint_id:
        raise InvalidURIError(
            "uri and checkpoint_id are two names for one thing, but differ: "
            f"{redacted(uri)!r}, {redacted(checkpoint_id)!r}"
        )
    chosen = uri if uri is not None else checkpoint_id
    if chosen is None:
        raise InvalidURIError("no location was given: pass a URI such as 's3://bucket/run/step-100', or a path")
    return chosen
