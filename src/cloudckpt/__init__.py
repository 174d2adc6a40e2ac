"""PyTorch Distributed Checkpoint for object stores: atomic, verified, fast.

`save`, `async_save` and `load` take a URI; `enable` teaches torch's own calls to take one.
"""

from cloudckpt import errors
from cloudckpt._async import AsyncSave
from cloudckpt._enable import disable, enable
from cloudckpt._version import __version__
from cloudckpt.api import SavedMetadata, async_save, load, save
from cloudckpt.catalog import CheckpointInfo, latest, list_checkpoints
from cloudckpt.errors import *  # noqa: F403  # its __all__ is sorted and tested
from cloudckpt.options import Options
from cloudckpt.reader import ObjectStoreReader
from cloudckpt.report import Event, LoadReport, SaveReport
from cloudckpt.writer import ObjectStoreWriter

__all__ = sorted(  # noqa: PLE0605  # a sorted list of str, as a test checks
    [
        "AsyncSave",
        "CheckpointInfo",
        "Event",
        "LoadReport",
        "ObjectStoreReader",
        "ObjectStoreWriter",
        "Options",
        "SaveReport",
        "SavedMetadata",
        "__version__",
        "async_save",
        "disable",
        "enable",
        "errors",
        "latest",
        "list_checkpoints",
        "load",
        "save",
        *errors.__all__,
    ]
)
