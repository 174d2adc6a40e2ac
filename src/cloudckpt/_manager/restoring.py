"""Loading one step, or the newest that is whole, on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from cloudckpt._api.failures import causes_of
from cloudckpt._manager.rule import OnDamaged
from cloudckpt._manager.steps import Steps, step_at
from cloudckpt.api import load
from cloudckpt.catalog import list_checkpoints
from cloudckpt.errors import CheckpointNotFoundError, CloudckptError, CorruptCheckpointError
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
    report: LoadReport | None
    """Of this rank; None of a checkpoint of torch's own writer, whose reader makes none."""

    @property
    def skipped(self) -> tuple[SkippedCheckpoint, ...]:
        """The newer ones that could not be loaded, and why."""
        return () if self.report is None else self.report.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """How a manager loads."""

    steps: Steps
    options: Options
    process_group: dist.ProcessGroup | None
    no_dist: bool
    allow_pickle: bool
    verify_first: bool
    on_damaged: OnDamaged
    note: Callable[[str], None]
    """Is told the URI of each checkpoint that is damaged, on all ranks."""

    def newest(self, state_dict: dict[str, Any], planner: LoadPlanner | None) -> Restored | None:
        """Of the steps that are whole, the one that was committed last; None where there is no step at all.

        Raises `CorruptCheckpointError` for the first one that is not, where that is asked for.
        """
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
            on_skip=self._pass_over,
        )
        if found is None:
            _log.info("no step is committed under %s: a fresh start", self._root)
            return None
        uri, report = found
        return Restored(step=step_at(uri), uri=uri, report=report)

    def one(self, state_dict: dict[str, Any], step: int, planner: LoadPlanner | None) -> Restored:
        """That step. Raises `CheckpointNotFoundError` with the steps that there are."""
        uri = self._ranks.agreed("find", lambda: self.steps.latest_uri_of(step))
        try:
            report: LoadReport | None = load(
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
                self._ranks.agreed("find", lambda: self._missing(step))
            if isinstance(error, CorruptCheckpointError):
                self.note(uri)
            raise
        return Restored(step=step, uri=uri, report=report)

    @property
    def _root(self) -> str:
        return self.steps.root.uri

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.process_group, no_dist=self.no_dist, root=self._root, timeout_s=self.options.timeout_s)

    def _pass_over(self, one: SkippedCheckpoint) -> None:
        if one.is_gone:
            return
        self.note(one.uri)
        if self.on_damaged == "raise":
            raise self._ranks.failure(
                CorruptCheckpointError(
                    f"the newest step under {self._root} is damaged, and this manager's on_damaged='raise' lets it go "
                    f"back to none before it: {one.why}. Restore an older one with restore(state_dict, step=…), or "
                    "pass over the damaged ones with on_damaged='skip'",
                    uri=one.uri,
                )
            )

    def _candidates(self) -> list[str]:
        """The newest first; on the coordinator."""
        found = [info.uri for info in self.steps.found(with_metrics=False)]
        if not found and holds_checkpoint(self._root, self.options):
            raise CheckpointNotFoundError(
                f"{self._root} is a checkpoint itself, and no steps lie under it. Give the manager the folder of all "
                "steps, or load this one with cloudckpt.load",
                uri=self._root,
            )
        if not found and (foreign := self.steps.of_torch()):
            raise CheckpointNotFoundError(
                f"no step is committed under {self._root}, but torch's own writer has saved the steps "
                f"{_shown(foreign)}. Import them with cloudckpt.import_checkpoint(…, format='dcp'); or load one with "
                "restore(state_dict, step=…), by a manager with allow_pickle=True, if you trust who wrote it; or give "
                "a run that begins anew another root",
                uri=self._root,
            )
        if not found and (in_other_form := self.steps.in_other_form()):
            raise self._in_other_form(in_other_form)
        if not found and (others := self._others()):
            names = ", ".join(others[:_MOST_SHOWN])
            _log.warning("no step is committed under %s, but checkpoints with other names are: %s", self._root, names)
        return found

    def _in_other_form(self, found: dict[int, int]) -> CheckpointNotFoundError:
        """The error that names the highest of these steps, and the others of its form."""
        num_ranks = found[max(found)]
        steps = _shown(sorted(step for step, other in found.items() if other == num_ranks))
        ranks = f"use_collectives=False on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        by = f"a manager with {ranks if num_ranks else 'use_collectives=True'}"
        return CheckpointNotFoundError(
            f"no step that this manager could load is committed under {self._root}, but {by} has saved the steps "
            f"{steps}. Restore them in the same way; or delete them (cloudckpt rm) if they are of a save that not all "
            "ranks ended; or give a run that begins anew another root",
            uri=self._root,
        )

    def _others(self) -> list[str]:
        """The names of checkpoints that are no steps: for a hint, so no failure counts."""
        try:
            return [info.name for info in list_checkpoints(self._root, options=self.options)]
        except CloudckptError:
            return []

    def _missing(self, step: int) -> None:
        steps = sorted(info.step for info in self.steps.found(with_metrics=False))
        there = f"there are the steps {_shown(steps)}" if steps else "there is none"
        raise CheckpointNotFoundError(
            f"step {step} is not committed under {self._root}: {there}. Ask for one of them, or for none in particular "
            "to get the newest",
            uri=self.steps.uri_of(step),
        )


def _shown(steps: Sequence[int]) -> str:
    """The highest of them, which are sorted."""
    return ("…, " if len(steps) > _MOST_SHOWN else "") + ", ".join(map(str, steps[-_MOST_SHOWN:]))
