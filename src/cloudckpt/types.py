"""The classes of arguments and results of calls, for annotations and ``isinstance``."""

from typing import TYPE_CHECKING

from cloudckpt._lazy import lazy_names
from cloudckpt.events import Event
from cloudckpt.report import LoadReport, SaveProgress, SaveReport, SkippedCheckpoint, VerifyReport

if TYPE_CHECKING:
    from cloudckpt.background.handle import AsyncSave
    from cloudckpt.convert.transfer import ConversionReport, CopyReport, MergeReport
    from cloudckpt.dcp.save_and_load import SavedMetadata
    from cloudckpt.inspect.catalog import CheckpointInfo
    from cloudckpt.inspect.comparison import Comparison, Difference
    from cloudckpt.inspect.description import (
        CheckpointDescription,
        ObjectDescription,
        TensorDescription,
        ValueDescription,
        WrapperDescription,
    )
    from cloudckpt.manager.drain import DrainReport
    from cloudckpt.manager.policies import SaveFailure
    from cloudckpt.manager.preemption import Preemption, PreemptionReport
    from cloudckpt.manager.restore import Restored
    from cloudckpt.manager.retention import RetentionReport
    from cloudckpt.manager.steps import StepInfo
    from cloudckpt.publication.publisher import PublishReport
    from cloudckpt.publication.pull import PullReport
    from cloudckpt.removal import Garbage, GarbageReport, KeptObject

__all__ = [
    "AsyncSave",
    "CheckpointDescription",
    "CheckpointInfo",
    "Comparison",
    "ConversionReport",
    "CopyReport",
    "Difference",
    "DrainReport",
    "Event",
    "Garbage",
    "GarbageReport",
    "KeptObject",
    "LoadReport",
    "MergeReport",
    "ObjectDescription",
    "Preemption",
    "PreemptionReport",
    "PublishReport",
    "PullReport",
    "Restored",
    "RetentionReport",
    "SaveFailure",
    "SaveProgress",
    "SaveReport",
    "SavedMetadata",
    "SkippedCheckpoint",
    "StepInfo",
    "TensorDescription",
    "ValueDescription",
    "VerifyReport",
    "WrapperDescription",
]

_LAZY = {
    "cloudckpt.background.handle": "AsyncSave",
    "cloudckpt.convert.transfer": "ConversionReport CopyReport MergeReport",
    "cloudckpt.dcp.save_and_load": "SavedMetadata",
    "cloudckpt.inspect.catalog": "CheckpointInfo",
    "cloudckpt.inspect.comparison": "Comparison Difference",
    "cloudckpt.inspect.description": "CheckpointDescription ObjectDescription TensorDescription "
    "ValueDescription WrapperDescription",
    "cloudckpt.removal": "Garbage GarbageReport KeptObject",
    "cloudckpt.manager.drain": "DrainReport",
    "cloudckpt.manager.policies": "SaveFailure",
    "cloudckpt.manager.preemption": "Preemption PreemptionReport",
    "cloudckpt.manager.restore": "Restored",
    "cloudckpt.manager.retention": "RetentionReport",
    "cloudckpt.manager.steps": "StepInfo",
    "cloudckpt.publication.publisher": "PublishReport",
    "cloudckpt.publication.pull": "PullReport",
}

if not TYPE_CHECKING:  # a type checker would take it that every name exists
    __getattr__, __dir__ = lazy_names(__name__, _LAZY)
