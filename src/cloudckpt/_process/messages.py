"""What the training process and its upload process say to each other."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._trace.timeline import Verb
from cloudckpt._uri import Location
from cloudckpt.options import Options
from cloudckpt.report import Event, SaveReport

Task: TypeAlias = Literal["open", "check", "check_beside", "write", "commit", "discard"]

Spans: TypeAlias = list[tuple[Literal["X", "C", "i"], str, int, int, tuple[int, str], Mapping[str, object]]]
"""Of a timeline: kind, name, beginning and length in ns of the monotonic clock, thread, and what else is known."""


FileId: TypeAlias = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The save that all tasks after ``"open"`` are about."""

    location: Location
    options: Options
    """Without what only the training process can do."""
    rank: int
    save_id: str
    transforms: WriteTransforms
    tells_events: bool
    """Whether there is an `Options.on_event` to call."""
    traces: tuple[Verb, str] | None
    """Of the timeline, if there is one."""
    log_level: int
    newest_commit_time_ns: int
    """See `cloudckpt._commit.commit_time`."""
    snapshot_files: frozenset[FileId]
    """Where the snapshot lies. Others that were mapped for earlier ones are not needed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Do this. The files that come with it are those of an `Order`."""

    number: int
    task: Task
    arguments: bytes
    """Pickled once more, so that what cannot be unpickled is an answer, and the end of nothing."""
    environment: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """It is done; or it failed."""

    number: int
    value: Any
    error: BaseException | None
    report: SaveReport | None
    spans: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """What is being done still goes on."""

    spans: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """Something for `Options.on_event`. The thread that came to it waits for `Heard`."""

    number: int
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What `Options.on_event` came to. An error stays in the training process, where it is known by the number."""

    number: int
    error: str | None
    is_interrupt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing:
    """From here on the manifest may be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A line for the training process's log."""

    level: int
    text: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The store has so many bytes more."""

    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Make no further call for the save with this ticket: have it fail with `error`."""

    nonce: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What write items that are alike have in common."""

    type: WriteItemType
    offset: torch.Size | None
    """As their indices have it."""
    tensor_data: TensorWriteData | None
    dtype: torch.dtype | None
    """As it lies in memory; None for a Python object."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None where it is contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A rank's write items, in columns of one length, since there can be many; and where their bytes lie."""

    fqns: list[str]
    forms: list[Form]
    form_numbers: array[int]
    hints: array[int]
    """Their indices' own; -1 for none."""
    file_numbers: array[int]
    """Among the files that come with the order."""
    begins: array[int]
    ends: array[int]
    """In their file. Nothing of an empty one is looked at."""
    own_file: int
    """The file that was made for this order alone; -1 where there is none. The others may come again."""


class EventError(Exception):
    """Stands for what `Options.on_event` raised, by the number of what happened."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        self.number = number

    def __str__(self) -> str:
        return str(self.args[1])


class EventInterrupt(BaseException):
    """The same for what is no `Exception`."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        self.number = number

    def __str__(self) -> str:
        return str(self.args[1])
