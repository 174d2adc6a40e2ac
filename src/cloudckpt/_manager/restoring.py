"""Loading one step, or the newest that is whole, on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from cloudckpt._api.failures import causes_of
from cloudckpt._manager.steps import Steps, step_in
from cloudckpt.api import load
from cloudckpt.catalog import list_checkpoints
from cloudckpt.errors import CheckpointNotFoundError, CloudckptError
from cloudckpt.newest import Ranks, holds_checkpoint, load_newest
from cloudckpt.options import Options
from cloudckpt.report import LoadReport, SkippedCheckpoint

_log = logging.getLogger("cloudckpt")

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `CheckpointManager.restore` has loaded."""

    step: int
    uri: str
    report: LoadReport
    """Of this rank."""

    @property
    def skipped(self) -> tuple[SkippedCheckpoint, ...]:
        """The newer ones that could not be loaded, and why."""
        return self.report.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """How a manager loads."""

    steps: Steps
    options: Options
    process_group: dist.ProcessGroup | None
    no_dist: bool
    allow_pickle: bool
    verify_first: bool

    def newest(self, state_dict: dict[str, Any], planner: LoadPlanner | None) -> Restored | None:
        """Of the steps that are whole, the one that was committed last; None where there is no step at all."""
        found = load_newest(
            state_dict,
            self._root,
            self._candidates,
            planner=planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
            allow_pickle=self.allow_pickle,
            verify_first=self.verify_first,
            options=self.options,
        )
        if found is None:
            _log.info("no step is committed under %s: a fresh start", self._root)
            return None
        uri, report = found
        return Restored(step=step_at(uri), uri=uri, report=report)

    def one(self, state_dict: dict[str, Any], step: int, planner: LoadPlanner | None) -> Restored:
        """That step. Raises `CheckpointNotFoundError` with the steps that there are."""
        uri = self.steps.uri_of(step)
        try:
            report = load(
                state_dict,
                uri,
                planner=planner,
                process_group=self.process_group,
                no_dist=self.no_dist,
                allow_pickle=self.allow_pickle,
                options=self.options,
            )
        except CheckpointException as error:
            # The same on all ranks, which so all come here.
            causes = causes_of(error)
            if causes and all(isinstance(cause, CheckpointNotFoundError) for cause in causes):
                ranks = Ranks(
                    self.process_group, no_dist=self.no_dist, root=self._root, timeout_s=self.options.timeout_s
                )
                ranks.agreed("find", lambda: self._missing(step))
            raise
        assert report is not None  # noqa: S101  # our reader makes one
        return Restored(step=step, uri=uri, report=report)

    @property
    def _root(self) -> str:
        return self.steps.root.uri

    def _candidates(self) -> list[str]:
        """The newest first; on the coordinator."""
        found = [info.uri for info in self.steps.found(with_metrics=False)]
        if not found and holds_checkpoint(self._root, self.options):
            raise CheckpointNotFoundError(
                f"{self._root} is a checkpoint itself, and no steps lie under it. Give the manager the folder of all "
                "steps, or load this one with cloudckpt.load",
                uri=self._root,
            )
        if not found and (others := self._others()):
            names = ", ".join(others[:_MOST_SHOWN])
            _log.warning("no step is committed under %s, but checkpoints with other names are: %s", self._root, names)
        return found

    def _others(self) -> list[str]:
        """The names of checkpoints that are no steps: for a hint, so no failure counts."""
        try:
            return [info.name for info in list_checkpoints(self._root, options=self.options)]
        except CloudckptError:
            return []

    def _missing(self, step: int) -> None:
        steps = sorted(info.step for info in self.steps.found(with_metrics=False))
        shown = ", ".join(map(str, steps[-_MOST_SHOWN:]))
        there = f"there are the steps {'…, ' if len(steps) > _MOST_SHOWN else ''}{shown}" if steps else "there is none"
        raise CheckpointNotFoundError(
            f"step {step} is not committed under {self._root}: {there}. Ask for one of them, or for none in particular "
            "to get the newest",
            uri=self.steps.uri_of(step),
        )


def step_at(uri: str) -> int:
    """The step that is saved at `uri`."""
    step = step_in(uri.rpartition("/")[2])
    assert step is not None  # noqa: S101  # it is one that a manager has named
    return step
