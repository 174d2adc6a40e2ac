"""PyTorch Distributed Checkpoint for object stores: atomic, verified, fast.

`save`, `async_save` and `load` take a URI; `enable` teaches torch's own calls to take one.
"""

from typing import TYPE_CHECKING

from cloudckpt import errors, telemetry
from cloudckpt._version import __version__
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ChecksumRefusedError,
    CloudckptError,
    CommitUnknownError,
    CorruptCheckpointError,
    CredentialsError,
    GarbageLeftError,
    IncompleteSaveError,
    InterruptedReadError,
    InvalidManifestError,
    InvalidOptionError,
    InvalidURIError,
    MissingDependencyError,
    NoConditionalCommitError,
    ObjectExistsError,
    ObjectNotFoundError,
    RankLostError,
    SaveCancelledError,
    SaveInFlightError,
    ShortObjectError,
    StateDictMismatchError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
    UnsafePickleError,
    UnsupportedFormatError,
    UnsupportedOperationError,
    UnsupportedValueError,
    UploadProcessError,
)
from cloudckpt.options import Options
from cloudckpt.report import Event, LoadReport, SaveProgress, SaveReport, SkippedCheckpoint, VerifyReport

if TYPE_CHECKING:
    from cloudckpt._api.saved import SavedMetadata
    from cloudckpt._background.handle import AsyncSave
    from cloudckpt._background.in_flight import close
    from cloudckpt._convert.copying import copy
    from cloudckpt._convert.exporting import export_checkpoint
    from cloudckpt._convert.importing import import_checkpoint
    from cloudckpt._convert.reports import ConversionReport, CopyReport
    from cloudckpt._enable import disable, enable
    from cloudckpt._manager.restoring import Restored
    from cloudckpt._manager.retention import RetentionReport
    from cloudckpt._manager.rule import StepInfo
    from cloudckpt._stage.stager import PinnedStager
    from cloudckpt._stage.zstandard import Zstandard
    from cloudckpt.api import async_save, load, save
    from cloudckpt.catalog import CheckpointInfo, latest, list_checkpoints
    from cloudckpt.comparison import Comparison, Difference, compare
    from cloudckpt.description import (
        CheckpointDescription,
        ObjectDescription,
        TensorDescription,
        ValueDescription,
        describe,
    )
    from cloudckpt.housekeeping import Garbage, GarbageReport, Spared, delete, gc
    from cloudckpt.manager import CheckpointManager
    from cloudckpt.newest import load_latest
    from cloudckpt.overview import CheckpointStatus, survey
    from cloudckpt.preemption import Preemption, PreemptionReport, on_sigterm
    from cloudckpt.reader import ObjectStoreReader
    from cloudckpt.verification import verify
    from cloudckpt.writer import ObjectStoreWriter

__all__ = [
    "AccessDeniedError",
    "AsyncSave",
    "BucketNotFoundError",
    "CheckpointChangedError",
    "CheckpointDescription",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointStatus",
    "ChecksumRefusedError",
    "CloudckptError",
    "CommitUnknownError",
    "Comparison",
    "ConversionReport",
    "CopyReport",
    "CorruptCheckpointError",
    "CredentialsError",
    "Difference",
    "Event",
    "Garbage",
    "GarbageLeftError",
    "GarbageReport",
    "IncompleteSaveError",
    "InterruptedReadError",
    "InvalidManifestError",
    "InvalidOptionError",
    "InvalidURIError",
    "LoadReport",
    "MissingDependencyError",
    "NoConditionalCommitError",
    "ObjectDescription",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "Options",
    "PinnedStager",
    "Preemption",
    "PreemptionReport",
    "RankLostError",
    "Restored",
    "RetentionReport",
    "SaveCancelledError",
    "SaveInFlightError",
    "SaveProgress",
    "SaveReport",
    "SavedMetadata",
    "ShortObjectError",
    "SkippedCheckpoint",
    "Spared",
    "StateDictMismatchError",
    "StepInfo",
    "StoreError",
    "StoreTimeoutError",
    "TensorDescription",
    "ThrottledError",
    "TransientStoreError",
    "UnsafePickleError",
    "UnsupportedFormatError",
    "UnsupportedOperationError",
    "UnsupportedValueError",
    "UploadProcessError",
    "ValueDescription",
    "VerifyReport",
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
    "on_sigterm",
    "save",
    "survey",
    "telemetry",
    "verify",
]

# torch takes seconds to import, which a command that lists or says how it is used need not wait for. The first of these
# names that is asked for brings all of them.
_LAZY = {
    "cloudckpt._background.handle": "AsyncSave",
    "cloudckpt._background.in_flight": "close",
    "cloudckpt._convert.copying": "copy",
    "cloudckpt._convert.exporting": "export_checkpoint",
    "cloudckpt._convert.importing": "import_checkpoint",
    "cloudckpt._convert.reports": "ConversionReport CopyReport",
    "cloudckpt._enable": "disable enable",
    "cloudckpt._api.saved": "SavedMetadata",
    "cloudckpt._stage.stager": "PinnedStager",
    "cloudckpt._stage.zstandard": "Zstandard",
    "cloudckpt.api": "async_save load save",
    "cloudckpt.catalog": "CheckpointInfo latest list_checkpoints",
    "cloudckpt.comparison": "Comparison Difference compare",
    "cloudckpt.description": "CheckpointDescription ObjectDescription TensorDescription ValueDescription describe",
    "cloudckpt.housekeeping": "Garbage GarbageReport Spared delete gc",
    "cloudckpt._manager.restoring": "Restored",
    "cloudckpt._manager.retention": "RetentionReport",
    "cloudckpt._manager.rule": "StepInfo",
    "cloudckpt.manager": "CheckpointManager",
    "cloudckpt.newest": "load_latest",
    "cloudckpt.overview": "CheckpointStatus survey",
    "cloudckpt.preemption": "Preemption PreemptionReport on_sigterm",
    "cloudckpt.reader": "ObjectStoreReader",
    "cloudckpt.verification": "verify",
    "cloudckpt.writer": "ObjectStoreWriter",
}

if not TYPE_CHECKING:  # or type checkers would believe that there is every name

    def __getattr__(name: str) -> object:
        from importlib import import_module  # noqa: PLC0415  # of no use to whoever imports this

        if not name.startswith("_"):  # else a module that is being imported, perhaps by one of these
            for module, names in _LAZY.items():
                found = vars(import_module(module))
                globals().update({each: found[each] for each in names.split()})
            if name in globals():  # perhaps as a module that the others have brought
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
