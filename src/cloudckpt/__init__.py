"""PyTorch Distributed Checkpoint for object stores: atomic, verified, fast.

`save`, `async_save` and `load` take a URI; `enable` teaches torch's own calls to take one.
"""

from cloudckpt import errors
from cloudckpt._async import AsyncSave
from cloudckpt._background.in_flight import close
from cloudckpt._enable import disable, enable
from cloudckpt._saved import SavedMetadata
from cloudckpt._stage.stager import PinnedStager
from cloudckpt._version import __version__
from cloudckpt.api import async_save, load, save
from cloudckpt.catalog import CheckpointInfo, latest, list_checkpoints
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
from cloudckpt.housekeeping import Garbage, GarbageReport, Spared, delete, gc
from cloudckpt.newest import load_latest
from cloudckpt.options import Options
from cloudckpt.preemption import Preemption, PreemptionReport, on_sigterm
from cloudckpt.reader import ObjectStoreReader
from cloudckpt.report import Event, LoadReport, SaveProgress, SaveReport, SkippedCheckpoint, VerifyReport
from cloudckpt.verification import verify
from cloudckpt.writer import ObjectStoreWriter

__all__ = [
    "AccessDeniedError",
    "AsyncSave",
    "BucketNotFoundError",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "ChecksumRefusedError",
    "CloudckptError",
    "CommitUnknownError",
    "CorruptCheckpointError",
    "CredentialsError",
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
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "Options",
    "PinnedStager",
    "Preemption",
    "PreemptionReport",
    "RankLostError",
    "SaveCancelledError",
    "SaveInFlightError",
    "SaveProgress",
    "SaveReport",
    "SavedMetadata",
    "ShortObjectError",
    "SkippedCheckpoint",
    "Spared",
    "StateDictMismatchError",
    "StoreError",
    "StoreTimeoutError",
    "ThrottledError",
    "TransientStoreError",
    "UnsafePickleError",
    "UnsupportedFormatError",
    "UnsupportedOperationError",
    "UnsupportedValueError",
    "UploadProcessError",
    "VerifyReport",
    "__version__",
    "async_save",
    "close",
    "delete",
    "disable",
    "enable",
    "errors",
    "gc",
    "latest",
    "list_checkpoints",
    "load",
    "load_latest",
    "on_sigterm",
    "save",
    "verify",
]
