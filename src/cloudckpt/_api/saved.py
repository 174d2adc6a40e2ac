"""What a save returns."""

from __future__ import annotations

import dataclasses

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.report import SaveReport


@dataclasses.dataclass
class SavedMetadata(Metadata):
    """torch's `Metadata` of a checkpoint that was saved, with this rank's report."""

    report: SaveReport | None = None
