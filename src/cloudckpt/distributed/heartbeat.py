"""Signs of life of ranks, and the decisions on which they all agree. See ``docs/design/009-waiting-for-ranks.md``."""

from __future__ import annotations

import msgspec


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank, posted again and again under its number."""

    beat: int = 0
    call: int = 0
    """Number of the save or load that the rank is in, from 1."""
    step: int = 0
    """Number of barriers of this call that the rank has come to."""
    task: str = ""
    """Digest of what the rank is to do in this call."""
    has_ended: bool = False
    """True once the rank has ended this call, in whichever way."""


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of all ranks. It changes by compare-and-set alone, so ranks never decide differently."""

    call: int = 0
    step: int = 0
    """The last barrier that all ranks may leave, in `call`."""
    failed_call: int = 0
    """The last call that failed outside of its collectives; all calls before it have ended, too."""
    failed_ranks: tuple[int, ...] = ()
    reason: str = ""
    is_final: bool = False
    """True once a rank is lost: no later call in this process group succeeds."""
    cancelled_call: int = 0
    cancelled_by: tuple[int, ...] = ()

    def permits(self, call: int, step: int) -> bool:
        """True if all ranks have come to this barrier."""
        return (self.call, self.step) >= (call, step)

    def permit(self, call: int, step: int) -> GroupState:
        """Let all ranks leave this barrier, unless the call has failed."""
        if self.is_final or self.failed_call >= call or self.permits(call, step):
            return self
        return msgspec.structs.replace(self, call=call, step=step)

    def fail(self, call: int, step: int, ranks: tuple[int, ...], reason: str, *, is_final: bool) -> GroupState:
        """Fail the call because of `ranks`, unless it has failed, or all may leave the barrier `step` (0 for none)."""
        if self.is_final or (step and self.permits(call, step)) or (self.failed_call >= call and not is_final):
            return self
        return msgspec.structs.replace(self, failed_call=call, failed_ranks=ranks, reason=reason, is_final=is_final)

    def cancel(self, call: int, rank: int) -> GroupState:
        """Note that `rank` wants this call to come to nothing."""
        others = self.cancelled_by if self.cancelled_call == call else ()
        return msgspec.structs.replace(self, cancelled_call=call, cancelled_by=tuple(sorted({*others, rank})))
