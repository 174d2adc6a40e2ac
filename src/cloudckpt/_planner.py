"""The planner that `cloudckpt.load` uses: torch's default, with errors that say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt._narrow import narrowed
from cloudckpt.errors import StateDictMismatchError

_MAX_SHOWN = 10
_MAX_COMPARED = 5000


class ExplainingLoadPlanner(DefaultLoadPlanner):
    """Raises `StateDictMismatchError` with every entry that does not fit, not only the first.

    A plan takes time by what the rank asks for, not by how many ranks saved.
    """

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._uri = uri

    def create_local_plan(self) -> LoadPlan:
        whole = self.metadata
        assert whole is not None  # noqa: S101  # set up before it plans
        try:
            self.metadata = narrowed(whole, self.state_dict)
            return super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            missing, reshaped = self._mismatches()
            if not missing and not reshaped:
                raise
            # Looking for near names takes long, so only for those that are shown.
            problems = [*reshaped, *(self._missing_text(fqn) for fqn in missing[:_MAX_SHOWN])][:_MAX_SHOWN]
            num_more = len(missing) + len(reshaped) - len(problems)
            more = f"; and {num_more} more" if num_more else ""
            raise StateDictMismatchError(
                f"the state dict does not fit the checkpoint at {self._uri}: {'; '.join(problems)}{more}. Ask only for "
                "what was saved, or pass planner=DefaultLoadPlanner(allow_partial_load=True) to leave out what is "
                "missing",
                uri=self._uri,
            ) from error
        finally:
            self.metadata = whole

    def _mismatches(self) -> tuple[list[str], list[str]]:
        """The FQNs that the checkpoint lacks, and a sentence for each that it has in another shape."""
        missing: list[str] = []
        reshaped: list[str] = []
        for fqn, value in self.state_dict.items():
            entry = self._saved.get(fqn)
            if entry is None:
                missing.append(fqn)
            elif (
                isinstance(entry, TensorStorageMetadata)
                and isinstance(value, torch.Tensor)
                and entry.size != value.size()
            ):
                reshaped.append(f"{fqn!r} was saved with shape {tuple(entry.size)}, not {tuple(value.size())}")
        return missing, reshaped

    def _missing_text(self, fqn: str) -> str:
        close = difflib.get_close_matches(fqn, list(self._saved)[:_MAX_COMPARED], n=1)
        return f"{fqn!r} is not in it" + (f" (but {close[0]!r} is)" if close else "")

    @property
    def _saved(self) -> Mapping[str, object]:
        assert self.metadata is not None  # noqa: S101  # set up before it plans
        return self.metadata.state_dict_metadata
