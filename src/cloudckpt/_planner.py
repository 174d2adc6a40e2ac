"""The planner that `cloudckpt.load` uses: torch's default, with errors that say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.errors import StateDictMismatchError

_MAX_SHOWN = 10


class ExplainingLoadPlanner(DefaultLoadPlanner):
    """Raises `StateDictMismatchError` with every entry that does not fit, not only the first."""

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._uri = uri

    def create_local_plan(self) -> LoadPlan:
        try:
            return super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            problems = list(self._problems())
            if not problems:
                raise
            more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
            raise StateDictMismatchError(
                f"the state dict does not fit the checkpoint at {self._uri}: "
                f"{'; '.join(problems[:_MAX_SHOWN])}{more}. Ask only for what was saved, or pass "
                "planner=DefaultLoadPlanner(allow_partial_load=True) to leave out what is missing",
                uri=self._uri,
            ) from error

    def _problems(self) -> Iterator[str]:
        assert self.metadata is not None  # noqa: S101  # set up before it plans
        saved = self.metadata.state_dict_metadata
        for fqn, value in self.state_dict.items():
            entry = saved.get(fqn)
            if entry is None:
                close = difflib.get_close_matches(fqn, list(saved), n=1)
                yield f"{fqn!r} is not in it" + (f" (but {close[0]!r} is)" if close else "")
            elif (
                isinstance(entry, TensorStorageMetadata)
                and isinstance(value, torch.Tensor)
                and entry.size != value.size()
            ):
                yield f"{fqn!r} was saved with shape {tuple(entry.size)}, not {tuple(value.size())}"
