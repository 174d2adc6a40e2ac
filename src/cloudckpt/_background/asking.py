"""Whether a save is in flight on any rank: all ranks have to come to the same answer, or some would wait for others."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._api.failures import failure_of
from cloudckpt._ranks.company import in_company
from cloudckpt._uri import redacted


def in_flight_on(
    mine: str | None, process_group: dist.ProcessGroup | None, *, uri: str, timeout_s: float
) -> tuple[int, str] | None:
    """The first rank with a save in flight, and where that goes; None where no rank has one. `mine` is this rank's.

    Collective, where the ranks can wait for one another; on a group of its own, since the save may be using the others.
    Raises `RankLostError` where not all ranks come.
    """
    uri = redacted(uri)
    try:
        with in_company(process_group, "asking", doing="beginning to save", uri=uri, timeout_s=timeout_s) as group:
            if group is process_group:
                return None if mine is None else (0, mine)
            answers: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(answers, mine, group=group)
    except CheckpointException as error:
        raise failure_of(error, what=f"saving {uri}") from None
    return next(((rank, answer) for rank, answer in enumerate(answers) if answer is not None), None)
