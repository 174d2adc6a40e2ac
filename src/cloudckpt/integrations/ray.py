"""Ray Train: reports that refer to a checkpoint of cloudckpt."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudckpt.errors import UnsupportedFormatError
from cloudckpt.integrations._requirements import require

with require("ray[train]"):
    import ray.train

_FILE = "cloudckpt.json"


def report(metrics: Mapping[str, Any], uri: str) -> None:
    """Call ``ray.train.report`` with a small checkpoint that contains a URI. Ray does not copy or delete the real one.

    Call it on all workers, after `cloudckpt.save` or the ``result`` of its handle has returned on each, so that every
    checkpoint that Ray knows is committed.

    Args:
        metrics: See ``ray.train.report``.
        uri: Place of the saved checkpoint.

    Example::

        report({"step": step}, manager.uri_of(step))  # instead of ray.train.report; on all workers

    """
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(dict(metrics), checkpoint=None)
        return
    with tempfile.TemporaryDirectory(prefix="cloudckpt-") as directory:
        (Path(directory) / _FILE).write_text(json.dumps({"uri": uri}), encoding="utf-8")
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(directory))


def get_uri(checkpoint: ray.train.Checkpoint | None) -> str | None:
    """Return the URI in a checkpoint of `report`.

    Args:
        checkpoint: Ray's checkpoint, such as ``ray.train.get_checkpoint()``.

    Returns:
        The URI. None if `checkpoint` is None.

    Raises:
        UnsupportedFormatError: `report` did not make the checkpoint.

    """
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        file = Path(directory) / _FILE
        if not file.exists():
            raise UnsupportedFormatError(
                f"{checkpoint} has no {_FILE}, so cloudckpt.integrations.ray.report did not create it. Use the "
                "checkpoint with Ray's own functions",
                uri=str(checkpoint),
            )
        uri: str = json.loads(file.read_text(encoding="utf-8"))["uri"]
    return uri
