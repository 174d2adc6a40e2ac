"""PyTorch Distributed Checkpoint for object stores: atomic, verified, fast.

`save`, `async_save` and `load` take a URI; `enable` teaches torch's own calls to take one. Classes of results are in
`cloudckpt.types`, all errors in `cloudckpt.errors`.
"""

from typing import TYPE_CHECKING

from cloudckpt import errors, telemetry, types
from cloudckpt._lazy import lazy_names
from cloudckpt._version import __version__
from cloudckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudckptError,
    CommitUnknownError,
    CorruptCheckpointError,
    RankLostError,
)
from cloudckpt.events import Event
from cloudckpt.options import AdvancedOptions, Options
from cloudckpt.report import LoadReport, SaveReport

if TYPE_CHECKING:
    from cloudckpt.api import async_save, load, save
    from cloudckpt.background.handle import AsyncSave
    from cloudckpt.background.in_flight import close
    from cloudckpt.background.stager import PinnedStager
    from cloudckpt.convert.copying import copy
    from cloudckpt.convert.exports import export_checkpoint
    from cloudckpt.convert.imports import import_checkpoint
    from cloudckpt.convert.merging import merge
    from cloudckpt.convert.state_dicts import read
    from cloudckpt.dcp.enable import disable, enable
    from cloudckpt.dcp.storage_reader import ObjectStoreReader
    from cloudckpt.dcp.storage_writer import ObjectStoreWriter
    from cloudckpt.inspect.catalog import latest, list_checkpoints
    from cloudckpt.inspect.comparison import compare
    from cloudckpt.inspect.description import describe
    from cloudckpt.inspect.verification import verify
    from cloudckpt.manager.candidates import load_latest
    from cloudckpt.manager.checkpoint_manager import CheckpointManager
    from cloudckpt.manager.preemption import Preemption, on_sigterm
    from cloudckpt.publication.publisher import Publisher
    from cloudckpt.publication.pull import pull
    from cloudckpt.removal import delete, gc
    from cloudckpt.tensors.extensions import Zstandard

__all__ = [
    "AdvancedOptions",
    "AsyncSave",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CloudckptError",
    "CommitUnknownError",
    "CorruptCheckpointError",
    "Event",
    "LoadReport",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "Options",
    "PinnedStager",
    "Preemption",
    "Publisher",
    "RankLostError",
    "SaveReport",
    "Zstandard",
    "__version__",
    "async_save",
    "close",
    "compare",
    "copy",
    "delete",
    "describe",
    "disable",
    "enable",
    "errors",
    "export_checkpoint",
    "gc",
    "import_checkpoint",
    "latest",
    "list_checkpoints",
    "load",
    "load_latest",
    "merge",
    "on_sigterm",
    "pull",
    "read",
    "save",
    "telemetry",
    "types",
    "verify",
]

_LAZY = {
    "cloudckpt.api": "async_save load save",
    "cloudckpt.background.handle": "AsyncSave",
    "cloudckpt.background.in_flight": "close",
    "cloudckpt.convert.copying": "copy",
    "cloudckpt.convert.exports": "export_checkpoint",
    "cloudckpt.convert.imports": "import_checkpoint",
    "cloudckpt.convert.merging": "merge",
    "cloudckpt.convert.state_dicts": "read",
    "cloudckpt.dcp.enable": "disable enable",
    "cloudckpt.dcp.storage_reader": "ObjectStoreReader",
    "cloudckpt.dcp.storage_writer": "ObjectStoreWriter",
    "cloudckpt.inspect.catalog": "latest list_checkpoints",
    "cloudckpt.inspect.comparison": "compare",
    "cloudckpt.inspect.description": "describe",
    "cloudckpt.removal": "delete gc",
    "cloudckpt.inspect.verification": "verify",
    "cloudckpt.manager.checkpoint_manager": "CheckpointManager",
    "cloudckpt.manager.candidates": "load_latest",
    "cloudckpt.manager.preemption": "Preemption on_sigterm",
    "cloudckpt.background.stager": "PinnedStager",
    "cloudckpt.publication.publisher": "Publisher",
    "cloudckpt.publication.pull": "pull",
    "cloudckpt.tensors.extensions": "Zstandard",
}

if not TYPE_CHECKING:  # a type checker would take it that every name exists
    __getattr__, __dir__ = lazy_names(__name__, _LAZY)
