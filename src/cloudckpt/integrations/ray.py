"""Ray Train: a checkpoint of cloudckpt as the one that a report carries."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudckpt.errors import UnsupportedFormatError
from cloudckpt.integrations._needs import needed

with needed("ray[train]"):
    import ray.train

_FILE = "cloudckpt.json"


def report(metrics: Mapping[str, Any], uri: str) -> None:
    """``ray.train.report`` with a checkpoint that says where the real one lies, which Ray neither uploads nor removes.

    Called on all workers, after `cloudckpt.save` to `uri` has returned there, or its handle's ``result``: then what Ray
    knows of is committed.
    """
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(dict(metrics), checkpoint=None)
        return
    with tempfile.TemporaryDirectory(prefix="cloudckpt-") as directory:
        (Path(directory) / _FILE).write_text(json.dumps({"uri": uri}), encoding="utf-8")
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(directory))


def uri_of(checkpoint: ray.train.Checkpoint | None) -> str | None:
    """Where the real one lies, of ``ray.train.get_checkpoint()`` or a result's; None of None, a fresh start.

    Raises `UnsupportedFormatError` for one that `report` did not make.
    """
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        file = Path(directory) / _FILE
        if not file.exists():
            raise UnsupportedFormatError(
                f"{checkpoint} has no {_FILE}: it was not reported by cloudckpt", uri=str(checkpoint)
            )
        uri: str = json.loads(file.read_text(encoding="utf-8"))["uri"]
    return uri
