"""Decide if training continues after a failed save, and remember the failures."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cloudckpt.dcp.protocol import SaveOrLoadError, causes_of
from cloudckpt.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    InvalidOptionError,
    SaveInFlightError,
    StoreError,
)
from cloudckpt.manager.retention_policy import is_positive

OnFailure: TypeAlias = Literal["raise", "warn"]
_TROUBLE = (StoreError, CommitUnknownError)
"""The classes of failures that are the store's. All others come from the program, or end the group of the ranks."""
_MOST_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure:
    """A save of a `CheckpointManager` that failed because of the store."""

    step: int
    """Number of the step."""
    uri: str
    """URI of the step. After a `CommitUnknownError`, it may be committed."""
    error: BaseException
    """The exception of `cloudckpt.save`, or a `SaveInFlightError`."""


class Failures:
    """The failed saves of one manager.

    The outcome of a save is the same on all ranks. A save that is refused beside another one changes nothing for that
    one, whichever ends first. `take` depends on nothing else, so all ranks go on, or none does.
    """

    def __init__(self, on_failure: OnFailure, max_failures: int) -> None:
        if on_failure not in ("raise", "warn"):
            raise InvalidOptionError(f"CheckpointManager: on_failure must be 'raise' or 'warn', not {on_failure!r}")
        if not is_positive(max_failures):
            raise InvalidOptionError(
                f"CheckpointManager: max_failures must be a positive whole number, not {max_failures!r}"
            )
        self.limit = max_failures if on_failure == "warn" else 1
        """Number of failures in a row of which the last is raised."""
        self.in_a_row = 0
        self.all: tuple[SaveFailure, ...] = ()

    def take(self, step: int, uri: str, error: BaseException) -> SaveFailure | None:
        """Take note of a failed save. Returns None if its error is to be raised."""
        # Without a URI, threads of this rank alone were in each other's way.
        is_refused = isinstance(error, SaveInFlightError) and error.uri != ""
        causes = causes_of(error)
        # A cause that is a SaveOrLoadError is the failure of another save.
        is_trouble = [
            isinstance(each, _TROUBLE) and not isinstance(each, (SaveOrLoadError, CheckpointExistsError))
            for each in causes
        ]
        if not is_refused and not (is_trouble and all(is_trouble)):
            return None
        # A copy has no traceback, whose frames hold the state dict.
        failure = SaveFailure(step=step, uri=uri, error=copy.copy(error))
        self.all = (*self.all, failure)[-_MOST_KEPT:]
        # The save in flight has an outcome of its own, and when that comes differs between ranks.
        self.in_a_row += not is_refused
        return failure if self.limit != 1 and (is_refused or self.in_a_row < self.limit) else None
