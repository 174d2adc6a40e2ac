"""What can go wrong with a call to a store."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cloudckpt.testing.wrapping import Call


def is_number(value: object) -> bool:
    """Whether it is one, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object, *, least: int) -> bool:
    """Whether it is a whole number of at least so many."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_after_bytes(fault: TruncatedBody | StalledBody) -> None:
    if fault.after_bytes is not None and not is_count(fault.after_bytes, least=0):
        raise ValueError(
            f"{type(fault).__name__}: after_bytes must be a whole number from 0 on, or None, not {fault.after_bytes!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerError:
    """500: a `TransientStoreError`. With `carried_out`, the store has done what it was asked all the same."""

    carried_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDown:
    """503 SlowDown: a `ThrottledError`, and nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """No answer in time: a `StoreTimeoutError`, at once. With `carried_out`, the request had arrived."""

    carried_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenConnection:
    """The connection is reset: before the request is carried out or, with `carried_out`, after, so that only the
    answer is lost.
    """

    carried_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedBody:
    """The answer to a read breaks off: the first bytes are filled in, then an `InterruptedReadError` says how many.

    After `after_bytes`, at the latest before the last byte; ``None`` draws the place.
    """

    after_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_after_bytes(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledBody:
    """As `TruncatedBody`, but first nothing moves for `stall_s`: for real, until `Faults.release` ends every stall.

    Where nothing had come, it is a `StoreTimeoutError`.
    """

    stall_s: float
    after_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_after_bytes(self)
        if not is_number(self.stall_s) or not 0 <= self.stall_s < math.inf:
            raise ValueError(f"StalledBody: stall_s must be a finite number from 0 on, not {self.stall_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedBits:
    """Bits are damaged on their way, at places that are drawn.

    Of a read, in what is filled in. Of a write, in what reaches the store, with the checksum that the caller sent: a
    store that looks at checksums refuses it. With ``noticed=False`` the checksum is that of the damaged bytes, as where
    a store does not look, and they are stored.
    """

    num_bits: int = 1
    noticed: bool = True

    def __post_init__(self) -> None:
        if not is_count(self.num_bits, least=1):
            raise ValueError(f"FlippedBits: num_bits must be a whole number from 1 on, not {self.num_bits!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """403: an `AccessDeniedError`, and nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """404 for an object, whether it exists or not: an `ObjectNotFoundError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """416 for a range, whether the object has it or not: a `ShortObjectError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingList:
    """A listing without the latest writes: of this process, through the same `Faults`.

    It shows the state before the last `num_writes` of objects (put, completed, copied, deleted), and before all those
    that came within the last `num_calls` of any kind.
    """

    num_writes: int = 0
    num_calls: int = 0

    def __post_init__(self) -> None:
        for name in ("num_writes", "num_calls"):
            if not is_count(getattr(self, name), least=0):
                raise ValueError(f"LaggingList: {name} must be a whole number from 0 on, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Calls a function, in the caller's thread: to kill a process at this very call, say. Otherwise all goes on."""

    before: Callable[[Call], object] | None = None
    after: Callable[[Call], object] | None = None
    """Once the store has carried the call out without an error."""

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"Tell: {name} is a function that takes a Call, not {function!r}")


Fault: TypeAlias = (
    ServerError
    | SlowDown
    | TimedOut
    | BrokenConnection
    | TruncatedBody
    | StalledBody
    | FlippedBits
    | Denied
    | Absent
    | Short
    | LaggingList
    | Tell
)

READS = frozenset({"read", "read_into"})
WRITES = frozenset({"put", "upload_part"})
EVERYTHING = READS | WRITES | {
    "abort_multipart",
    "complete_multipart",
    "copy",
    "copy_from",
    "create_multipart",
    "delete",
    "head",
    "list",
    "list_directories",
    "list_parts",
    "list_uploads",
    "probe",
}  # fmt: skip


def operations_of(fault: Fault) -> frozenset[str]:
    """The calls that `fault` can happen to."""
    if isinstance(fault, TruncatedBody | StalledBody):
        return READS
    if isinstance(fault, FlippedBits):
        return READS | WRITES
    if isinstance(fault, Absent):
        return READS | {"head"}
    if isinstance(fault, Short):
        return frozenset({"read_into"})
    return frozenset({"list"}) if isinstance(fault, LaggingList) else EVERYTHING
