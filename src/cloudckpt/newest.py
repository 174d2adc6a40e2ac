"""Loading the newest checkpoint that can be loaded."""

from __future__ import annotations

import dataclasses
import functools
import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from cloudckpt._api.beginning import require_state_dict
from cloudckpt._api.failures import causes_of, failure_of, raise_own_interrupt, rank_in
from cloudckpt._commit.resolve import MOST_LOOKS, read_log
from cloudckpt._pipeline.lifecycle import tell
from cloudckpt._ranks.company import in_company
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import redacted
from cloudckpt.api import load
from cloudckpt.catalog import list_checkpoints
from cloudckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from cloudckpt.options import Options
from cloudckpt.reader import ObjectStoreReader
from cloudckpt.report import Event, LoadReport, SkippedCheckpoint
from cloudckpt.stores.open import open_store
from cloudckpt.verification import verify

_T = TypeVar("_T")

_SKIPPED = (CorruptCheckpointError, CheckpointNotFoundError)


class _Damage(NamedTuple):
    why: str
    is_gone: bool

    @property
    def kind(self) -> str:
        return (CheckpointNotFoundError if self.is_gone else CorruptCheckpointError).__name__


def load_latest(
    state_dict: dict[str, Any],
    root: str | os.PathLike[str],
    *,
    storage_reader: ObjectStoreReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    verify_first: bool = False,
    options: Options | None = None,
) -> LoadReport:
    """Load the newest checkpoint directly under `root` that is whole, as `load` does, and say what was passed over.

    The coordinator lists the candidates (`list_checkpoints`), and all ranks go through the same ones, the newest first.
    One that any rank finds damaged, or gone by then, is skipped by all ranks alike: with a warning in the log, and in
    the report's ``skipped``; where one is gone, `root` is listed anew, for what has been saved meanwhile. Nothing else
    is a reason to take another one: a store that does not answer or denies, a state dict that does not fit, a value
    that would need `allow_pickle`, or a newer format, is raised as `load` does.

    A load checks only the bytes that it needs, and by then tensors have been filled; those of a checkpoint that is
    skipped are all overwritten by the next. With `verify_first`, the coordinator verifies each candidate whole
    (`verify`) before any tensor is touched, while the other ranks wait, as long as it lives. A planner
    with ``allow_partial_load`` implies it: what an older checkpoint lacks would keep a damaged one's values.

    With a `storage_reader`, `options` are only for listing and verifying. Raises torch's ``CheckpointException``, which
    is a `CheckpointNotFoundError` where nothing is committed under `root`, and a `CorruptCheckpointError`, whose
    ``problems`` give each checkpoint and its reason, where none can be loaded.
    """
    found = load_newest(
        state_dict,
        root,
        lambda: _candidates(root, options),
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        allow_pickle=allow_pickle,
        verify_first=verify_first,
        options=options,
    )
    assert found is not None  # noqa: S101  # that there is nothing is raised
    return found[1]


def load_newest(
    state_dict: dict[str, Any],
    root: str | os.PathLike[str],
    find: Callable[[], list[str]],
    *,
    storage_reader: ObjectStoreReader | None = None,
    planner: LoadPlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    allow_pickle: bool,
    verify_first: bool,
    options: Options | None,
    on_skip: Callable[[SkippedCheckpoint], None] = lambda _: None,
) -> tuple[str, LoadReport] | None:
    """As `load_latest`, of what `find` gives on the coordinator, the newest first: which one, and the report.

    None where that is nothing. Where one is gone that `find` gave, somebody removes old ones, and there may be newer
    ones by now: it is asked anew. `on_skip` is told of each one that is passed over, on all ranks, and may raise.
    """
    require_state_dict(state_dict, doing="loading")
    timeout_s = (options or storage_reader or Options()).timeout_s
    ranks = Ranks(process_group, no_dist=no_dist, root=redacted(root), timeout_s=timeout_s)
    verify_first = verify_first or bool(getattr(planner, "allow_partial_load", False))
    skipped: list[SkippedCheckpoint] = []
    waiting = ranks.agreed("find", find)
    if not waiting:
        return None
    num_looks = 1
    while waiting:
        uri, *waiting = waiting
        damage = ranks.agreed("verify", functools.partial(_damage_of, uri, options)) if verify_first else None
        if damage is None:
            try:
                report = load(
                    state_dict,
                    uri,
                    storage_reader=storage_reader,
                    planner=planner,
                    process_group=process_group,
                    no_dist=no_dist,
                    allow_pickle=allow_pickle,
                    options=options if storage_reader is None else None,
                )
            except CheckpointException as error:
                # All ranks get the same failures, and so come to the same conclusion.
                causes = causes_of(error)
                if not causes or not all(isinstance(cause, _SKIPPED) for cause in causes):
                    raise
                damage = _Damage("; ".join(dict.fromkeys(map(str, causes))), _is_gone(causes))
            else:
                assert report is not None  # noqa: S101  # our reader makes one
                return uri, _with_skipped(report, skipped, storage_reader)
        if damage.is_gone and num_looks < MOST_LOOKS:
            num_looks += 1
            tried = {one.uri for one in skipped}
            waiting = [other for other in ranks.agreed("find", lambda: _found_again(find)) if other not in tried]
            if uri in waiting:  # it was overwritten, and is not gone
                continue
        skipped.append(SkippedCheckpoint(uri=uri, why=damage.why, is_gone=damage.is_gone))
        on_skip(skipped[-1])
        tell(
            Event(name="load.skipped", uri=uri, rank=ranks.rank, error=damage.kind, message=damage.why),
            options or Options(),
            words=f"passed over {uri}, and going on to another checkpoint: {damage.why}",
        )
    problems = [f"{one.uri}: {one.why}" for one in skipped]
    raise ranks.failure(
        CorruptCheckpointError(
            f"none of the {len(skipped)} checkpoints under {redacted(root)} can be loaded. {'; '.join(problems)}",
            uri=redacted(root),
            problems=problems,
        )
    )


class Ranks:
    """What the ranks do together besides loading."""

    def __init__(self, process_group: dist.ProcessGroup | None, *, no_dist: bool, root: str, timeout_s: float) -> None:
        self._process_group = process_group
        self._use_dist = not no_dist and dist.is_available() and dist.is_initialized()
        self.rank = rank_in(process_group, no_dist=no_dist)
        self._root, self._timeout_s = root, timeout_s
        self._what = f"loading the newest checkpoint under {root}"

    def agreed(self, step: str, find: Callable[[], _T]) -> _T:
        """What the coordinator finds, or its failure, on every rank."""
        try:
            with self._in_company() as group:
                found: _T = _DistWrapper(group, self._use_dist, 0).broadcast(step, find)
        except CheckpointException as error:
            raise_own_interrupt(error, self.rank)
            raise failure_of(error, what=self._what) from None
        return found

    def _in_company(self) -> AbstractContextManager[dist.ProcessGroup | None]:
        if not self._use_dist:
            return nullcontext(self._process_group)
        doing = "finding the newest checkpoint"
        return in_company(self._process_group, doing=doing, uri=self._root, timeout_s=self._timeout_s)

    def failure(self, error: CorruptCheckpointError) -> CheckpointException:
        """`error`, found by all ranks alike, as a load's failures come."""
        failures: Any = {self.rank: (error, traceback.StackSummary())}
        return failure_of(CheckpointException("find", failures), what=self._what)


def _candidates(root: str | os.PathLike[str], options: Options | None) -> list[str]:
    """The newest first."""
    found = [info.uri for info in reversed(list_checkpoints(root, options=options))]
    if not found:
        is_one = holds_checkpoint(root, options)
        hint = ", which is a checkpoint itself: cloudckpt.load loads it" if is_one else ""
        raise CheckpointNotFoundError(
            f"no checkpoint is committed directly under {redacted(root)}{hint}. Check the URI; a first run has nothing "
            "to load, and should say so by not asking (cloudckpt.latest(root) is None)",
            uri=redacted(root),
        )
    return found


def _found_again(find: Callable[[], list[str]]) -> list[str]:
    try:
        return find()
    except CheckpointNotFoundError:
        return []


def holds_checkpoint(root: str | os.PathLike[str], options: Options | None) -> bool:
    """Whether it is a checkpoint itself. Raises `StoreError`: who may not look must not be told that it is none."""
    options = options or Options()
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    return read_log(open_store(root, options), retrier, is_lenient=True).counting is not None


def _damage_of(uri: str, options: Options | None) -> _Damage | None:
    try:
        verify(uri, options=options)
    except _SKIPPED as error:
        return _Damage(str(error), _is_gone([error]))
    return None


def _is_gone(causes: Iterable[BaseException]) -> bool:
    return any(isinstance(cause, CheckpointNotFoundError) for cause in causes)


def _with_skipped(
    report: LoadReport, skipped: list[SkippedCheckpoint], storage_reader: ObjectStoreReader | None
) -> LoadReport:
    report = dataclasses.replace(report, skipped=tuple(skipped))
    if storage_reader is not None:
        storage_reader.report = report
    return report
