"""One in twenty calls goes wrong: some in the store's client, some on the wire.

In the client, what befalls a save or a load follows from its seed and from nothing that threads do.
"""

from __future__ import annotations

from cloudckpt.testing import faults, wire
from cloudckpt.testing.faults import BrokenConnection, Denied, Faults, ServerError, SlowDown, TimedOut, TruncatedBody
from cloudckpt.testing.wire import S3_INTERNAL_ERROR, S3_SLOW_DOWN, CutSomewhere, LoseAnswer

# Together 5 %.
SHARE_ON_THE_WIRE = 0.03
SHARE_IN_THE_CLIENT = 0.02

_IN_THE_CLIENT: dict[faults.Fault, float] = {
    ServerError(): 0.15,
    ServerError(carried_out=True): 0.2,
    BrokenConnection(): 0.15,
    BrokenConnection(carried_out=True): 0.2,
    TimedOut(carried_out=True): 0.1,
    SlowDown(): 0.1,
    Denied(): 0.1,
    TruncatedBody(): 0.3,  # of the reads alone
}
_ON_THE_WIRE: dict[wire.Action, float] = {
    S3_SLOW_DOWN: 0.2,
    S3_INTERNAL_ERROR: 0.2,
    CutSomewhere(): 0.4,
    LoseAnswer(): 0.2,
}


def client_faults(seed: int) -> Faults:
    """For one save or load."""
    rules = (
        faults.Rule(fault=fault, times=None, probability=SHARE_IN_THE_CLIENT * share)
        for fault, share in _IN_THE_CLIENT.items()
    )
    return Faults(*rules, seed=seed)


def wire_faults(seed: int) -> list[wire.Rule]:
    """Throttled, failed, cut off on the way there or back, answer lost: shares of the requests."""
    return [
        wire.Rule(action=action, times=None, probability=SHARE_ON_THE_WIRE * share, seed=seed + number)
        for number, (action, share) in enumerate(_ON_THE_WIRE.items())
    ]
