"""What a manager has saved last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloudckpt._api.saved import SavedMetadata
from cloudckpt._background.handle import AsyncSave


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The last save, as `save` has answered it; or without an answer, what was restored."""

    step: int
    numbers: Mapping[str, float | None] | None = None
    answer: AsyncSave | SavedMetadata | None = None

    @property
    def has_failed(self) -> bool:
        """Once it has ended, for which this waits: all ranks come to the same conclusion then."""
        if not isinstance(self.answer, AsyncSave):
            return False
        self.answer.committed.wait()
        return self.answer.committed.failure() is not None
